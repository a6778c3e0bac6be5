"""A ring of connections, by which ranks learn at once that another one has failed or is gone.

[Note: A ring of connections]
Each rank has a TCP connection to the next rank, and the last one to the first. While all goes well nothing is sent. The
kernel closes the connections of a process that dies, however it dies, and its probes find out that a machine no longer
answers. A process that computes, waits or is stopped keeps its connections, however long it takes: the kernel answers
for it. So no rank is taken for dead because it is busy, as with heartbeats of a thread. A rank that ends in order says
goodbye first. What a rank knows it tells its two neighbours, and each passes on what is new to it. One lost rank leaves
a chain, which still reaches all others.

[Note: A rank that dies before it is found]
A rank publishes where it is, and may die before the rank before it has connected. Then the kernel of its machine
refuses the connection. A firewall may refuse as well, so a rank to which nobody has connected yet counts in the store,
again and again. A rank that refuses, and whose count stands still for `_SILENT_S`, is gone. A rank that ends in order
takes back what it has published. If the store itself is lost before the ring is closed, the process that hosts it is
gone, which is rank 0 or its launcher.

[Note: Strangers at the port]
A rank listens at one address, at which it belongs to the job: `own_address`. Whoever connects must first send a line: a
token, which only those know who can read the store. The other side answers with another token. Until then nothing else
is read, so a stranger cannot make a rank parse anything. After that each line is JSON of one type. A neighbour that
sends anything else counts as gone. Few connections may be without a name at a time; the oldest has to go.

[Note: Why no receive on Gloo]
A receive that is always pending on a group of Gloo tells of a killed process as soon, in 20 ms. It fails otherwise, as
measured with torch 2.13. Gloo's sockets have no probes: 36 s after a link was cut, nothing was told. With heartbeats
and a limit of 8 s, ranks learn of a cut in 8 s. But they also take a stopped rank for dead, and one whose computation
holds the interpreter's lock. The receive that reaches its limit closes the connections to living ranks as well. A rank
that dies before it is found keeps another one waiting for more than three timeouts of the group. A stranger who
connects, gives a number that Gloo's listener awaits, and hangs up, ends the group. No call of Python ends a receive: of
24 processes that ended in order while receives were pending, 14 were aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import torch.distributed as dist

from laconic.comm.entries import EntryError, decode, encode

_KEY = "laconic/ring"
_CONNECT_S = 2.0
_RETRY_S, _SLOWER, _MOST_RETRY_S = 0.1, 1.1, 1.0  # between two looks for the neighbours, which may come late
_MOST_PATIENCE_S = 32_000.0  # the longest that Linux waits before it probes
_PROBES = 4  # without an answer, until the kernel gives a connection up
_SILENT_S = 3.0  # until a rank that refuses connections and does not count is gone
_NOWHERE = ("192.0.2.1", 9)  # an address for documentation; to connect a UDP socket sends nothing
_MOST_STRANGERS, _BACKLOG = 16, 128
_TOKEN_BYTES = 16
_MOST_BYTES = 1 << 20  # of one message; a traceback has a tenth


@dataclass(frozen=True, kw_only=True)
class PeerMessage:
    """What a rank tells its neighbours."""

    rank: int
    """The rank that failed or is gone first; -1 stands for the process that hosts the store."""
    text: str
    """What has happened to it."""
    has_failed: bool
    """Whether any rank has failed, and not only ended."""


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where the rank before may connect, as the store has it."""

    host: str
    port: int
    call: str
    """The token by which others call this rank, in hexadecimal digits."""
    answer: str
    """The token by which this rank answers."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16 or {len(self.call), len(self.answer)} != {2 * _TOKEN_BYTES}:
            raise ValueError(f"port {self.port} or the tokens are none")


class PeerRing:
    """This rank's two connections, and what has happened first, as far as it knows."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, patience_s: float) -> None:
        """Publish in the `store` where the rank before may connect.

        A connection is lost once its other end has not answered for `patience_s` seconds.
        """
        self._store, self._rank = store, rank
        self._patience_s = min(patience_s, _MOST_PATIENCE_S)
        self._next, self._before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        host = own_address(store, num_ranks)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._connections: set[socket.socket] = set()
        self._strangers: list[socket.socket] = []
        """The connections of those who have called and have not named themselves, the oldest first."""
        self._neighbours: list[asyncio.StreamWriter] = []
        self.is_joined = False  # to the next rank, which has answered
        self._is_found = False  # by the rank before
        self.first: PeerMessage | None = None
        self.has_heard, self.has_news = threading.Event(), asyncio.Event()
        """Set when `first` is there, and when it is another one. Any thread may wait for the former."""
        self._called: _Place | None = None  # where the next rank was when it was called last
        self._counted, self._counted_s = -1, 0.0  # its count, and the time at which it was another one
        self._has_warned = False
        self._own = _Place(
            host=host,
            port=self._listener.getsockname()[1],
            call=secrets.token_hex(_TOKEN_BYTES),
            answer=secrets.token_hex(_TOKEN_BYTES),
        )
        self._published = encode(self._own)
        store.set(f"{_KEY}/{rank}", self._published)

    async def live(self) -> None:
        """Find the neighbours, and hear what they say. When this is cancelled, say goodbye to them."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for step in (self._count, self._call):
                    self._tasks.create_task(self._repeat(step))
                await self._accept()
        finally:
            if self.first is None and not self._is_found:  # after a failure the rank before shall find this one gone
                with contextlib.suppress(RuntimeError):  # the store may have ended
                    self._store.compare_set(f"{_KEY}/{self._rank}", self._published, "")
            self.abandon()

    def abandon(self) -> None:
        """Close this process's ends. In a fork the connections of the parent stay."""
        for connection in (self._listener, *self._connections):
            connection.close()

    def learn(self, message: PeerMessage) -> None:
        """Keep what happened first, and whether any rank has failed. Tell it to both neighbours, if that is news."""
        first = self.first or message
        first = replace(first, has_failed=first.has_failed or message.has_failed)
        if first != self.first:
            self.first = first
            self.has_heard.set()
            self.has_news.set()
            for neighbour in self._neighbours:
                _say(neighbour, encode(first))

    async def tell(self, message: PeerMessage) -> None:
        """Note an end of this rank, wait for a neighbour if there is none, and wait until all neighbours know it."""
        self.learn(message)
        while not self._neighbours:
            await asyncio.sleep(_RETRY_S)
        for neighbour in list(self._neighbours):
            with contextlib.suppress(OSError):  # it is lost
                await neighbour.drain()

    async def _accept(self) -> None:
        """Take the connections of [Note: Strangers at the port]."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:  # it has gone again; or this process has no descriptor left, and would try again at once
                await asyncio.sleep(_RETRY_S)
                continue
            self._strangers.append(connection)
            self._tasks.create_task(self._talk(connection, None))
            if len(self._strangers) > _MOST_STRANGERS:
                with contextlib.suppress(OSError):  # it has gone, too
                    self._strangers.pop(0).shutdown(socket.SHUT_RDWR)
            await asyncio.sleep(0)  # many may call at once

    async def _repeat(self, step: Callable[[], Awaitable[bool]]) -> None:
        """Take a step again and again until it has done its work, first soon and then more seldom."""
        pause_s = _RETRY_S
        try:
            while not await step():
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * _SLOWER, _MOST_RETRY_S)
        except RuntimeError:  # torch's own errors
            self._lose("the host of the rendezvous (rank 0, or the launcher)", -1)

    async def _count(self) -> bool:
        """Count until the rank before has come: [Note: A rank that dies before it is found]."""
        if not self._is_found:
            self._store.add(f"{_KEY}/lives/{self._own.answer}", 1)
        return self._is_found

    async def _call(self) -> bool:
        """Call the next rank where it is. Returns True once it has answered, or is gone."""
        place = self._look_up()
        if place is None:
            return False
        if place != self._called:  # the first one, or that of an earlier process group is replaced
            self._called, self._counted = place, -1
        try:
            connection = socket.create_connection((place.host, place.port), _CONNECT_S)
        except ConnectionRefusedError:
            counted, now_s = self._store.add(f"{_KEY}/lives/{place.answer}", 0), time.monotonic()
            if counted != self._counted:
                self._counted, self._counted_s = counted, now_s
            is_gone = now_s - self._counted_s > _SILENT_S
            if is_gone:
                self._lose(f"rank {self._next}", self._next)
            return is_gone
        except OSError:
            return False
        await self._talk(connection, place)
        return self.is_joined

    async def _talk(self, connection: socket.socket, place: _Place | None) -> None:
        """Hear a neighbour, once it has said the right token; else the other side is a stranger.

        This rank has called the next one at `place`, or with None is called by the rank before.
        """
        is_known = False
        token = self._own.call if place is None else place.answer
        self._connections.add(connection)
        reader, writer = await asyncio.open_connection(sock=connection, limit=_MOST_BYTES)
        try:
            _let_kernel_probe(connection, self._patience_s)
            writer.transport.set_write_buffer_limits(0)  # so that `drain` waits for all
            if place is not None:
                _say(writer, place.call)
            said = await reader.readexactly(len(token) + 1)
            if not hmac.compare_digest(said, f"{token}\n".encode()):
                return
            is_known = True
            if place is None:
                self._strangers = [other for other in self._strangers if other is not connection]
                self._is_found = True
                _say(writer, self._own.answer)
            else:
                self.is_joined = True
            if self.first is not None:
                _say(writer, encode(self.first))
            self._neighbours.append(writer)
            while (message := decode(PeerMessage | None, (await reader.readline())[:-1])) is not None:  # type: ignore[arg-type]  # a union is no class
                self.learn(message)
            is_known = False  # that was its goodbye
        except asyncio.CancelledError:
            if is_known or place is not None:  # the other side knows this one
                _say(writer, encode(None))
            raise
        except (OSError, EOFError, ValueError):
            pass  # lost; or its process is not what it was, as the kernel and the wire check what they carry
        finally:
            self._neighbours = [other for other in self._neighbours if other is not writer]
            self._strangers = [other for other in self._strangers if other is not connection]
            self._connections.discard(connection)
            writer.close()
        if is_known:
            peer = self._before if place is None else self._next
            self._lose(f"rank {peer}", peer)

    def _lose(self, who: str, rank: int) -> None:
        text = (
            f"{who} is gone: its process ended without a word, or its machine no longer answers "
            f"(rank {self._rank} lost the connection to it)"
        )
        self.learn(PeerMessage(rank=rank, text=text, has_failed=False))

    def _look_up(self) -> _Place | None:
        """Where the next rank listens; None if it has not come or has ended. Says once if the entry is damaged."""
        key = f"{_KEY}/{self._next}"
        published = self._store.get(key) if self._store.check([key]) else b""
        try:
            return decode(_Place, published) if published else None
        except EntryError as error:
            if not self._has_warned:
                self._has_warned = True
                print(
                    f"laconic: the entry {key} of the store is damaged ({error}); rank {self._rank} does not hear from "
                    f"rank {self._next} directly until it is whole",
                    file=sys.__stderr__ or sys.stderr, flush=True,
                )  # fmt: skip
            return None


def _say(writer: asyncio.StreamWriter, line: str) -> None:
    writer.write(line.encode() + b"\n")


def _let_kernel_probe(connection: socket.socket, patience_s: float) -> None:
    """Let the kernel give a connection up if the other machine does not answer for `patience_s` seconds."""
    options = {
        "TCP_KEEPIDLE": max(1, int(patience_s / 2)),
        "TCP_KEEPINTVL": max(1, int(patience_s / 2 / _PROBES)),
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": int(1000 * patience_s),
        "TCP_NODELAY": 1,
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def address_of(store: dist.Store) -> tuple[str, int] | None:
    """The address of the process that hosts a store; None for a store that no process hosts."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def own_address(store: dist.Store, num_ranks: int) -> str:
    """The address at which the other ranks of the job find this process: the one by which it reaches the store.

    On the machine of the store this may be a loopback address. If the job has ranks elsewhere, the address by which
    this machine reaches others takes its place. The same holds for stores that are not on a network.
    """
    found = ""
    with contextlib.suppress(OSError):
        if (address := address_of(store)) is not None:
            with socket.create_connection(address, _CONNECT_S) as connection:
                found = connection.getsockname()[0].removeprefix("::ffff:")
    is_loopback = found.startswith("127.") or found == "::1"
    is_one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks if is_loopback else 0)) >= num_ranks
    is_link = found.startswith("fe80:")  # such an address says nothing without an interface
    if found and not is_link and (is_one_machine or not is_loopback):
        return found
    if not is_one_machine:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_NOWHERE)
            return str(probe.getsockname()[0])
    return "127.0.0.1"
