"""The ring of connections: who is gone, who said goodbye, and what goes round."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterator
from itertools import product

import pytest
import torch.distributed as dist

from laconic.comm.entries import encode
from laconic.comm.ring import PeerMessage, _Place, own_address
from tests.comm import rings
from tests.comm.rings import FIRE, NEIGHBOURS, PATIENCE_S, STRANGERS, Circle
from tests.support import launch

pytestmark = pytest.mark.machine


@pytest.fixture
def circle() -> Iterator[Circle]:
    with Circle(4) as made:
        yield made


@pytest.mark.parametrize("is_found", [True, False])
@pytest.mark.parametrize("says_goodbye", [True, False])
def test_a_rank_that_ends_is_gone_for_the_others_unless_it_says_goodbye(
    circle: Circle, monkeypatch: pytest.MonkeyPatch, is_found: bool, says_goodbye: bool
) -> None:
    """It ends when both neighbours have found it, or before."""
    if is_found:
        circle.join()
    if not says_goodbye:
        circle.kill(2)
        circle.wait_until_gone(2)
        return
    monkeypatch.setattr("laconic.comm.ring._SILENT_S", 0.0)
    circle.end(2)
    circle.wait_until(lambda: [len(ring._neighbours) for ring in circle.rings.values()] == [2, 1, 1])
    began = time.monotonic()
    circle.wait_until(lambda: time.monotonic() - began > 0.5)
    assert circle.rings[1].is_joined == is_found
    assert circle.is_quiet


def test_a_rank_behind_a_firewall_counts_and_is_not_gone(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    circle.store.set("laconic/ring/2", encode(dataclasses.replace(circle.place_of(2), port=port)))
    monkeypatch.setattr("laconic.comm.ring._SILENT_S", 0.2)
    began = time.monotonic()
    circle.wait_until(lambda: time.monotonic() - began > 1.0)
    assert circle.is_quiet
    circle.kill(2)
    circle.wait_until_gone(2)


def test_news_go_round_and_reach_neighbours_that_come_later(circle: Circle) -> None:
    """Whatever comes after the first failure changes only whether any rank has failed."""
    first = PeerMessage(rank=0, text="x" * 300_000, has_failed=False)
    for rank, told, known in ((1, first, first), (3, FIRE, dataclasses.replace(first, has_failed=True))):
        circle.rings[rank].learn(told)
        circle.wait_until(lambda known=known: all(ring.first == known for ring in circle.rings.values()))
        circle.join()


@pytest.mark.parametrize(
    ("kind", "data"),
    [*product(["stranger"], STRANGERS), *product(["neighbour"], NEIGHBOURS)],
    ids=lambda value: repr(value[:8]),
)
def test_strangers_are_turned_away_and_a_neighbour_that_says_anything_else_is_gone(
    circle: Circle, kind: str, data: bytes
) -> None:
    """Many strangers who stay do not keep the ranks apart."""
    rings.send(circle, kind, data)


def test_nobody_is_a_neighbour_who_returns_what_he_hears(circle: Circle) -> None:
    """The place of the next rank belongs to a stranger, who sends back the call: he does not know the answer."""
    server, whole = socket.create_server(("127.0.0.1", 0)), circle.store.get("laconic/ring/1")
    place = dataclasses.replace(circle.place_of(1), host="127.0.0.1", port=server.getsockname()[1])
    circle.store.set("laconic/ring/1", encode(place))
    circle.wait_until(lambda: len(circle.rings[0]._connections) == 2)
    with server, server.accept()[0] as connection:
        connection.sendall(connection.recv(1 << 10))
        circle.wait_until(lambda: len(circle.rings[0]._connections) == 1)
    assert not circle.rings[0].is_joined
    circle.store.set("laconic/ring/1", whole)
    circle.join()
    assert circle.is_quiet


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
    for connection in (connection for ring in circle.rings.values() for connection in ring._connections):
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
    circle.wait_until(lambda: all(ring.is_joined for rank, ring in circle.rings.items() if rank != 0))
    said = capfd.readouterr().err
    is_named = entry not in (OLD, b"")
    assert said.count("\n") == said.count("the entry laconic/ring/1 of the store is damaged") == is_named
    circle.store.set("laconic/ring/1", whole)
    circle.join()


def test_a_process_with_more_than_1024_files_keeps_its_watcher() -> None:
    process = launch.started(rings.watch_with_many_files)
    process.join()
    assert process.exitcode == 0
