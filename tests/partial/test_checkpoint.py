"""Checkpoints of sliced models: the unsliced layout, written and read in parts, by any slices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.checkpoint import load_checkpoint, open_checkpoint, save_checkpoint, storage
from laconic.hf.layers import layers_to_shard
from laconic.partial.updates import partial_updates, unsliced_state_dict
from tests.support.launch import on_ranks
from tests.support.partial_models import active_mask, build, lm_loss, tokens, unslice

adamw = partial(torch.optim.AdamW, lr=1e-2)


def trained(kind: str, slice_index: int, num_slices: int, *, sharded: bool = False, steps: int = 2) -> tuple[Any, Any]:
    """Build a sliced model and train it. Returns the model and its optimizer, which has state."""
    model = partial_updates(build(kind), slice_index=slice_index, num_slices=num_slices)
    if sharded:
        mesh = laconic.init_mesh("cpu")
        for module in [*layers_to_shard(model), model]:
            laconic.fully_shard(module, mesh=mesh)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        lm_loss(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, laconic.RaggedTensor) else value


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return second moments by the names of the unsliced model, zero where there are none."""

    def moment_of(parameter: nn.Parameter) -> torch.Tensor:
        state = optimizer.state.get(parameter)
        return whole(state["exp_avg_sq"]).clone() if state else torch.zeros(parameter.shape)

    return unslice(model, moment_of)


def assert_loaded(
    folder: Path, model: nn.Module, num_slices: int, slice_index: int, kind: str, *, sharded: bool = False
) -> None:
    """Assert that a model with other slices loads the same values, and the saved moments of what it trains."""
    wanted, saved = unsliced_state_dict(model), unsliced_moments(folder, model)
    other, optimizer = trained(kind, slice_index, num_slices, sharded=sharded, steps=0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7.0)
    assert load_checkpoint(folder, model=other, optimizer=optimizer) is not None
    got, trains = unsliced_state_dict(other), active_mask(other)
    assert [name for name, value in wanted.items() if not torch.equal(got[name], value)] == []
    for name, value in moments(other, optimizer).items():
        assert torch.equal(value, torch.where(trains[name], saved[name], 0.0)), name
    assert {p for p in other.parameters() if p.requires_grad} == set(optimizer.state)
    assert all(each.shape in ((), p.shape) for p, held in optimizer.state.items() for each in held.values())


def unsliced_moments(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """Read the second moments of a folder by the names of the unsliced model."""
    names = [name for name in unsliced_state_dict(model) if "rotary" not in name]
    stored = open_checkpoint(folder)
    entries = storage.entries_of(storage.read_metadata(stored.folder))
    keys = {name: f"optim.state.{name}.exp_avg_sq" for name in names if f"optim.state.{name}.exp_avg_sq" in entries}
    read = {key: torch.empty(entries[key].shape) for key in keys.values()}
    storage.load(read, stored.folder, offline=True)
    return {name: read[key] for name, key in keys.items()}


@pytest.mark.parametrize("kind", ["phi3", "gpt2", "gpt-oss-eager"])
def test_a_checkpoint_is_unsliced_and_loads_into_any_slices(kind: str, tmp_path: Path) -> None:
    """The kinds have rows and columns, fused and interleaved matrices, stacks of experts, and biases."""
    model, optimizer = trained(kind, 1, 2)
    save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, extra={})
    stored = open_checkpoint(tmp_path)
    assert stored.tensors.keys() == build(kind).state_dict().keys()
    state = unsliced_state_dict(model)
    read = stored.read(stored.tensors)
    assert all(torch.equal(value, state[name]) for name, value in read.items())
    saved = unsliced_moments(tmp_path, model)
    for name, value in moments(model, optimizer).items():  # a slice that nobody trains has zeros
        assert torch.equal(value, saved[name]), name
    for num_slices, slice_index in ((4, 1), (1, 0)):
        assert_loaded(tmp_path, model, num_slices, slice_index, kind)


@on_ranks(3)
def test_a_sharded_model_is_written_and_read_in_parts(tmp_path: Path) -> None:
    kind = "mixtral-eager"
    model, optimizer = trained(kind, 1, 2, sharded=True)
    with pytest.MonkeyPatch.context() as patch:  # a save and a load must not gather
        if dist.get_rank() == 0:  # ranks in one process share the class
            patch.setattr(laconic.RaggedTensor, "full_tensor", None)
        dist.barrier()
        save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, extra={})
        dist.barrier()
    dist.barrier()
    state, read = unsliced_state_dict(model), open_checkpoint(tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in read.read(read.tensors).items())
    for num_slices, slice_index in ((4, 3), (1, 0)):
        assert_loaded(tmp_path, model, num_slices, slice_index, kind, sharded=True)
        dist.barrier()


def test_an_unsliced_checkpoint_loads_into_slices(tmp_path: Path) -> None:
    plain = build("llama")
    optimizer = adamw(plain.parameters())
    lm_loss(plain, tokens()).backward()
    optimizer.step()
    save_checkpoint(tmp_path, 1, model=plain, optimizer=optimizer, extra={})
    assert_loaded(tmp_path, plain, 4, 2, "llama")
