"""DDP whose gradients cross in fewer bits, by torch's own hooks for it.

[Note: DDP's hooks]
`bf16_compress_hook` casts a bucket to bfloat16, divides it, and sums that. torch lets nobody register it by its name
where it finds no NCCL. Gloo sums bfloat16 all the same, so here the hook has another name.

`powerSGD_hook` gets the settings that its documentation advises: warm start and error feedback, and a rank between 1
and 4, of which the largest loses least. Its first two steps are exact, the fewest that torch allows, because DDP orders
its buckets anew after the first step. Matrices that would not halve cross as they are, and so do vectors.

This hook sums three times, and begins the second and third sum when the one before has come. On NCCL a stream orders
them. On Gloo they would begin on its threads, beside those of the next bucket: in another order on other ranks, which
sums what does not belong together, or with all threads waiting for sums that none is left to run. So on CPU a thread of
our own takes one bucket after the other. Backward goes on meanwhile.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from laconic import _compat
from laconic.strategies import parallelize
from laconic.strategies.stepper import Setup

_RANK, _EXACT_STEPS = 4, 2


def ddp_bf16(model: nn.Module, setup: Setup) -> tuple[nn.Module, None]:
    """DDP whose gradients cross in bfloat16: see `parallelize` and [Note: DDP's hooks]."""
    return _hooked(model, setup, None, _in_bfloat16)


def ddp_powersgd(model: nn.Module, setup: Setup) -> tuple[nn.Module, None]:
    """DDP whose gradients cross as factors of a low rank: see `parallelize` and [Note: DDP's hooks]."""
    state = PowerSGDState(None, matrix_approximation_rank=_RANK, start_powerSGD_iter=_EXACT_STEPS)
    return _hooked(model, setup, state, _one_by_one(powerSGD_hook) if setup.device.type == "cpu" else powerSGD_hook)


def _hooked(model: nn.Module, setup: Setup, state: Any, hook: Callable[..., Any]) -> tuple[nn.Module, None]:
    wrapped, mesh = parallelize.ddp(model, setup)
    wrapped.register_comm_hook(state, hook)  # type: ignore[operator]
    return wrapped, mesh


def _in_bfloat16(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    return bf16_compress_hook(group, bucket)  # type: ignore[arg-type]  # None is all ranks


def _one_by_one(
    hook: Callable[[Any, dist.GradBucket], Future[Tensor]],
) -> Callable[[Any, dist.GradBucket], Future[Tensor]]:
    """The same hook, whose buckets a thread takes one after the other."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="laconic-hook")

    def in_thread(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        future: Future[Tensor] = Future()

        def take() -> None:
            try:
                future.set_result(hook(state, bucket).wait())
            except Exception as error:  # DDP raises it at the end of backward
                future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation wants a result

        _compat.after_this_backward(thread.submit(take).result)
        return future

    return in_thread
