"""Kernels that run on GPUs only: what they take, and that they have the bits of their twins in torch."""

from __future__ import annotations

import pytest

from tests.kernels.apart import told

pytestmark = pytest.mark.machine

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


MOST_REGISTERS_OF_TILES = 128
"""Of kernels whose programs have 512 threads: so many that a multiprocessor holds one."""


SPILLED_OF_PAIRS = 80
"""The bytes that kernels may spill for two patterns a byte, which no wire sends."""


OF_PAYLOADS = {"payload", "payload_words", "all_words", "nbytes"}
OF_TENSORS = {"stride", "num_tiles", "known"}
"""The arguments that vary with what has changed, and with the number of values: no kernel is compiled for each."""


def takes_little_of_tiles(*architectures: str) -> None:
    """No spills, and of memory outside a cache each value is read once, and at most 12 bytes are moved for it."""
    found = told("tests.kernels.compiled", "lossless", *architectures, timeout_s=280)
    assert len(found) == len(architectures) * (4 * 2 * 3 + 3)
    for name, facts in found.items():
        form, kernel, *_ = name.split(", ")
        assert facts["spilled"] <= SPILLED_OF_PAIRS * ("FP4" in form), name
        assert facts["registers"] <= MOST_REGISTERS_OF_TILES, name
        assert facts["orders_programs"] == (kernel == "write"), name
        compiled_for = set(facts["compiled_for"])
        assert not compiled_for & (OF_PAYLOADS | OF_TENSORS | ({"new"} if kernel == "gather" else set())), name
        if kernel not in ("write", "read"):  # others are over few tiles, or over tables
            continue
        moved = facts["moved"]
        nbytes = {"lossless bf16": 2, "lossless FP4 pairs": 0.5}.get(form, 1)
        assert moved["reads held"] == nbytes, name
        assert moved.get("reads new", 0) == nbytes * (kernel == "write"), name
        assert moved.get("reads last", 0) == (", last" in name), name
        assert moved.get("writes out", 0) == nbytes * (kernel == "read"), name
        # the table has 192 bytes, and a payload is some bits a value, which several threads ask for
        cached = sum(each for what, each in moved.items() if what.split()[-1] in ("table", "payload", "payload_words"))
        assert facts["bytes_a_value"] - cached <= 12, name


@pytest.mark.timeout(300)  # of 27 compilations
def test_lossless_kernels_compile_for_an_h100() -> None:
    takes_little_of_tiles("sm_90")


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_lossless_kernels_compile_for_the_gpus_that_people_have() -> None:
    takes_little_of_tiles("sm_80", "sm_100")


@pytest.mark.timeout(300)  # triton's interpreter is slow
def test_lossless_kernels_have_the_bytes_of_their_twin() -> None:
    found = told("tests.kernels.lossless", TRITON_INTERPRET="1", timeout_s=280)
    assert found["different"] == []
    assert found["compared"] > 80
    for way, kernels, reads in (
        ("encode", 4, 1), ("decode", 2, 1), ("encode a message", 4, 0), ("decode a message", 2, 0),
    ):  # fmt: skip
        takes = found["takes"][way]
        assert takes.pop("triton") == kernels
        assert takes.pop("reads of the host", 0) == reads
        assert sum(takes.values()) <= (4 if "message" in way else 2), "of torch, on few numbers, or a copy of a payload"
