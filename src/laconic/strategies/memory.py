"""The memory of a step on CPU, whose allocator keeps no peak, measured in the same way for every strategy.

[Note: Frees that the profiler does not see]
torch's profiler watches the thread that starts it, and a thread of Gloo while that runs a collective, but not when it
frees the collective's tensors afterwards. Summed up, the profiler's events of memory then grow with every collective:
for FSDP2 by up to 13 % of a step's peak. So torch is told to count in all threads: each event then says how much is
allocated, which no lost free spoils.

A free of memory that nobody allocated in the body does not count: it belongs to what was there before.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from laconic._compat import AllocatorEvent, allocator_events, count_in_all_threads


class StepPeak:
    """The result of `measured_peak`."""

    nbytes: int | None = None
    """The peak of the memory that was allocated in the body, in bytes; None until the body ends, and on a system where
    torch cannot count in all threads."""


@contextmanager
def measured_peak() -> Iterator[StepPeak]:
    """Watch torch's CPU allocator during the body: activations, gathered weights, gradients and transfers.

    Memory that was allocated before (parameters, optimizer states, a host cache) does not count. The profiler slows the
    body down, so do not time it. See [Note: Frees that the profiler does not see].
    """
    peak = StepPeak()
    with count_in_all_threads() as counts_all:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield peak
        events = allocator_events(profiler)
    peak.nbytes = peak_of_totals(events) if counts_all else None


def peak_of_totals(events: Sequence[AllocatorEvent]) -> int:
    """The peak in bytes of what the allocator has counted in all threads since the first of `events`."""
    known: set[int] = set()
    before = most = 0
    for index, event in enumerate(events):
        if index == 0:
            before = event.total_bytes - event.nbytes
        if event.nbytes > 0:
            known.add(event.address)
        elif event.address not in known:
            before += event.nbytes
        most = max(most, event.total_bytes - before)
    return most


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
