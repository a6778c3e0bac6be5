"""The program of a pipeline, all of whose places are rehearsed and played together, and the choice among pipelines.

[Note: A few micro-batches for all]
In the middle of a step a schedule repeats itself: with each round of as many micro-batches as there are places, all
places do what they did in the round before. So a step of many micro-batches is rehearsed with two rounds, and once more
with a third; what that adds counts for each round that is left out. A step of no more micro-batches than these two
rehearsals have together is rehearsed whole. All layers run: a stage with more of them waits
less for the wire, so their number is no line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import WIRE_LEVELS, Level, Purpose
from laconic.config import Config, JobError
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.estimates import Estimate
from laconic.plan.machine import PlanLane, Reading, Simulator
from laconic.plan.meeting import play_together
from laconic.plan.rehearsal import Rehearsal
from laconic.plan.rehearsed import RehearsedStep, StepWork, extended, moved_bytes
from laconic.rehearse.rings import Places
from laconic.strategies.pipeline import num_places, pipeline_policy

_ROUNDS = 2
_MOST_PLACES = 4
"""The most places of pipelines that the plan tries itself."""
_MUCH = 0.1
"""The share of a step that a place may wait, before the plan looks for a pipeline that waits less."""
_MORE = 3
"""The interleaved schedule sends so many times as much on two places, and less on more: three boundaries for one."""


def _launch(cluster: ClusterSpec) -> RankInfo:
    nodes, local = cluster.nodes, cluster.ranks_per_node
    return RankInfo(rank=0, world_size=nodes * local, local_rank=0, num_local=local, num_nodes=nodes)


def rows_of(job: Config, cluster: ClusterSpec) -> int:
    """The rows of a micro-batch of a job with a pipeline.

    Raises:
        JobError: the nodes, the rows or the schedule do not allow the pipeline.
    """
    launch = _launch(cluster)
    rows = job.train.micro_batch_size * job.train.accumulation * num_places(job.pipeline, launch)
    return rows // pipeline_policy(job.pipeline, job.train, launch).micro_batches


class PipelinedStep(RehearsedStep):
    """A job with [pipeline]: one rank of each place, on one clock."""

    def __init__(self, cluster: ClusterSpec, work: StepWork, *, keeps_spans: bool = False) -> None:
        """Rehearse the job.

        Raises:
            JobError, ValueError: the trainer refuses the job; or its schedule splits backward, or its cache is "auto".
        """
        launch, pipeline = _launch(cluster), work.job.pipeline
        policy = pipeline_policy(pipeline, work.job.train, launch)
        if policy.splits_backward:
            raise JobError(
                f"pipeline.schedule = {pipeline.schedule!r} splits backward, and laconic plan has traced it whole; a "
                "short run of laconic train measures it, or plan with '1F1B' or 'Interleaved1F1B'"
            )
        if work.job.shard.policy.cache.where == "auto":
            raise JobError(
                "shard.cache = 'auto' and pipeline.stages: each stage chooses in its own free memory, which laconic "
                "plan does not follow; plan with 'none', 'host', 'device' or 'rank'"
            )
        if policy.wire != "exact":
            self.inexact = f"activations and their gradients cross in {policy.wire.removesuffix('bit')} bits"
        self._num_places, self._count = num_places(pipeline, launch), policy.micro_batches
        self._rows = rows_of(work.job, cluster)
        few = _ROUNDS * self._num_places
        is_short = self._count % self._num_places or self._count <= 2 * few + self._num_places or keeps_spans
        self._few_rounds = self._count if is_short else few
        super().__init__(cluster, work, keeps_spans=keeps_spans)
        rows = f"{self._count} micro-batches of {self._rows} row{'s' * (self._rows > 1)}"
        self.notes = (
            f"laconic pipeline: {self._num_places} groups of nodes, {policy.num_stages(self._num_places)} stages by "
            f"{policy.schedule}, {rows}, cache {work.job.shard.policy.cache.where}; its bytes are those of the node "
            "that sends most, its memory that of the fullest rank",
        )

    def num_layers(self) -> int:
        """See `RehearsedStep.num_layers`."""
        return 0

    def _rehearse(self, num_layers: int, micro_batches: int) -> Rehearsal:
        return self._at_places(self._few_rounds)[0]

    def _at_places(self, count: int) -> list[Rehearsal]:
        """The rehearsals of all places, with `count` micro-batches."""
        config, work = self._config, self._work
        accumulation, rest = divmod(count, self._num_places)
        train = replace(config.train, micro_batch_size=self._rows, accumulation=accumulation)
        if rest:  # all micro-batches of the job
            train = replace(config.train)
        pipeline = replace(config.pipeline, micro_batches=count)
        job = replace(config, train=train, pipeline=pipeline)
        return work.rehearsals.of_stages(job, work.trace, work.places, self._num_places, rows=self._rows)

    def _moved_bytes(self) -> Counter[tuple[Level, Purpose]]:
        return Counter()  # each place has its own

    def _step(self) -> Reading:
        """All places as one: the time of the latest, the memory of the fullest, the bytes of whoever sends most."""
        seconds, places = self._played(self._few_rounds)
        if left := (self._count - self._few_rounds) / self._num_places:
            longer_s, longer = self._played(self._few_rounds + self._num_places)
            seconds += left * (longer_s - seconds)
            places = list(map(partial(extended, left=left), places, longer))
        fullest = max(places, key=lambda each: each.peak_bytes)
        busiest = max(places, key=lambda each: each.busy_s[PlanLane.COMPUTE])
        sending = max(places, key=_wire_bytes)
        return Reading(
            begin_s=max(each.begin_s for each in places),
            seconds=seconds,
            sent_bytes=sending.sent_bytes,
            waits_s=busiest.waits_s,
            busy_s=busiest.busy_s,
            peaks=fullest.peaks,
            held=fullest.held,
            host_bytes=max(each.host_bytes for each in places),
            spans=[replace(span, place=place) for place, each in enumerate(places) for span in each.spans],
        )

    def _played(self, count: int) -> tuple[float, list[Reading]]:  # type: ignore[override]
        """The seconds from the end of one step to the end of the next, and the readings of all places."""
        rehearsals, device_type = self._at_places(count), self._work.trace.device_type
        machines = [
            Simulator(self._cluster, device_type=device_type, keeps_spans=self._keeps_spans) for _ in rehearsals
        ]
        places = play_together(machines, rehearsals)
        all_places = self._work.places
        inner = Places(nodes=all_places.nodes // self._num_places, local=all_places.local)
        for reading, rehearsal in zip(places, rehearsals, strict=True):
            for key, size in moved_bytes(rehearsal.matrices, inner).items():
                reading.sent_bytes[key] = size
            reading.peaks = {"step": reading.peak}  # a layer's peak is no line, as other stages work beside it
        begin_s = max(each.begin_s for each in places)
        return max(each.begin_s + each.seconds for each in places) - begin_s, places


def _wire_bytes(reading: Reading) -> float:
    return sum(size for (level, _), size in reading.sent_bytes.items() if level in WIRE_LEVELS)


# -- the choice --------------------------------------------------------------------------------------------------------


def best_pipeline(job: Config, num_nodes: int, predict: Callable[[Config], Estimate]) -> Estimate:
    """The best of a few pipelines of a job that leaves the pipeline open, one choice after the other.

    First the number of stages, with whole weights on each rank of a stage, as torch's schedules keep them until the
    step ends; the job's own cache if that does not fit. Then, if places wait for each other or for the wire, smaller
    micro-batches, the eager schedule, and the interleaved one, if the wire has time for what that sends. `predict`
    predicts a job.

    Raises:
        JobError, ValueError: no pipeline can run the job; the error is that of the first one.
    """
    found: list[Estimate] = []
    errors: list[Exception] = []

    def best_with(*others: Config) -> Estimate:
        for other in others:
            try:
                found.append(predict(other))
            except (JobError, ValueError, AssertionError) as error:
                errors.append(error)
        if not found:
            raise errors[0]
        return min(found, key=lambda each: (not each.fits, each.seconds))

    counts = [count for count in range(num_nodes, 1, -1) if num_nodes % count == 0 and count <= _MOST_PLACES]
    whole = replace(job, shard=job.shard.with_keys(cache="rank"))
    accumulation = job.train.accumulation
    best = best_with(
        *(_with(whole, stages=count, micro_batches=accumulation * count) for count in counts or [num_nodes])
    )
    if not best.fits:
        best = best_with(replace(best.job, shard=job.shard))
    if best.fits and best.waits_s.get(PlanLane.STAGES, 0.0) > _MUCH * best.seconds:
        best = best_with(*_smaller(best.job))
    if best.fits and _waits_much(best):
        best = best_with(_with(best.job, schedule="Eager1F1B"))
    if best.fits and _waits_much(best) and _MORE * best.busy_s.get(PlanLane.WIRE, 0.0) < best.seconds:
        best = best_with(_with(best.job, schedule="Interleaved1F1B"))
    return best


def _waits_much(found: Estimate) -> bool:
    waits_s = sum(found.waits_s.get(lane, 0.0) for lane in (PlanLane.STAGES, PlanLane.WIRE))
    return waits_s > _MUCH * found.seconds


def _smaller(job: Config) -> list[Config]:
    """The job with half the rows in each micro-batch, if they can be halved."""
    pipeline, train = job.pipeline, job.train
    assert pipeline.micro_batches is not None
    assert isinstance(pipeline.stages, int)
    rows = train.micro_batch_size * train.accumulation * pipeline.stages
    more = 2 * pipeline.micro_batches
    return [] if rows % more else [_with(job, micro_batches=more)]


def _with(job: Config, **keys: object) -> Config:
    return replace(job, pipeline=replace(job.pipeline, **keys))  # type: ignore[arg-type]
