"""Steps, state, the unsliced layout, checkpoints, and the engine: a sliced model is trained like any other."""

from __future__ import annotations

import copy
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
from laconic.partial.updates import assign_slice, partial_updates, unsliced, unsliced_state_dict
from laconic.ragged.parts import sliced_parameters
from laconic.shard.reduce import BucketGradients
from tests.reference.partial import MaskedTraining
from tests.support.launch import on_ranks
from tests.support.partial_models import (
    BOTH,
    MLPS,
    MODELS,
    MlpNet,
    active_mask,
    build,
    lm_loss,
    partial_net,
    plain_net,
    tokens,
    unslice,
)
from tests.support.sharded_net import inputs, squared_error

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("kind", ["llama-mha-biases", "gpt2", "mixtral-grouped_mm"])
def test_training_equals_masked_training_and_frozen_coordinates_do_not_move(kind: str) -> None:
    model = partial_updates(build(kind), slice_index=1, num_slices=4, include=BOTH)
    masks = active_mask(model)
    oracle = MaskedTraining(build(kind), masks, lm_loss, make_optimizer=adamw, max_norm=0.5)
    optimizer = adamw(model.parameters())
    before = {name: value.clone() for name, value in unsliced_state_dict(model).items()}
    for step in range(3):
        lm_loss(model, tokens(step)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(norm, oracle.step([tokens(step)]))
    after = unsliced_state_dict(model)
    for name, parameter in oracle.model.named_parameters():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-4, atol=2e-5)
        assert torch.equal(after[name][~masks[name]], before[name][~masks[name]])
        assert not torch.equal(after[name], before[name])
    assert set(optimizer.state) == {p for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", [kind for kind in MODELS if not kind.endswith("_mm")])
def test_unsliced_layout_round_trip(kind: str) -> None:
    plain = build(kind)
    model = partial_updates(copy.deepcopy(plain), slice_index=1, num_slices=2, include=BOTH)
    state, want = unsliced_state_dict(model), plain.state_dict()
    assert list(state) == list(want)
    assert all(torch.equal(state[name], value) for name, value in want.items())

    other = build(kind)
    for parameter in other.parameters():
        nn.init.uniform_(parameter)
    partial_updates(other, slice_index=3, num_slices=4, include=BOTH)
    other.load_state_dict(state)
    assert all(torch.equal(value, want[name]) for name, value in unsliced_state_dict(other).items())
    plain.load_state_dict(state)
    model.load_state_dict(model.state_dict())  # its own layout loads too


def test_wrong_shapes_and_missing_tensors_are_named_on_load() -> None:
    model, state = partial_net(0), unsliced_state_dict(partial_net(0))
    state["blocks.0.up.weight"] = torch.zeros(3, 3)
    del state["blocks.1.down.weight"]
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing.*blocks\.1\.down\.weight_slice0.*Unexpected.*blocks\.0\.up\.weight"
    ):
        model.load_state_dict(state)


def test_unsliced_lets_others_initialise_and_save(tmp_path: Any) -> None:
    import transformers

    plain = build("gpt2")
    model = partial_updates(build("gpt2"), slice_index=1, num_slices=2, include=BOTH)
    with unsliced(model):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        model.save_pretrained(tmp_path)
        model.transformer.h[0].mlp.c_fc.weight.fill_(2.0)
    assert (unsliced_state_dict(model)["transformer.h.0.mlp.c_fc.weight"] == 2).all()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), plain.parameters(), strict=True))
    assert len(sliced_parameters(model)) == 12
    lm_loss(model, tokens()).backward()
    assert model.transformer.h[0].mlp.c_fc.weight_slice1.grad is not None


def test_another_slice_takes_over_where_this_one_stopped() -> None:
    model = partial_net(0, num_slices=2)
    optimizer = adamw(model.parameters())

    def step() -> None:
        squared_error(model, inputs(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    first = unsliced_state_dict(model)
    masks = active_mask(model)
    squared_error(model, inputs(0, 0)).backward()
    assign_slice(model, slice_index=1, optimizer=optimizer)
    assert {p for p in model.parameters() if p.grad is not None} <= {p for p in model.parameters() if p.requires_grad}
    assert all(p.requires_grad for p in optimizer.state)
    assert all(torch.equal(value, first[name]) for name, value in unsliced_state_dict(model).items())
    optimizer.zero_grad()
    step()
    second = unsliced_state_dict(model)
    taken = active_mask(model)
    for name in sliced_parameters(model):
        assert torch.equal(masks[name], ~taken[name])
        assert torch.equal(second[name][masks[name]], first[name][masks[name]])
        assert not torch.equal(second[name][taken[name]], first[name][taken[name]])
    with pytest.raises(ValueError, match="slice_index=2 must be 0 to 1"):
        assign_slice(model, slice_index=2)
    with pytest.raises(ValueError, match="not sliced"):
        assign_slice(plain_net(), slice_index=0)


def test_a_model_without_values_is_sliced_and_filled_later() -> None:
    with torch.device("meta"):
        model = MlpNet()
    partial_updates(model, slice_index=1, num_slices=2, include=["mlp"], patterns=MLPS)
    model.to_empty(device="cpu")
    model.load_state_dict(plain_net().state_dict())
    x, _ = inputs(0, 0)
    assert torch.equal(model(x), plain_net()(x))


# -- sharded -----------------------------------------------------------------------------------------------------------


def _count_products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the names of gradients that a product writes into their bucket."""
    written: list[str] = []
    add_product = BucketGradients.add_product

    def counted(self: BucketGradients, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        written.append(self.bucket.layout.slots[index].name)
        add_product(self, index, left, right)

    monkeypatch.setattr(BucketGradients, "add_product", counted)
    return written


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks("ranks")
def test_a_sharded_model_trains_as_the_plain_one() -> None:
    """Two steps with slice 1, and two with slice 2."""
    model: Any = partial_net(1)
    mesh, ranks = laconic.init_mesh("cpu"), dist.get_world_size()
    for unit in (*model.blocks, model):
        laconic.fully_shard(unit, mesh=mesh)
    for block in model.blocks:
        # The shared part and one slice train. Each slice has a bucket, so that all islands have the same buckets.
        kinds = [bucket.stored.is_frozen for bucket in block._laconic_unit.buckets]
        assert sorted(kinds) == [False, False, True, True, True]
    if ranks == 1:  # ranks in one process share the class
        with pytest.MonkeyPatch.context() as patch:
            written = _count_products(patch)
            patch.setattr("laconic.shard.full._TINY_NUMEL", 0)  # as if the matrices were large
            squared_error(model, inputs(0, 0)).backward()
            products = [*["down.weight_slice1", "up.weight_slice1"] * 2, "inp.weight", "out.weight"]
            assert sorted(written) == sorted(products)
            model.zero_grad()
    masks, optimizer = [active_mask(partial_net(slice_index)) for slice_index in (1, 2)], sgd(model.parameters())
    oracle = MaskedTraining(plain_net(), masks[0], squared_error, make_optimizer=sgd, max_norm=0.1)
    for step in range(4):
        if step == 2:
            assign_slice(model, slice_index=2, optimizer=optimizer)
            oracle.hand_over(masks[1])
        squared_error(model, inputs(step, dist.get_rank())).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        optimizer.step()
        optimizer.zero_grad()
        wanted = oracle.step([inputs(step, rank) for rank in range(ranks)]).item()
        assert norm == pytest.approx(wanted, rel=1e-4)
    state = unsliced_state_dict(model)
    for name, parameter in oracle.model.named_parameters():
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    with unsliced(model.blocks[0]):
        assert torch.equal(model.blocks[0].up.weight, state["blocks.0.up.weight"])
    other: Any = partial_net(3)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    laconic.fully_shard(other, mesh=mesh)
    other.load_state_dict(state)
    again = unsliced_state_dict(other)
    assert all(torch.equal(again[name], value) for name, value in state.items())


# -- checkpoints: the unsliced layout, written and read in parts, by any slices ----------------------------------------


def trained(kind: str, slice_index: int, num_slices: int, *, sharded: bool = False, steps: int = 2) -> tuple[Any, Any]:
    """Build a sliced model and train it. Returns the model and its optimizer, which has state."""
    model = partial_updates(build(kind), slice_index=slice_index, num_slices=num_slices, include=BOTH)
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


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return second moments by the names of the unsliced model, zero where there are none."""

    def moment_of(parameter: nn.Parameter) -> torch.Tensor:
        moment = optimizer.state.get(parameter, {}).get("exp_avg_sq", torch.zeros(parameter.shape))
        return moment.full_tensor() if isinstance(moment, laconic.RaggedTensor) else moment.clone()

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


@on_ranks(2, local=1)
def test_a_checkpoint_of_as_many_slices_of_other_layers_is_refused_by_name(tmp_path: Path) -> None:
    """What a run slices without being told may change from release to release: a resumed run says so, and stops."""
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=1)

    def island(**options: Any) -> dict[str, Any]:
        model = partial_updates(build("llama"), slice_index=dist.get_rank(), num_slices=2, **options)
        optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        return {"model": model, "optimizer": optimizer, "local_steps": laconic.LocalSteps(model, optimizer, mesh=mesh)}

    save_checkpoint(tmp_path, 1, **island(include=BOTH), extra={})
    with pytest.raises(
        ValueError, match=r"slice other layers than this run does, into as many slices \(2\)"
    ) as refused:
        load_checkpoint(tmp_path, **island())
    assert 'partial_updates(include=["mlp", "attention"]) (in a job sync.slice_include)' in str(refused.value)
    same = load_checkpoint(tmp_path, **island(include=BOTH))
    assert same is not None
    assert "islands" not in same
    other = load_checkpoint(tmp_path, **island(), strict=False)
    assert other is not None
    assert other["islands"].startswith("was saved by islands that slice other layers: every island starts from")
