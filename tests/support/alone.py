"""One process as rank 0 of a cluster whose other ranks are not there."""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed as dist
from torch import Tensor


def become_rank_0(num_ranks: int) -> None:
    """Make the default process group, in which this process is alone: collectives carry nothing and take no time.

    Small agreements, which are exchanges of all with all, find that the other ranks say what this one says.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", rank=0, world_size=num_ranks)
    exchange = dist.all_to_all_single

    def with_equals(output: Tensor, input: Tensor, *args: Any, **options: Any) -> Any:
        output.copy_(input)
        return exchange(output, input, *args, **options)

    dist.all_to_all_single = with_equals
