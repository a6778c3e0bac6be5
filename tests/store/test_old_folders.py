"""Folders that earlier releases have written load as before: tests/store/old has one of each kind.

`checkpoints` has steps 1 and 2 of a layer whose weights are the step, `trainer` the same of step 3 beside a file of
Trainer's. `tokens` has a stream of tokens, which is made anew. `islands` has the states of two syncs of one
island with two fragments, and `islands.json` what it had trained at their last syncs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import laconic
from laconic import checkpoint
from laconic.data import arrays
from laconic.integrations import trained_state
from tests.support.launch import run_ranks

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


def restored(folder: str) -> dict[str, object]:
    """Restore the island, and return what it has."""
    mesh = laconic.init_mesh("cpu", islands=1, nodes=1, local=1)
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps = laconic.LocalSteps(
        model, optimizer, mesh=mesh, every=4, fragments=2, codec="fp32", recovery=folder, run_id="old"
    )
    assert steps.steps == 4
    states = {name: optimizer.state[p] for each in steps.fragments for name, p in each.parameters.items()}
    found = {
        "outer": [vector.tolist() for fragment in steps.fragments for vector in fragment.vectors()],
        "inner": {name: {key: value.tolist() for key, value in state.items()} for name, state in states.items()},
    }
    for step in range(4, 8):  # the new states take the place of the old ones
        model(torch.ones(1, 2)).square().sum().backward()
        steps.step()
        steps.zero_grad()
        assert steps.steps == step + 1
    steps.finish()
    return found


def test_states_of_islands(tmp_path: Path) -> None:
    shutil.copytree(OLD / "islands", tmp_path / "machine")
    wanted = json.loads((OLD / "islands.json").read_text())
    assert run_ranks(restored, 1, str(tmp_path / "machine")) == [wanted]
    names = [path.name for path in (tmp_path / "machine" / "run-old").iterdir()]
    assert names
    assert all(name.startswith("start-2-") for name in names), "states of the start before are removed"
