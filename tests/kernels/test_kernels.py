"""Kernels that run on GPUs only: what they take, and that they have the bits of their twins in torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TRITON = Path(sys.prefix) / "triton"
"""Where the Makefile puts triton: torch and DeepSpeed would import it in every process."""


def told(module: str, **variables: str) -> dict[str, Any]:
    path = os.pathsep.join([str(TRITON), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-m", module], env={**os.environ, **variables, "PYTHONPATH": path}, capture_output=True,
        text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))


def test_every_kernel_compiles_for_the_gpus_that_people_have() -> None:
    """No spills, few registers, and each value is read once and written once."""
    found = told("tests.kernels.compiled")
    assert {name.rpartition(", ")[2] for name in found} == {"sm_80", "sm_90", "sm_100"}
    assert len(found) == 3 * (8 * 4 + 2)
    for name, facts in found.items():
        assert facts["spilled"] == 0, name
        assert facts["registers"] <= 96, name
        if name.startswith(("int8", "int4", "int3", "int2")):  # the others read tables, which stay in a cache
            assert facts["bytes_a_value"] <= (5.2 if "code" in name else 9.2), name


def test_every_kernel_has_the_bits_of_its_twin() -> None:
    assert told("tests.kernels.interpreted", TRITON_INTERPRET="1") == {}
