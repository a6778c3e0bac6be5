"""Coded crossings beside other features, their refusals, and numbers that are not finite."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
import laconic.optim
from laconic.shard.crossing import CopyState
from tests.shard.wire_helpers import assert_nodes_agree, crossings_after, states
from tests.support.launch import on_ranks, run_ranks
from tests.support.sharded_net import buckets, build, full_parameters, inputs, shard, squared_error, train_step


def job_refusals() -> None:
    with pytest.raises(ValueError, match=r"sends differences to the copies.*cache='none' keeps none; use cache='host'"):
        shard(build(), wire="4bit")
    with pytest.raises(ValueError, match="wire='5bit' is not known; use one of exact, 8bit, 4bit"):
        shard(build(), cache="host", wire="5bit")
    model = shard(build(), wire=laconic.Wire(weights="int8", as_values=True, gradients="int4"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(2):
        train_step(model, optimizer, seed)
        assert_nodes_agree(model)


def job_one_node() -> None:
    with pytest.warns(UserWarning, match="wire= does nothing here: all ranks that share the parameters are on one"):
        shard(build(), units=[], cache="host", wire="4bit")


def job_islands_of_one_node() -> None:
    """Replicas send gradients in few bits; islands under LocalSteps do not."""
    mesh = laconic.init_mesh("cpu", islands=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = shard(build(), mesh=mesh, wire=laconic.Wire(gradients="int4"))
    with pytest.warns(UserWarning, match=r"wire= does nothing here: every island has one node"):
        laconic.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), mesh=mesh)


def test_what_cannot_be_is_refused_and_what_does_nothing_says_so() -> None:
    run_ranks(job_refusals, 2, local=1)
    run_ranks(job_one_node, 2, local=2)
    run_ranks(job_islands_of_one_node, 2, local=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"weights": "int5"},
            r"Wire\(weights='int5'\) is not known; use one of 'exact', 'bf16', 'int8', 'int4', 'int3'",
        ),
        ({"gradients": "int1"}, r"Wire\(gradients='int1'\) is not known"),
        ({"weights": "int4", "as_values": True}, "values need 8 bits or more; use 'int8'"),
        ({"exact_every": 0, "weights": "int4"}, r"exact_every=0\) must be at least 1"),
        ({"feedback": True}, "needs gradients other than 'exact'"),
    ],
)
def test_policies_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laconic.Wire(**arguments)


@on_ranks(4, local=2)
def test_an_overflow_reaches_every_rank_and_passes() -> None:
    """A gradient that overflows on one rank makes the norm of all not finite, and a skipped step leaves nothing."""
    wire = laconic.Wire(weights="int4", gradients="int4", feedback=True)
    model = shard(build(), cache="host", wire=wire)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    crossings_after(model, optimizer)
    loss = squared_error(model, inputs(0, dist.get_rank()))
    (loss * (math.inf if dist.get_rank() == 1 else 1.0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not math.isfinite(float(norm))
    model.zero_grad()
    for seed in range(3):
        train_step(model, optimizer, seed)
    assert all(bool(value.isfinite().all()) for value in full_parameters(model).values())
    assert_nodes_agree(model)


@on_ranks(4, local=2)
def test_other_features_go_together_with_it() -> None:
    """Coded runs stay near exact ones, and all ranks compute with equal weights."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cases: dict[str, dict[str, Any]] = {
        "bf16 copies": {"mp_policy": bf16},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "stays gathered": {"reshard_after_forward": False},
        "budget": {"cache": laconic.Cache(where="host", device_budget_bytes=4096)},
        "device": {"cache": "device"},
    }
    for what, options in cases.items():
        losses = {}
        for wire in ("exact", "4bit"):
            model = shard(build(), **{"cache": "host", **options}, wire=wire)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses[wire] = torch.stack([train_step(model, optimizer, seed % 3) for seed in range(9)])
            assert_nodes_agree(model)
        torch.testing.assert_close(losses["4bit"], losses["exact"], rtol=0.02, atol=0.01, msg=f"{what}: {losses}")


@on_ranks(4, local=2)
def test_frozen_weights_stay_exact() -> None:
    """Frozen weights cross once and exactly; weights that are frozen later keep their exact shard."""
    model = build()
    for parameter in model.blocks.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    model = shard(model, cache="host", wire="4bit")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    crossings_after(model, optimizer)
    assert all(bucket.wire.is_exact for bucket in buckets(*model.blocks))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    exact = full_parameters(model)
    for _ in range(3):
        with torch.no_grad():
            model(inputs(0, dist.get_rank())[0])
    assert all(torch.equal(value, exact[name]) for name, value in full_parameters(model).items())


@on_ranks(4, local=1)
def test_replicas_stay_equal() -> None:
    """Replicas of two nodes each. Gradients cross in four bits between nodes, then between replicas."""
    mesh = laconic.init_mesh("cpu", islands=2, nodes=2, local=1)
    model = shard(build(), mesh=mesh, cache="host", wire="4bit")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    crossings_after(model, optimizer, steps=4)
    assert_nodes_agree(model)


def edit_by_hand(model: Any) -> None:
    for seed in range(12):
        train_step(model, seed=seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)


@on_ranks(2, local=1)
def test_only_optimizers_make_differences() -> None:
    """Edits inside any optimizer's step are differences; edits outside are named after a while."""
    for make in (
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        lambda parameters: laconic.optim.AdamW8bit(parameters, lr=1e-2),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True),
    ):
        granularity = laconic.optim.AdamW8bit.granularity
        model = shard(build(), cache="host", wire="4bit", granularity=granularity)
        crossings_after(model, make(model.parameters()), steps=3)
        assert states(model) == {CopyState.DECODED}
    with pytest.warns(UserWarning, match=r"exactly, not in few bits, because something else than an optimizer's step"):
        edit_by_hand(model)
