"""Ranks that run different programs: all of them end soon, with an exception that says who differs, where and how."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.faults.bench import Bench, campaign_row
from tests.faults.differing import kinds, run_kind
from tests.support.launch import launch
from tests.support.record import Row

MOST_S = 15.0
QUICK = ("depth", "cache", "unit b for unit c", "evaluation on rank 0", "uneven steps", "full_tensor on rank 0")
_EXITS = ("uneven steps", "exit in forward")  # here the odd rank ends in order, and has no exception
_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one kind."""

    name: str
    wall_s: float
    """The seconds until the last rank ended."""
    fault: str
    """What was missing; "" if all ranks ended as promised."""
    told: list[str]
    """The exceptions of all ranks."""


def try_kind(name: str) -> Outcome:
    """Run all ranks of a kind, and look at their exceptions."""
    kind = kinds()[name]
    try:
        ends = launch(run_kind, name, num_ranks=kind.num_ranks, num_local=kind.num_local, timeout_s=90, backend=None)
    except (RuntimeError, TimeoutError) as error:
        return Outcome(name=name, wall_s=90.0, fault=f"no end: {str(error)[-300:]}", told=[])
    told, wall_s = [end[0] for end in ends], max(end[1] for end in ends)
    judged = told[:-1] if name in _EXITS else told
    words = ("rank ", *kind.words)
    # the rank whose own exception began all has that exception
    missing = [
        f"rank {rank} lacks {word!r}"
        for rank, text in enumerate(judged)
        for word in words
        if word not in text and not (name == "exception in forward" and rank == kind.num_ranks - 1)
    ]
    if wall_s > MOST_S:
        missing.append(f"took {wall_s:.1f} s")
    return Outcome(name=name, wall_s=wall_s, fault="; ".join(missing), told=told)


@campaign_row("ranks-differ", section="mend")
def row(bench: Bench) -> Row:
    """Try all kinds."""
    names = [name for name in kinds() if not bench.quick or name in QUICK]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        outcomes = list(pool.map(try_kind, names))
    for outcome in outcomes:
        print(f"{outcome.name}: {outcome.wall_s:.1f} s {outcome.fault or 'ok'}", flush=True)
    faulty = [outcome.name for outcome in outcomes if outcome.fault]
    good, longest = len(outcomes) - len(faulty), max(outcome.wall_s for outcome in outcomes)
    least = len(QUICK) if bench.quick else 30
    return Row(
        claim="ranks that differ in settings, in what they call, or that miss",
        required=f">= {least} kinds; all of them end on all ranks within {MOST_S:g} s with an exception that names "
        "rank, unit and difference",
        measured=f"{good} of {len(outcomes)}; the longest {longest:.1f} s",
        is_met=good == len(outcomes) >= least,
        note=f"2 or 4 processes with Gloo; fails: {', '.join(faulty)}" if faulty else "2 or 4 processes with Gloo.",
    )
