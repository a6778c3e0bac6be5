"""Steps, state, the unsliced layout, and the engine: a sliced model is trained like any other."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.partial.updates import (
    assign_slice,
    partial_updates,
    unsliced,
    unsliced_state_dict,
)
from laconic.ragged.parts import sliced_parameters
from laconic.shard.reduce import BucketGradients
from tests.reference.partial import MaskedTraining
from tests.support.launch import on_ranks
from tests.support.partial_models import (
    MLPS,
    MODELS,
    MlpNet,
    active_mask,
    build,
    lm_loss,
    partial_net,
    plain_net,
    tokens,
)
from tests.support.sharded_net import inputs, squared_error

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
sgd = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("kind", ["llama-mha-biases", "gpt2", "mixtral-grouped_mm"])
def test_training_equals_masked_training_and_frozen_coordinates_do_not_move(kind: str) -> None:
    model = partial_updates(build(kind), slice_index=1, num_slices=4)
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
    model = partial_updates(copy.deepcopy(plain), slice_index=1, num_slices=2)
    state, want = unsliced_state_dict(model), plain.state_dict()
    assert list(state) == list(want)
    assert all(torch.equal(state[name], value) for name, value in want.items())

    other = build(kind)
    for parameter in other.parameters():
        nn.init.uniform_(parameter)
    partial_updates(other, slice_index=3, num_slices=4)
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
    model = partial_updates(build("gpt2"), slice_index=1, num_slices=2)
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
