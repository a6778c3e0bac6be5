"""Random module trees: beside the unsharded model, and on ranks of one process beside processes over Gloo.

tests/shard/random_trees draws the trees, has the oracle, and says how close sums in another order must come. A tree
that fails is shrunk and printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from laconic import rehearse
from laconic.comm.speed import AS_IN_A_RACK
from laconic.shard import choosing
from tests.faults.bench import Bench, Found, campaign
from tests.faults.fuzz import each_drawn
from tests.shard.random_trees.case import Case
from tests.shard.random_trees.play import Part
from tests.shard.random_trees.pool import explore, play
from tests.shard.random_trees.strategies import cases
from tests.support.launch import launch

_WORLDS = (1, 2, 3, 4)
_NUM_TREES = 2000


@campaign(
    "module-trees",
    "random module trees: values and gradients of fully_shard against the unsharded model's",
    harms=("trees that differ",),
)
def module_trees(bench: Bench) -> Found:
    """Try as many trees on each number of ranks. Those that torch itself cannot run do not count."""
    share, kinds, harms = -(-(60 if bench.quick else _NUM_TREES) // len(_WORLDS)), Counter[str](), []
    for world in _WORLDS:
        found, seed = Counter[str](), 1000 * world
        while not harms and (num_left := share - found.total() + found["invalid"]) > 0:
            try:
                found += explore(world, min(50, num_left), seed, ("differs", "foreign"))
            except AssertionError as error:
                harms.append(f"trees that differ: {error}")
            seed += 1
        kinds += found
    return kinds.total() - kinds["invalid"], harms, f"{dict(kinds)}"


def _played(some: Sequence[Case]) -> list[Any]:
    """The outcome of each case on this rank: the name of an error, or its values as plain data, tensors as bytes."""
    choosing.measure_gathers = lambda cluster, level: AS_IN_A_RACK[level]

    def plain(value: Any) -> Any:
        if isinstance(value, Part):
            return value.start, value.shape, plain(value.values)
        if isinstance(value, torch.Tensor):
            return str(value.dtype), tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return repr(value)

    found: list[Any] = []
    for case in some:
        try:
            found.append([(entry.label, plain(entry.value)) for entry in play(case)])
        except Exception as error:
            found.append(type(error).__name__)
    return found


@campaign(
    "in-process",
    "ranks in one process against processes over Gloo, random module trees with most parts: equal to the bit",
    harms=("difference",),
    section="suite",
)
def in_process(bench: Bench) -> Found:
    """Scenarios on ranks that are threads, against processes over Gloo."""
    torch.set_num_threads(1)  # as the processes have; products of two threads have other bits
    number, drawn = (2, 15) if bench.quick else (20, 133)
    tried, differing = 0, []
    for world in _WORLDS[1:]:
        chosen: list[Case] = []
        each_drawn(cases(world), chosen.append, drawn, 57)
        chosen.sort(key=lambda case: -len(repr(case)))
        with mock.patch.object(choosing, "measure_gathers"):
            played = [(case, [found for [found] in rehearse.ranks(_played, [case], local=world)]) for case in chosen]
        runs = [(case, ours) for case, ours in played if not isinstance(ours[0], str)][:number]
        by_rank = launch(_played, [case for case, _ in runs], num_ranks=world, timeout_s=600)
        pairs = zip(runs, zip(*by_rank, strict=True), strict=True)
        differing += [f"difference: {case}" for (case, ours), theirs in pairs if ours != list(theirs)]
        tried += len(runs)
    return tried, differing, "Outputs, gradients, weights."
