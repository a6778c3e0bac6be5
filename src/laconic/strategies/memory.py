"""The memory of a step on CPU, whose allocator keeps no peak, measured in the same way for every strategy."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


class StepPeak:
    """The result of `measured_peak`."""

    nbytes: int | None = None
    """The peak of the memory that was allocated in the body, in bytes; None until the body ends."""


@contextmanager
def measured_peak() -> Iterator[StepPeak]:
    """Watch torch's CPU allocator during the body: activations, gathered weights, gradients and transfers.

    Memory that was allocated before (parameters, optimizer states, a host cache) does not count. The profiler slows the
    body down, so do not time it.
    """
    peak = StepPeak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    peak.nbytes = max(itertools.accumulate(changes, initial=0))


def whole_numel(parameter: torch.Tensor) -> int:
    """The elements of a whole parameter, under DeepSpeed too, whose parameters look empty between their uses."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def local_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of this rank's part of plain or sharded tensors."""
    parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of this rank's part of the optimizer's states."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return local_nbytes(value for value in states if torch.is_tensor(value))
