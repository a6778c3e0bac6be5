"""A training job as the planner sees it: the trace of its model, and what each step has to do."""

from __future__ import annotations

from laconic.config import Config
from laconic.plan.buckets import Sharding
from laconic.plan.job_trace import trace_job
from laconic.plan.model_trace import ModelTrace
from laconic.plan.program import StepWork
from laconic.plan.rehearsal import Rehearsals
from laconic.strategies.parallelize import mixed_precision, shard_policy


def work_of(
    config: Config, *, device_type: str, trace: ModelTrace | None = None, rehearsals: Rehearsals | None = None
) -> StepWork:
    """What a job has to do in every step. A trace and rehearsals of the same model and batch may be given.

    Raises:
        JobError: the model cannot be built.
        TraceError: the model cannot be traced, and there is no formula for it.
    """
    policy = shard_policy(config.shard, config.optimizer)
    sharding = Sharding(precision=mixed_precision(config.shard, config.model), granularity=policy.granularity)
    return StepWork(
        trace=trace or trace_job(config, device_type=device_type),
        job=config,
        sharding=sharding,
        rehearsals=rehearsals or Rehearsals(),
    )
