"""Islands: a rehearsed step, and the rehearsed steps in which fragments sync, now and then."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from laconic.codec import CODECS
from laconic.islands.all_reduce import sent_bytes_of
from laconic.plan.machine import PlanLane, Reading, Simulator
from laconic.plan.program import Shape, StepWork, add_share
from laconic.plan.rehearsed import RehearsedStep
from laconic.ragged.spec import RaggedSpec

_MOST_RANKS = 64
"""The ranks whose elements are looked at."""


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
        """What a rank sends for a fragment, or for those for which it stands: a mean over ranks, which differ in it."""
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
