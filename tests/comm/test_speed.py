"""Measured transfers: their bytes, the numbers that come of times by a pretended clock, and what is not measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import laconic
from laconic.comm import speed as speed_module
from laconic.comm.speed import AS_IN_A_RACK, Speed, _speed, measure_copies, measure_gathers
from laconic.comm.traffic import IslandLevel
from tests.support.launch import on_ranks

LEVELS: tuple[IslandLevel, ...] = ("node", "local")
CPU = torch.device("cpu")


@pytest.mark.parametrize(("world_size", "local"), [(1, 1), (3, 1), (3, 3), (6, 2)])
@on_ranks("world_size", local="local")
def test_gathers_are_measured_and_their_bytes_counted() -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    sizes = {"node": cluster.num_nodes, "local": cluster.num_local}
    for level in LEVELS:
        before = cluster.traffic.snapshot()
        speed = measure_gathers(cluster, level)
        moved = cluster.traffic.snapshot() - before
        nbytes = (sizes[level] - 1) * 6 * (64 + 2**18)  # one gather warms up, and five are measured
        assert moved.total(level, "control", "sent") == moved.total(level, "control", "received") == nbytes
        assert moved.total() == 2 * nbytes, "nothing else was counted"
        if sizes[level] == 1:
            assert speed == Speed(), "one rank takes no time"
            assert speed.seconds(10**12) == 0
        else:
            assert 0 < speed.latency_s < math.inf
            assert 0 < speed.bytes_per_s < math.inf


@on_ranks(2, local=1)
def test_a_rehearsal_has_no_clock_and_sends_nothing() -> None:
    cluster = laconic.Cluster.of(laconic.init_mesh("cpu"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(speed_module, "is_rehearsed", lambda: True)
        before = cluster.traffic.snapshot()
        assert measure_gathers(cluster, "node") == AS_IN_A_RACK["node"]
        assert measure_gathers(cluster, "local") == Speed()
        assert measure_copies(torch.device("cuda")) == AS_IN_A_RACK["copy"]
        assert (cluster.traffic.snapshot() - before).total() == 0


def test_seconds_grow_with_bytes_and_nothing_takes_no_time() -> None:
    speed = Speed(latency_s=0.25, bytes_per_s=8.0)
    assert [speed.seconds(nbytes) for nbytes in (0, 1, 16)] == [0.0, 0.375, 2.25]
    assert Speed().seconds(10**15) == 0.0


def slow_at_times(nbytes: int, number: int) -> float:
    return 0.0 if number == 0 else 2.0 + nbytes / 64 + (0.0 if number == 3 else 5.0)


@pytest.mark.parametrize(
    ("seconds_of", "latency_s", "bytes_per_s"),
    [
        (slow_at_times, 3.0, 3 * 64),  # the fastest counts, but never the first; a rank gets three times what it gives
        (lambda nbytes, number: 9.0 if nbytes == 64 else 4.0, 4.0, 3 * 1000 / 0.4),  # on a busy machine
    ],
)
def test_speeds_are_finite_and_those_of_the_fastest_transfers(
    monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[int, int], float], latency_s: float, bytes_per_s: float
) -> None:
    """By a clock on which the nth transfer of 64 or 1,064 bytes takes `seconds_of(bytes, n)`."""
    clock = [100.0]
    monkeypatch.setattr(speed_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def make(nbytes: int) -> Callable[[], object]:
        numbers = count()

        def transfer() -> None:
            clock[0] += seconds_of(nbytes, next(numbers))

        return transfer

    speed = _speed(make, CPU, 1064, factor=3)
    assert (speed.latency_s, speed.bytes_per_s) == (pytest.approx(latency_s), pytest.approx(bytes_per_s))


def test_a_device_is_waited_for_before_and_after_each_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=waits.append))
    monkeypatch.setattr(torch, "empty", lambda *shape, device, **options: empty(*shape, **options))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(speed_module, "is_rehearsed", lambda: False)
    assert 0 < measure_copies(torch.device("cuda", 1)).bytes_per_s < math.inf
    assert waits == [torch.device("cuda", 1)] * 24, "twelve copies, of two sizes"


def test_on_a_stream_gathers_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def all_gather(whole: torch.Tensor, piece: torch.Tensor, purpose: str) -> SimpleNamespace:
        sizes.append(piece.nbytes)
        return SimpleNamespace(wait=lambda: None)

    ranks = SimpleNamespace(size=2, is_stream_ordered=True, all_gather=all_gather)
    monkeypatch.setattr(speed_module, "Communicator", lambda cluster, level: ranks)
    monkeypatch.setattr(speed_module, "is_rehearsed", lambda: False)
    measure_gathers(SimpleNamespace(device=CPU), "node")  # type: ignore[arg-type]
    assert set(sizes) == {64, 2**23}
