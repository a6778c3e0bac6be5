"""A pipeline across machines: torch's schedules over stages that are sharded inside their machines."""

from laconic.pipeline.cutting import PipelineCut, cut_pipeline
from laconic.pipeline.policies import SCHEDULES, PipelinePolicy, ScheduleName
from laconic.pipeline.runtime import Pipeline
from laconic.pipeline.wire import Boundary, TensorForm, WireStage

__all__ = [
    "SCHEDULES",
    "Boundary",
    "Pipeline",
    "PipelineCut",
    "PipelinePolicy",
    "ScheduleName",
    "TensorForm",
    "WireStage",
    "cut_pipeline",
]
