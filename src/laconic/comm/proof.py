"""The search for a transfer that never ends: [Note: Proof that a transfer never ends] in journal.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from laconic.comm.journal import Entries
from laconic.comm.progress import Record

REMEDY = (
    "All ranks must run the same program: every rank calls the same units, takes the same steps, and calls what is "
    "collective (full_tensor, state_dict, clip_grad_norm_, a save) too"
)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Ranks whose programs differ, so that they wait for each other for ever."""

    ranks: list[int]
    line: str
    """What each of them waits for."""


def find_proof(own_rank: int, records: Mapping[int, Record]) -> Proof | None:
    """Find a proof that this rank's wait never ends. `records` has this rank's and those that others have told."""
    return _differing_names(own_rank, records) or _ended(own_rank, records) or _circle(own_rank, records)


def _differing_names(own_rank: int, records: Mapping[int, Record]) -> Proof | None:
    """Two names under one number of a group."""
    own = records[own_rank]
    for rank, other in records.items():
        for group in own.groups.keys() & other.groups.keys():
            found = _first_difference(own.groups[group], other.groups[group])
            if found is not None:
                number, name, other_name = found
                line = (
                    f"rank {rank} differs from rank {own_rank}: transfer {number} of their group is {other_name} there "
                    f"({other.step}), and {name} on rank {own_rank} ({own.step}). {REMEDY}"
                )
                return Proof(ranks=sorted([own_rank, rank]), line=line)
    return None


def _first_difference(own: Entries, other: Entries) -> tuple[int, str, str] | None:
    for number in range(max(1, own.issued - len(own.last) + 1), min(own.issued, other.issued) + 1):
        name, other_name = own.name_of(number), other.name_of(number)
        if name is not None and other_name is not None and name != other_name:
            return number, name, other_name
    return None


def _ended(own_rank: int, records: Mapping[int, Record]) -> Proof | None:
    """A rank that has ended, and for which this one waits."""
    for rank in _awaited(own_rank, records):
        if records[rank].has_ended:
            return Proof(ranks=[own_rank, rank], line=f"{_reason(own_rank, rank, records)}. {REMEDY}")
    return None


def _circle(own_rank: int, records: Mapping[int, Record]) -> Proof | None:
    """Ranks that wait for each other in a circle, of which this rank is one."""
    came_from: dict[int, int] = {}
    waiting = [own_rank]
    for rank in waiting:
        for awaited in _awaited(rank, records):
            if awaited == own_rank:
                path = [rank]
                while path[-1] != own_rank:
                    path.append(came_from[path[-1]])
                path.reverse()
                reasons = [_reason(a, b, records) for a, b in zip(path, [*path[1:], own_rank], strict=True)]
                return Proof(ranks=path, line=f"{'; '.join(reasons)}: none of them ever goes on. {REMEDY}")
            if awaited not in came_from:
                came_from[awaited] = rank
                waiting.append(awaited)
    return None


def _awaited(rank: int, records: Mapping[int, Record]) -> list[int]:
    """The ranks that have not issued the transfer for which `rank` waits. Ranks without a record may have."""
    ticket = records[rank].ticket
    if ticket is None:
        return []
    others = [other for other in ticket.ranks if other != rank and other in records]
    return [other for other in others if _issued(records[other], ticket.group) < ticket.number]


def _issued(record: Record, group: str) -> int:
    return record.groups[group].issued if group in record.groups else 0


def _reason(rank: int, other: int, records: Mapping[int, Record]) -> str:
    """Say that `rank` waits for `other`, and where both are."""
    own, missing = records[rank], records[other]
    missed = missing.lacks(own)
    never = f"rank {other} never entered {missed}" if missed else f"rank {other} does not take part"
    return f"rank {rank} waits for {own.awaited} {own.step}: {never}; {missing.whereabouts}"
