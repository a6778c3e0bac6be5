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

import contextlib
import hmac
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import wait

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

HOST = -1
"""Stands for the process that hosts the store, in place of a rank."""


@dataclass(frozen=True, kw_only=True)
class PeerMessage:
    """What a rank tells its neighbours."""

    rank: int
    """The rank that failed or is gone first."""
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


class _Link:
    """A connection to a neighbour. Until `is_known`, the other side may be anybody."""

    def __init__(self, connection: socket.socket, peer: int, token: str, patience_s: float, *, is_caller: bool) -> None:
        """Take a connection to `peer`, whose first line is `token`. `is_caller`: this rank has called."""
        self.connection, self.peer, self.is_caller = connection, peer, is_caller
        self.is_known = self.is_over = False
        self._token, self._arrived, self._is_cut = token.encode(), b"", False
        connection.settimeout(_CONNECT_S)
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

    def send(self, line: str) -> None:
        """Send a line. If the connection is lost, `receive` finds out."""
        if not self._is_cut:
            try:
                self.connection.sendall(line.encode() + b"\n")
            except OSError:
                self._is_cut = True  # perhaps in the middle of a line, so another one would be read as its rest

    def receive(self) -> list[bytes]:
        """Take what has arrived, and return the lines of the neighbour that are whole.

        `is_over` is then set if the connection is closed or lost, or the other side is a stranger.
        """
        data, most = b"", _MOST_BYTES if self.is_known else len(self._token) + 1
        try:
            data = self.connection.recv(most)
            self.is_over = not data
        except TimeoutError:  # the kernel took back what it had announced
            pass
        except OSError:  # a reset, or the kernel's probes had no answer
            self.is_over = True
        *lines, self._arrived = (self._arrived + data).split(b"\n")
        if not self.is_known and (lines or len(self._arrived) > len(self._token)):
            self.is_known = bool(lines) and hmac.compare_digest(lines.pop(0), self._token)
            self.is_over |= not self.is_known
        self.is_over |= len(self._arrived) > _MOST_BYTES
        return lines


class PeerRing:
    """This rank's two connections. All methods but `wake` are for one thread."""

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
        self._woken, self._waker = socket.socketpair()
        self._links: list[_Link] = []
        self._said: PeerMessage | None = None
        self.is_joined = False  # to the next rank, which has answered
        self._is_found = False  # by the rank before
        self._called: _Place | None = None  # where the next rank was when it was called last
        self._count, self._counted_s = -1, 0.0  # of the next rank, and the time at which it was another one
        self._retry_s = _RETRY_S
        self._has_warned = False
        self._own = _Place(
            host=host,
            port=self._listener.getsockname()[1],
            call=secrets.token_hex(_TOKEN_BYTES),
            answer=secrets.token_hex(_TOKEN_BYTES),
        )
        self._published = encode(self._own)
        store.set(f"{_KEY}/{rank}", self._published)

    def wake(self) -> None:
        """Let `poll` return at once. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def send(self, message: PeerMessage) -> None:
        """Send a message to the neighbours that are connected, and to those that come later."""
        self._said = message
        for link in self._links:
            if link.is_known:
                link.send(encode(message))

    @property
    def has_neighbours(self) -> bool:
        """True if a neighbour is connected."""
        return any(link.is_known for link in self._links)

    def poll(self, timeout_s: float) -> tuple[list[PeerMessage], list[int]]:
        """Wait up to `timeout_s` seconds. Return the messages that came, and the neighbours that are gone."""
        if not (self.is_joined and self._is_found):
            timeout_s, self._retry_s = min(timeout_s, self._retry_s), min(self._retry_s * _SLOWER, _MOST_RETRY_S)
            if (lost := self._look()) is not None:
                self.is_joined = self._is_found = True  # as far as this rank ever will be
                return [], [lost]
        # `wait` polls, while select.select takes no descriptor from 1,024 on
        ready = wait([self._listener, self._woken, *(link.connection for link in self._links)], timeout_s)
        if self._listener in ready:
            self._accept()
        if self._woken in ready:
            self._woken.recv(1 << 10)
        messages: list[PeerMessage] = []
        gone: list[int] = []
        for link in [link for link in self._links if link.connection in ready]:
            messages += self._heard(link)
            if link.is_over:
                self._drop(link)
                if link.is_known:
                    gone.append(link.peer)
        return messages, gone

    def close(self) -> None:
        """Say goodbye, and end the connections."""
        if self._said is None and not self._is_found:  # after a failure the rank before shall find this one gone
            with contextlib.suppress(RuntimeError):  # the store may have ended
                self._store.compare_set(f"{_KEY}/{self._rank}", self._published, "")
        for link in self._links:
            if link.is_known:
                link.send(encode(None))
        self.abandon()

    def abandon(self) -> None:
        """Close this process's ends. In a fork the connections of the parent stay."""
        for connection in (self._listener, self._woken, self._waker, *(link.connection for link in self._links)):
            connection.close()
        self._links = []

    def _accept(self) -> None:
        """Take a connection of [Note: Strangers at the port]."""
        try:
            self._add(self._listener.accept()[0], self._before, self._own.call, is_caller=False)
        except OSError:  # it has gone again; or this process has no descriptor left, and would try again at once
            time.sleep(_RETRY_S)
        strangers = [link for link in self._links if not link.is_known and not link.is_caller]
        if len(strangers) > _MOST_STRANGERS:
            self._drop(strangers[0])

    def _add(self, connection: socket.socket, peer: int, token: str, *, is_caller: bool) -> _Link:
        self._links.append(_Link(connection, peer, token, self._patience_s, is_caller=is_caller))
        return self._links[-1]

    def _drop(self, link: _Link) -> None:
        self._links.remove(link)
        link.connection.close()

    def _heard(self, link: _Link) -> list[PeerMessage]:
        """Read the messages of a connection. Send what this rank knows to a neighbour that names itself."""
        was_known, lines = link.is_known, link.receive()
        if link.is_known and not was_known:
            if link.is_caller:
                self.is_joined = True
            else:
                self._is_found = True
                link.send(self._own.answer)
            if self._said is not None:
                link.send(encode(self._said))
        messages: list[PeerMessage] = []
        try:
            for line in lines:
                message = decode(PeerMessage | None, line)  # type: ignore[arg-type]  # a union is no class
                if message is None:  # the goodbye
                    link.is_known, link.is_over = False, True
                    break
                messages.append(message)
        except EntryError:  # the kernel and the wire check what they carry, so its process is not what it was
            link.is_over = True
        return messages

    def _look(self) -> int | None:
        """Count for the rank before, and try to find the next rank. Returns the next rank or HOST if it is gone."""
        try:
            if not self._is_found:
                self._store.add(f"{_KEY}/lives/{self._own.answer}", 1)
            if not self.is_joined and self._is_refused() and self._is_silent():
                return self._next
        except RuntimeError:  # torch's own errors
            return HOST
        return None

    def _is_refused(self) -> bool:
        """Call the next rank, if that rank has published where and no call is under way. True if it refuses."""
        if any(link.is_caller for link in self._links):
            return False
        place = self._look_up()
        if place != self._called:  # the first one, or that of an earlier process group is replaced
            self._called, self._count = place, -1
        if place is None:
            return False
        try:
            connection = socket.create_connection((place.host, place.port), _CONNECT_S)
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        self._add(connection, self._next, place.answer, is_caller=True).send(place.call)
        return False

    def _is_silent(self) -> bool:
        """Whether the count of the next rank stands still: [Note: A rank that dies before it is found]."""
        assert self._called is not None
        count, now_s = self._store.add(f"{_KEY}/lives/{self._called.answer}", 0), time.monotonic()
        if count != self._count:
            self._count, self._counted_s = count, now_s
        return now_s - self._counted_s > _SILENT_S

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
