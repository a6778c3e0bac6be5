"""Differences between the torch releases laconic runs on (2.11 to 2.15), and the private names it needs, in one
place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

_F = TypeVar("_F", bound=Callable[..., Any])

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


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that carries a group's tensors on a device: "nccl", "gloo", ...

    `dist.get_backend` says "undefined" or "cpu:gloo,cuda:nccl" for a group with one backend per device.
    """
    return group._get_backend(torch.device(device_type)).name().lower()


def let_optimizers_batch(tensor_type: type[torch.Tensor]) -> None:
    """Have optimizers and `clip_grad_norm_` choose their list implementations for this type, as for plain tensors."""
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_utils

    for types in (of_optimizers, of_utils):
        if tensor_type not in types:
            types.append(tensor_type)


def outside_compilation(function: _F) -> _F:
    """Decorate what torch.compile must call, not trace. Unlike `torch.compiler.disable` it imports dynamo when used."""
    return cast(_F, torch._disable_dynamo(function))


def is_transforming() -> bool:
    """True under torch.compile's tracing or a torch.func transform, which cannot look into an autograd function."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def in_backward() -> bool:
    """True while the autograd engine runs a graph on this thread: also inside a recomputed forward."""
    return torch._C._current_graph_task_id() != -1


def after_this_backward(callback: Callable[[], None]) -> None:
    """Run `callback()` on this thread when the current autograd graph task has finished, before `backward` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
