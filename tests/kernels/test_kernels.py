"""Kernels that run on GPUs only: what they take, and that they have the bits of their twins in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.kernels.apart import told

pytestmark = pytest.mark.machine

OF_PAYLOADS = {"payload", "payload_words", "all_words", "nbytes"}
OF_TENSORS = {"num_tiles", "known"}
OF_GRADIENTS = {"message", "nbytes", "num_blocks", "whole"}
"""The arguments that vary with what has changed, and with the number of values: no kernel is compiled for each."""


def of_codecs(name: str, facts: dict[str, Any], moved: dict[str, float]) -> None:
    """Each value is read once and written once."""
    assert facts["spilled"] == 0
    assert facts["registers"] <= 96
    if not name.startswith("AdamW8bit"):
        what = name.split(", ")[1]
        assert (moved.get("reads values") == 4) == (what in ("encode", "difference"))
        assert (moved.get("reads base") == 4) == (what == "difference")
        assert (moved.get("writes out") == 4) == (what in ("decode", "sum"))
        assert (moved.get("reads out") == 4) == (what == "sum")
        assert moved.get("reads codes", 0) + moved.get("writes codes", 0) <= 1


def of_tiles(name: str, facts: dict[str, Any], moved: dict[str, float]) -> None:
    """Of memory outside a cache each value is read once, and at most 12 bytes are moved for it."""
    form, kernel, *_ = name.split(", ")
    assert facts["spilled"] == 0
    assert facts["registers"] <= 128, "a program has 512 threads, and a multiprocessor holds one"
    assert facts["orders_programs"] == (kernel == "write")
    compiled_for = set(facts["compiled_for"])
    assert not compiled_for & (OF_PAYLOADS | OF_TENSORS | ({"new"} if kernel == "gather" else set()))
    if kernel not in ("write", "read"):  # others are over tables, or over what is coded
        return
    nbytes = 2 if form == "lossless bf16" else 1
    assert moved["reads held"] == nbytes
    assert moved.get("reads new", 0) == nbytes * (kernel == "write")
    assert moved.get("writes out", 0) == nbytes * (kernel == "read")
    # codes have 24 bytes, and a payload is some bits a value, which several threads ask for
    of_few = ("codes", "table", "payload", "payload_words")
    cached = sum(each for what, each in moved.items() if what.split()[-1] in of_few)
    assert facts["bytes_a_value"] - cached <= 12


def of_gradients(name: str, facts: dict[str, Any], moved: dict[str, float]) -> None:
    """Values and what is written of them are moved once by each kernel that needs them."""
    form, kernel, _ = name.split(", ")
    nbytes = 4 if form.endswith("32") else 2
    assert facts["spilled"] == 0
    assert facts["registers"] <= 128, "a program has 128 threads, and a multiprocessor holds four"
    assert not set(facts["compiled_for"]) & OF_GRADIENTS
    # each thread reads the last value, too
    assert 0 <= moved.get("reads values", 0) - nbytes * (kernel in ("measure", "write")) < 0.1 * nbytes
    assert moved.get("writes out", 0) == nbytes * (kernel == "read")
    # of counts all threads read the same; a message of the values themselves has nothing else
    others = sum(each for what, each in moved.items() if what.endswith(("ends", "counts", "length", "_values")))
    assert facts["bytes_a_value"] - others <= 2 * nbytes + 1.25


@pytest.mark.parametrize(
    "gpus", [("sm_90",), pytest.param(("sm_80", "sm_100"), marks=pytest.mark.campaign(seconds=120))]
)
@pytest.mark.parametrize(
    ("kind", "num", "check"),
    [
        ((), 4 * 2 * 4 + 2 * 4 + 5 * 2 + 2, of_codecs),
        (("lossless",), 3 * 2 + 2, of_tiles),
        (("gradients",), 3 * 4 + 1, of_gradients),
    ],
)
def test_kernels_compile_and_take_little(
    kind: tuple[str, ...], num: int, check: Callable[..., None], gpus: tuple[str, ...]
) -> None:
    found = told("tests.kernels.compiled", *kind, *gpus)
    assert {name.rpartition(", ")[2] for name in found} == set(gpus)
    assert len(found) == len(gpus) * num
    for name, facts in found.items():
        print(name)  # for a failure
        check(name, facts, facts["moved"])


def test_kernels_of_codecs_have_the_bits_of_their_twins() -> None:
    found = told("tests.kernels.interpreted", TRITON_INTERPRET="1")
    assert found["different"] == []
    assert found["compared"] > 800
    assert set(found["kernels_a_piece"].values()) == {1}


def test_lossless_kernels_have_the_bytes_of_their_twin() -> None:
    found = told("tests.kernels.lossless", TRITON_INTERPRET="1")
    assert found["different"] == []
    assert found["compared"] > 50
    for way, reads in (("encode", 1), ("decode", 1), ("encode a message", 0), ("decode a message", 0)):
        takes = found["takes"][way]
        assert takes.pop("triton") == 2
        assert takes.pop("reads of the host", 0) == reads
        assert sum(takes.values()) <= (4 if "message" in way else 2), "of torch, on few numbers, or a copy of a payload"


def test_gradient_kernels_have_the_bytes_of_their_twin() -> None:
    found = told("tests.kernels.gradients", TRITON_INTERPRET="1")
    assert found["different"] == []
    assert found["compared"] > 300
    assert found["takes"] == {
        "encode": {"triton": 2, "aten::cumsum": 1}, "decode": {"triton": 3, "aten::cumsum": 2},
    }, "and no read of the host"  # fmt: skip
