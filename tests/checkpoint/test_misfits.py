"""Checkpoints of another model or program are refused with all names, or loaded as far as they fit.

One process, no process group.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from laconic import checkpoint
from laconic.checkpoint import CheckpointError, Differences
from laconic.checkpoint.keys import Keys, _nested_groups
from laconic.checkpoint.storage import TensorMeta
from tests.checkpoint import zoo

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return model, optimizer


def _wide(layers: int, width: int = 3) -> nn.Module:
    torch.manual_seed(layers)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.5)


@pytest.fixture(scope="module")
def twelve_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twelve")
    model = _wide(12)
    model[0] = nn.Linear(5, 3)
    _, optimizer = _trained(model, _adamw(model))
    checkpoint.save_checkpoint(folder, 1, model=model, optimizer=optimizer, extra={"tokens": 7})
    return folder


def test_strict_lists_every_tensor_that_differs(twelve_layers: Path) -> None:
    model = _wide(24)
    for load in (checkpoint.load_checkpoint, checkpoint.load_dcp):
        folder = twelve_layers if load is checkpoint.load_checkpoint else twelve_layers / "step-1"
        with pytest.raises(CheckpointError) as caught:
            load(folder, model=model, optimizer=_adamw(model))
        for layer in range(12, 24):
            assert f"{layer}.weight" in str(caught.value)
            assert f"{layer}.bias" in str(caught.value)
        assert "0.weight is float32[3, 5] in the checkpoint and float32[3, 3] in the model" in str(caught.value)
        assert "train different parameters: 12.bias, 12.weight" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"0\.weight is .* and bfloat16\[3, 3\] in the model"):
        checkpoint.load_checkpoint(twelve_layers, model=_wide(12).bfloat16(), optimizer=None)
    smaller = _wide(1)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_checkpoint(twelve_layers, model=smaller, optimizer=_adamw(smaller))
    for layer in range(1, 12):
        assert f"{layer}.weight, " in str(caught.value)
        assert f"{layer}.weight.exp_avg (optimizer)" in str(caught.value)


def test_tensors_that_fit_are_loaded_and_the_others_are_listed(twelve_layers: Path) -> None:
    saved = checkpoint.open_checkpoint(twelve_layers)
    model = _wide(2)
    model.append(nn.Linear(2, 2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = _adamw(model)
    with pytest.warns(UserWarning, match=r"only what fits was loaded \(.*0\.weight is float32\[3, 5\]"):
        loaded = checkpoint.load_checkpoint(twelve_layers, model=model, optimizer=optimizer, strict=False)
    assert loaded is not None
    assert (loaded["step"], loaded["tokens"]) == (1, 7)
    skipped = loaded["skipped"]
    layers = [f"{layer}.{kind}" for layer in range(3, 12) for kind in ("bias", "weight")]
    assert {name for name in skipped.unexpected if "optimizer" not in name} == set(layers)
    assert {name.split(" ")[0] for name in skipped.different} == {"0.weight", "2.weight", "2.bias"}
    assert not skipped.missing
    assert "train different parameters: 10.bias" in skipped.optimizer
    values = saved.read(["0.bias", "1.weight"])
    for name, parameter in model.named_parameters():
        fits = name in ("0.bias", "1.weight", "1.bias")
        assert torch.equal(parameter, before[name]) != fits, name
        assert bool(optimizer.state.get(parameter)) == fits, name
        assert name not in values or torch.equal(parameter, values[name])
    _trained(model, optimizer)  # a parameter with half of its state would raise


def test_nothing_is_skipped_if_all_fit_and_an_optimizer_that_was_not_saved_is_missed(
    twelve_layers: Path, tmp_path: Path
) -> None:
    model = _wide(12)
    model[0] = nn.Linear(5, 3)
    loaded = checkpoint.load_checkpoint(twelve_layers, model=model, optimizer=_adamw(model), strict=False)
    assert loaded == {"step": 1, "tokens": 7, "skipped": Differences()}
    checkpoint.save_checkpoint(tmp_path, 1, model=model, optimizer=None, extra={})
    for load, folder in ((checkpoint.load_checkpoint, tmp_path), (checkpoint.load_dcp, tmp_path / "step-1")):
        with pytest.raises(CheckpointError, match="the optimizer: was not saved, this run has AdamW"):
            load(folder, model=model, optimizer=_adamw(model))
    assert not checkpoint.load_dcp(tmp_path / "step-1", model=model)


def test_state_of_another_shape_or_optimizer_is_left_out(tmp_path: Path) -> None:
    model = zoo.Zoo()
    hoarder = zoo.Hoarder(model.parameters())
    _trained(model, hoarder)
    hoarder.state[model.up.weight]["rows"] = torch.zeros(4)  # as if the run had other blocks
    checkpoint.save_checkpoint(tmp_path, 1, model=model, optimizer=hoarder, extra={})
    other = zoo.Zoo()
    fresh = zoo.Hoarder(other.parameters())
    with pytest.raises(CheckpointError, match=r"up\.weight\.rows \(optimizer\) is float32\[4\] .* and float32\[13\]"):
        checkpoint.load_checkpoint(tmp_path, model=other, optimizer=fresh)
    with pytest.warns(UserWarning, match=r"up\.weight\.rows"):
        checkpoint.load_checkpoint(tmp_path, model=other, optimizer=fresh, strict=False)
    assert not fresh.state.get(other.up.weight)
    assert torch.equal(fresh.state[other.up.bias]["momentum"], hoarder.state[model.up.bias]["momentum"])
    sgd = torch.optim.SGD(other.parameters(), lr=3.0)
    with pytest.raises(CheckpointError, match="written with Hoarder, this run uses SGD"):
        checkpoint.load_checkpoint(tmp_path, model=other, optimizer=sgd)
    with pytest.warns(UserWarning, match="written with Hoarder"):
        checkpoint.load_checkpoint(tmp_path, model=other, optimizer=sgd, strict=False)
    assert (len(sgd.state), sgd.param_groups[0]["lr"]) == (0, 3.0)


def test_tied_weights_are_stored_once_and_found_under_both_names(tmp_path: Path) -> None:
    model = zoo.make_zoo(seed=0, hidden=1)
    model.embed = nn.Embedding(50_000, 7)
    model.head.weight = model.embed.weight
    folder = checkpoint.save_checkpoint(tmp_path / "run", 1, model=model, optimizer=None, extra={})
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1.2 * model.embed.weight.nbytes
    plain = {"model": {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}}
    dcp.load(plain, checkpoint_id=folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(plain["model"][name], tensor), name
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    again = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    assert again.keys() == model.state_dict().keys()
    zoo.make_zoo(seed=1, hidden=1).up.load_state_dict({"weight": again["up.weight"], "bias": again["up.bias"]})


def test_foreign_groups_come_back(tmp_path: Path) -> None:
    """Two groups, one of them without decay, and a learning rate that is a tensor."""
    model = _wide(2)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.25), betas=(0.5, 0.75))
    _trained(model, optimizer)
    dcp.save(
        {"optim": get_optimizer_state_dict(model, optimizer), **get_model_state_dict(model)}, checkpoint_id=tmp_path
    )
    other = _wide(3)[:2]
    fresh = torch.optim.AdamW([{"params": layer.parameters()} for layer in other], lr=0.1)
    assert not checkpoint.load_dcp(tmp_path, model=other, optimizer=fresh)
    for group, expected in zip(fresh.param_groups, (0.01, 0.0), strict=True):
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.25, (0.5, 0.75), expected)
    assert zoo.whole(other, fresh).keys() == zoo.whole(model, optimizer).keys()
    for name, tensor in zoo.whole(model, optimizer).items():
        assert torch.equal(zoo.whole(other, fresh)[name], tensor), name
    with pytest.raises(CheckpointError, match="group their parameters differently"):
        checkpoint.load_dcp(tmp_path, model=other, optimizer=_adamw(other))


def test_two_models_in_a_folder_need_a_key(tmp_path: Path) -> None:
    model, average = _wide(2), _wide(2)
    for parameter in average.parameters():
        parameter.data.mul_(2)
    _, optimizer = _trained(model, _adamw(model))
    optimizers = {"first": get_optimizer_state_dict(model, optimizer), "second": _one_step_further(model, optimizer)}
    dcp.save({"model": model.state_dict(), "average": average.state_dict(), **optimizers}, checkpoint_id=tmp_path)
    other = _wide(3)[:2]
    with pytest.raises(CheckpointError, match="such a model under each of 'average', 'model'; say which one"):
        checkpoint.load_dcp(tmp_path, model=other)
    assert not checkpoint.load_dcp(tmp_path, model=other, model_key="model")
    assert torch.equal(other[1].weight, model[1].weight)
    fresh = _adamw(other)
    with pytest.raises(CheckpointError, match="an optimizer of it under each of 'first', 'second'; say which one"):
        checkpoint.load_dcp(tmp_path, model=other, optimizer=fresh, model_key="model")
    checkpoint.load_dcp(tmp_path, model=other, optimizer=fresh, model_key="average", optimizer_key="second")
    assert torch.equal(other[1].weight, average[1].weight)
    assert fresh.state[other[1].weight]["step"] == 2


def _one_step_further(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    copied = copy.deepcopy(model)
    further = _adamw(copied)
    further.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _trained(copied, further)
    return get_optimizer_state_dict(copied, further)


@pytest.mark.parametrize("root", ["", "app.model"])
def test_names_with_equal_ends_are_distinguished(root: str) -> None:
    names = {"weight", "layer.weight", "state.weight", "layer.step"}
    prefix = f"{root}." if root else ""
    saved = {f"{prefix}{name}" for name in names}
    saved |= {f"o.state.{name}.{key}" for name in names for key in ("step", "exp_avg")}
    saved |= {f"o.param_groups.{name}.{key}" for name in names for key in ("lr", "betas", "eps", "weight_decay")}
    found = Keys.found_in(saved, tensors=names, parameters=names)
    assert found == Keys(model=prefix, optimizer="o.", optimizers=("o.",))
    entry = TensorMeta((1,), torch.float32)
    assert found.model_entries(dict.fromkeys(saved, entry)).keys() == names
    assert found.state_entries({k: entry for k in saved if "groups" not in k}).keys() == names


def test_groups_come_in_the_order_of_their_numbers() -> None:
    entries = {
        f"groups.{number}.{key}": value for number in (0, 10, 2) for key, value in (("params", []), ("lr", number))
    }
    assert [group["settings"]["lr"] for group in _nested_groups(entries, "groups.")] == [0, 2, 10]


def test_a_folder_that_dcp_did_not_write_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="is no DCP checkpoint"):
            checkpoint.load_dcp(folder, model=_wide(1))
    dcp.save({"something": torch.zeros(3)}, checkpoint_id=tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"only in the model: 0\.bias, 0\.weight"):
        checkpoint.load_dcp(tmp_path / "other", model=_wide(1))
