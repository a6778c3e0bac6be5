"""Kernels of lossless gradients: what they take, and that they have the bytes of their twin."""

from __future__ import annotations

import pytest

from tests.kernels.apart import told

pytestmark = pytest.mark.machine

MOST_REGISTERS = 128
"""Of kernels whose programs have 128 threads: so many that a multiprocessor holds four."""


def takes_little_of_gradients(*architectures: str) -> None:
    """No spills, and values and what is written of them are moved once by each kernel that needs them."""
    found = told("tests.kernels.compiled", "gradients", *architectures, timeout_s=280)
    assert len(found) == len(architectures) * (3 * 4 + 1)
    for name, facts in found.items():
        form, kernel, _ = name.split(", ")
        nbytes, moved = 4 if form.endswith("32") else 2, facts["moved"]
        assert facts["spilled"] == 0, name
        assert facts["registers"] <= MOST_REGISTERS, name
        assert not set(facts["compiled_for"]) & {"message", "nbytes", "num_blocks", "whole"}, name
        # each thread reads the last value, too
        assert 0 <= moved.get("reads values", 0) - nbytes * (kernel in ("measure", "write")) < 0.1 * nbytes, name
        assert moved.get("writes out", 0) == nbytes * (kernel == "read"), name
        # of counts all threads read the same; a message of the values themselves has nothing else
        others = sum(each for what, each in moved.items() if what.endswith(("ends", "counts", "length", "_values")))
        assert facts["bytes_a_value"] - others <= 2 * nbytes + 1.25, name


@pytest.mark.timeout(300)  # of 13 compilations
def test_gradient_kernels_compile_for_an_h100() -> None:
    takes_little_of_gradients("sm_90")


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_gradient_kernels_compile_for_the_gpus_that_people_have() -> None:
    takes_little_of_gradients("sm_80", "sm_100")


@pytest.mark.timeout(300)  # triton's interpreter is slow
def test_gradient_kernels_have_the_bytes_of_their_twin() -> None:
    found = told("tests.kernels.gradients", TRITON_INTERPRET="1", timeout_s=280)
    assert found["different"] == []
    assert found["compared"] > 300
    assert found["takes"] == {
        "encode": {"triton": 2, "aten::cumsum": 1}, "decode": {"triton": 3, "aten::cumsum": 2},
    }, "and no read of the host"  # fmt: skip
