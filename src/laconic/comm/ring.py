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
refuses the connection. A firewall may refuse as well, so the rank before asks in the store: a rank to which nobody has
connected yet looks for the question, and answers. A rank that refuses and does not answer for `_SILENT_S` is gone. A
rank that ends in order takes back what it has published. If the store itself is lost before the ring is closed, the
process that hosts it is gone, which is rank 0 or its launcher.

[Note: Strangers at the port]
A rank listens at one address, at which it belongs to the job: `own_address`. Whoever connects must first send a call,
of fixed length: a token, which only those know who can read the store, and a rank. The other side answers with another
token. Until then nothing else is read, so a stranger cannot make a rank parse anything. After that each message is its
length and JSON of one type. A neighbour that sends anything else counts as gone. Few connections may be without a name
at a time; the oldest has to go.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Self

import torch.distributed as dist

from laconic.comm.entries import EntryError, decode, encode

_KEY = "laconic/ring"
_CONNECT_S = 2.0
_RETRY_S, _SLOWER, _MOST_RETRY_S = 0.1, 1.1, 1.0  # between two looks for the neighbours, which may come late
_MOST_PATIENCE_S = 32_000.0  # the longest that Linux waits before it probes
_PROBES = 4  # without an answer, until the kernel gives a connection up
_SILENT_S = 2.0  # until a rank that refuses connections and does not answer in the store is gone
_NOWHERE = ("192.0.2.1", 9)  # an address for documentation; to connect a UDP socket sends nothing
_MOST_STRANGERS, _BACKLOG = 16, 128
_TOKEN_BYTES = 16
_CALL = struct.Struct(f">{_TOKEN_BYTES}sI")  # the token of the rank that is called, and the rank that calls
_LENGTH = struct.Struct(">I")
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
        if not 0 < self.port < 1 << 16 or any(len(self.token(each)) != _TOKEN_BYTES for each in ("call", "answer")):
            raise ValueError(f"port {self.port} or the tokens are none")

    def token(self, name: str) -> bytes:
        return bytes.fromhex(getattr(self, name))


class _Link:
    """A connection to a neighbour. Until `peer` is known, the other side may be anybody."""

    def __init__(self, connection: socket.socket, patience_s: float, awaited: tuple[int, bytes] | None = None) -> None:
        """Take a connection. `awaited` has the rank that this rank has called, and the token with which it answers."""
        self.connection, self.awaited = connection, awaited
        self.peer: int | None = None
        self.is_over = False
        self._arrived, self._is_cut = b"", False
        connection.setblocking(False)
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

    def tell(self, message: PeerMessage | None) -> None:
        """Send a message; None is the goodbye."""
        text = encode(message).encode()
        self.send(_LENGTH.pack(len(text)) + text)

    def send(self, data: bytes) -> None:
        if self._is_cut:
            return
        try:  # `receive` finds out that the connection is lost
            self.connection.settimeout(_CONNECT_S)
            self.connection.sendall(data)
        except OSError:
            self._is_cut = True  # perhaps in the middle of a message, so another one would be read as its rest
        with contextlib.suppress(OSError):
            self.connection.setblocking(False)

    def receive(self) -> None:
        """Take what has arrived. `is_over` is then set if the connection is closed or lost."""
        most = _LENGTH.size + _MOST_BYTES if self.peer is not None else _CALL.size
        try:
            while len(self._arrived) < most and (data := self.connection.recv(most - len(self._arrived))):
                self._arrived += data
            self.is_over = len(self._arrived) < most
        except BlockingIOError:
            pass
        except OSError:  # a reset, or the kernel's probes had no answer
            self.is_over = True

    def take(self, num_bytes: int) -> bytes | None:
        """The next bytes that have arrived; None if there are fewer."""
        if len(self._arrived) < num_bytes:
            return None
        taken, self._arrived = self._arrived[:num_bytes], self._arrived[num_bytes:]
        return taken

    def messages(self) -> list[PeerMessage | None]:
        """The whole messages that have arrived from a neighbour; None is the goodbye. Raises: EntryError."""
        found: list[PeerMessage | None] = []
        while len(self._arrived) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._arrived)
            if length > _MOST_BYTES:
                raise EntryError(f"a message of {length} bytes")
            if len(self._arrived) < _LENGTH.size + length:
                break
            text = self._arrived[_LENGTH.size : _LENGTH.size + length]
            self._arrived = self._arrived[_LENGTH.size + length :]
            found.append(decode(PeerMessage | None, text))  # type: ignore[arg-type]  # a union is no class
        return found


class PeerRing:
    """This rank's two connections. All methods but `wake` are for one thread."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, patience_s: float) -> None:
        """Publish in the `store` where the rank before may connect.

        A connection is lost once its other end has not answered for `patience_s` seconds.
        """
        self._store, self._rank = store, rank
        self._patience_s = min(patience_s, _MOST_PATIENCE_S)
        self._next = (rank + 1) % num_ranks
        self._before = (rank - 1) % num_ranks
        host = own_address(store, num_ranks)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._links: list[_Link] = []
        self._said: PeerMessage | None = None
        self._called: _Place | None = None  # where the next rank was when it was called last
        self.is_joined = False  # to the next rank, which has answered
        self._is_found = False  # by the rank before
        self._is_refused = False  # by the next rank's machine
        self._asked_s: float | None = None  # the time of the question to the next rank
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
            if link.peer is not None:
                link.tell(message)

    @property
    def has_neighbours(self) -> bool:
        """True if a neighbour is connected."""
        return any(link.peer is not None for link in self._links)

    def poll(self, timeout_s: float) -> tuple[list[PeerMessage], list[int]]:
        """Wait up to `timeout_s` seconds. Return the messages that came, and the neighbours that are gone."""
        if not (self.is_joined and self._is_found):
            timeout_s = min(timeout_s, self._retry_s)
            self._retry_s = min(self._retry_s * _SLOWER, _MOST_RETRY_S)
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
            link.receive()
            self._take(link, messages)
            if link.is_over:
                self._drop(link)
                if link.peer is not None:
                    gone.append(link.peer)
        return messages, gone

    def close(self) -> None:
        """Say goodbye, and end the connections."""
        if self._said is None and not self._is_found:  # after a failure the rank before shall find this one gone
            with contextlib.suppress(RuntimeError):  # the store may have ended
                self._store.compare_set(f"{_KEY}/{self._rank}", self._published, "")
        for link in self._links:
            if link.peer is not None:
                link.tell(None)
        self.abandon()

    def abandon(self) -> None:
        """Close this process's ends. In a fork the connections of the parent stay."""
        for connection in (self._listener, self._woken, self._waker, *(link.connection for link in self._links)):
            connection.close()
        self._links = []

    def _accept(self) -> None:
        """Take a connection of [Note: Strangers at the port]."""
        try:
            self._links.append(_Link(self._listener.accept()[0], self._patience_s))
        except OSError:  # it has gone again; or this process has no descriptor left, and would try again at once
            time.sleep(_RETRY_S)
        strangers = [link for link in self._links if link.peer is None and link.awaited is None]
        if len(strangers) > _MOST_STRANGERS:
            self._drop(strangers[0])

    def _drop(self, link: _Link) -> None:
        self._links.remove(link)
        link.connection.close()

    def _take(self, link: _Link, messages: list[PeerMessage]) -> None:
        """Find out who is at the other end, and take the messages of a neighbour."""
        if link.peer is None:
            self._name(link)
        if link.peer is None:
            return
        try:
            for message in link.messages():
                if message is None:
                    link.peer, link.is_over = None, True
                    break
                messages.append(message)
        except EntryError:  # the kernel and the wire check what they carry, so its process is not what it was
            link.is_over = True

    def _name(self, link: _Link) -> None:
        if link.awaited is not None:
            peer, expected = link.awaited
            answer = link.take(_TOKEN_BYTES)
            if answer is None:
                return
            if hmac.compare_digest(answer, expected):
                link.peer, self.is_joined = peer, True
        else:
            call = link.take(_CALL.size)
            if call is None:
                return
            token, rank = _CALL.unpack(call)
            if hmac.compare_digest(token, self._own.token("call")) and rank == self._before:
                link.peer, self._is_found = rank, True
                link.send(self._own.token("answer"))
        if link.peer is None:
            link.is_over = True
        elif self._said is not None:
            link.tell(self._said)

    def _look(self) -> int | None:
        """Try to find the next rank, and answer the rank before. Returns the next rank or HOST if it is gone."""
        try:
            if not self._is_found and self._store.check([f"{_KEY}/asks/{self._own.answer}"]):
                self._store.set(f"{_KEY}/lives/{self._own.answer}", "")
            if not self.is_joined:
                self._join()
                if self._is_refused and self._is_silent():
                    return self._next
        except RuntimeError:  # torch's own errors
            return HOST
        return None

    def _is_silent(self) -> bool:
        """Whether the next rank has not answered: [Note: A rank that dies before it is found]."""
        assert self._called is not None
        if self._asked_s is None:
            self._asked_s = time.monotonic()
            self._store.set(f"{_KEY}/asks/{self._called.answer}", "")
        if self._store.check([f"{_KEY}/lives/{self._called.answer}"]):
            return False
        return time.monotonic() - self._asked_s > _SILENT_S

    def _join(self) -> None:
        """Try to connect to the next rank, if that rank has published where and no try is under way."""
        if any(link.awaited is not None for link in self._links):
            return
        place = self._look_up()
        if place != self._called:  # the first one, or that of an earlier process group is replaced
            self._called, self._is_refused, self._asked_s = place, False, None
        if place is None:
            return
        try:
            connection = socket.create_connection((place.host, place.port), _CONNECT_S)
        except OSError as error:
            self._is_refused |= isinstance(error, ConnectionRefusedError)
            return
        link = _Link(connection, self._patience_s, (self._next, place.token("answer")))
        link.send(_CALL.pack(place.token("call"), self._rank))
        self._links.append(link)

    def _look_up(self) -> _Place | None:
        """Where the next rank listens; None if it has not come or has ended. Says once if the entry is damaged."""
        key = f"{_KEY}/{self._next}"
        published = self._store.get(key) if self._store.check([key]) else b""
        if not published:
            return None
        try:
            return decode(_Place, published)
        except EntryError as error:
            if not self._has_warned:
                self._has_warned = True
                print(
                    f"laconic: the entry {key} of the store is damaged ({error}); rank {self._rank} does not hear from "
                    f"rank {self._next} directly until it is whole",
                    file=sys.__stderr__ or sys.stderr, flush=True,
                )  # fmt: skip
            return None


class HostConnection:
    """A connection to the process that hosts a store, by which to see that the process is gone."""

    def __init__(self, store: dist.Store | None) -> None:
        self._connection: socket.socket | None = None
        self._is_lost = False
        address = _address_of(store)
        if address is not None:
            try:
                self._connection = socket.create_connection(address, _CONNECT_S)
                self._connection.setblocking(False)
            except ConnectionRefusedError:
                self._is_lost = True
            except OSError:  # perhaps the host is slow
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def is_lost(self) -> bool:
        """Whether the process is gone. False for a store that no process hosts, such as a file."""
        if self._connection is not None and not self._is_lost:
            try:
                self._is_lost = not self._connection.recv(1)
            except BlockingIOError:
                pass
            except OSError:
                self._is_lost = True
        return self._is_lost


def _address_of(store: dist.Store | None) -> tuple[str, int] | None:
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
        if (address := _address_of(store)) is not None:
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
