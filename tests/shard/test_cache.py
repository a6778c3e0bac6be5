from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import HfArgumentParser

import laconic
from laconic.config import Config, from_dict
from laconic.integrations import LaconicArguments
from laconic.shard import cache as cache_module
from laconic.shard.cache import NodeShard, Slab, choose_device_shards, free_slab, make_slab
from laconic.shard.lanes import Lanes
from laconic.shard.ledger import Ledger
from laconic.shard.policies import Cache
from laconic.shard.unit import unit_of
from tests.support import sharded_net
from tests.support.launch import on_ranks, run_ranks

CPU = torch.device("cpu")

# -- the policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "disk"}, r"Cache\(where='disk'\) is not known; use one of 'none', 'host', 'device', 'rank'"),
        ({"where": "host", "device_budget_bytes": -1}, r"Cache\(device_budget_bytes=-1\) must not be negative"),
        (
            {"where": "device", "device_budget_bytes": 5},
            r"budget_bytes=5\) needs where='host'.*got Cache\(where='device'\)",
        ),
        ({"device_budget_bytes": 5}, r"Cache\(device_budget_bytes=5\) needs where='host'.*got Cache\(where='none'\)"),
        ({"until": "step"}, r"Cache\(until='step'\) is not known; use one of 'change', 'backward'"),
        ({"until": "backward"}, r"Cache\(until=.backward.\) says how long .* where=.none. keeps nothing"),
    ],
)
def test_invalid_policies_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cache(**options)


def test_a_policy_is_frozen_and_made_from_a_word() -> None:
    assert Cache.of("host") == Cache(where="host")
    policy = Cache(where="host", device_budget_bytes=7)
    assert Cache.of(policy) is policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.where = "none"  # type: ignore[misc]
    with pytest.raises(ValueError, match="not known"):
        Cache.of("gpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "crossings"),
    [({}, 8), ({"where": "host"}, 1), ({"where": "device"}, 1), ({"where": "device", "until": "backward"}, 4)],
)
def test_a_policy_knows_its_cost(options: dict[str, Any], crossings: int) -> None:
    assert Cache(**options).node_gathers_per_step(num_micro_batches=4) == crossings


@pytest.mark.parametrize(
    ("budget", "chosen"),
    [(0, set()), (3, set()), (4, {3}), (9, {3}), (10, {3, 2}), (12, {3, 2, 1}), (99, {0, 1, 2, 3})],
)
def test_a_budget_keeps_the_last_node_shards(budget: int, chosen: set[int]) -> None:
    assert choose_device_shards([5, 2, 6, 4], budget) == chosen


# -- host memory -------------------------------------------------------------------------------------------------------


def test_a_slab_has_exactly_the_requested_bytes() -> None:
    slab = make_slab(1_000_003, CPU)
    assert (slab.nbytes, slab.dtype) == (1_000_003, torch.uint8)
    assert make_slab(0, CPU).numel() == 0


def test_too_little_host_memory_warns_once_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "host_memory", lambda: (1_000, 1_000))
    with pytest.warns(UserWarning, match=r"needs 0.01 GB, but the machine has 0.00 GB.*Use cache='none'") as caught:
        make_slab(10_000_000, CPU)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=r"needs 0.03 GB"):
        make_slab(10_000_000, CPU, num_local=3)


def page_lock_returning(error: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    calls: list[tuple[int, ...]] = []

    def register(*args: int) -> int:
        calls.append(args)
        return error

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    return calls


def test_a_slab_for_a_gpu_is_page_locked(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    calls = page_lock_returning(0, monkeypatch)
    slab = make_slab(4096, torch.device("cuda"))
    assert calls == [(slab.data_ptr(), 4096, 0)]
    assert not recwarn.list


def test_a_tight_memlock_limit_falls_back_to_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    page_lock_returning(2, monkeypatch)
    monkeypatch.setattr(cache_module.resource, "getrlimit", lambda _: (8_000_000, 8_000_000))
    with pytest.warns(UserWarning, match=r"CUDA error 2; `ulimit -l` is 8.0 MB.*slower.*ulimit -l unlimited") as caught:
        slab = make_slab(4096, torch.device("cuda"))
    assert len(caught) == 1
    assert slab.fill_(3).sum() == 3 * 4096


@pytest.mark.machine
@pytest.mark.parametrize("pins", [True, False])
@on_ranks(2, local=1)
def test_the_user_says_whether_the_host_cache_is_page_locked(pins: bool) -> None:
    """The number of slabs that are page-locked if the ranks have GPUs, which are pretended while a slab is made."""
    model = sharded_net.shard(sharded_net.build(), cache=Cache(where="host", pin_memory=pins))
    with pytest.MonkeyPatch.context() as patched:
        calls, fill = page_lock_returning(0, patched), Slab.fill

        def fill_on_gpu(slab: Slab, shards: Sequence[NodeShard]) -> None:
            with pytest.MonkeyPatch.context() as pretended:
                pretended.setattr(slab, "_cluster", SimpleNamespace(device=torch.device("cuda"), num_local=1))
                fill(slab, shards)

        patched.setattr(Slab, "fill", fill_on_gpu)
        sharded_net.train_step(model)
    assert len(calls) == int(pins)


def test_only_the_host_cache_can_do_without_page_locking() -> None:
    """In Python, in a file and as an option."""
    with pytest.raises(ValueError, match=r"Cache\(pin_memory=False\) is for the host cache: it needs where='host'"):
        Cache(where="device", pin_memory=False)
    with pytest.raises(
        ValueError, match=r"shard\.pin_memory = False .* needs shard\.cache = 'host' or 'auto', got .* 'none'"
    ):
        from_dict(Config, {"shard": {"cache": "none", "pin_memory": False}})
    assert not from_dict(Config, {"shard": {"pin_memory": False}}).shard.policy.cache.pin_memory
    (options,) = HfArgumentParser(LaconicArguments).parse_args_into_dataclasses(["--pin_memory", "false"])
    assert not options.policy.cache.pin_memory


@pytest.mark.parametrize("refuses", [False, True])
def test_another_accelerator_gets_pinned_memory_from_torch(
    refuses: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def pretend(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        if refuses and pin_memory:
            raise RuntimeError("no pinned memory here")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", pretend)
    slab = make_slab(4096, torch.device("xpu"))
    assert asked == [True]
    assert slab.fill_(3).sum() == 3 * 4096
    messages = [str(warning.message) for warning in recwarn.list]
    assert len(messages) == refuses
    assert all("could not page-lock" in text and "(no pinned memory here;" in text for text in messages)
    free_slab(slab, torch.device("xpu"))  # calls nothing of CUDA's


# -- one node shard ----------------------------------------------------------------------------------------------------


LANES = Lanes(CPU)


@dataclass(kw_only=True)
class Form:
    """The part of a bucket's form that a node shard asks."""

    dtype: torch.dtype = torch.float32

    def find_hooks(self) -> None:
        """Find none."""


@dataclass(kw_only=True)
class EightElements:
    """A bucket whose node shard has 8 elements."""

    ledger: Ledger
    cluster: Any = field(default_factory=lambda: sharded_net.Place(2, 1))
    form: Form = field(default_factory=Form)
    node_shard_numel: int = 8


def node_shard_of(ledger: Ledger) -> NodeShard:
    return NodeShard(EightElements(ledger=ledger))


def test_a_node_shard_that_stays_nowhere_is_never_used_again() -> None:
    ledger = Ledger()
    shard, full = node_shard_of(ledger), torch.ones(8)
    assert shard.gathered_in(lambda: full) is full
    assert shard.store(full, 1, None, LANES) is None
    assert not shard.holds(1)
    shard.free()
    assert shard.nbytes == ledger.device_bytes == 0


def test_a_node_shard_on_the_device_is_counted_until_it_is_freed() -> None:
    ledger = Ledger()
    cached = node_shard_of(ledger)
    cached.stay_on_device()
    assert not cached.holds(0)
    node_shard = cached.buffer()
    assert (ledger.device_bytes, cached.nbytes) == (32, 32)
    node_shard.fill_(5)
    cached.store(node_shard, 3, None, LANES)
    assert cached.holds(3)
    assert not cached.holds(4)
    cached.load_into(cached.buffer(), LANES)
    assert cached.buffer().data_ptr() == node_shard.data_ptr(), "no copy from a direct cache"
    cached.free()
    assert ledger.device_bytes == 0
    assert not cached.holds(3)


def test_a_node_shard_in_the_slab_takes_no_device_memory_and_stays() -> None:
    ledger = Ledger()
    cached = node_shard_of(ledger)
    slab = torch.zeros(32, dtype=torch.uint8)
    cached.stay_in_slab(slab)
    cached.buffer().fill_(1)
    cached.store(cached.buffer(), 1, None, LANES)
    cached.free()
    assert cached.holds(1)
    assert ledger.device_bytes == 0
    assert slab.view(torch.float32).eq(1).all()


def test_a_node_shard_that_is_being_gathered_is_not_valid() -> None:
    cached = node_shard_of(Ledger())
    cached.stay_on_device()
    cached.store(cached.buffer(), 1, None, LANES)
    cached.invalidate()
    assert not cached.holds(1)


# -- in a model --------------------------------------------------------------------------------------------------------

CACHES: list[Any] = ["host", "device", "rank", Cache(where="host", device_budget_bytes=4000)]
UNTIL_BACKWARD = [Cache(where="host", until="backward"), Cache(where="device", until="backward")]


def forward_bytes(model: Any) -> int:
    """Count this rank's bytes of weights across nodes in one forward without gradients. The cache must not change."""
    with sharded_net.moved(model) as m, torch.no_grad():
        model(sharded_net.inputs(0, dist.get_rank())[0])
    return m.weights


def job_staleness(cache: Any) -> None:
    model = sharded_net.shard(sharded_net.build(), cache=cache)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    everything = sharded_net.gather_bytes("node", sharded_net.buckets(model))
    ema = [p.detach().clone() for p in model.parameters()]
    weight = model.blocks[1].up.weight
    block = sharded_net.gather_bytes("node", sharded_net.buckets(model.blocks[1]))
    plain_state = {name: torch.randn(p.shape) for name, p in sharded_net.build().named_parameters()}

    def swap() -> None:
        for p, average in zip(model.parameters(), ema, strict=True):
            saved = p.detach().clone()
            p.copy_(average)
            average.copy_(saved)

    def scaler_skips() -> None:
        scaler = torch.amp.GradScaler("cpu")
        sharded_net.squared_error(model, sharded_net.inputs(0, dist.get_rank())).backward()
        scaler.scale(torch.zeros(()))
        weight.grad.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        model.zero_grad()

    keep_valid: dict[str, Any] = {
        "evaluation": lambda: model(sharded_net.inputs(5, dist.get_rank())[0]),
        "a backward without a step": lambda: sharded_net.train_step(model),
        "a step skipped for overflow": scaler_skips,
        "reading": lambda: (
            sharded_net.full_parameters(model),
            [p.detach().clone().add_(1) for p in model.parameters()],
        ),
        "a state dict": lambda: model.state_dict(),
        "train and eval mode": lambda: model.eval().train(),
        "an average of the weights": lambda: torch._foreach_lerp_(ema, [p.detach() for p in model.parameters()], 0.5),
        "no change of device or dtype": lambda: model.to("cpu", torch.float32),
        "clipping": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    }
    make_stale: dict[str, tuple[Any, int]] = {
        "an optimizer step": (lambda: sharded_net.train_step(model, optimizer), everything),
        "a load": (lambda: model.load_state_dict(plain_state), everything),
        "a load of another sharded state": (lambda: model.load_state_dict(model.state_dict()), everything),
        "an edit": (lambda: weight.mul_(1.5), block),
        "an edit of .data": (lambda: weight.data.mul_(1.5), block),
        "an edit of the local part": (lambda: weight.to_local().add_(1), block),
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
        want = model_output(model)
        assert forward_bytes(model) == stale_bytes, name
        assert forward_bytes(model) == 0, name
        with torch.no_grad():
            torch.testing.assert_close(model(sharded_net.inputs(0, dist.get_rank())[0]), want, msg=name)


def model_output(model: Any) -> torch.Tensor:
    """Compute the output of a plain model with these parameters."""
    plain = sharded_net.build()
    plain.load_state_dict(sharded_net.full_parameters(model))
    with torch.no_grad():
        return plain(sharded_net.inputs(0, dist.get_rank())[0])


@pytest.mark.parametrize("cache", CACHES, ids=["host", "device", "rank", "budget"])
def test_node_shards_become_stale_exactly_when_parameters_change(cache: Any) -> None:
    run_ranks(job_staleness, 3 if cache == "host" else 2, cache, local=1)


def job_host_bytes(param_dtype: torch.dtype | None) -> int:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = sharded_net.build(lambda: sharded_net.Net(4, d=128, h=384))
    sharded_net.shard(model, cache="host", mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    assert model.memory().host_bytes == 0, "allocated when first used"
    sharded_net.train_step(model)
    assert model.memory().host_bytes == sum(
        bucket.node_shard_numel * bucket.compute_dtype.itemsize for bucket in sharded_net.buckets(model)
    )
    return model.memory().host_bytes


@pytest.mark.parametrize(("world_size", "local"), [(2, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_a_nodes_host_memory_is_one_copy_of_the_weights(
    world_size: int, local: int, param_dtype: torch.dtype | None
) -> None:
    one_copy = (
        sum(p.numel() for p in sharded_net.Net(4, d=128, h=384).parameters()) * (param_dtype or torch.float32).itemsize
    )
    by_rank = run_ranks(job_host_bytes, world_size, param_dtype, local=local)
    for node in range(world_size // local):
        assert one_copy <= sum(by_rank[node * local : (node + 1) * local]) <= 1.01 * one_copy


@on_ranks(2, local=1)
def test_a_budget_keeps_the_last_layers_on_the_device() -> None:
    model = sharded_net.build(lambda: sharded_net.Net(4))
    units = [*model.blocks]
    unit_bytes = 4 * 2 * 516  # two nodes: a node shard is the whole bucket of a block, 1032 elements
    sharded_net.shard(model, cache=Cache(where="host", device_budget_bytes=2 * unit_bytes + 100))
    sharded_net.train_step(model)
    on_device = [bucket.node_shard.where == "device" for unit in units for bucket in sharded_net.buckets(unit)]
    sizes = [bucket.node_shard.nbytes for unit in units for bucket in sharded_net.buckets(unit)]
    assert sizes == [unit_bytes] * 4
    assert on_device == [False, False, True, True]
    assert all(bucket.node_shard.where == "host" for bucket in unit_of(model).buckets)  # type: ignore[union-attr]
    assert model.memory().host_bytes == sum(
        b.node_shard.nbytes for b in sharded_net.buckets(model) if b.node_shard.where == "host"
    )
    with torch.no_grad():
        model(sharded_net.inputs(0, 0)[0])
    held = model.memory().device_bytes
    assert held == 4 * sum(bucket.layout.shard_numel for bucket in sharded_net.buckets(model)) + 2 * unit_bytes


@on_ranks(2, local=2)
def test_on_one_node_nothing_is_cached() -> None:
    model = sharded_net.shard(sharded_net.build(), cache="host")
    with sharded_net.moved(model) as m:
        sharded_net.train_step(model)
    assert m.weights == m.gradients == 0
    assert model.memory().host_bytes == 0
    assert not any(bucket.node_shard.is_kept for bucket in sharded_net.buckets(model))


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank correction that trains."""

    def __init__(self, d: int = 64, rank: int = 6) -> None:
        super().__init__()
        self.base = nn.Linear(d, d).requires_grad_(False)
        self.down = nn.Linear(d, rank, bias=False)
        self.up = nn.Linear(rank, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted() -> nn.Module:
    return nn.Sequential(*(Adapted() for _ in range(3)))


def job_frozen(cache: Any) -> dict[str, torch.Tensor]:
    policy = Cache.of(cache)
    caches_frozen = policy.where != "none" and policy.until == "change"
    model = sharded_net.build(adapted)
    mesh = laconic.init_mesh("cpu")
    sharded_net.shard(model, list(model), mesh=mesh, cache=cache)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    frozen = [bucket for bucket in sharded_net.buckets(model) if bucket.is_frozen]
    trained = [bucket for bucket in sharded_net.buckets(model) if not bucket.is_frozen]
    assert (len(frozen), len(trained)) == (3, 3)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    shard_bytes = 4 * sum(bucket.layout.shard_numel for bucket in sharded_net.buckets(model))
    assert model.memory().device_bytes == shard_bytes
    expected = sharded_net.build(adapted)
    for step in range(4):
        with sharded_net.moved(model) as m:
            for sync in (False, True):
                model.set_requires_gradient_sync(sync)
                model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        per_step = sharded_net.gather_bytes("node", trained)
        if not caches_frozen:
            crossings = policy.node_gathers_per_step(num_micro_batches=2)
            assert m.weights == crossings * (per_step + sharded_net.gather_bytes("node", frozen))
            assert model.memory().device_bytes == shard_bytes
        else:
            assert m.weights == per_step + (sharded_net.gather_bytes("node", frozen) if step == 0 else 0)
            assert all(bucket.stored.is_dropped for bucket in frozen)
        assert m.gradients == sum(bucket.layout.shard_numel * 4 for bucket in trained) * (
            frozen[0].cluster.num_nodes - 1
        )
    frozen_bytes = 4 * sum(bucket.layout.shard_numel for bucket in frozen)
    resting = sum(b.node_shard.nbytes for b in frozen if b.node_shard.where == "device")
    if caches_frozen:
        assert model.memory().device_bytes == shard_bytes - frozen_bytes + resting
    for name, parameter in expected.named_parameters():
        if "base" in name:
            assert torch.equal(model.get_parameter(name).full_tensor(), parameter), name  # type: ignore[operator]
    with sharded_net.moved(model) as m, torch.no_grad():
        for _ in range(2):
            model(x)
    everything = sharded_net.gather_bytes("node", sharded_net.buckets(model))
    assert m.weights == (per_step if caches_frozen else 2 * everything), "a forward without gradients is the end, too"
    return sharded_net.full_parameters(model)


@pytest.mark.heavy
def test_frozen_weights_cross_once_in_the_run_and_leave_the_device_or_cross_in_every_forward() -> None:
    """As the policy says. The parameters have the same bits after training."""
    want, *others = (run_ranks(job_frozen, 4, cache, local=2)[0] for cache in ("none", *CACHES[:2], *UNTIL_BACKWARD))
    for got in others:
        assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("cache", CACHES[:2])
@on_ranks(4, local=2)
def test_unfreezing_loading_and_merging_into_frozen_weights(cache: Any) -> None:
    """Frozen, used, edited, loaded, unfrozen, trained: the values always equal those of a plain model."""
    plain, model = sharded_net.build(adapted), sharded_net.build(adapted)
    sharded_net.shard(model, list(model), cache=cache)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))  # the same on all ranks

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

    def same() -> None:
        torch.testing.assert_close(step(model), step(plain))
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name).full_tensor(), parameter.detach(), msg=name)  # type: ignore[operator]

    same()
    same()
    merge = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    both(lambda net: net[1].base.weight.add_(merge, alpha=0.01))  # a merge into a dropped shard
    same()
    state = {name: torch.randn(p.shape) * 0.1 for name, p in plain.named_parameters()}
    both(lambda net: net.load_state_dict(state))
    same()
    frozen = [bucket for bucket in sharded_net.buckets(model) if bucket.is_frozen]
    assert all(bucket.stored.is_dropped for bucket in frozen)
    for net in (plain, model):
        net[0].base.weight.requires_grad_(True)
        net[2].base.requires_grad_(True)
    both(lambda net: net[2].base.weight.mul_(0.9))  # edited after unfreezing, before the next use
    same()
    same()
    assert [bucket.stored.is_dropped for bucket in frozen] == [False, True, False]
    for net in (plain, model):
        net.requires_grad_(False)
        net[1].up.requires_grad_(True)
    same()
    same()


@on_ranks(2, local=1)
def test_frozen_weights_keep_their_bits_under_mixed_precision() -> None:
    """A node shard in the compute dtype has not the bits of fp32 weights, so the shard stays."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = sharded_net.build(lambda: nn.Sequential(sharded_net.Block(), sharded_net.Block())).requires_grad_(False)
    sharded_net.shard(model, list(model), cache="host", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    x = torch.randn(2, 17)
    with torch.no_grad(), sharded_net.moved(model) as first:
        model(x)
    with torch.no_grad(), sharded_net.moved(model) as second:
        model(x)
    assert first.weights == sharded_net.gather_bytes("node", sharded_net.buckets(model)) > 0
    assert second.weights == 0
    assert not any(bucket.stored.is_dropped for bucket in sharded_net.buckets(model))
    for name, parameter in sharded_net.build(
        lambda: nn.Sequential(sharded_net.Block(), sharded_net.Block())
    ).named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), parameter)  # type: ignore[operator]
