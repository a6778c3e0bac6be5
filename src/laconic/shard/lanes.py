"""One stream of the accelerator for each kind of transfer. On CPU the backend's asynchronous work takes their place.

[Note: Who may free a transfer buffer]
The compute stream allocates and frees the weights and gradients that it shares with a lane. A lane starts each job
after everything that the compute stream has issued so far, so it may write to memory that compute has just freed. One
that begins late starts after an event instead, and uses no memory that compute has touched since that.
Compute waits for the lane's event before it uses or frees a buffer that the lane has touched. Transfers and sums are
allocated on the lane that makes them. So is the sum that becomes `.grad`: compute uses it and drops it, and its memory
goes to a later job of that lane, which starts after compute. So the engine needs no `record_stream`, and the memory in
use depends on what has been issued, not on when the host learns that a transfer is done. docs/races.md proves it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

Event = torch.Event | None
"""An event of the accelerator; None on CPU."""
_R = TypeVar("_R")
_HERE = nullcontext()


class Lane:
    """One stream for one kind of transfer: its jobs run in order, beside the compute stream."""

    def __init__(self, device: torch.device, *, is_urgent: bool = False) -> None:
        """The kernels of an urgent lane run before those of the compute stream when the device is busy."""
        self._device = device
        self._stream: Any = None
        if device.type != "cpu":
            self._stream = torch.get_device_module(device).Stream(device, priority=-1 if is_urgent else 0)
        self.has_stream = self._stream is not None
        """False on CPU, where the host waits for transfers."""

    def run_job(self, job: Callable[..., _R], *arguments: Any, after: Sequence[Event] = ()) -> _R:
        """Call `job` in `running`. Without a stream, a context in Python would take longer than most jobs."""
        if self._stream is None:
            return job(*arguments)
        with self.running(*after):
            return job(*arguments)

    def go_on_with(self, job: Callable[..., _R], *arguments: Any, after: Sequence[Event] = ()) -> _R:
        """Call `job` in `going_on`."""
        if self._stream is None:
            return job(*arguments)
        with self.going_on(*after):
            return job(*arguments)

    def event_after(self, job: Callable[..., object], *arguments: Any) -> Event:
        """Call `job` in `going_on`. Returns the event that completes with it."""
        if self._stream is None:
            job(*arguments)
            return None
        with self.going_on():
            job(*arguments)
        return self._stream.record_event()

    def running(self, *after: Event) -> AbstractContextManager[Any]:
        """Start a job: issue the body here, after everything on the compute stream so far and the given events."""
        if self._stream is None:
            return _HERE
        self._stream.wait_stream(torch.get_device_module(self._device).current_stream(self._device))
        return self.going_on(*after)

    def going_on(self, *after: Event) -> AbstractContextManager[Any]:
        """Issue the body behind this lane's jobs so far and after the given events, without a wait for compute.

        The body uses no memory that compute has allocated, used or freed since those jobs began.
        """
        if self._stream is None:
            return _HERE
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        return torch.get_device_module(self._device).stream(self._stream)

    def record_event(self) -> Event:
        """An event that completes when everything issued on this lane so far is done."""
        return None if self._stream is None else self._stream.record_event()


class Lanes:
    """All lanes of a root module."""

    def __init__(self, device: torch.device) -> None:
        self.gather_node, self.gather_local = Lane(device, is_urgent=True), Lane(device, is_urgent=True)
        self.reduce = Lane(device, is_urgent=True)
        self.to_host, self.to_device = Lane(device), Lane(device)


def compute_event(device: torch.device) -> Event:
    """An event after everything that compute has issued so far."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device).record_event()


def wait_for(event: Event) -> None:
    """Let the compute stream wait for `event`."""
    if event is not None:
        torch.get_device_module(event.device).current_stream(event.device).wait_event(event)
