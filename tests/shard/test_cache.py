"""The cache of weights on a node: its policy, its memory, and when what it holds is stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic.config import Config, from_dict
from laconic.shard import cache as cache_module
from laconic.shard.cache import NodeShard, Slab, choose_device_shards, make_slab
from laconic.shard.policies import Cache
from laconic.shard.unit import unit_of
from tests.shard.test_small_buckets import Adapted
from tests.support.launch import on_ranks
from tests.support.scenario import Scenario, assert_same_bits
from tests.support.sharded_net import (
    Net,
    buckets,
    build,
    full_parameters,
    gather_bytes,
    inputs,
    moved,
    shard,
    squared_error,
    train_step,
)

CPU = torch.device("cpu")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

# -- the policy --------------------------------------------------------------------------------------------------------


def test_only_the_host_cache_can_do_without_page_locking() -> None:
    message = r"shard\.pin_memory = False .* needs shard\.cache = 'host' or 'auto', got .* 'none'"
    with pytest.raises(ValueError, match=message):
        from_dict(Config, {"shard": {"cache": "none", "pin_memory": False}})
    assert not from_dict(Config, {"shard": {"pin_memory": False}}).shard.policy.cache.pin_memory


@pytest.mark.parametrize(("budget", "chosen"), [(3, set()), (4, {3}), (9, {3}), (10, {3, 2}), (12, {3, 2, 1})])
def test_a_budget_keeps_the_last_node_shards(budget: int, chosen: set[int]) -> None:
    assert choose_device_shards([5, 2, 6, 4], budget) == chosen


# -- host memory -------------------------------------------------------------------------------------------------------


def test_too_little_host_memory_warns_once_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "host_memory", lambda: (1_000, 1_000))
    with pytest.warns(UserWarning, match=r"needs 0.01 GB, but the machine has 0.00 GB.*Use cache='none'") as caught:
        assert make_slab(10_000_003, CPU).nbytes == 10_000_003
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"needs 0.03 GB"):
        make_slab(10_000_000, CPU, num_local=3)


@pytest.mark.parametrize("pins", [True, False])
def test_the_user_says_whether_the_host_cache_is_page_locked(pins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of slabs that are page-locked if the ranks have GPUs, which are pretended while a slab is made."""
    calls: list[tuple[int, ...]] = []
    cudart = SimpleNamespace(cudaHostRegister=lambda *arguments: calls.append(arguments) or 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    fill = Slab.fill

    def fill_on_gpu(slab: Slab, shards: Sequence[NodeShard]) -> None:
        with pytest.MonkeyPatch.context() as pretended:
            pretended.setattr(slab, "_cluster", SimpleNamespace(device=torch.device("cuda"), num_local=1))
            fill(slab, shards)

    monkeypatch.setattr(Slab, "fill", fill_on_gpu)
    Scenario(cache=Cache(where="host", pin_memory=pins), steps=1).run()
    assert len(calls) == 2 * pins, "one for each rank"


@pytest.mark.parametrize(("local", "precision", "itemsize"), [(1, None, 4), (3, BF16, 2)])
def test_a_nodes_host_memory_is_one_copy_of_the_weights(
    local: int, precision: MixedPrecisionPolicy | None, itemsize: int
) -> None:
    def bytes_of(model: Any) -> tuple[int, int]:
        whole = sum(bucket.form.geometry.node_numel * bucket.form.compute_dtype.itemsize for bucket in buckets(model))
        return model.memory().host_bytes, whole

    scenario = Scenario(
        local=local, cache="host", precision=precision, make=lambda: Net(2, d=128, h=384), steps=1, look=bytes_of
    )
    runs = scenario.run()
    one_copy = sum(p.numel() for p in scenario.make().parameters()) * itemsize
    for node in (runs[:local], runs[local:]):
        assert all(run.looks[0][0] == 0 for run in node), "allocated when first used"
        assert all(run.looks[1][0] == run.looks[1][1] for run in node)
        assert one_copy <= sum(run.looks[1][0] for run in node) <= 1.01 * one_copy


@on_ranks(2, local=1)
def test_a_budget_keeps_the_last_layers_on_the_device() -> None:
    unit_bytes = 4 * 2 * 516  # two nodes: a node shard is the whole bucket of a block, 1032 elements
    model = shard(build(lambda: Net(4)), cache=Cache(where="host", device_budget_bytes=2 * unit_bytes + 100))
    train_step(model)
    of_blocks = [(bucket.node_shard.where, bucket.node_shard.nbytes) for bucket in buckets(*model.blocks)]
    assert of_blocks == [("host", unit_bytes)] * 2 + [("device", unit_bytes)] * 2
    assert all(bucket.node_shard.where == "host" for bucket in unit_of(model).buckets)  # type: ignore[union-attr]
    on_host = sum(b.node_shard.nbytes for b in buckets(model) if b.node_shard.where == "host")
    assert model.memory().host_bytes == on_host
    with torch.no_grad():
        model(inputs(0, 0)[0])
    assert model.memory().device_bytes == 4 * sum(b.layout.shard_numel for b in buckets(model)) + 2 * unit_bytes


def test_on_one_node_nothing_is_cached() -> None:
    run = Scenario(nodes=1, local=2, cache="host", steps=1).run()[0]
    assert run.sent[0].weights == run.sent[0].gradients == run.memory[0].host_bytes == 0
    assert not any(bucket.node_shard.is_kept for bucket in buckets(run.model))


# -- what is stale -----------------------------------------------------------------------------------------------------


def forward_bytes(model: Any) -> int:
    """Count this rank's bytes of weights across nodes in one forward without gradients. The cache must not change."""
    with moved(model) as m, torch.no_grad():
        model(inputs(0, dist.get_rank())[0])
    return m.weights


def assert_output(model: Any, name: str) -> None:
    """Assert that the output is that of an unsharded model with these parameters."""
    plain, x = build(), inputs(0, dist.get_rank())[0]
    plain.load_state_dict(full_parameters(model))
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), msg=name)


@pytest.mark.parametrize(
    ("world", "cache"),
    [(2, "host"), (2, "rank"), (2, Cache(where="host", device_budget_bytes=4000))],
    ids=["host", "rank", "budget"],
)
@on_ranks("world", local=1)
def test_node_shards_become_stale_exactly_when_parameters_change(cache: Any) -> None:
    model = shard(build(), cache=cache)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    everything = gather_bytes("node", buckets(model))
    ema = [p.detach().clone() for p in model.parameters()]
    weight = model.blocks[1].up.weight
    block = gather_bytes("node", buckets(model.blocks[1]))
    plain_state = {name: torch.randn(p.shape) for name, p in build().named_parameters()}

    def swap() -> None:
        for p, average in zip(model.parameters(), ema, strict=True):
            saved = p.detach().clone()
            p.copy_(average)
            average.copy_(saved)

    def scaler_skips() -> None:
        scaler = torch.amp.GradScaler("cpu")
        squared_error(model, inputs(0, dist.get_rank())).backward()
        scaler.scale(torch.zeros(()))
        weight.grad.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        model.zero_grad()

    keep_valid: dict[str, Any] = {
        "evaluation": lambda: model(inputs(5, dist.get_rank())[0]),
        "a backward without a step": lambda: train_step(model),
        "a step skipped for overflow": scaler_skips,
        "reading": lambda: (full_parameters(model), [p.detach().clone().add_(1) for p in model.parameters()]),
        "a state dict": lambda: model.state_dict(),
        "train and eval mode": lambda: model.eval().train(),
        "an average of the weights": lambda: torch._foreach_lerp_(ema, [p.detach() for p in model.parameters()], 0.5),
        "no change of device or dtype": lambda: model.to("cpu", torch.float32),
        "clipping": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    }
    make_stale: dict[str, tuple[Any, int]] = {
        "an optimizer step": (lambda: train_step(model, optimizer), everything),
        "a load": (lambda: model.load_state_dict(plain_state), everything),
        "a load of another sharded state": (lambda: model.load_state_dict(model.state_dict()), everything),
        "an edit": (lambda: weight.mul_(1.5), block),
        "an edit of .data": (lambda: weight.data.mul_(1.5), block),
        "an edit of the local part": (lambda: weight.to_local().add_(1), block),
        "an edit of all": (lambda: torch._foreach_add_([weight], 1.0), block),
        # only one rank holds a part of it
        "an edit of a row": (lambda: weight.detach()[2].zero_(), block),
        "initialisation": (lambda: nn.init.normal_(weight), block),
        "a swap of averages": (swap, everything),
        "a merge of low rank": (lambda: weight.add_(torch.outer(torch.ones(29), torch.ones(17))), block),
    }
    forward_bytes(model)
    for name, event in keep_valid.items():
        with torch.enable_grad() if name.startswith(("a backward", "a step")) else torch.no_grad():
            event()
        if cache != "host" and name.startswith(("a backward", "a step")):
            forward_bytes(model)  # backward frees node shards on the device, because a step usually follows
        assert forward_bytes(model) == 0, name
    for name, (event, stale_bytes) in make_stale.items():
        with torch.enable_grad() if name == "an optimizer step" else torch.no_grad():
            event()
        assert forward_bytes(model) == stale_bytes, name
        assert forward_bytes(model) == 0, name
        assert_output(model, name)


# -- frozen weights ----------------------------------------------------------------------------------------------------


def adapted() -> nn.Sequential:
    return nn.Sequential(*(Adapted(64, 6) for _ in range(3)))


def rows(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * number + rank))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_frozen_weights_cross_once_in_the_run_and_leave_the_device_or_cross_in_every_forward() -> None:
    """As the policy says. The parameters have the same bits after training."""
    plain = Scenario(make=adapted, batch=rows, loss=square, micro_batches=2)
    expected, base = plain.run()[0], build(adapted)
    for policy in (Cache(), Cache(where="host"), Cache(where="device"), Cache(where="host", until="backward")):
        caches_frozen = policy.where != "none" and policy.until == "change"
        run = replace(plain, cache=policy).run()[0]
        assert_same_bits(run, expected)
        frozen, trained = ([b for b in buckets(run.model) if b.stored.is_frozen is frozen] for frozen in (True, False))
        assert (len(frozen), len(trained)) == (3, 3)
        at_first, per_step = gather_bytes("node", frozen), gather_bytes("node", trained)
        for step, sent in enumerate(run.sent):
            if caches_frozen:
                assert sent.weights == per_step + (at_first if step == 0 else 0)
            else:
                assert sent.weights == policy.node_gathers_per_step(num_micro_batches=2) * (per_step + at_first)
            assert sent.gradients == sum(bucket.layout.shard_numel * 4 for bucket in trained)
        assert all(bucket.stored.is_dropped for bucket in frozen) == caches_frozen
        resting = sum(b.node_shard.nbytes for b in frozen if b.node_shard.where == "device") if caches_frozen else 0
        kept = trained if caches_frozen else trained + frozen
        assert run.memory[-1].device_bytes == 4 * sum(bucket.layout.shard_numel for bucket in kept) + resting
        for name, parameter in base.named_parameters():
            assert not name.endswith("base.weight") or torch.equal(run.parameters[name], parameter), name


@pytest.mark.parametrize("where", ["host", "device"])
@on_ranks(2, local=1)
def test_until_backward_a_forward_without_gradients_is_the_end_too(where: Any) -> None:
    model = shard(build(), cache=Cache(where=where, until="backward"))
    assert [forward_bytes(model), forward_bytes(model)] == [gather_bytes("node", buckets(model))] * 2


@pytest.mark.parametrize("cache", ["host", "rank"])
@on_ranks(2, local=1)
def test_unfreezing_loading_and_merging_into_frozen_weights(cache: Any) -> None:
    """Frozen, used, edited, loaded, unfrozen, trained: the values always equal those of a plain model."""
    plain, model = build(adapted), build(adapted)
    shard(model, list(model), cache=cache)  # type: ignore[call-overload]
    x = rows(0, 0)  # the same on all ranks

    def step(net: Any) -> torch.Tensor:
        output = net(x)
        output.square().mean().backward()
        torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5).step()
        net.zero_grad()
        return output.detach()

    def both(event: Any) -> None:
        for net in (plain, model):
            with torch.no_grad():
                event(net)

    def same(num_steps: int = 2) -> None:
        for _ in range(num_steps):
            torch.testing.assert_close(step(model), step(plain))
            for name, value in full_parameters(model).items():
                torch.testing.assert_close(value, plain.get_parameter(name).detach(), msg=name)

    same()
    both(lambda net: net[1].base.weight.add_(rows(2, 0).T @ rows(3, 0), alpha=0.01))  # a merge into a dropped shard
    same(1)
    state = {name: torch.randn(p.shape) * 0.1 for name, p in plain.named_parameters()}
    both(lambda net: net.load_state_dict(state))
    same(1)
    frozen = [bucket for bucket in buckets(model) if bucket.stored.is_frozen]
    assert all(bucket.stored.is_dropped for bucket in frozen)
    places = [bucket.shard.data_ptr() for bucket in frozen]
    both(lambda net: (net[0].base.weight.requires_grad_(True), net[2].base.requires_grad_(True)))
    both(lambda net: net[2].base.weight.mul_(0.9))  # edited after unfreezing, before the next use
    same()
    assert [bucket.stored.is_dropped for bucket in frozen] == [False, True, False]
    stay = [bucket.shard.data_ptr() == place for bucket, place in zip(frozen, places, strict=True)]
    assert stay == [False, True, False], "what trains has memory of its own"
    both(lambda net: (net.requires_grad_(False), net[1].up.requires_grad_(True)))
    same()


@on_ranks(2, local=1)
def test_frozen_weights_keep_their_bits_under_mixed_precision() -> None:
    """A node shard in the compute dtype has not the bits of fp32 weights, so the shard stays."""
    model = shard(build().requires_grad_(False), cache="host", mp_policy=BF16)
    assert forward_bytes(model) == gather_bytes("node", buckets(model)) > 0
    assert forward_bytes(model) == 0
    assert not any(bucket.stored.is_dropped for bucket in buckets(model))
    for name, parameter in build().named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), parameter)
