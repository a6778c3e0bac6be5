"""Where weights rest: offloaded shards, `cache="rank"`, which keeps whole weights, and FSDP2's shard_placement_fn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import laconic
from tests.support.launch import on_ranks
from tests.support.scenario import Scenario, adamw, assert_same_bits
from tests.support.sharded_net import (
    buckets,
    gather_bytes,
    held_bytes,
    inputs,
    partly_frozen,
    squared_error,
)


def test_offloaded_shards_take_no_device_memory() -> None:
    """Shards and gradients are counted in host memory; the numbers are those of a model without offloading."""
    scenario = Scenario(cache="host", optimizer=adamw)
    run, offloaded = (replace(scenario, options={"offload_policy": it}).run()[0] for it in (None, CPUOffloadPolicy()))
    assert_same_bits(run, offloaded)
    memory, elsewhere = run.memory[-1], offloaded.memory[-1]
    shards = sum(bucket.shard.nbytes for bucket in buckets(run.model))
    assert memory.device_bytes == shards
    assert elsewhere.device_bytes == 0
    assert elsewhere.host_bytes == memory.host_bytes + shards
    assert elsewhere.device_peak_bytes <= memory.device_peak_bytes - shards


@on_ranks(4, local=1)
def test_parameters_of_one_unit_may_lie_on_two_meshes() -> None:
    """Parameters of one unit on two meshes: the weight of a layer on all ranks, its bias on pairs of ranks."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    class Result:
        def __init__(self, mesh: Any) -> None:
            self.placement, self.mesh_info = Shard(0), self
            self.mesh = mesh

    def place(parameter: nn.Parameter) -> Any:
        return Result(whole["inner"]) if parameter.ndim == 1 else Shard(0)

    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    laconic.fully_shard(model, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=place)
    assert [bucket.cluster.size for bucket in buckets(model)] == [4, 2]
    rank = dist.get_rank()
    model(torch.full((1, 5), rank + 1.0)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((7, 5), 2.5))  # type: ignore[union-attr]
    assert torch.equal(model.bias.grad.full_tensor(), torch.ones(7))  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="laconic cuts it at block borders"):
        laconic.fully_shard(
            nn.Linear(2, 2), shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim > 1 else None
        )
    with pytest.raises(AssertionError, match="does not fit a parameter of shape"):
        laconic.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda parameter: Shard(1))
    with pytest.raises(ValueError, match="must return a Shard"):
        laconic.fully_shard(nn.Linear(2, 2), shard_placement_fn=lambda parameter: "rows")


# -- whole weights that stay -------------------------------------------------------------------------------------------

_CHECKS = laconic.Checks(interval=1, on_damage="regather", unnoticed_edits=True)
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _evaluate(model: Any) -> Tensor:
    with torch.no_grad():
        return squared_error(model, inputs(99, 0))


def _edit(model: nn.Module) -> None:
    next(iter(model.parameters())).mul_(0.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"local": 2, "make": partly_frozen, "precision": _BF16, "options": {"checks": _CHECKS}},
        {"options": {"wire": "4bit"}},
        {"options": {"wire": laconic.Wire(weights="int8", as_values=True)}},
        {"own": {"blocks.0": {"cache": "host"}, "blocks.1": {"cache": "none"}}},
    ],
)
def test_whole_weights_train_to_the_bits_of_gathered_ones(changes: dict[str, Any]) -> None:
    """With two micro-batches a step, evaluations, and an edit. A difference has its base in the whole buffer."""
    other = "device" if "wire" in changes.get("options", {}) else "none"
    scenario = Scenario(micro_batches=2, optimizer=adamw, look=_evaluate, edits={1: _edit}, **changes)
    whole, gathered = (replace(scenario, cache=cache).run()[0] for cache in ("rank", other))
    assert_same_bits(whole, gathered)
    assert whole.looks == gathered.looks


def test_weights_are_gathered_once_a_step_and_frozen_ones_once_in_a_run() -> None:
    run = Scenario(local=2, cache="rank", make=partly_frozen, micro_batches=2, steps=3).run()[0]
    trained, every = [bucket for bucket in buckets(run.model) if not bucket.stored.is_frozen], buckets(run.model)
    for sent, which in zip(run.sent, (every, trained, trained), strict=True):
        for level in ("node", "local"):
            assert sent.sent(level, "weights") == gather_bytes(level, which)
    whole = sum(bucket.form.geometry.numel * bucket.layout.num_shards * 4 for bucket in every)
    kept = sum(bucket.shard.nbytes for bucket in trained)
    assert run.memory[-1].device_bytes == held_bytes(run.model) == whole + kept, (
        "a frozen shard lies in the whole buffer"
    )
