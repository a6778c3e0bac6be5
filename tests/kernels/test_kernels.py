"""Kernels that run on GPUs only: what they take, and that they have the bits of their twins in torch."""

from __future__ import annotations

import pytest

from tests.kernels.apart import told

MOST_REGISTERS = 96


def takes_little(*architectures: str) -> None:
    """No spills, few registers, and each value is read once and written once."""
    found = told("tests.kernels.compiled", *architectures, timeout_s=280)
    assert {name.rpartition(", ")[2] for name in found} == set(architectures)
    assert len(found) == len(architectures) * (6 * 2 * 4 + 2 * 4 + 5 * 2 + 2)
    for name, facts in found.items():
        assert facts["spilled"] == 0, name
        assert facts["registers"] <= MOST_REGISTERS, name
        if not name.startswith("AdamW8bit"):
            moved = facts["moved"]
            what = name.split(", ")[1]
            assert (moved.get("reads values") == 4) == (what in ("encode", "difference")), name
            assert (moved.get("reads base") == 4) == (what == "difference"), name
            assert (moved.get("writes out") == 4) == (what in ("decode", "sum")), name
            assert (moved.get("reads out") == 4) == (what == "sum"), name
            assert moved.get("reads codes", 0) + moved.get("writes codes", 0) <= 1, name


@pytest.mark.timeout(300)  # of 68 compilations
def test_every_kernel_compiles_for_an_h100() -> None:
    takes_little("sm_90")


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_every_kernel_compiles_for_the_gpus_that_people_have() -> None:
    takes_little("sm_80", "sm_100")


@pytest.mark.timeout(300)  # triton's interpreter is slow
def test_every_kernel_has_the_bits_of_its_twin() -> None:
    found = told("tests.kernels.interpreted", TRITON_INTERPRET="1", timeout_s=280)
    assert found["different"] == {}
    assert found["compared"] > 1000
    assert set(found["kernels_a_piece"].values()) == {1}
