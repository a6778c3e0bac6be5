"""Which states of which syncs the machines of a job have, and who gets which of them: arithmetic without files.

[Note: A sync that counts]
After a crash one rank may have the state of step 6 and another only that of step 4. So the ranks tell each other what
their machines have before anything is loaded. A sync counts if every shard of it is on some machine. The newest such
sync is restored, all shards of one sync and never two beside each other.

Steps alone do not name a sync. When a machine is lost, the others start again and may take the same steps once more,
with other results. If the lost machine returns, its states are of the earlier start. So every start of a run has a
number, one more than any that is found, and a random token, in case machines that do not see each other start from the
same number. A later start is newer, whatever its step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, Self

from laconic.comm.entries import typed
from laconic.store import folder as store

_STATE: Any = tuple[tuple[int, int, str], int, int, int, tuple[int, ...], list[Any]]  # of a saved state, as in a file


@dataclass(frozen=True, kw_only=True, order=True)
class Sync:
    """A sync of a run. The order is that of [Note: A sync that counts]."""

    start: int
    """The number of the start of the run, from 1."""
    steps: int
    """The inner step after which the fragment was applied."""
    token: str
    """The random name of the start."""


@dataclass(frozen=True, kw_only=True)
class SavedState(store.Manifest):
    """The state of one rank after a sync: the manifest of its folder. Its files are the parts, by fragment."""

    FORMAT = "laconic-state-2"

    run: str = ""
    layout: str | None = None
    """The value that must be equal in the run that restores; see `StateFolder`."""
    sync: Sync
    island: int
    """The place of the island, when the state was saved."""
    shard: int
    """The shard of the island's model; see `Cluster.shard_index`."""
    num_shards: int
    slices: tuple[int, ...]
    """The slices that the island trained, in ascending order."""
    files: tuple[store.FileRecord, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """The name of the state's folder."""
        shard = f"shard-{self.shard}-of-{self.num_shards}"
        return f"start-{self.sync.start}-step-{self.sync.steps}-island-{self.island}-{shard}"

    @property
    def sizes(self) -> list[int]:
        """The bytes of the files."""
        return [each.size_bytes for each in self.files]

    def to_json(self) -> dict[str, Any]:
        """Return plain values, which can be sent, too."""
        sync, files = [self.sync.start, self.sync.steps, self.sync.token], [asdict(record) for record in self.files]
        state = [sync, self.island, self.shard, self.num_shards, list(self.slices), []]
        return {"run": self.run, "layout": self.layout, "state": state, "files": files, "format": self.FORMAT}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Self:
        """Return the state from the values of `to_json`. Raises: KeyError; EntryError if they are none."""
        (start, steps, token), island, shard, num_shards, slices, _ = typed(_STATE, body["state"])
        sync = Sync(start=start, steps=steps, token=token)
        place = {"island": island, "shard": shard, "num_shards": num_shards, "slices": slices}
        files = typed(tuple[store.FileRecord, ...], body["files"])
        return cls(run=typed(str, body["run"]), layout=body["layout"], sync=sync, files=files, **place)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a rank in the job that restores, and the states on its machine."""

    island: int
    shard: int
    slices: tuple[int, ...]
    offers: tuple[SavedState, ...]


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """One rank gets one state, from its own machine or from another rank."""

    rank: int
    holder: int
    state: SavedState
    has_inner: bool
    """Whether the rank takes the inner optimizer's state, too, and not the outer state alone."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sync to restore."""

    sync: Sync
    lead: int
    """The island that gets the outer state and tells it to all others."""
    fetches: tuple[Fetch, ...]
    notes: tuple[str, ...]
    """The lines for users: a newer sync that does not count, islands without a state of their own."""


_Found = Mapping[tuple[int, int], tuple[SavedState, list[int]]]
"""The states of one sync by island and shard, each with the ranks that have it."""


def make_plan(places: Sequence[Place]) -> Plan | None:
    """Choose the newest sync that counts, and the state that each rank gets. None if no sync counts.

    `places` is by rank. An island gets the state of the island of which its own machines have most, if both train the
    same slices. An island whose machines have nothing gets the outer state alone.
    """
    num_shards = 1 + max(place.shard for place in places)
    by_sync: dict[Sync, dict[tuple[int, int], tuple[SavedState, list[int]]]] = {}
    for rank, place in enumerate(places):
        for state in place.offers:
            found = by_sync.setdefault(state.sync, {})
            found.setdefault((state.island, state.shard), (state, []))[1].append(rank)
    notes: list[str] = []
    for sync in sorted(by_sync, reverse=True):
        missing = sorted(set(range(num_shards)) - {shard for _, shard in by_sync[sync]})
        if not missing:
            return _plan(sync, by_sync[sync], places, num_shards, notes)
        shards = ", ".join(map(str, missing))
        notes.append(f"the sync after step {sync.steps} is not used: no machine has its shards {shards}")
    return None


def _plan(sync: Sync, found: _Found, places: Sequence[Place], num_shards: int, notes: list[str]) -> Plan:
    origins = _origins(found, places, num_shards)
    lead = min(origins, default=0)
    fetches = []
    for rank, place in enumerate(places):
        origin = origins.get(place.island)
        if origin is None and place.island != lead:
            continue
        any_island = min(island for island, shard in found if shard == place.shard)
        state, holders = found[any_island if origin is None else origin, place.shard]
        near = [holder for holder in holders if places[holder].island == place.island]
        holder = rank if rank in holders else min(near or holders)
        fetches.append(Fetch(rank=rank, holder=holder, state=state, has_inner=origin is not None))
    without = [str(island) for island in sorted({place.island for place in places} - origins.keys())]
    if without:
        whose = f"island {without[0]} has" if len(without) == 1 else f"islands {', '.join(without)} have"
        none = f"{whose} no state of its own from the sync after step {sync.steps}: the inner optimizer starts afresh"
        notes = [*notes, none]
    return Plan(sync=sync, lead=lead, fetches=tuple(fetches), notes=tuple(notes))


def _origins(found: _Found, places: Sequence[Place], num_shards: int) -> dict[int, int]:
    """Give islands the inner states of earlier islands, one to one, those with most shards on their machines first."""
    shards, slices = range(num_shards), {place.island: place.slices for place in places}
    pairs = []
    for island, origin in product(slices, {island for island, _ in found}):
        states = [found[origin, shard] for shard in shards if (origin, shard) in found]
        if len(states) < num_shards or any(state.slices != slices[island] for state, _ in states):
            continue
        at = [{(places[rank].island, places[rank].shard) for rank in holders} for _, holders in states]
        in_place = sum((island, shard) in each for shard, each in enumerate(at))
        near = sum(any((island, other) in each for other in shards) for each in at)
        if near:
            pairs.append((-in_place, -near, island, origin))
    chosen: dict[int, int] = {}
    for _, _, island, origin in sorted(pairs):
        if island not in chosen and origin not in chosen.values():
            chosen[island] = origin
    return chosen
