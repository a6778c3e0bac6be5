"""Ranks compare what they are and what they issue: guard/comparison.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import laconic
from laconic.comm.cluster import Cluster
from laconic.errors import RanksDifferError
from laconic.guard.comparison import IssuedProgram, compare
from tests.support import sharded_net
from tests.support.launch import on_ranks


@on_ranks(4)
def test_all_ranks_learn_the_first_difference() -> None:
    group = dist.group.WORLD
    rank = dist.get_rank()
    equal = {"a": {"x": "1", "wire of the island": str(rank // 2)}, "b": {}}
    compare(group, "a test", equal, island=rank // 2)
    odd = {"a": {"x": "1", "wire of the island": "0" if rank == 3 else str(rank // 2)}, "b": {}}
    with pytest.raises(RanksDifferError, match=r"rank 3 differs from rank 2: a has wire of the island 0 here, and 1"):
        compare(group, "a test", odd, island=rank // 2)
    with pytest.raises(RanksDifferError, match=r"^rank 2 differs from rank 0: it has no b, which rank 0 has"):
        compare(group, "a test", equal if rank != 2 else {"a": equal["a"]}, island=rank // 2)
    with pytest.raises(RanksDifferError, match=r"rank 1 differs from rank 0: it runs another call where rank 0 runs a"):
        compare(group, "another call" if rank == 1 else "a test", equal, island=rank // 2)


@on_ranks(2, local=1)
def test_an_optimizer_never_uses_gradients_of_programs_that_differ() -> None:
    cluster = Cluster.of(laconic.init_mesh("cpu"))
    program, rank = IssuedProgram(cluster), dist.get_rank()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for step in range(3):
        program.note("the gather of a")
        program.start_comparison(diverges=False)
        if step:
            program.settle()
        optimizer.step()
    program.note("the gather of a")
    program.note("the gather of b" if rank == 1 else "the gather of c")
    program.start_comparison(diverges=False)
    words = "rank 1 differs from rank 0 at transfer 5, .* it issued the gather of b where rank 0 issued the gather of c"
    with pytest.raises(RanksDifferError, match=words):
        optimizer.step()  # not with these gradients
    program.note("the gather of a")
    program.start_comparison(diverges=False)
    program.settle()


@on_ranks(2, local=1)
def test_the_engine_notes_all_that_it_issues() -> None:
    """The names of both passes reach the comparison. Messages that fit would otherwise be mixed without a word."""
    model: Any = sharded_net.shard(sharded_net.build())
    program = model._laconic_unit.root.observer._program
    noted: list[str] = []
    program.note = noted.append
    sharded_net.train_step(model)
    gathers = [f"the gather of {name}" for name in ("Net", "blocks.0", "blocks.1", "blocks.2")]
    reductions = [f"the reduction of {name}" for name in ("blocks.2", "blocks.1", "blocks.0", "Net")]
    assert sorted(noted) == sorted([*gathers, *gathers[1:], *reductions])
