"""The programs of strategies that are rehearsed: a step of a large model from steps of a few of its equal layers.

With islands it has its share of the steps in which fragments sync, now and then.

[Note: A few layers for all]
Equal layers add the same seconds, bytes and memory each, once a step has begun and before it ends. So a model of many
equal layers runs with four of them, and once more with a fifth in the middle: what that adds counts for each layer
that is left out. Peaks of memory are taken apart, one for each layer's phase, since with more layers memory may be
fullest at another place. Micro-batches between the first and the last are equal, too. All layers run where ranks own
whole matrices, since which matrices a rank owns does not follow from those that it would own of fewer layers; where a
job says how many units are gathered ahead, which may be more than four; and where units have places of their own.

[Note: Steps now and then]
A step that checks does more than others. So what a step takes is a mean over the steps from one check to the next:
one that is rehearsed with checks, and the others without. Memory is that of the fullest.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from laconic.codec import CODECS
from laconic.comm.traffic import Level, Purpose
from laconic.config import Config
from laconic.islands.all_reduce import sent_bytes_of
from laconic.optim.owners import Matrix, assign
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.machine import PlanLane, Reading, Simulator
from laconic.plan.model_trace import ModelTrace
from laconic.plan.playing import Player
from laconic.plan.rehearsal import STEPS, Rehearsal, Rehearsals
from laconic.ragged.spec import RaggedSpec
from laconic.rehearse.rings import Places
from laconic.shard.policies import Placement, Prefetch

_KEPT = 4
"""Two at either end: while a layer computes, the gathers of two more have begun."""
_MICRO_BATCHES = 3
_MOST_RANKS = 64
"""The ranks whose elements are looked at."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a strategy has to do in a step."""

    job: Config
    """The job under the strategy."""
    trace: ModelTrace
    rehearsals: Rehearsals
    places: Places
    """Of the ranks."""
    placements: Mapping[str, Placement] | None = None
    """Where units rest, by their names; None: as the job's cache says."""


class RehearsedStep:
    """A strategy of the trainer, rehearsed, on the machines of a cluster."""

    inexact: str = ""
    """What the strategy trains otherwise than ZeRO-3, in words; empty if it trains the same."""
    notes: tuple[str, ...] = ()
    """Notes for readers of its figures."""
    _stands_for = 1
    """The fragments of islands for which each rehearsed one stands."""

    def __init__(self, cluster: ClusterSpec, work: StepWork, *, keeps_spans: bool = False) -> None:
        """Rehearse the job under the strategy. With `keeps_spans`, readings can be drawn.

        Raises:
            JobError, ValueError: the trainer refuses the job.
        """
        self._cluster, self._work, self._keeps_spans = cluster, work, keeps_spans
        self._checks_every = work.job.shard.policy.checks.interval
        """The steps from one that checks to the next; 1 if all do, 0 if none does."""
        self._config = self._job(checks=self._checks_every == 1)
        self._num_layers = self.num_layers()
        self._micro_batches = work.job.train.accumulation
        self._few = self._micro_batches if keeps_spans else min(self._micro_batches, _MICRO_BATCHES)
        self.rehearsal = self._rehearse(_KEPT, self._few)

    def _job(self, *, checks: bool) -> Config:
        """The job in which every step checks, or none. No audit repeats a micro-batch of another rank now and then."""
        shard = self._work.job.shard
        keys = {"check_every": 1} if checks else {"check_every": 0, "on_damage": "raise"}
        return replace(self._work.job, shard=shard.with_keys(audit_every=0, **keys))

    def num_layers(self) -> int:
        """The number of layers of which a few are rehearsed; 0 if all are."""
        work, policy = self._work, self._work.job.shard.policy
        has_places = work.placements is not None or policy.cache.device_budget_bytes > 0
        runs_all = self._keeps_spans or work.job.optimizer.has_owners or policy.prefetch != Prefetch() or has_places
        layers = 0 if runs_all else work.rehearsals.equal_layers(work.job)
        return layers if layers > _KEPT + 1 else 0

    def read(self) -> Reading:
        """Read a step after caches and states are warm: [Note: A few layers for all], [Note: Steps now and then]."""
        reading = self._step()
        if self._checks_every > 1:
            plain, other = copy.deepcopy(reading), copy.copy(self)
            other._config = self._job(checks=True)
            other.rehearsal = other._rehearse(_KEPT, self._few)
            reading.add(other._step(), 1 / self._checks_every)
            reading.add(plain, -1 / self._checks_every)
        for key, size in self._moved_bytes().items():
            reading.sent_bytes[key] = size
        return reading

    def _moved_bytes(self) -> Counter[tuple[Level, Purpose]]:
        """What a rank sends to owners of matrices and back, as a mean over all ranks, which differ in it."""
        return moved_bytes(self.rehearsal.matrices, self._work.places)

    @property
    def _left_out(self) -> int:
        """The layers that `rehearsal` does not have. They are as its last one."""
        return max(0, self._num_layers - _KEPT)

    def _step(self) -> Reading:
        """A step without what comes now and then."""
        return self._readings()[0]

    def _readings(self) -> list[Reading]:
        """A plain step, and the sync of each fragment if there are islands."""
        readings, left = self._all_layers(self._few), self._micro_batches - self._few
        if left:
            readings = list(map(partial(extended, left=left), readings, self._all_layers(self._few + 1)))
        return [readings[0], *(self._of_one(readings[0], sync) for sync in readings[1:])]

    def _of_one(self, plain: Reading, sync: Reading) -> Reading:
        """The sync in the memory of one of the fragments that it has synced as one."""
        peaks = {}
        for stretch, peak in sync.peaks.items():
            before = plain.peaks.get(stretch, plain.peaks["step", STEPS - 1])
            peaks[stretch] = _line(before, peak, 1 / self._stands_for)
        return replace(sync, peaks=peaks)

    def _all_layers(self, micro_batches: int) -> list[Reading]:
        """The readings of all layers, with so many micro-batches."""
        few = self._played(_KEPT, micro_batches)
        if not self._left_out:
            return few
        return list(map(partial(extended, left=self._left_out), few, self._played(_KEPT + 1, micro_batches)))

    def _played(self, num_layers: int, micro_batches: int) -> list[Reading]:
        machine = Simulator(self._cluster, device_type=self._work.trace.device_type, keeps_spans=self._keeps_spans)
        return Player(machine, self._rehearse(num_layers, micro_batches)).readings(self._stands_for)

    def _rehearse(self, num_layers: int, micro_batches: int) -> Rehearsal:
        """Rehearse the model with so many layers, the first and the last, if a few stand for all."""
        config = replace(self._config, train=replace(self._config.train, accumulation=micro_batches))
        kept, behind = None, num_layers // 2
        if self._num_layers:
            kept = [*range(num_layers - behind), *range(self._num_layers - behind, self._num_layers)]
        work = self._work
        return work.rehearsals.of(config, work.trace, work.places, kept=kept, placements=work.placements)


class BucketedStep(RehearsedStep):
    """DDP, whose buckets end where they have their size, and not where a layer ends. So all layers run."""

    def num_layers(self) -> int:
        """See `RehearsedStep.num_layers`."""
        return 0


class LocalStepsProgram(RehearsedStep):
    """Islands that train on their own, and average their pseudo-gradients now and then: `laconic.LocalSteps`.

    A model of which a few layers are rehearsed has one fragment, which stands for all: they are equally large.
    """

    def __init__(self, cluster: ClusterSpec, work: StepWork, *, keeps_spans: bool = False) -> None:
        """Rehearse steps with and without a sync.

        Raises:
            JobError, ValueError: the trainer refuses the job.
        """
        self._sync = work.job.sync
        self._schedule = self._sync.policy.schedule
        self._cluster, self._work, self._keeps_spans = cluster, work, keeps_spans
        self._stands_for = self._schedule.fragments if self.num_layers() else 1
        if self._stands_for > 1:
            work = replace(work, job=replace(work.job, sync=self._sync.with_keys(fragments=1)))
        slices = f" and train {self._sync.slices} slices" if self._sync.slices > 1 else ""
        self.inexact = f"islands agree every {self._schedule.every} steps{slices}"
        super().__init__(cluster, work, keeps_spans=keeps_spans)

    def _step(self) -> Reading:
        """A step, with its share of the syncs."""
        plain, *syncs = self._readings()
        reading, overlap = copy.deepcopy(plain), self._schedule.overlap
        steps, share = 1 + min(1, overlap), 1 / self._schedule.every
        for sync in syncs:
            more = max(0, self._stands_for * overlap - 1)  # steps that hide exchanges besides the one that is rehearsed
            hidden_s = min(sync.waits_s[PlanLane.WIRE], more * plain.seconds)
            sync.waits_s[PlanLane.WIRE] -= hidden_s  # type: ignore[assignment]
            sync.seconds -= hidden_s
            reading.add(sync, share)
            reading.add(plain, -steps * share)
        for key in [key for key in reading.sent_bytes if key[0] == "island"]:
            del reading.sent_bytes[key]
        if sent_bytes := sum(map(self._sent_bytes, self.rehearsal.fragments)):
            reading.sent_bytes["island", "outer"] = share * sent_bytes  # type: ignore[assignment]  # bytes are means
        return reading

    def _sent_bytes(self, specs: Sequence[RaggedSpec]) -> float:
        """The bytes that a rank sends for a fragment, or for all fragments that it stands for: the mean over ranks."""
        codec, count, places = CODECS[self._sync.policy.coding.codec], self._stands_for, self._work.places
        last, _ = self.rehearsal.buckets[-1]
        repeated = [layout for unit, layout in self.rehearsal.buckets if unit == last]
        sizes = []
        for rank in range(0, places.ranks, max(1, places.ranks // _MOST_RANKS)):
            numel = 0
            for spec in specs:
                extent = spec.layout.extent(spec.index, rank)
                times = 1 + self._left_out if any(spec.layout is layout for layout in repeated) else 1
                numel += 0 if extent is None else times * extent.numel
            sizes.append(count * sent_bytes_of(-(-numel // count), places.islands, codec))
        return fmean(sizes)


def moved_bytes(matrices: Sequence[Matrix], places: Places) -> Counter[tuple[Level, Purpose]]:
    """What a rank sends to owners of matrices and back, as a mean over the ranks that share them."""
    moved: Counter[tuple[Level, Purpose]] = Counter()
    for index, owner in assign(matrices, [0.0] * places.ranks):
        spec = matrices[index].spec
        for shard in set(spec.layout.holders(spec.index)) - {owner}:
            is_local = shard % places.nodes == owner % places.nodes  # [Note: A bucket's order]
            level: Level = "local" if is_local else "node"
            sent_bytes = matrices[index].num_held(shard) * matrices[index].itemsize
            moved[level, "optimizer"] += 2 * sent_bytes / places.ranks  # type: ignore[assignment]  # bytes are means
    return moved


def extended(few: Reading, more: Reading, left: float) -> Reading:
    """The reading of a program with `left` more of what `more` has one more of than `few`: all grows along a line."""
    return Reading(
        seconds=few.seconds + left * (more.seconds - few.seconds),
        host_bytes=few.host_bytes + left * (more.host_bytes - few.host_bytes),
        peaks={stretch: _line(peak, more.peaks[stretch], left) for stretch, peak in few.peaks.items()},
        sent_bytes=_line(few.sent_bytes, more.sent_bytes, left),
        waits_s=_line(few.waits_s, more.waits_s, left),
        busy_s=_line(few.busy_s, more.busy_s, left),
        held=_line(few.held, more.held, left),
    )


def _line(start: Counter[Any], end: Counter[Any], times: float) -> Counter[Any]:
    return Counter({key: value + times * (end[key] - value) for key, value in start.items()})
