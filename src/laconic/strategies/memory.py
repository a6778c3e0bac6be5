"""How much memory a step really takes where no allocator keeps a peak: on CPU, for every strategy alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


class StepPeak:
    """Filled when the profiled block ends."""

    nbytes: int | None = None
    """The most that was allocated at once beyond what was there at the start."""


@contextmanager
def measured_peak() -> Iterator[StepPeak]:
    """Watch torch's CPU allocator during the body: activations, gathered weights, gradients, transfers, all of it.

    Memory that exists before and rests (parameters, optimizer states, a host cache) is not in the figure. It slows the
    body down: do not time it.
    """
    peak = StepPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = most = 0
    for event in events:
        held += event.nbytes()
        most = max(most, held)
    peak.nbytes = most


def local_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of this rank's part of plain or sharded tensors."""
    locals_ = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in locals_)


def state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's part of the optimizer's states."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return local_nbytes(value for value in states if torch.is_tensor(value))
