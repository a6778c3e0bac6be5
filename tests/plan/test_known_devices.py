"""The table of devices: names that do not shadow each other, and the advice for a device that is not in it."""

import re

import pytest

from laconic.plan.known import device_named, devices, find_device

TORCH_NAMES = {
    "L4": "NVIDIA L4",
    "L20": "NVIDIA L20",
    "L40": "NVIDIA L40",
    "L40S": "NVIDIA L40S",
    "RTX PRO 6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "RTX 6000 Ada": "NVIDIA RTX 6000 Ada Generation",
    "RTX A6000": "NVIDIA RTX A6000",
    "RTX A5000": "NVIDIA RTX A5000",
    "RTX A4000": "NVIDIA RTX A4000",
    "MI300X": "AMD Instinct MI300X",
    "MI325X": "AMD Instinct MI325X",
} | {name: f"NVIDIA GeForce {name}" for name in devices() if re.match(r"RTX \d{4}( Ti)?( SUPER)?$", name)}


def test_names_are_unique() -> None:
    words = [word.lower() for each in devices().values() for word in (each.name, *each.also)]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_one_pattern_matches_a_name_of_torch(name: str) -> None:
    matching = [each.name for each in devices().values() if re.search(each.torch_name, TORCH_NAMES[name])]
    assert matching == [name]


@pytest.mark.parametrize(
    "torch_name",
    [
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 4090 D",
        *(f"{name} Laptop GPU" for name in TORCH_NAMES.values() if "RTX" in name),
        "NVIDIA GeForce RTX 3070 Ti",
        "NVIDIA GeForce RTX 4060 Ti",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX A6000-24Q",
        "Quadro RTX 6000",
        "NVIDIA GB10",
    ],
)
def test_a_card_of_another_speed_is_unknown(torch_name: str) -> None:
    assert device_named(torch_name) is None


def test_geforce_cards_have_the_rate_of_sums_in_float32() -> None:
    cards = [each for each in devices().values() if re.match(r"RTX \d{4}( Ti)?( SUPER)?$", each.name)]
    assert len(cards) > 10
    for each in cards:
        assert each.peak_flops_per_s["bfloat16"] == each.peak_flops_per_s["float16"]
        assert each.peak_flops_per_s["bfloat16"] == pytest.approx(2 * each.peak_flops_per_s["float32"], rel=0.01)


def test_an_unknown_card_says_how_to_measure_it() -> None:
    with pytest.raises(ValueError, match=r"nearest is 'RTX 3080.*laconic plan measure"):
        find_device("RTX 3080X")
