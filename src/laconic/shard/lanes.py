"""One CUDA stream per kind of transfer; on CPU the backend's asynchronous work plays that part and a lane is nothing.

[Note: Who may free a transfer buffer]
Every buffer that a lane shares with compute is allocated and freed on the compute stream. A lane begins each job behind
the compute stream's position at that moment, so memory that compute has just freed is safe to write; and compute waits
for the lane's mark before it uses, or frees, what the lane has touched. Buffers that only one lane sees are allocated
inside it. Hence no `record_stream`, and memory is bounded by what has been issued, not by when the host learns that it
is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Mark = Any
"""A CUDA event, or None on CPU."""


class Lane:
    """A place in time: jobs of one lane run in order, beside the compute stream."""

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        """With `urgent`, kernels of the lane go before compute's on a busy device."""
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0) if device.type == "cuda" else None

    @contextmanager
    def running(self, *after: Mark) -> Iterator[None]:
        """Run the body on this lane, behind the compute stream's present position and behind the marks in `after`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for mark in after:
            if mark is not None:
                self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """The lane's present position."""
        return None if self._stream is None else self._stream.record_event()


class Lanes:
    """All lanes of a root module."""

    def __init__(self, device: torch.device) -> None:
        self.gather, self.reduce = Lane(device, urgent=True), Lane(device, urgent=True)
        self.to_host, self.to_device = Lane(device), Lane(device)


def wait_for(mark: Mark) -> None:
    """Order the compute stream behind `mark`."""
    if mark is not None:
        torch.cuda.current_stream(mark.device).wait_event(mark)
