"""accelerate's own scripts, unchanged but for the import, with `LaconicAccelerator` on two ranks.

`python -m tests.faults --rows accelerate-scripts` compares them with accelerate's own classes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.accelerate_scripts import CHECKS, Check, Kind, run_checks
from tests.support.launch import run_ranks

pytestmark = pytest.mark.machine

_TRAINING = {check for check in CHECKS if check.function == "training_check"} | {Check("test_script", "main")}


def failures(checks: set[Check], kind: Kind, folder: Path) -> list[str | None]:
    """The errors of the checks on both ranks, in the order of the scripts."""
    in_order = [check for check in CHECKS if check in checks]
    return [error for result in run_ranks(run_checks, 2, in_order, kind, folder) for error in result.values() if error]


@pytest.mark.timeout(120)
def test_checks_that_hold_for_a_sharded_model(tmp_path: Path) -> None:
    assert not failures(set(CHECKS) - _TRAINING, "laconic", tmp_path)


@pytest.mark.timeout(120)
def test_training_gives_the_weights_of_one_process(tmp_path: Path) -> None:
    """In fp32, bf16 and fp16, to 1e-6, with DDP's mixed precision."""
    assert not failures(_TRAINING, "laconic-whole", tmp_path)
