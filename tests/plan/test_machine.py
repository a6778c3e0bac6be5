"""The machine that reads programs: its clock, its memory, its bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from laconic.config import ConfigError
from laconic.plan.machine import PlanLane, Simulator
from laconic.plan.phase import OpWork
from laconic.rehearse.rings import Route
from tests.plan.traces import cluster, phase


def on_cpu() -> Simulator:
    return Simulator(cluster(), device_type="cpu")


def send(machine: Simulator, *after: Any, hops: Any = None, **sent: float) -> Any:
    """Begin a transfer of so many bytes by level."""
    return machine.send(Route(sent=sent, hops=hops or {}), "gather", "weights", *after)  # type: ignore[arg-type]


def test_a_transfer_runs_beside_compute() -> None:
    """The wire carries 10 MB/s, shared by two ranks, so 1 MB of each rank takes 0.2 s."""
    machine = on_cpu()
    with machine.reading() as reading:
        job = send(machine, node=1e6)
        machine.compute("layer", phase(0.15))
        machine.wait(job)
    assert reading.seconds == pytest.approx(0.2)
    assert reading.waits_s == {PlanLane.WIRE: pytest.approx(0.05)}
    assert reading.busy_s == {PlanLane.WIRE: pytest.approx(0.2), PlanLane.COMPUTE: pytest.approx(0.15)}
    assert reading.sent_bytes == {("node", "weights"): 1e6}


def test_a_lane_has_one_transfer_at_a_time_and_waits_have_their_cause() -> None:
    machine = on_cpu()
    with machine.reading() as reading:
        first, second = send(machine, node=1e6), send(machine, node=1e6)
        inside = send(machine, second, local=1e6)
        machine.wait(inside)
        machine.wait(first)
    assert reading.seconds == pytest.approx(0.2 + 0.2 + 0.01)
    assert reading.waits_s[PlanLane.WIRE] == pytest.approx(0.4)
    assert reading.waits_s[PlanLane.LOCAL] == pytest.approx(0.01)


def test_operations_take_their_products_or_their_bytes_and_their_launches() -> None:
    machine = Simulator(cluster(device_launch_s=0.001, device_attention_share=0.25), device_type="cpu")
    product = OpWork(1e8, flops=5e9, dtype="float32")
    for work, seconds in (
        (product, 0.501), (replace(product, nbytes=1e9), 1.001), (replace(product, count=4.0), 0.504),
        (replace(product, is_attention=True), 2.001), (OpWork(1e8, count=7), 0.107),
    ):  # fmt: skip
        with machine.reading() as reading:
            machine.run("a kernel", work)
        assert reading.seconds == pytest.approx(seconds)
        assert machine.seconds(replace(phase(), work=(work, work))) == pytest.approx(2 * seconds)
    with pytest.raises(ConfigError, match=r"device_flops_per_s\.bfloat16 is missing; .*has float32"):
        machine.run("a kernel", replace(product, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("device_type", "overlap", "beside", "blocking"),
    [("cuda", 1.0, 0.3, 0.21), ("cpu", 1.0, 0.31, 0.21), ("cpu", 0.75, 0.36, 0.21), ("cpu", 0.0, 0.51, 0.21)],
)
def test_cores_that_compute_also_copy(device_type: str, overlap: float, beside: float, blocking: float) -> None:
    """A transfer of 0.2 s after a latency of 0.01 s, beside 0.3 s of compute, and with nothing beside it."""
    spec = cluster(wire_latency_s=0.01, wire_overlap=overlap)
    for compute_s, seconds in ((0.3, beside), (0.0, blocking)):
        machine = Simulator(spec, device_type=device_type)
        job = send(machine, node=1e6)
        machine.compute("layer", phase(compute_s))
        machine.wait(job)
        assert machine.now_s == pytest.approx(seconds)


def test_a_ring_of_all_ranks_takes_as_long_as_its_slowest_edge() -> None:
    machine = on_cpu()
    job = send(machine, node=1e6, local=5e6, hops={"node": 3})
    assert job.lane is PlanLane.WIRE
    assert job.end_s == pytest.approx(0.2)
    assert send(machine, node=0.0) is None


def test_copies_to_the_host_take_time_on_accelerators_alone() -> None:
    assert Simulator(cluster(), device_type="cpu").copy("store", 1e8, to_device=False) is None
    machine = Simulator(cluster(ranks_per_host_link=2), device_type="cuda")
    job = machine.copy("store", 1e8, to_device=False)
    assert job is not None
    assert (job.lane, job.end_s) == (PlanLane.TO_HOST, pytest.approx(2.0))


def test_the_peak_is_split_by_kind_and_counted_anew_in_each_reading() -> None:
    machine = on_cpu()
    machine.hold("parameters", 100)
    with machine.reading() as reading:
        machine.hold("transfers", 30)
        machine.compute("layer", phase(peak=50))
        machine.leave(20)
        machine.hold("transfers", -30)
        machine.hold("cache", 40)
    assert reading.peak_bytes == 180
    assert {kind: size for kind, size in reading.peak.items() if size} == {
        "parameters": 100, "transfers": 30, "activations": 50,
    }  # fmt: skip
    machine.hold("cache", -40)
    with machine.reading() as later:
        machine.hold("transfers", 10)
        machine.compute("layer", phase(0.1, peak=5))
        machine.leave(1)
        machine.hold("transfers", -10)
    assert (later.peak_bytes, later.peak["transfers"], later.peak["activations"]) == (135, 10, 25)
    assert (machine.held["transfers"], machine.held["activations"]) == (0, 21)


@pytest.mark.parametrize(("late", "last", "peak"), [(10, 0, 190), (80, 0, 220), (80, 70, 230)])
def test_memory_for_gradients_is_taken_at_the_first_of_them(late: int, last: int, peak: int) -> None:
    machine = on_cpu()
    machine.hold("parameters", 100)
    with machine.reading() as reading:
        machine.compute("layer", phase(peak=90))
        for taken_bytes, peak_bytes in ((40, late), (0, 20), (20, last)):
            machine.hold("gradients", taken_bytes)
            machine.set_extra(peak_bytes)
    assert reading.peak_bytes == peak
    assert machine.held["gradients"] == 60
