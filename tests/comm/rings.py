"""Rings of several ranks in one event loop of this process, and what strangers and broken neighbours say to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from laconic.comm.entries import decode, encode
from laconic.comm.ring import _MOST_STRANGERS, PeerMessage, PeerRing, _Place

PATIENCE_S = 8.0
FIRE = PeerMessage(rank=1, text="the disk\nis on fire", has_failed=True)

STRANGERS: list[bytes] = [
    b"GET / HTTP/1.1\r\n\r\n", b"[" * 500_000, b'{"a":' * 100_000 + b"\n", b"\xff" * (3 << 20), b"\n" * 100_000, b"",
    b"0" * 32 + b"\n", b'{"rank": 3, "token": "wrong"}\n', b"\xff" * 24, random.Random(0).randbytes(1000),
]  # fmt: skip
"""What strangers say, who do not know the token."""
NEIGHBOURS: list[bytes] = [
    b"\n", b"\xff" * 1000 + b"\n", b"garbage\n", b"[" * 200_000 + b"\n", b"x" * ((1 << 20) + 1),
    *(encode(value).encode() + b"\n" for value in ([], {"rank": 1, "text": []}, 7, "text")),
]  # fmt: skip
"""What a neighbour says whose process is not what it was."""


class Circle:
    """Ranks of one ring, which live while the test waits for something."""

    def __init__(self, num_ranks: int) -> None:
        self.store, self._loop = dist.HashStore(), asyncio.new_event_loop()
        self.rings = {rank: PeerRing(self.store, rank, num_ranks, PATIENCE_S) for rank in range(num_ranks)}
        self._lives: dict[int, asyncio.Task[None]] = {}

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Let all ranks live until the condition holds."""
        deadline = time.monotonic() + 60
        for rank in self.rings:
            self._begin(rank)
        while not condition():
            assert time.monotonic() < deadline, "the condition never holds"
            assert not any(life.done() for life in self._lives.values()), "a rank watches no more"
            self._loop.run_until_complete(asyncio.sleep(0.005))

    def _begin(self, rank: int) -> None:
        if rank not in self._lives:
            self._lives[rank] = self._loop.create_task(self.rings[rank].live())

    def join(self) -> None:
        """Live until every rank has both neighbours."""
        self.wait_until(lambda: all(len(ring._neighbours) == 2 for ring in self.rings.values()))

    def wait_until_gone(self, gone: int) -> None:
        """Live until all other ranks know that a rank is gone."""
        self.wait_until(lambda: all(f"rank {gone} is gone" in str(ring.first) for ring in self.rings.values()))

    @property
    def is_quiet(self) -> bool:
        """Whether no rank has heard of anything."""
        return not any(ring.first for ring in self.rings.values())

    def end(self, rank: int) -> None:
        """Let a rank end in order, also if it has only just begun."""
        self._begin(rank)
        life = self._lives.pop(rank)
        self._loop.run_until_complete(asyncio.sleep(0))
        del self.rings[rank]
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(life)

    def kill(self, rank: int) -> None:
        """End a rank without a goodbye, as the kernel does with the connections of a process that is killed."""
        ring = self.rings[rank]
        ring.first = FIRE  # so that it takes nothing back, and has no news
        for connection in ring._connections:
            connection.shutdown(socket.SHUT_RDWR)
        self.end(rank)

    def __enter__(self) -> Circle:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in list(self.rings):
            self.end(rank)
        self._loop.close()

    def place_of(self, rank: int) -> _Place:
        """What a rank has published."""
        return decode(_Place, self.store.get(f"laconic/ring/{rank}"))


def send(to: Circle, kind: str, data: bytes) -> None:
    """Send what strangers or a neighbour say, or put it in the place of a rank, and let the ranks find each other.

    They must hear of each other then, or of the neighbour that sent it; else there is an AssertionError.
    """
    place, whole = to.place_of(0), to.store.get("laconic/ring/0").decode()
    with contextlib.ExitStack() as stack:
        if kind == "stranger":
            for _ in range(5 if data else 3 * _MOST_STRANGERS):
                stranger = stack.enter_context(socket.create_connection((place.host, place.port)))
                stranger.setblocking(False)
                with contextlib.suppress(OSError):
                    stranger.send(data)
            stranger.close()
        elif kind == "place":
            to.store.set("laconic/ring/0", data)  # type: ignore[arg-type]  # a store takes bytes, too
            to.wait_until(lambda: to.rings[0].is_joined)
            to.store.set("laconic/ring/0", whole)
        to.join()
        assert len(to.rings[0]._connections) <= _MOST_STRANGERS + 2
    assert to.is_quiet
    if kind == "neighbour":
        sides = [side for side in to.rings[1]._neighbours if side.get_extra_info("sockname")[1] == to.place_of(1).port]
        sides[0].write(data)
    else:
        to.rings[0].learn(FIRE)
    to.wait_until(lambda: all(ring.first for ring in to.rings.values()))
    told = {ring.first.rank for ring in to.rings.values() if ring.first}
    assert told <= ({0, 1} if kind == "neighbour" else {FIRE.rank}), "either of two may close a connection first"


def watch_with_many_files() -> None:
    """Watch in a process that has more than 1,024 files open, and hear of news and of a rank that is gone."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if most == resource.RLIM_INFINITY else min(most, 4096)
    assert wanted > 1100, "this machine allows no process more than 1,024 files"
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(Path(os.devnull).open()) for _ in range(1040)]
        circle = stack.enter_context(Circle(3))
        assert min(ring._listener.fileno() for ring in circle.rings.values()) > max(1024, kept[-1].fileno())
        send(circle, "stranger", STRANGERS[0])
        circle.kill(1)
        circle.wait_until(lambda: all(len(ring._neighbours) == 1 for ring in circle.rings.values()))
