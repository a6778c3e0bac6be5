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
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import time
from typing import Any, Self

import torch.distributed as dist

_KEY = "laconic/ring"
_CONNECT_S = 2.0
_RETRY_S, _SLOWER, _MOST_RETRY_S = 0.1, 1.1, 1.0  # between two looks for the neighbours, which may come late
_MOST_BYTES = 1 << 20  # of one message
_MOST_PATIENCE_S = 32_000.0  # the longest that Linux waits before it probes
_PROBES = 4  # without an answer, until the kernel gives a connection up
_SILENT_S = 2.0  # until a rank that refuses connections and does not answer in the store is gone
_NOWHERE = ("192.0.2.1", 9)  # an address for documentation; to connect a UDP socket sends nothing

Message = dict[str, Any]
HOST = -1
"""Stands for the process that hosts the store, in place of a rank."""


class _Link:
    """A connection to a neighbour. Until `peer` is known, the other side may be anybody."""

    def __init__(self, connection: socket.socket, patience_s: float, awaited: tuple[int, str] | None = None) -> None:
        """Take a connection. `awaited` has the rank that this rank has called, and the word by which it is known."""
        self.connection, self.awaited = connection, awaited
        self.peer: int | None = None
        self.is_over = False
        self._arrived = b""
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

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # `receive` finds out that the connection is lost
            self.connection.setblocking(True)
            self.connection.settimeout(_CONNECT_S)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(OSError):
            self.connection.setblocking(False)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived. `is_over` is then set if the connection is closed or lost."""
        try:
            while data := self.connection.recv(1 << 16):
                self._arrived += data
                if len(self._arrived) > _MOST_BYTES:
                    break
            self.is_over = True
        except BlockingIOError:
            pass
        except OSError:  # a reset, or the kernel's probes had no answer
            self.is_over = True
        *lines, self._arrived = self._arrived.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):  # nobody that belongs to the ring sends this
                self.is_over, self.peer = True, None
                break
            messages.append(message)
        return messages


class Ring:
    """This rank's two connections. All methods but `wake` are for one thread."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, patience_s: float) -> None:
        """Publish in the `store` where the rank before may connect.

        A connection is lost once its other end has not answered for `patience_s` seconds.
        """
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._patience_s = min(patience_s, _MOST_PATIENCE_S)
        self._next = (rank + 1) % num_ranks
        self._token = secrets.token_hex(8)
        self._listener = socket.create_server(("", 0), backlog=8)
        self._listener.setblocking(False)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._links: list[_Link] = []
        self._said: Message | None = None
        self._addresses: list[str] = []  # of the next rank, that were not tried yet
        self._next_token = ""
        self.is_joined = False  # to the next rank, which has answered
        self._is_found = False  # by the rank before
        self._is_refused = False  # by an address of the next rank
        self._asked_s: float | None = None  # the time of the question to the next rank
        self._retry_s = _RETRY_S
        port = self._listener.getsockname()[1]
        self._published = json.dumps([own_addresses(store), port, self._token])
        store.set(f"{_KEY}/{rank}", self._published)

    def wake(self) -> None:
        """Let `poll` return at once. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def send(self, message: Message) -> None:
        """Send a message to the neighbours that are connected, and to those that come later."""
        self._said = message
        for link in self._links:
            if link.peer is not None:
                link.send(message)

    @property
    def has_neighbours(self) -> bool:
        """True if a neighbour is connected."""
        return any(link.peer is not None for link in self._links)

    def poll(self, timeout_s: float) -> tuple[list[Message], list[int]]:
        """Wait up to `timeout_s` seconds. Return the messages that came, and the neighbours that are gone."""
        if not (self.is_joined and self._is_found):
            timeout_s = min(timeout_s, self._retry_s)
            self._retry_s = min(self._retry_s * _SLOWER, _MOST_RETRY_S)
            if (lost := self._look()) is not None:
                self.is_joined = self._is_found = True  # as far as this rank ever will be
                return [], [lost]
        sources = [self._listener, self._woken, *(link.connection for link in self._links)]
        ready = select.select(sources, [], [], timeout_s)[0]
        if self._listener in ready:
            with contextlib.suppress(OSError):
                self._links.append(_Link(self._listener.accept()[0], self._patience_s))
        if self._woken in ready:
            self._woken.recv(1 << 10)
        messages: list[Message] = []
        gone: list[int] = []
        for link in [link for link in self._links if link.connection in ready]:
            for message in link.receive():
                self._take(link, message, messages)
            if link.is_over:
                self._links.remove(link)
                link.connection.close()
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
                link.send({"goodbye": True})
        self.abandon()

    def abandon(self) -> None:
        """Close this process's ends. In a fork the connections of the parent stay."""
        for connection in (self._listener, self._woken, self._waker, *(link.connection for link in self._links)):
            connection.close()
        self._links = []

    def _take(self, link: _Link, message: Message, messages: list[Message]) -> None:
        if link.peer is None:
            if message.get("token") == self._token and isinstance(message.get("rank"), int):
                link.peer, self._is_found = message["rank"], True
                link.send({"welcome": self._token})
                self._repeat(link)
            elif link.awaited is not None and message.get("welcome") == link.awaited[1]:
                link.peer, self.is_joined = link.awaited[0], True
                self._repeat(link)
            else:
                link.is_over = True
        elif "goodbye" in message:
            link.peer, link.is_over = None, True
        elif "welcome" not in message:
            messages.append(message)

    def _repeat(self, link: _Link) -> None:
        if self._said is not None:
            link.send(self._said)

    def _look(self) -> int | None:
        """Try to find the next rank, and answer the rank before. Returns the next rank or HOST if it is gone."""
        try:
            if not self._is_found and self._store.check([f"{_KEY}/asks/{self._token}"]):
                self._store.set(f"{_KEY}/lives/{self._token}", "")
            if not self.is_joined:
                self._join()
                if self._is_refused and self._is_silent():
                    return self._next
        except RuntimeError:  # torch's own errors
            return HOST
        return None

    def _is_silent(self) -> bool:
        """Whether the next rank has not answered: [Note: A rank that dies before it is found]."""
        if self._asked_s is None:
            self._asked_s = time.monotonic()
            self._store.set(f"{_KEY}/asks/{self._next_token}", "")
        if self._store.check([f"{_KEY}/lives/{self._next_token}"]):
            return False
        return time.monotonic() - self._asked_s > _SILENT_S

    def _join(self) -> None:
        """Try the next address of the next rank, if that rank has published any and no try is under way."""
        if any(link.awaited is not None for link in self._links):
            return
        if not self._addresses:  # none works: perhaps they are those of an earlier process group, so read them again
            key = f"{_KEY}/{self._next}"
            published = self._store.get(key) if self._store.check([key]) else b""
            if not published:  # the next rank has not come, or has ended in order
                self._is_refused = False
                return
            self._addresses, self._port, token = json.loads(published)
            if token != self._next_token:
                self._next_token, self._is_refused, self._asked_s = token, False, None
            if not self._addresses:
                return
        try:
            connection = socket.create_connection((self._addresses.pop(0), self._port), _CONNECT_S)
        except OSError as error:
            self._is_refused |= isinstance(error, ConnectionRefusedError)
            return
        link = _Link(connection, self._patience_s, (self._next, self._next_token))
        link.send({"rank": self._rank, "token": self._next_token})
        self._links.append(link)


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


def own_addresses(store: dist.Store) -> list[str]:
    """The addresses at which other ranks may find this process, the likeliest first."""
    found = []
    with contextlib.suppress(OSError):
        if (address := _address_of(store)) is not None:
            with socket.create_connection(address, _CONNECT_S) as connection:
                found.append(connection.getsockname()[0].removeprefix("::ffff:"))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_NOWHERE)
        found.append(probe.getsockname()[0])
    return [address for address in dict.fromkeys([*found, "127.0.0.1"]) if ":" not in address]
