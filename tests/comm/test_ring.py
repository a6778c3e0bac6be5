"""The ring of connections: who is gone, who said goodbye, and what goes round."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from laconic.comm.ring import Message, Ring

PATIENCE_S = 8.0


class Circle:
    """Rings of several ranks in this process, and what each has heard."""

    def __init__(self, num_ranks: int) -> None:
        self.store = dist.HashStore()
        self.rings = {rank: Ring(self.store, rank, num_ranks, PATIENCE_S) for rank in range(num_ranks)}
        self.heard: dict[int, list[Message]] = {rank: [] for rank in self.rings}
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

    def join(self) -> None:
        """Turn until every rank has both neighbours."""
        self.turn_until(lambda: all([link.peer for link in r._links].count(None) == 0 for r in self.rings.values()))
        self.turn_until(lambda: all(len(ring._links) == 2 for ring in self.rings.values()))
        self.turn_until(lambda: all(link.peer is not None for ring in self.rings.values() for link in ring._links))


@pytest.fixture
def circle() -> Iterator[Circle]:
    made = Circle(4)
    yield made
    for ring in made.rings.values():
        ring.abandon()


def test_a_rank_that_ends_without_a_word_is_gone_for_both_neighbours(circle: Circle) -> None:
    circle.join()
    assert [sorted(link.peer for link in ring._links) for ring in circle.rings.values()] == [
        [1, 3], [0, 2], [1, 3], [0, 2],
    ]  # fmt: skip
    circle.rings.pop(2).abandon()
    circle.turn_until(lambda: circle.gone == {0: set(), 1: {2}, 2: set(), 3: {2}})
    assert not any(circle.heard.values())


def test_a_rank_that_says_goodbye_is_not_gone(circle: Circle) -> None:
    circle.join()
    circle.rings.pop(2).close()
    circle.turn_until(lambda: [len(ring._links) for ring in circle.rings.values()] == [2, 1, 1])
    assert not any(circle.gone.values())


def test_a_rank_that_dies_before_it_is_found_is_gone(circle: Circle) -> None:
    circle.rings.pop(2).abandon()
    circle.turn_until(lambda: circle.gone[1] == {2})
    assert circle.gone[0] == circle.gone[3] == set()


def test_a_rank_that_ends_in_order_before_it_is_found_is_not_gone(
    circle: Circle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laconic.comm.ring._SILENT_S", 0.0)
    circle.rings.pop(2).close()
    circle.turn_until(lambda: circle.rings[0].is_joined and circle.rings[3].is_joined)
    for _ in range(100):
        circle.rings[1].poll(0.001)
    assert not circle.gone[1]
    assert not circle.rings[1].is_joined


def test_a_rank_behind_a_firewall_answers_and_is_not_gone(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, token = json.loads(circle.store.get("laconic/ring/2"))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    circle.store.set("laconic/ring/2", json.dumps([["127.0.0.1"], port, token]))
    circle.turn_until(lambda: circle.store.check([f"laconic/ring/lives/{token}"]))
    monkeypatch.setattr("laconic.comm.ring._SILENT_S", 0.0)
    for _ in range(100):
        circle.gone[1] |= set(circle.rings[1].poll(0.001)[1])
    assert circle.rings[1]._is_refused
    assert not circle.gone[1]


def test_messages_reach_neighbours_that_come_later(circle: Circle) -> None:
    circle.rings[1].send({"text": "fire"})
    circle.turn_until(lambda: circle.heard == {0: [{"text": "fire"}], 1: [], 2: [{"text": "fire"}], 3: []})
    circle.join()
    circle.rings[3].send({"text": "x" * 300_000})
    circle.turn_until(lambda: len(circle.heard[0]) == len(circle.heard[2]) == 2)
    assert circle.heard[0][1] == {"text": "x" * 300_000}


def test_strangers_are_turned_away(circle: Circle) -> None:
    _, port, token = json.loads(circle.store.get("laconic/ring/0"))
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    says = [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"rank": 3, "token": "wrong"}\n', b"", b"\xff" * (3 << 20) + b"\n"]
    for stranger, words in zip(strangers, says, strict=True):
        stranger.setblocking(False)
        stranger.send(words)
    strangers[3].close()
    circle.turn_until(lambda: len(circle.rings[0]._links) >= 2)
    circle.join()
    assert not any(circle.gone.values())
    assert token not in str(circle.heard)
    for stranger in strangers:
        stranger.close()


def test_the_kernel_asks_whether_a_silent_machine_is_there(circle: Circle) -> None:
    circle.join()
    for ring in circle.rings.values():
        for link in ring._links:
            assert link.connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, between, times = (
                link.connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
            )
            assert idle + between * times <= PATIENCE_S
            assert link.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * PATIENCE_S


def test_addresses_of_an_earlier_process_group_are_read_again() -> None:
    store = dist.HashStore()
    closed = socket.create_server(("", 0))
    store.set("laconic/ring/1", json.dumps([["127.0.0.1"], closed.getsockname()[1], "old"]))
    closed.close()
    first = Ring(store, 0, 2, PATIENCE_S)
    first.poll(0.01)
    second = Ring(store, 1, 2, PATIENCE_S)
    deadline = time.monotonic() + 60
    while not (first.has_neighbours and second.has_neighbours):
        assert time.monotonic() < deadline
        first.poll(0.01)
        second.poll(0.01)
    first.abandon()
    second.abandon()
