"""A pipeline across machines: torch's schedules over stages that are sharded inside their machines."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic.pipeline.cutting import PipelineCut as PipelineCut
    from laconic.pipeline.cutting import cut_pipeline as cut_pipeline
    from laconic.pipeline.policies import SCHEDULES as SCHEDULES
    from laconic.pipeline.policies import PipelinePolicy as PipelinePolicy
    from laconic.pipeline.policies import ScheduleName as ScheduleName
    from laconic.pipeline.runtime import Pipeline as Pipeline
    from laconic.pipeline.wire import Boundary as Boundary
    from laconic.pipeline.wire import TensorForm as TensorForm
    from laconic.pipeline.wire import WireStage as WireStage

_HOMES = {
    "cutting": ("PipelineCut", "cut_pipeline"),
    "policies": ("SCHEDULES", "PipelinePolicy", "ScheduleName"),
    "runtime": ("Pipeline",),
    "wire": ("Boundary", "TensorForm", "WireStage"),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: a job description reads the policy, and imports no torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"laconic.pipeline.{home}"), name)
    raise AttributeError(f"module 'laconic.pipeline' has no attribute {name!r}")
