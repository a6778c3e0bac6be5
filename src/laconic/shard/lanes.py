"""One CUDA stream for each kind of transfer. On CPU the backend's asynchronous work takes their place.

[Note: Who may free a transfer buffer]
The compute stream allocates and frees every buffer that it shares with a lane. A lane starts each job after everything
that the compute stream has issued so far, so it may write to memory that compute has just freed. Compute waits for the
lane's event before it uses or frees a buffer that the lane has touched. A buffer that only one lane uses is allocated
on that lane. So the engine needs no `record_stream`, and the memory in use depends on what has been issued, not on when
the host learns that a transfer is done.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

Event = torch.cuda.Event | None
"""A CUDA event; None on CPU."""


class Lane:
    """One CUDA stream for one kind of transfer: its jobs run in order, beside the compute stream."""

    def __init__(self, device: torch.device, *, is_urgent: bool = False) -> None:
        """The kernels of an urgent lane run before those of the compute stream when the device is busy."""
        self._stream = torch.cuda.Stream(device, priority=-1 if is_urgent else 0) if device.type == "cuda" else None

    @contextmanager
    def running(self, *after: Event) -> Iterator[None]:
        """Issue the body on this lane, after everything on the compute stream so far and after the given events."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def record_event(self) -> Event:
        """An event that completes when everything issued on this lane so far is done."""
        return None if self._stream is None else self._stream.record_event()


class Lanes:
    """All lanes of a root module."""

    def __init__(self, device: torch.device) -> None:
        self.gather, self.reduce = Lane(device, is_urgent=True), Lane(device, is_urgent=True)
        self.to_host, self.to_device = Lane(device), Lane(device)


def wait_for(event: Event) -> None:
    """Let the compute stream wait for `event`."""
    if event is not None:
        torch.cuda.current_stream(event.device).wait_event(event)
