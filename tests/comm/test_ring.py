"""The ring of connections: who is gone, who said goodbye, and what goes round."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from laconic.comm.entries import decode, encode
from laconic.comm.ring import _MOST_STRANGERS, PeerMessage, PeerRing, _Place, own_address
from tests.support import launch

pytestmark = pytest.mark.machine

PATIENCE_S = 8.0
FIRE = PeerMessage(rank=1, text="the disk\nis on fire", has_failed=True)


class Circle:
    """Rings of several ranks in this process, and what each has heard."""

    def __init__(self, num_ranks: int) -> None:
        self.store = dist.HashStore()
        self.rings = {rank: PeerRing(self.store, rank, num_ranks, PATIENCE_S) for rank in range(num_ranks)}
        self.heard: dict[int, list[PeerMessage]] = {rank: [] for rank in self.rings}
        self.gone: dict[int, set[int]] = {rank: set() for rank in self.rings}

    def turn_until(self, condition: Callable[[], bool]) -> None:
        """Let all ranks look, in turn, until the condition holds."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            for rank, ring in self.rings.items():
                messages, gone = ring.poll(0.01)
                self.heard[rank] += messages
                self.gone[rank] |= set(gone)

    def join(self, *but: int) -> None:
        """Turn until every rank has both neighbours and, unless it is among `but`, no other connection."""

        def has_both(rank: int) -> bool:
            known = [link.is_known for link in self.rings[rank]._links]
            return known.count(True) == 2 and (rank in but or all(known))

        self.turn_until(lambda: all(map(has_both, self.rings)))

    def place_of(self, rank: int) -> _Place:
        """What a rank has published."""
        return decode(_Place, self.store.get(f"laconic/ring/{rank}"))


@pytest.fixture
def circle() -> Iterator[Circle]:
    made = Circle(4)
    yield made
    for ring in made.rings.values():
        ring.abandon()


@pytest.mark.parametrize("is_found", [True, False])
@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_rank_that_ends_is_gone_for_its_neighbours_unless_it_says_goodbye(
    circle: Circle, monkeypatch: pytest.MonkeyPatch, is_found: bool, says_goodbye: bool
) -> None:
    """It ends when both neighbours have found it, or before."""
    if is_found:
        circle.join()
        peers = [sorted(link.peer for link in ring._links) for ring in circle.rings.values()]
        assert peers == [[1, 3], [0, 2], [1, 3], [0, 2]]
    elif says_goodbye:
        monkeypatch.setattr("laconic.comm.ring._SILENT_S", 0.0)
    ended = circle.rings.pop(2)
    if not says_goodbye:
        ended.abandon()
        circle.turn_until(lambda: circle.gone == {0: set(), 1: {2}, 2: set(), 3: {2} if is_found else set()})
        assert not any(circle.heard.values())
        return
    ended.close()
    if is_found:
        circle.turn_until(lambda: [len(ring._links) for ring in circle.rings.values()] == [2, 1, 1])
    else:
        circle.turn_until(lambda: circle.rings[0].is_joined and circle.rings[3].is_joined)
        for _ in range(100):
            circle.gone[1] |= set(circle.rings[1].poll(0.001)[1])
        assert not circle.rings[1].is_joined
    assert not any(circle.gone.values())


def test_a_rank_behind_a_firewall_counts_and_is_not_gone(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    circle.store.set("laconic/ring/2", encode(dataclasses.replace(circle.place_of(2), port=port)))
    monkeypatch.setattr("laconic.comm.ring._SILENT_S", 0.2)
    began = time.monotonic()
    circle.turn_until(lambda: time.monotonic() - began > 1.0)
    assert not circle.gone[1]
    circle.rings.pop(2).abandon()
    circle.turn_until(lambda: circle.gone[1] == {2})


def test_messages_reach_neighbours_that_come_later(circle: Circle) -> None:
    long = PeerMessage(rank=1, text="x" * 300_000, has_failed=False)
    circle.rings[1].send(FIRE)
    circle.turn_until(lambda: circle.heard == {0: [FIRE], 1: [], 2: [FIRE], 3: []})
    circle.join()
    circle.rings[3].send(long)
    circle.turn_until(lambda: circle.heard == {0: [FIRE, long], 1: [], 2: [FIRE, long], 3: []})


STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n", b"[" * 500_000, b"\xff" * (3 << 20), b"0" * 32 + b"\n", b"\n", b"",
]  # fmt: skip
"""What strangers say, who do not know the token."""


@pytest.mark.parametrize("data", STRANGE, ids=lambda data: repr(data[:8]))
def test_strangers_are_turned_away_and_many_who_stay_do_not_keep_the_ranks_apart(circle: Circle, data: bytes) -> None:
    count = 5 if data else 3 * _MOST_STRANGERS
    place = circle.place_of(0)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((place.host, place.port))) for _ in range(count)]
        for stranger in strangers:
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.send(data)
        strangers[3].close()
        circle.turn_until(lambda: len(circle.rings[0]._links) >= (2 if data else _MOST_STRANGERS))
        circle.join(0)
    assert len(circle.rings[0]._links) <= _MOST_STRANGERS + 2
    assert not any(circle.gone.values())
    assert not any(circle.heard.values())


def test_nobody_is_a_neighbour_who_returns_what_he_hears(circle: Circle) -> None:
    """The place of the next rank belongs to a stranger, who sends back the call: he does not know the answer."""
    server, whole = socket.create_server(("127.0.0.1", 0)), circle.store.get("laconic/ring/1")
    place = dataclasses.replace(circle.place_of(1), host="127.0.0.1", port=server.getsockname()[1])
    circle.store.set("laconic/ring/1", encode(place))
    circle.rings[0].poll(0.01)
    with server, server.accept()[0] as connection:
        connection.sendall(connection.recv(1 << 10))
        circle.turn_until(lambda: not any(link.is_caller for link in circle.rings[0]._links))
    assert not circle.rings[0].is_joined
    circle.store.set("laconic/ring/1", whole)
    circle.join()


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 100 + b"\n", b"\n", b"[" * 100_000 + b"\n", b"x" * ((1 << 20) + 1)]
    + [encode(value).encode() + b"\n" for value in (7, {"rank": 1, "text": []})],
    ids=lambda data: repr(data[:14]),
)
def test_a_neighbour_that_sends_anything_else_counts_as_gone(circle: Circle, data: bytes) -> None:
    circle.join()
    [link] = [link for link in circle.rings[2]._links if link.peer == 3]
    link.connection.sendall(data)
    circle.turn_until(lambda: circle.gone[3] == {2})
    assert not any(circle.heard.values())


def test_a_rank_listens_at_one_address_only_and_the_kernel_asks_whether_a_silent_machine_is_there(
    circle: Circle,
) -> None:
    for rank, ring in circle.rings.items():
        host, port = ring._listener.getsockname()
        assert host == circle.place_of(rank).host
        assert host not in ("", "0.0.0.0", "::")
        for other in {"127.0.0.1", "127.0.0.2"} - {host}:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, port), 5)
    circle.join()
    for connection in (link.connection for ring in circle.rings.values() for link in ring._links):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        idle, between, times = (connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
        assert idle + between * times <= PATIENCE_S
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * PATIENCE_S


def test_the_address_is_the_one_by_which_a_rank_reaches_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert own_address(dist.PrefixStore("a", store), 4) == "127.0.0.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert own_address(store, 4) == own_address(dist.HashStore(), 4) == "127.0.0.1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the other two are on another machine
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            expected = probe.getsockname()[0]
        except OSError:  # this machine has no network
            expected = "127.0.0.1"
    assert own_address(store, 4) == expected
    monkeypatch.setattr("laconic.comm.ring._NOWHERE", ("127.1.2.3", 9))
    assert own_address(store, 4) == "127.0.0.1"


OLD = encode(_Place(host="127.0.0.1", port=1, call="00" * 16, answer="00" * 16)).encode()
"""The place of an earlier process group, at which nobody listens."""


@pytest.mark.parametrize("entry", [OLD, b"", b"{", b"[" * 100_000, b"\xff", encode(["127.0.0.1", 9, "x"]).encode()])
def test_a_place_that_is_damaged_or_old_is_named_once_and_read_again(
    circle: Circle, entry: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = circle.store.get("laconic/ring/1")
    circle.store.set("laconic/ring/1", entry)
    circle.turn_until(lambda: all(ring.is_joined for rank, ring in circle.rings.items() if rank != 0))
    said = capfd.readouterr().err
    is_named = entry not in (OLD, b"")
    assert said.count("\n") == said.count("the entry laconic/ring/1 of the store is damaged") == is_named
    circle.store.set("laconic/ring/1", whole)
    circle.join()


def watch_with_many_files() -> None:
    """Watch in a process that has more than 1,024 files open, until a neighbour is gone."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if most == resource.RLIM_INFINITY else min(most, 4096)
    assert wanted > 1100, "this machine allows no process more than 1,024 files"
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    kept: list[Any] = [os.open(os.devnull, os.O_RDONLY) for _ in range(1040)]
    circle = Circle(2)
    assert min(ring._listener.fileno() for ring in circle.rings.values()) > max(1024, kept[-1])
    circle.join()
    circle.rings.pop(1).abandon()
    circle.turn_until(lambda: circle.gone[0] == {1})


def test_a_process_with_more_than_1024_files_keeps_its_watcher() -> None:
    process = launch.started(watch_with_many_files)
    process.join()
    assert process.exitcode == 0
