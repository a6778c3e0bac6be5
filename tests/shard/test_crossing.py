"""Weights and gradients that cross between nodes in few bits, and when they cross exactly."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.codec import lossless
from laconic.optim import AdamW8bit
from laconic.shard.crossing import CopyState
from tests.shard.wire_helpers import assert_nodes_agree, crossings, crossings_after, is_exact, states
from tests.support.launch import on_ranks
from tests.support.scenario import adamw, sgd
from tests.support.sharded_net import (
    FailsInBackward,
    buckets,
    build,
    full_parameters,
    held_bytes,
    inputs,
    moved,
    shard,
    small_net,
    squared_error,
    train_step,
)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def coded(net: Any = None, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded net whose weights cross in few bits, and an optimizer."""
    model = shard(net or build(small_net), **{"cache": "host", "wire": "4bit", **options})
    return model, adamw([p for p in model.parameters() if p.requires_grad])


@on_ranks(2, local=1)
def test_a_wire_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sends differences to the copies.*cache='none' keeps none; use cache='host'"):
        shard(build(), wire="4bit")
    with pytest.raises(ValueError, match="wire='5bit' is not known; use one of exact, 8bit, 4bit"):
        shard(build(), cache="host", wire="5bit")
    model = shard(build(), wire=laconic.Wire(weights="int8", as_values=True, gradients="int4"))
    crossings_after(model, adamw(model.parameters()))
    assert_nodes_agree(model)


@on_ranks(2, local=2)
def test_a_wire_that_does_nothing_says_so() -> None:
    """Replicas send gradients in few bits; islands under LocalSteps do not."""
    with pytest.warns(UserWarning, match="wire= does nothing here: all ranks that share the parameters are on one"):
        shard(build(), units=[], cache="host", wire="4bit")
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = shard(build(), mesh=mesh, wire=laconic.Wire(gradients="int4"))
    with pytest.warns(UserWarning, match=r"wire= does nothing here: every island has one node"):
        laconic.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)


@on_ranks(4, local=2)
def test_an_overflow_reaches_every_rank_and_passes() -> None:
    """A gradient that overflows on one rank makes the norm of all not finite, and a skipped step leaves nothing."""
    model, optimizer = coded(wire=laconic.Wire(weights="int4", gradients="int4", feedback=True))
    crossings_after(model, optimizer)
    loss = squared_error(model, inputs(0, dist.get_rank()))
    (loss * (math.inf if dist.get_rank() == 1 else 1.0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not math.isfinite(float(norm))
    model.zero_grad()
    crossings_after(model, optimizer, steps=3)
    assert all(bool(value.isfinite().all()) for value in full_parameters(model).values())
    assert_nodes_agree(model)


@on_ranks(2, local=1)
def test_frozen_weights_stay_exact() -> None:
    """Frozen weights cross once and exactly; weights that are frozen later keep their exact shard."""
    net: Any = build(small_net)
    net.blocks.requires_grad_(False)
    model, optimizer = coded(net)
    crossings_after(model, optimizer)
    assert all(bucket.wire.is_exact for bucket in buckets(*model.blocks))
    model.requires_grad_(False)
    exact = full_parameters(model)
    for _ in range(3):
        with torch.no_grad():
            model(inputs(0, dist.get_rank())[0])
    assert all(torch.equal(value, exact[name]) for name, value in full_parameters(model).items())


@torch.no_grad()
def edit(model: Any, factor: float = 0.5) -> None:
    for parameter in model.parameters():
        parameter.mul_(factor)


def train_by_hand(model: Any) -> None:
    for seed in range(12):
        train_step(model, seed=seed)
        edit(model, 0.99)


@on_ranks(2, local=1)
def test_only_optimizers_make_differences() -> None:
    """Edits inside any optimizer's step are differences; edits outside are named after a while."""
    for make in (sgd, AdamW8bit, lambda parameters: torch.optim.Adam(parameters, foreach=True)):
        model, _ = coded(granularity=AdamW8bit.granularity)
        crossings_after(model, make(model.parameters()), steps=3)
        assert states(model) == {CopyState.DECODED}
    with pytest.warns(UserWarning, match=r"exactly, not in few bits, because something else than an optimizer's step"):
        train_by_hand(model)


@on_ranks(3, local=1)
def test_weights_cross_exactly_for_each_cause() -> None:
    model, optimizer = coded()

    def step() -> None:
        train_step(model, optimizer)

    step()
    assert states(model) == {CopyState.EXACT}, "the first crossing is exact"
    step()
    assert states(model) == {CopyState.DECODED}
    assert not is_exact(model)
    assert_nodes_agree(model)

    def expect_exact(cause: str) -> None:
        assert is_exact(model), cause
        assert_nodes_agree(model)
        step()
        step()
        assert states(model) == {CopyState.DECODED}, f"differences again after {cause}"

    edit(model)
    expect_exact("an edit")
    squared_error(model, inputs(6, dist.get_rank())).backward()
    edit(model)
    optimizer.step()
    model.zero_grad()
    expect_exact("an edit between a backward and its step")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expect_exact("a state dict")
    model.load_state_dict(state)
    expect_exact("a load")
    if dist.get_rank() == 1:  # its memory was lost
        crossings(model)[0].forget()
    step()
    assert {each.state for each in crossings(model)} == {CopyState.EXACT, CopyState.DECODED}
    step()
    x, y = inputs(3, dist.get_rank())
    loss = squared_error(model, (FailsInBackward.apply(x.requires_grad_()), y))
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    model.zero_grad()
    step()  # the weights are the same, so nothing crosses before its forward
    step()
    assert states(model) == {CopyState.EXACT}, "after a backward that failed"
    step()
    for _ in range(2):  # a skipped step changes nothing, so nothing crosses
        with moved(model) as m:
            squared_error(model, inputs(5, dist.get_rank())).backward()
        model.zero_grad()
    assert m.weights == 0


@pytest.mark.parametrize("weights", ["int4", "lossless"])
@on_ranks(2, local=1)
def test_copies_that_differ_are_made_equal_once_and_then_named(weights: Any) -> None:
    wire = laconic.Wire(weights=weights, exact_every=4)
    model, optimizer = coded(wire=wire, mp_policy=BF16)
    damaged = next(each for each in crossings_after(model, optimizer) if "up" in each.bucket.layout.slots[0].name)

    def flip_a_bit() -> None:
        if dist.get_rank() == 0:
            damaged.bucket.node_shard.buffer().view(torch.int16)[0] ^= 1  # by an ulp, which no size tells

    flip_a_bit()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        crossings_after(model, optimizer, steps=4)
    assert any("different copies of 1 buckets, those of up.weight" in str(each.message) for each in seen)
    assert_nodes_agree(model)
    flip_a_bit()
    with pytest.raises(RuntimeError, match=r"different copies of 1 buckets, those of up\.weight.*is damaged"):
        crossings_after(model, optimizer, steps=8)


class Interrupted(BaseException):
    """Stands for what may arrive while a difference is added."""


@pytest.mark.parametrize("wire", ["4bit", laconic.Wire(weights="lossless")], ids=["4bit", "lossless"])
@on_ranks(2, local=1)
def test_a_difference_that_is_read_in_part_is_never_a_base(wire: Any) -> None:
    """One rank is interrupted in the middle of a difference. Next time the weights cross exactly, on all ranks."""
    model, optimizer = coded(units=[], wire=wire, mp_policy=BF16)
    (victim,) = crossings_after(model, optimizer)
    decoders: Any = (lossless, "decode_in_pieces") if wire != "4bit" else (victim.coding, "decode_into")
    decode = getattr(*decoders)
    decoded: list[int] = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if decoded or wire != "4bit":
            raise Interrupted
        decoded.append(1)
        return decode(*arguments, **options)

    if dist.get_rank() == 0:
        with mock.patch.object(*decoders, interrupted), pytest.raises(Interrupted):
            model.unshard()
        assert victim.state is CopyState.LOST
    else:
        model.unshard()
    model.reshard()
    edit(model)
    assert is_exact(model, torch.bfloat16)
    assert victim.state is CopyState.EXACT
    crossings_after(model, optimizer)
    assert_nodes_agree(model)


@pytest.mark.parametrize(
    "options",
    [
        {"wire": laconic.Wire(weights="int4", gradients="int2", feedback=True)},
        {"wire": "lossless-4bit", "mp_policy": BF16},
    ],
    ids=["feedback", "lossless"],
)
@on_ranks(2, local=1)
def test_a_resumed_run_has_the_bits_of_the_one_that_saved(options: dict[str, Any], tmp_path: Path) -> None:
    model, optimizer = coded(**options)
    crossings_after(model, optimizer, steps=3)
    lost = sum(4 * bucket.layout.shard_numel for bucket in buckets(model) if bucket.wire.feedback)
    assert model.memory().device_bytes == held_bytes(model) + lost, "what a codec lost is counted"
    assert bool(lost) == ("mp_policy" not in options)
    save_checkpoint(tmp_path, 3, model=model, optimizer=optimizer, extra={})
    resumed, second = coded(build(small_net, seed=1), cache="device", **options)
    assert load_checkpoint(tmp_path, model=resumed, optimizer=second) is not None
    for each in ((model, optimizer), (resumed, second)):
        crossings_after(*each, steps=3)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, full_parameters(resumed)[name]), name
