"""Ranks that are threads of one process, against processes over Gloo: the same bits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from laconic import rehearse
from laconic.comm.speed import AS_IN_A_RACK
from laconic.shard import choosing
from tests.faults.bench import Bench, campaign_row
from tests.shard.random_trees.case import Case
from tests.shard.random_trees.play import Part
from tests.shard.random_trees.pool import play
from tests.shard.random_trees.strategies import cases
from tests.support.launch import launch
from tests.support.record import Row

_SCENARIOS, _DRAWN = 60, 400
_WORLDS = (2, 3, 4)


def _as_in_a_rack(cluster: Any, level: Any) -> Any:
    return AS_IN_A_RACK[level]


def _drawn(world: int, number: int) -> list[Case]:
    found: list[Case] = []

    def body(case: Case) -> None:
        found.append(case)

    options = settings(
        max_examples=number, database=None, deadline=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    seed(57)(options(given(cases(world))(body)))()
    return found


def _played(case: Case) -> Any:
    try:
        return play(case)
    except Exception as error:
        return f"{type(error).__name__}"


def _played_in_turn(some: Sequence[Case]) -> list[Any]:
    choosing.measure_gathers = _as_in_a_rack
    return [_played(case) for case in some]


def _bits(trace: Any) -> Any:
    """A trace as plain data; tensors as their bytes."""

    def plain(value: Any) -> Any:
        if isinstance(value, Part):
            return value.start, value.shape, plain(value.values)
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return repr(value)

    return trace if isinstance(trace, str) else [(entry.label, plain(entry.value)) for entry in trace]


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    pairs = enumerate(zip(map(_bits, ours), map(_bits, theirs), strict=True))
    return next(
        (
            f"rank {rank}, {one[0]}"
            for rank, (mine, other) in pairs
            for one, two in zip(mine, other, strict=False)
            if one != two
        ),
        "in length",
    )


@campaign_row("in-process", section="suite")
def in_process(bench: Bench) -> Row:
    """Scenarios on ranks that are threads, against processes over Gloo."""
    torch.set_num_threads(1)  # as the processes have; products of two threads have other bits
    number, drawn = (6, 45) if bench.quick else (_SCENARIOS, _DRAWN)
    equal, tried, entries, parts = 0, 0, 0, []
    for world in _WORLDS:
        chosen = sorted(_drawn(world, drawn // len(_WORLDS)), key=lambda case: -len(repr(case)))
        with mock.patch.object(choosing, "measure_gathers", _as_in_a_rack):
            traces = [rehearse.ranks(_played, case, local=world) for case in chosen]
        ran = [index for index, trace in enumerate(traces) if not isinstance(trace[0], str)][: number // len(_WORLDS)]
        others = launch(_played_in_turn, [chosen[index] for index in ran], num_ranks=world, timeout_s=600)
        for place, index in enumerate(ran):
            theirs = [others[rank][place] for rank in range(world)]
            is_equal = [_bits(trace) for trace in traces[index]] == [_bits(trace) for trace in theirs]
            equal, tried = equal + is_equal, tried + 1
            entries += sum(len(trace) for trace in traces[index])
            parts.append(len(repr(chosen[index])))
            if not is_equal:
                print(f"  differs: {_first_difference(traces[index], theirs)}", file=sys.stderr, flush=True)
    return Row(
        claim=f"ranks in one process against processes over Gloo, the {number} scenarios with most parts",
        required=f"{number} equal to the bit",
        measured=f"{equal} of {tried}",
        is_met=equal == tried == number,
        note=(
            f"Random module trees on {', '.join(map(str, _WORLDS))} ranks, of {drawn} drawn those with the longest "
            f"description ({min(parts)} to {max(parts)} characters); {entries:,} values: outputs, gradients, weights."
        ),
    )
