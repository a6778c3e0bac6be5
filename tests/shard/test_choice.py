"""The choice of placements: close to the best set of all, within the bytes, and what it is for units made by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from laconic.comm.speed import AS_IN_A_RACK, Speed
from laconic.shard.placement import (
    BucketUse,
    Chosen,
    Passing,
    Saving,
    Speeds,
    UnitUse,
    choose_placements,
    good_set,
)
from laconic.shard.policies import Placement
from tests.reference.placement import least_step_seconds, most_seconds_split, step_seconds, taken_bytes

RACK = Speeds(node=AS_IN_A_RACK["node"], local=AS_IN_A_RACK["local"], copy=AS_IN_A_RACK["copy"])
EVEN = Speeds(node=Speed(bytes_per_s=1e9), local=Speed(bytes_per_s=1e9), copy=Speed(bytes_per_s=1e12))
SLOW_WIRE = replace(EVEN, node=Speed(bytes_per_s=1e6))
MUCH = 10**12


def _bucket(nbytes: int = 1200, *, nodes: int = 2, local: int = 2, is_frozen: bool = False) -> BucketUse:
    node_bytes = nbytes // local
    return BucketUse(
        whole_bytes=nbytes,
        node_bytes=node_bytes,
        crossing_bytes=(nodes - 1) * node_bytes // nodes,
        gradient_bytes=0 if is_frozen else nbytes,
        node_gradient_bytes=0 if is_frozen else node_bytes,
        waiting_bytes=0 if is_frozen else nbytes - node_bytes,
    )


def _unit(*buckets: BucketUse, keeps_copies: bool = False, **options: Any) -> UnitUse:
    buckets = buckets or (_bucket(**options),)
    return UnitUse(buckets=buckets, num_gathers=2, num_early_sums=0, keeps_copies=keeps_copies)


def _weights(choice: Chosen) -> list[str]:
    return [each.weights for each in choice.placements]


# -- a good set --------------------------------------------------------------------------------------------------------


def _total(options: Sequence[Sequence[Saving]], numbers: Sequence[int]) -> tuple[float, int, int]:
    """The seconds, device bytes and host bytes of a set."""
    chosen = [unit[index] for unit, index in zip(options, numbers, strict=True)]
    seconds, device, host = (sum(each[place] for each in chosen) for place in range(3))
    return seconds, int(device), int(host)


def test_of_sets_that_save_equally_one_takes_less_of_the_device() -> None:
    options = [[Saving(0.0, 0, 0), Saving(3.0, 8, 0), Saving(3.0, 0, 5)], [Saving(0.0, 0, 0), Saving(0.0, 4, 0)]]
    assert good_set(options, 100, 100) == [2, 0]
    assert good_set(options, 100, 0) == [1, 0]


def test_a_large_step_that_saves_most_is_taken_though_small_ones_are_steeper() -> None:
    small, large = [Saving(0.0, 0, 0), Saving(1.0, 1, 0)], [Saving(0.0, 0, 0), Saving(99.0, 100, 0)]
    assert good_set([small, large], 100, 0) == [0, 1]
    assert good_set([small, large], 101, 0) == [1, 1]
    assert good_set([small, large], 99, 0) == [1, 0]


@pytest.mark.parametrize("host_bytes", [0, 10**8])
def test_a_set_of_many_units_saves_nearly_what_split_units_would(host_bytes: int) -> None:
    """No two units are alike, and the best of their sets, some 10 ** 24, saves less than if units could be split."""
    draw = random.Random(5)
    for share in (0.1, 0.5, 0.9):
        options = [
            [Saving(0.0, 0, 0)]
            + [Saving(draw.uniform(0.0, 1), draw.randint(0, 10**9), draw.choice((0, host_bytes))) for _ in range(3)]
            for _ in range(40)
        ]
        device_bytes = int(share * sum(max(each.device_bytes for each in unit) for unit in options))
        numbers = good_set(options, device_bytes, 10**9)
        assert numbers is not None
        seconds, on_device, on_host = _total(options, numbers)
        assert seconds >= 0.95 * most_seconds_split(options, device_bytes)
        assert on_device <= device_bytes
        assert on_host <= 10**9


# -- the choice --------------------------------------------------------------------------------------------------------


def _random_unit(draw: random.Random) -> UnitUse:
    nodes, local = draw.choice(((1, 1), (1, 3), (3, 1), (2, 2), (3, 2), (2, 5)))
    buckets = [
        _bucket(
            draw.choice((30, 60, 600, 6000)) * local * nodes, nodes=nodes, local=local, is_frozen=draw.random() < 0.3
        )
        for _ in range(draw.choice((0, 1, 1, 2)))
    ]
    return UnitUse(
        buckets=tuple(buckets),
        num_gathers=draw.randint(0, 5),
        num_early_sums=draw.randint(0, 2),
        keeps_copies=nodes > 1 and len(buckets) > 0 and draw.random() < 0.2,
    )


def _random_speeds(draw: random.Random) -> Speeds:
    node, local, copy = (
        Speed(latency_s=draw.choice((0.0, 1e-5)), bytes_per_s=10 ** draw.uniform(6, 9)) for _ in range(3)
    )
    return Speeds(node=node, local=local, copy=draw.choice((copy, None)))


def test_the_choice_saves_nearly_the_most_of_all_placements_within_the_bytes() -> None:
    draw, refused, best = random.Random(3), 0, 0
    for number in range(300):
        units = [_random_unit(draw) for _ in range(draw.randint(0, 3))]
        speeds = _random_speeds(draw)
        most = sum(bucket.whole_bytes + bucket.gradient_bytes for unit in units for bucket in unit.buckets)
        device_bytes, host_bytes = (draw.choice((0, draw.randint(0, most), 2 * most)) for _ in range(2))
        least = least_step_seconds(units, speeds, device_bytes, host_bytes)
        if least is None:
            refused += 1
            with pytest.raises(ValueError, match="raise one, or use wire='exact'"):
                choose_placements(units, speeds, device_bytes=device_bytes, host_bytes=host_bytes)
            continue
        choice = choose_placements(units, speeds, device_bytes=device_bytes, host_bytes=host_bytes)
        pairs = list(zip(units, choice.placements, strict=True))
        seconds = sum(step_seconds(unit, each, speeds) for unit, each in pairs)
        nowhere = sum(step_seconds(unit, Placement(), speeds) for unit in units)
        best += seconds <= least * (1 + 1e-6)
        assert seconds <= least + 0.05 * max(0.0, nowhere - least) + 1e-6 * least, number
        assert choice.saving.seconds == pytest.approx(nowhere - seconds, rel=1e-6, abs=1e-12), number
        taken = [taken_bytes(unit, each) for unit, each in pairs]
        assert choice.saving[1:] == (sum(device for device, _ in taken), sum(host for _, host in taken)), number
        assert choice.saving.device_bytes <= device_bytes, number
        assert choice.saving.host_bytes <= host_bytes, number
        for unit, each in pairs:
            assert not (unit.keeps_copies and each.weights == "none"), number
            assert each.gradients == "node" or unit.num_early_sums > 0, number
            assert each.gradients == "node" or any(bucket.is_trained for bucket in unit.buckets), number
    assert 5 < refused < 100, "both kinds are tried"
    assert best >= 0.99 * (300 - refused)


PLAIN, COPIES = _unit(), _unit(keeps_copies=True)


@pytest.mark.parametrize(
    ("units", "speeds", "device_bytes", "host_bytes", "weights"),
    [
        ([PLAIN] * 4, SLOW_WIRE, 5 * 600, 0, ["device"] * 3 + ["rank"]),
        ([PLAIN] * 4, EVEN, 4 * 600, 0, ["none"] * 2 + ["rank"] * 2),
        ([PLAIN] * 3, SLOW_WIRE, 0, 2 * 600, ["none", "host", "host"]),
        ([_unit(_bucket(is_frozen=True)), PLAIN], EVEN, 1200, 0, ["rank", "none"]),
        ([_unit(nodes=1, local=4)] * 2, RACK, 1200, MUCH, ["none", "rank"]),
        ([COPIES, COPIES], replace(EVEN, copy=Speed(bytes_per_s=1e3)), 600, 600, ["host", "device"]),
    ],
)
def test_of_choices_that_save_equally_the_last_units_get_the_memory(
    units: list[UnitUse], speeds: Speeds, device_bytes: int, host_bytes: int, weights: list[str]
) -> None:
    assert _weights(choose_placements(units, speeds, device_bytes=device_bytes, host_bytes=host_bytes)) == weights


def test_copies_without_room_are_refused() -> None:
    message = r"0.00 GB on each rank, but device_bytes=599 and host_bytes=599 have no room for them; raise one, or use"
    with pytest.raises(ValueError, match=message):
        choose_placements([PLAIN, COPIES], EVEN, device_bytes=599, host_bytes=599)


def test_what_passes_in_any_case_is_free_once_all_of_its_kind_rest_whole() -> None:
    root = replace(_unit(), is_around=True)
    units, passing = [root, *[_unit()] * 3], Passing(around_bytes=1200, others_bytes=2000, all_bytes=3000)

    def rests(device_bytes: int) -> list[str]:
        return _weights(choose_placements(units, EVEN, device_bytes=device_bytes, host_bytes=0, passing=passing))

    assert rests(0)[0] == "rank", "the root is whole at the fullest moment"
    assert rests(0)[1:] == ["none"] * 3
    assert rests(1200)[1:].count("rank") == 1
    assert rests(4 * 1200 - 3000) == ["rank"] * 4
    assert rests(4 * 1200 - 3000 - 1) != ["rank"] * 4
