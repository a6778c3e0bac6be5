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
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from laconic.codec import CODECS
from laconic.comm.traffic import Level, Purpose
from laconic.config import Config
from laconic.islands.all_reduce import sent_bytes_of
from laconic.optim.owners import assign
from laconic.plan.machine import KINDS, PlanLane, Reading, Simulator
from laconic.plan.playing import Player
from laconic.plan.program import Program, Shape, StepWork, add_share
from laconic.plan.rehearsal import STEPS, Rehearsal
from laconic.ragged.spec import RaggedSpec
from laconic.shard.policies import Prefetch

_KEPT = 4
"""Two at either end: while a layer computes, the gathers of two more have begun."""
_MICRO_BATCHES = 3
_MOST_RANKS = 64
"""The ranks whose elements are looked at."""
Figures = dict[tuple[object, ...], float]
"""All numbers of a reading and of a machine after it, which are linear in the number of layers."""


class RehearsedStep(Program):
    """A strategy of the trainer's `Simultaneous`, rehearsed."""

    _stands_for = 1
    """The fragments of islands for which each rehearsed one stands."""

    def __init__(self, machine: Simulator, work: StepWork, shape: Shape) -> None:
        """Rehearse the job under the strategy.

        Raises:
            JobError, ValueError: the trainer refuses the job.
        """
        self._work, self._shape = work, shape
        self._checks_every = work.job.shard.policy.checks.interval
        """The steps from one that checks to the next; 1 if all do, 0 if none does."""
        config = self._config = self._job(checks=self._checks_every == 1)
        self._num_layers = self.num_layers(machine, work)
        self._micro_batches = config.train.accumulation
        self._few = self._micro_batches if machine.keeps_spans else min(self._micro_batches, _MICRO_BATCHES)
        self.rehearsal = self._rehearse(self._with_micro_batches(self._few), self._ids(_KEPT))

    def _job(self, *, checks: bool) -> Config:
        """The job in which every step checks, or none. No audit repeats a micro-batch of another rank now and then."""
        shard = self._work.job.shard
        keys = {"check_every": 1} if checks else {"check_every": 0, "on_damage": "raise"}
        return replace(self._work.job, shard=shard.with_keys(audit_every=0, **keys))

    @staticmethod
    def num_layers(machine: Simulator, work: StepWork) -> int:
        """The number of layers of which a few are rehearsed; 0 if all are."""
        policy = work.job.shard.policy
        has_places = work.placements is not None or policy.cache.device_budget_bytes > 0
        runs_all = machine.keeps_spans or work.job.optimizer.has_owners or policy.prefetch != Prefetch() or has_places
        layers = 0 if runs_all else work.rehearsals.equal_layers(work.job)
        return layers if layers > _KEPT + 1 else 0

    def read(self, machine: Simulator) -> Reading:
        """See `Program.read`: [Note: A few layers for all], [Note: Steps now and then]."""
        reading = self._step(machine)
        if self._checks_every > 1:
            plain, other = copy.deepcopy(reading), copy.copy(self)
            other._config = self._job(checks=True)
            other.rehearsal = other._rehearse(other._with_micro_batches(self._few), self._ids(_KEPT))
            checked = other._step(Simulator(machine.cluster, device_type=machine.device_type))
            add_share(reading, checked, 1 / self._checks_every)
            add_share(reading, plain, -1 / self._checks_every)
        for key, size in self._moved_bytes().items():
            reading.sent_bytes[key] = size
        return reading

    def _moved_bytes(self) -> Counter[tuple[Level, Purpose]]:
        """What a rank sends to owners of matrices and back, as a mean over all ranks, which differ in it."""
        moved: Counter[tuple[Level, Purpose]] = Counter()
        matrices, ranks, nodes = self.rehearsal.matrices, self._shape.ranks, self._shape.nodes
        for index, owner in assign(matrices, [0.0] * ranks):
            spec = matrices[index].spec
            for shard in set(spec.layout.holders(spec.index)) - {owner}:
                level: Level = "local" if shard % nodes == owner % nodes else "node"  # [Note: A bucket's order]
                sent_bytes = matrices[index].num_held(shard) * matrices[index].itemsize
                moved[level, "optimizer"] += 2 * sent_bytes / ranks  # type: ignore[assignment]  # bytes are means
        return moved

    @property
    def _left_out(self) -> int:
        """The layers that `rehearsal` does not have. They are as its last one."""
        return max(0, self._num_layers - _KEPT)

    def _step(self, machine: Simulator) -> Reading:
        """A step without what comes now and then."""
        (reading,) = self._readings(machine)
        return reading

    def _readings(self, machine: Simulator) -> list[Reading]:
        """A plain step, and the sync of each fragment if there are islands."""
        if not self._num_layers and self._micro_batches == self._few:
            player = Player(machine, self.rehearsal)
            readings = list(player.all())
            machine.host_bytes = player.host_peak_bytes
            return readings
        few = self._few
        total = self._all_layers(machine, few)
        if self._micro_batches > few:
            total = _extended(total, self._all_layers(machine, few + 1), self._micro_batches - few)
        return _readings_of(_of_one(total, self._stands_for), machine)

    def _all_layers(self, machine: Simulator, micro_batches: int) -> Figures:
        """The figures of all layers, with so many micro-batches."""
        found = self._figures(machine, _KEPT, micro_batches)
        if not self._left_out:
            return found
        return _extended(found, self._figures(machine, _KEPT + 1, micro_batches), self._left_out)

    def _rehearse(self, config: Config, kept: Sequence[int] | None) -> Rehearsal:
        nodes, local, islands = self._shape.nodes, self._shape.local, self._shape.islands
        return self._work.rehearsals.of(
            config, self._work.trace, nodes=nodes, local=local, islands=islands, kept=kept,
            placements=self._work.placements,
        )  # fmt: skip

    def _with_micro_batches(self, count: int) -> Config:
        return replace(self._config, train=replace(self._config.train, accumulation=count))

    def _ids(self, count: int) -> list[int] | None:
        """The layers that stay if there are so many: the first and the last. None: all."""
        if not self._num_layers:
            return None
        return [*range(count - count // 2), *range(self._num_layers - count // 2, self._num_layers)]

    def _figures(self, machine: Simulator, num_layers: int, micro_batches: int) -> Figures:
        player = Player(
            Simulator(machine.cluster, device_type=machine.device_type),
            self._rehearse(self._with_micro_batches(micro_batches), self._ids(num_layers)),
        )
        found: Figures = {}
        for number, reading in enumerate(player.all()):
            found[number, "seconds"] = reading.seconds
            for name in ("sent_bytes", "waits_s", "busy_s"):
                found |= {(number, name, key): value for key, value in getattr(reading, name).items()}
            found |= {(number, "peak", at, kind): peak[kind] for at, peak in player.peaks.items() for kind in KINDS}
        held = {("held", kind): player.machine.held[kind] for kind in KINDS}
        resting = player.machine.host_bytes
        return found | held | {("host",): resting + (player.host_peak_bytes - resting) / self._stands_for}


class LocalStepsProgram(RehearsedStep):
    """Islands that train on their own, and average their pseudo-gradients now and then: `laconic.LocalSteps`.

    A model of which a few layers are rehearsed has one fragment, which stands for all: they are equally large.
    """

    def __init__(self, machine: Simulator, work: StepWork, shape: Shape) -> None:
        """Rehearse steps with and without a sync.

        Raises:
            JobError, ValueError: the trainer refuses the job.
        """
        self._sync = work.job.sync
        self._schedule = self._sync.policy.schedule
        self._stands_for = self._schedule.fragments if self.num_layers(machine, work) else 1
        if self._stands_for > 1:
            one = self._sync.with_keys(fragments=1)
            work = replace(work, job=replace(work.job, sync=one))
        slices = f" and train {self._sync.slices} slices" if self._sync.slices > 1 else ""
        self.inexact = f"islands agree every {self._schedule.every} steps{slices}"
        super().__init__(machine, work, shape)

    def _step(self, machine: Simulator) -> Reading:
        """A step, with its share of the syncs."""
        plain, *syncs = self._readings(machine)
        reading, overlap = copy.deepcopy(plain), self._schedule.overlap
        steps, share = 1 + min(1, overlap), 1 / self._schedule.every
        for sync in syncs:
            more = max(0, self._stands_for * overlap - 1)  # steps that hide exchanges besides the one that is rehearsed
            hidden_s = min(sync.waits_s[PlanLane.WIRE], more * plain.seconds)
            sync.waits_s[PlanLane.WIRE] -= hidden_s  # type: ignore[assignment]
            sync.seconds -= hidden_s
            add_share(reading, sync, share)
            add_share(reading, plain, -steps * share)
        for key in [key for key in reading.sent_bytes if key[0] == "island"]:
            del reading.sent_bytes[key]
        if sent_bytes := sum(map(self._sent_bytes, self.rehearsal.fragments)):
            reading.sent_bytes["island", "outer"] = share * sent_bytes  # type: ignore[assignment]  # bytes are means
        return reading

    def _sent_bytes(self, specs: Sequence[RaggedSpec]) -> float:
        """The bytes that a rank sends for a fragment, or for all fragments that it stands for: the mean over ranks."""
        codec, count, islands = CODECS[self._sync.policy.coding.codec], self._stands_for, self._shape.islands
        last, _ = self.rehearsal.buckets[-1]
        repeated = [layout for unit, layout in self.rehearsal.buckets if unit == last]
        sizes = []
        for rank in range(0, self._shape.ranks, max(1, self._shape.ranks // _MOST_RANKS)):
            numel = 0
            for spec in specs:
                extent = spec.layout.extent(spec.index, rank)
                times = 1 + self._left_out if any(spec.layout is layout for layout in repeated) else 1
                numel += 0 if extent is None else times * extent.numel
            sizes.append(count * sent_bytes_of(-(-numel // count), islands, codec))
        return fmean(sizes)


def _extended(figures: Figures, with_one_more: Figures, left: int) -> Figures:
    """The figures with `left` more of what `with_one_more` has one more of."""
    return {key: value + left * (with_one_more.get(key, 0.0) - value) for key, value in figures.items()}


def _of_one(figures: Figures, fragments: int) -> Figures:
    """The figures in which a sync works in the memory of one of the fragments that it has synced as one."""

    def share(number: object, name: object, at: Any, kind: object) -> float:
        plain = figures.get((0, name, ("step", STEPS - 1) if at[0] == "sync" else at, kind), 0.0)
        return plain + (figures[number, name, at, kind] - plain) / fragments

    return {key: share(*key) if key[0] and key[1:2] == ("peak",) else value for key, value in figures.items()}


def _readings_of(figures: Figures, machine: Simulator) -> list[Reading]:
    """The readings that have these figures. The machine ends as it would have ended."""
    for kind in KINDS:
        machine.hold(kind, figures["held", kind])
    machine.host_bytes += figures["host",]
    readings = [Reading(seconds=value) for (number, *name), value in figures.items() if name == ["seconds"]]
    for (number, name, *keys), value in ((key, value) for key, value in figures.items() if len(key) > 2):
        if name != "peak":
            getattr(readings[number], name)[keys[0]] = value  # type: ignore[call-overload]
    for number, reading in enumerate(readings):
        places = dict.fromkeys(key[2] for key in figures if key[:2] == (number, "peak"))
        peaks = [{kind: figures[number, "peak", at, kind] for kind in KINDS} for at in places]
        reading.peak = max(peaks, key=lambda peak: sum(peak.values()))
    return readings
