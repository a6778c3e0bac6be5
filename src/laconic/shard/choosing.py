"""`cache="auto"`: after the first step, each unit of a root is placed where that saves most: [Note: Placement].

[Note: One choice on all ranks]
Ranks have different rooms and measure different speeds, and must place alike, since a gather needs all of them. So they
tell each other what they have found, and all choose by the least room, the slowest transfer and the first rank's uses.
The choice is a function of numbers that are then equal, so nobody sends it. It stays for the whole run, and a
checkpoint of `laconic.train` has it.

[Note: Room is tried]
A rank that ran out of memory in the middle of a step would leave the others waiting, and no step could be repeated. So
memory is tried between two steps: what shall stay is allocated at once, and so, for a moment, is the rest that the
first step needed. If a rank finds no room, all choose again, within half of the bytes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.comm.speed import Speed, measure_copies, measure_gathers
from laconic.shard.ledger import Ledger
from laconic.shard.placement import Chosen, Passing, Speeds, UnitUse, choose_placements
from laconic.shard.policies import Cache, Placement
from laconic.shard.room import Room, held_bytes, room_after_a_step

_log = logging.getLogger("laconic")
_LEAST_BYTES = 1 << 20
"""Half of a budget that is smaller is no budget."""


class PlacingRoot(ABC):
    """A root, as a chooser sees it."""

    cluster: Cluster
    ledger: Ledger
    chooser: Chooser | None
    """None once units rest where they will for the whole run."""

    @property
    @abstractmethod
    def version(self) -> int:
        """A number that every change of weights increases."""

    @abstractmethod
    def watch_passing(self) -> None:
        """Let the ledger keep what its `passing` needs from now on."""

    @abstractmethod
    def uses_to_place(self) -> list[UnitUse]:
        """The use of each unit that a chooser places, since the counting began."""

    @abstractmethod
    def place_chosen(self, placements: Sequence[Placement]) -> None:
        """Let the units that a chooser places rest elsewhere."""

    @abstractmethod
    def allocate_chosen(self) -> int:
        """Allocate the device memory in which the weights of these units stay. Returns its bytes."""


class Chooser:
    """Places the units of one root whose cache is "auto", once, when the first step has shown what they need."""

    def __init__(self, root: PlacingRoot, caches: Sequence[Cache]) -> None:
        """Choose for the units of `root` that have these caches. It has found them just now."""
        self._root = root
        root.watch_passing()
        self._held_before: int | None = None  # until the first forward
        self._version_before: int | None = None  # of the weights, before an optimizer's step
        self._passing = Passing()
        self._given: dict[str, int | None] = {
            name: min((size for cache in caches if (size := getattr(cache, name)) is not None), default=None)
            for name in ("device_bytes", "host_bytes")
        }

    def end_step(self) -> None:
        """Note the end of a backward that syncs: an optimizer's step may follow."""
        self._version_before, self._passing = self._root.version, self._root.ledger.passing

    def begin_forward(self) -> None:
        """Before the second step, choose and place. Collective over the island.

        Raises:
            ValueError: copies of weights for differences on the wire have no room.
        """
        if self._held_before is None and None in self._given.values():
            self._held_before = held_bytes(self._root.cluster.device)
        if self._version_before in (None, self._root.version):
            return
        self._root.chooser = None
        self._root.ledger.forget_passing()
        self._say(str(self._choose()))

    def _choose(self) -> Chosen:
        cluster = self._root.cluster
        uses = self._root.uses_to_place()
        speeds, room, passing, uses = _agree(cluster, _measured(cluster), self._room(), self._passing, uses)
        device_bytes, host_bytes = room.device_bytes, room.host_bytes
        while True:
            choice = choose_placements(uses, speeds, device_bytes=device_bytes, host_bytes=host_bytes, passing=passing)
            taken = choice.saving
            if self._place(choice, room.step_bytes) or max(taken.device_bytes, taken.host_bytes) <= 0:
                return choice
            self._say(
                f"there was no memory for the {taken.device_bytes / 1e9:.2f} GB on the device and "
                f"{taken.host_bytes / 1e9:.2f} GB on the host that were to be allowed: choosing within half of them"
            )
            device_bytes, host_bytes = (
                half if (half := max(0, nbytes) // 2) >= _LEAST_BYTES else 0
                for nbytes in (taken.device_bytes, taken.host_bytes)
            )

    def _say(self, sentence: str) -> None:
        """Let one rank of all islands log a sentence."""
        if self._root.cluster.shard_index == 0 and self._root.cluster.island_rank == 0:
            _log.warning("%s", sentence)

    def _room(self) -> Room:
        """This rank's room, within the budget that the user has set."""
        cluster = self._root.cluster
        given = {name: size for name, size in self._given.items() if size is not None}
        if self._held_before is None:
            return Room(step_bytes=0, **given)
        found = room_after_a_step(cluster.device, held_before=self._held_before, num_local=cluster.num_local)
        return replace(found, **given)

    def _place(self, choice: Chosen, step_bytes: int) -> bool:
        """Place the units, and return whether all ranks have room: [Note: Room is tried]. Collective."""
        has_room = True
        try:
            self._root.place_chosen(choice.placements)
            resting_bytes = self._root.allocate_chosen()
            rest_bytes = max(0, step_bytes + choice.saving.device_bytes - resting_bytes)
            torch.empty(rest_bytes, dtype=torch.uint8, device=self._root.cluster.device)
        except (RuntimeError, OSError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            has_room = False
        return all(_gather(self._root.cluster, has_room))


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, OSError) or "can't allocate memory" in str(error)


def _measured(cluster: Cluster) -> Speeds:
    copy = None if cluster.device_type == "cpu" else measure_copies(cluster.device)
    return Speeds(node=measure_gathers(cluster, "node"), local=measure_gathers(cluster, "local"), copy=copy)


def _agree(
    cluster: Cluster, speeds: Speeds, room: Room, passing: Passing, uses: Sequence[UnitUse]
) -> tuple[Speeds, Room, Passing, list[UnitUse]]:
    """The numbers by which all ranks choose: [Note: One choice on all ranks]. Collective."""
    counts = [[use.num_gathers, use.num_early_sums] for use in uses]
    own: dict[str, Any] = {"speeds": asdict(speeds), "room": asdict(room), "passing": asdict(passing), "counts": counts}
    by_rank: list[dict[str, Any]] = _gather(cluster, own)

    def slowest(level: str) -> Speed:
        each = [Speed(**found["speeds"][level]) for found in by_rank]
        return Speed(
            latency_s=max(speed.latency_s for speed in each), bytes_per_s=min(speed.bytes_per_s for speed in each)
        )

    def least(name: str) -> dict[str, int]:
        return {key: min(found[name][key] for found in by_rank) for key in own[name]}

    agreed = Speeds(node=slowest("node"), local=slowest("local"), copy=None if speeds.copy is None else slowest("copy"))
    step_bytes = max(found["room"]["step_bytes"] for found in by_rank)
    first = [
        replace(use, num_gathers=num_gathers, num_early_sums=num_early_sums)
        for use, (num_gathers, num_early_sums) in zip(uses, by_rank[0]["counts"], strict=True)
    ]
    return agreed, Room(**{**least("room"), "step_bytes": step_bytes}), Passing(**least("passing")), first


def _gather(cluster: Cluster, value: Any) -> list[Any]:
    """The values of all ranks of the island."""
    return [value] if cluster.size == 1 else RankGroup(cluster.flag_group).gather(value)
