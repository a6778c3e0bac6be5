"""Folders that earlier releases have written load as before: tests/store/old has one of each kind.

`checkpoints` has steps 1 and 2 of a layer whose weights are the step, `trainer` the same of step 3 beside a file of
Trainer's. `tokens` has a stream of tokens, which is made anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from laconic import checkpoint
from laconic.data import arrays
from laconic.integrations import trained_state

pytestmark = pytest.mark.filterwarnings("error")
OLD = Path(__file__).parent / "old"


def test_checkpoints(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    found = checkpoint.load_checkpoint(OLD / "checkpoints", model=model, optimizer=optimizer)
    assert found == {"number": 2, "step": 2}
    assert model.weight.tolist() == [[2.0, 2.0]]
    assert optimizer.param_groups[0]["lr"] == 0.5
    shutil.copytree(OLD / "checkpoints", tmp_path / "run")
    checkpoint.save_checkpoint(tmp_path / "run", 3, model=model, optimizer=None, extra={})
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-2", "step-3"]


def test_trainers_folder() -> None:
    folder = OLD / "trainer" / "checkpoint-3"
    assert trained_state.incomplete(folder) == ""
    model = nn.Linear(2, 1)
    trained_state.load_trained(folder, model)
    assert model.weight.tolist() == [[3.0, 3.0]]


def test_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    (index,) = (OLD / "tokens").glob("corpus-*.json")
    assert not arrays.is_whole(index)
    (line,) = capsys.readouterr().err.splitlines()
    assert "is made again from the corpus" in line
