"""The accelerators that hold the inputs of a stage: their random states, and the end of their work."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def restoring_random_states(values: Iterable[Tensor]) -> Iterator[None]:
    """Afterwards, the random states of the CPU and of the accelerators that hold `values` are as before."""
    devices = _accelerators(values)
    kind = next((device.type for device in devices), "cpu")  # the CPU's state is restored whatever this says
    with torch.random.fork_rng(devices, device_type=kind):
        yield


def synchronize(values: Iterable[Tensor]) -> None:
    """Wait until the accelerators that hold `values` have finished all work."""
    for device in _accelerators(values):
        torch.accelerator.synchronize(device)


def _accelerators(values: Iterable[Tensor]) -> set[torch.device]:
    return {value.device for value in values if value.device.type != "cpu"}
