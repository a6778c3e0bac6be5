"""`LaconicStrategy` against Lightning's DDP; and its refusals.

Lightning takes seconds to import, so each test does it inside: all workers import this file, and one runs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from laconic.integrations import LaconicArguments
from laconic.integrations.options import ArgumentError
from tests.support.launch import on_ranks


@pytest.mark.machine
@pytest.mark.parametrize("checks", ["SAMPLE", pytest.param("OTHERS", marks=pytest.mark.campaign)])
@on_ranks(2, local=1)
def test_a_trainer_its_checkpoints_and_its_precisions(tmp_path: Path, checks: str) -> None:
    from tests.integrations import lightning_checks
    from tests.support.lightning_jobs import train

    torch.testing.assert_close(train("laconic", 3), train("ddp", 3), rtol=1e-5, atol=1e-5)
    for check in getattr(lightning_checks, checks):
        mine = tmp_path / check.__name__
        mine.mkdir(exist_ok=True)
        check(mine)


def test_what_does_not_go_with_lightning() -> None:
    from lightning.fabric import Fabric
    from lightning.pytorch import Trainer

    from laconic.integrations.lightning import LaconicFabricStrategy, LaconicStrategy

    for arguments, message in (({"local_steps": 5}, "local_steps=5"), ({"audit_every": 5}, "audit_every=5")):
        with pytest.raises(ArgumentError, match=message):
            LaconicStrategy(LaconicArguments(**arguments))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"use LaconicFabricStrategy\(\) for Fabric"):
        Fabric(strategy=LaconicStrategy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"use LaconicStrategy\(\) for Lightning's Trainer"):
        Trainer(strategy=LaconicFabricStrategy())  # type: ignore[arg-type]
