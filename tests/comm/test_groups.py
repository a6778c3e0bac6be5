"""Groups that their members make alone: [Note: Names that do not come back]."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist

from laconic.comm.groups import destroy_with, new_group
from tests.support.launch import run_ranks


class Owner:
    pass


def job_uneven_ends(members: list[int]) -> list[float]:
    """Each round makes a group. Only the first member's goes at once, as where Python collects a cycle early."""
    sums: list[float] = []
    if dist.get_rank() not in members:
        return sums
    owners = []
    for _ in range(4):
        owner, group = Owner(), new_group(members, None)
        destroy_with(owner, [group])
        number = torch.tensor([1.0 + dist.get_rank(group)])
        dist.all_reduce(number, group=group)
        sums.append(float(number))
        if dist.get_rank() != members[0]:
            owners.append(owner)
        del owner, group
        gc.collect()
    return sums


@pytest.mark.parametrize("members", [[0, 1], [2, 0], [0, 1, 2]])
def test_a_group_is_made_again_although_some_ranks_still_hold_the_last(members: list[int]) -> None:
    all_sums = run_ranks(job_uneven_ends, 3, members, local=1)
    expected = float(sum(range(1, len(members) + 1)))
    assert [bool(sums) for sums in all_sums] == [rank in members for rank in range(3)]
    assert all(sums == [expected] * 4 for sums in all_sums if sums)


def job_order() -> list[int]:
    group = new_group([2, 0, 1], None)
    assert dist.get_process_group_ranks(group) == [0, 1, 2]
    pieces: list[int] = [-1] * 3
    dist.all_gather_object(pieces, dist.get_rank(), group=group)
    return pieces


def test_members_are_in_ascending_order() -> None:
    assert run_ranks(job_order, 3, local=1) == [[0, 1, 2]] * 3
