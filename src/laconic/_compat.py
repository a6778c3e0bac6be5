"""Differences between the torch releases laconic runs on (2.11 to 2.15), and the private names it needs, in one
place."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# 2.13 renamed the flat collective and made the old name warn.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_flat(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start gathering equal flat pieces into `output` in rank order; `input` may be this rank's piece of `output`."""
    return _all_gather_flat(output, input, group=group, async_op=True)


# 2.13 renamed this one too; only backends with a true reduce-scatter (NCCL) come here.
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reduce_scatter_flat(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start summing `input` over ranks and scattering equal flat pieces of the sum into `output`."""
    return _reduce_scatter_flat(output, input, group=group, async_op=True)


def in_backward() -> bool:
    """True while the autograd engine runs a graph on this thread: also inside a recomputed forward."""
    return torch._C._current_graph_task_id() != -1


def after_this_backward(callback: Callable[[], None]) -> None:
    """Run `callback()` on this thread when the current autograd graph task has finished, before `backward` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
