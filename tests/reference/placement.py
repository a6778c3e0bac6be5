"""The best placements of some units, by trying all of them, and the seconds of a step by going through its uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from laconic.shard.placement import JOINING, Saving, Speeds, UnitUse
from laconic.shard.policies import Placement


def most_seconds_split(options: Sequence[Sequence[Saving]], device_bytes: int) -> float:
    """The most seconds that units could save if each could be split between its options, and hosts were large.

    This is the bound of Lagrange. Let a byte have a price. Each unit takes the option that saves most after its bytes
    are paid. The bound is the sum of these savings and of the price of all bytes; the best price makes it least.
    """
    slopes = [each.seconds / max(1, each.device_bytes) for unit in options for each in unit]
    return min(
        price * device_bytes + sum(max(each.seconds - price * each.device_bytes for each in unit) for unit in options)
        for price in [0.0, *slopes]
    )


def step_seconds(unit: UnitUse, placement: Placement, speeds: Speeds) -> float:
    """The seconds of one step's gathers, copies, and sums before its last, use by use."""
    seconds = 0.0
    for bucket in unit.buckets:
        has_node_shard = has_whole = not bucket.is_trained  # frozen weights rest since an earlier step
        for _ in range(unit.num_gathers):
            if placement.weights == "none" or not has_node_shard:
                seconds += speeds.node.seconds(bucket.crossing_bytes)
            if placement.weights != "rank" or not has_whole:
                seconds += speeds.local.seconds(bucket.whole_bytes - bucket.node_bytes)
            if placement.weights in ("host", "device"):
                seconds += JOINING.seconds(bucket.node_bytes)
            if placement.weights == "host" and speeds.copy is not None:
                seconds += speeds.copy.seconds(bucket.node_bytes)
            has_node_shard = has_whole = True
        for _ in range(unit.num_early_sums):
            if placement.gradients == "node":
                seconds += speeds.local.seconds(bucket.gradient_bytes - bucket.node_gradient_bytes)
    return seconds


def taken_bytes(unit: UnitUse, placement: Placement) -> tuple[int, int]:
    """The bytes on the device and on the host that a unit takes, beside one that rests nowhere."""
    device = host = 0
    for bucket in unit.buckets:
        device += bucket.node_bytes if placement.weights == "device" else 0
        device += bucket.whole_bytes if placement.weights == "rank" else 0
        host += bucket.node_bytes if placement.weights == "host" else 0
        device += bucket.waiting_bytes if placement.gradients == "rank" else 0
    return device, host


def placements_of(unit: UnitUse) -> Iterator[Placement]:
    """All placements that a unit may have."""
    for weights, gradients in product(("none", "host", "device", "rank"), ("node", "rank")):
        if weights != "none" or not unit.keeps_copies:
            yield Placement(weights=weights, gradients=gradients)  # type: ignore[arg-type]


def least_step_seconds(units: Sequence[UnitUse], speeds: Speeds, device_bytes: int, host_bytes: int) -> float | None:
    """The seconds of a step with the best placements within the bytes, of all that there are; None if none fit."""
    found = []
    for each in product(*map(placements_of, units)):
        taken = [taken_bytes(unit, placement) for unit, placement in zip(units, each, strict=True)]
        if sum(device for device, _ in taken) <= device_bytes and sum(host for _, host in taken) <= host_bytes:
            found.append(sum(step_seconds(unit, one, speeds) for unit, one in zip(units, each, strict=True)))
    return min(found, default=None)
