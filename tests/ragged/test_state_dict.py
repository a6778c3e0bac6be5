"""torch's own state dict functions over sharded models: full and sharded, to and from, against an unsharded model."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

import laconic
from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.optim import AdamW8bit, Muon, Shampoo, matrices_and_rest
from laconic.ragged.tensor import RaggedTensor
from tests.support.launch import on_ranks, run_ranks
from tests.support.sharded_net import Net, build, inputs, shard, squared_error, train_step


class Mixed(Net):
    """Inner units and a root; a frozen table, another dtype, a scalar, a vector shorter than the mesh, a buffer."""

    def __init__(self) -> None:
        super().__init__(2)
        self.table = nn.Parameter(torch.randn(5, 3, 2), requires_grad=False)
        self.low = nn.Parameter(torch.randn(7, 5).bfloat16())
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.one, self.empty = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(0, 3))
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        extra = self.low.float().sum() * self.scalar * self.one + self.table.sum()
        return super().forward(x) + 1e-3 * extra


def set_gradients(model: nn.Module, seed: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(100 * seed + index)
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = torch.zeros_like(parameter).copy_(gradient)


def trained(model: nn.Module, steps: int = 2, seed: int = 0) -> tuple[Any, Optimizer]:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    take_steps(model, optimizer, *range(seed, seed + steps))
    return model, optimizer


def take_steps(model: Any, optimizer: Optimizer, *seeds: int) -> None:
    for seed in seeds:
        set_gradients(model, seed)
        optimizer.step()
    optimizer.zero_grad()


def sharded(seed: int = 0, **policies: Any) -> Any:
    return shard(build(Mixed, seed=seed), **policies)


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts and lists by path."""
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {path: leaf for key, value in items for path, leaf in flat(value, f"{prefix}/{key}").items()}
    return {prefix: tree}


def assert_same(got: Any, want: Any) -> None:
    """Assert that two trees of plain values are equal to the bit."""
    got, want = flat(got), flat(want)
    assert not set(got) ^ set(want), set(got) ^ set(want)
    for path, value in want.items():
        if isinstance(value, Tensor):
            assert not isinstance(got[path], DTensor), path
            assert got[path].dtype == value.dtype, path
            assert torch.equal(got[path].cpu(), value), path
        else:
            assert got[path] == value, path


def whole(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, gathered."""
    gathered = {path: v.full_tensor() if isinstance(v, DTensor) else v for path, v in flat(tree).items()}
    return {path: v.clone() if isinstance(v, Tensor) else v for path, v in gathered.items()}


def both(model: nn.Module, optimizer: Optimizer, **options: bool) -> dict[str, Any]:
    chosen = dsd.StateDictOptions(**options)
    states = dsd.get_state_dict(model, optimizer, options=chosen)
    assert_keys = (
        dsd.get_model_state_dict(model, options=chosen),
        dsd.get_optimizer_state_dict(model, optimizer, options=chosen),
    )
    assert [list(flat(state)) for state in states] == [list(flat(state)) for state in assert_keys]
    return {"model": states[0], "optim": states[1]}


def assert_ragged(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        assert isinstance(parameter, RaggedTensor)
        for key, value in optimizer.state.get(parameter, {}).items():
            assert key == "step" or (isinstance(value, RaggedTensor) and value.spec == parameter.spec), key


# -- full state dicts --------------------------------------------------------------------------------------------------


@on_ranks(3, local=1)
def test_full_state_dicts_are_those_of_the_unsharded_model() -> None:
    want = both(*trained(build(Mixed)), full_state_dict=True)
    model, optimizer = trained(sharded())
    assert_same(both(model, optimizer, full_state_dict=True), want)
    offloaded = both(model, optimizer, full_state_dict=True, cpu_offload=True)
    assert_same(offloaded, want if dist.get_rank() == 0 else {"model": {}, "optim": {}})
    flattened = dsd.get_optimizer_state_dict(
        model, optimizer, options=dsd.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    )
    assert "state.low.exp_avg" in flattened
    trainable = dsd.StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    assert "table" not in dsd.get_model_state_dict(model, options=trainable)
    assert_ragged(model, optimizer)


ALIVE: dict[int, list[weakref.ref[Tensor]]] = {0: [], 1: []}
"""The whole tensors of a state dict, by rank."""


def test_ranks_that_keep_nothing_hold_one_whole_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most, original = [0, 0], RaggedTensor.full_tensor

    def counting(self: RaggedTensor, **kwargs: Any) -> Tensor:
        rank = dist.get_rank()
        most[rank] = max(most[rank], sum(reference() is not None for reference in ALIVE[rank]))
        result = original(self, **kwargs)
        ALIVE[rank].append(weakref.ref(result))
        return result

    monkeypatch.setattr(RaggedTensor, "full_tensor", counting)
    run_ranks(job_one_at_a_time, 2, local=1)
    assert most[1] <= 1


def job_one_at_a_time() -> None:
    model, optimizer = trained(sharded())
    ALIVE[dist.get_rank()].clear()
    both(model, optimizer, full_state_dict=True, cpu_offload=True)
    assert len(ALIVE[dist.get_rank()]) > 20


@pytest.mark.parametrize("broadcast", [True, False])
@on_ranks(2, local=1)
def test_full_state_dicts_load(broadcast: bool) -> None:
    want = both(*trained(build(Mixed)), full_state_dict=True)
    given = want if not broadcast or dist.get_rank() == 0 else {"model": {}, "optim": {}}
    options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    for steps in (0, 1):  # an optimizer without state and one with state
        model, optimizer = trained(sharded(seed=3, cache="host"), steps, seed=7)
        x = inputs(0, dist.get_rank())
        stale = train_step(model)  # fills the cache
        named = dict(model.named_parameters())
        dsd.set_model_state_dict(model, dict(given["model"]), options=options)
        dsd.set_optimizer_state_dict(model, optimizer, copied(given["optim"]), options=options)
        assert {name: id(p) for name, p in named.items()} == {name: id(p) for name, p in model.named_parameters()}
        assert_ragged(model, optimizer)
        assert_same(both(model, optimizer, full_state_dict=True), want)
        loaded = squared_error(model, x).detach()
        reference = build(Mixed)
        reference.load_state_dict(want["model"])
        torch.testing.assert_close(loaded, squared_error(reference, x).detach())
        assert not torch.equal(loaded, stale)


def copied(tree: Any) -> Any:
    """Copy the containers, which torch's functions change."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, list) else tree


# -- sharded state dicts -----------------------------------------------------------------------------------------------


@on_ranks(3, local=1)
def test_sharded_state_dicts_load() -> None:
    model, optimizer = trained(sharded())
    states = both(model, optimizer)
    want = whole(states)
    assert_same(want, flat(both(*trained(build(Mixed)))))
    offloaded = both(model, optimizer, cpu_offload=True)
    assert_same(whole(offloaded), want)
    other, other_optimizer = trained(sharded(seed=3), 1, seed=9)
    dsd.set_state_dict(
        other, other_optimizer, model_state_dict=states["model"], optim_state_dict=copied(states["optim"])
    )
    assert_same(whole(both(other, other_optimizer)), want)
    assert_ragged(other, other_optimizer)


def job_save(folder: Path) -> None:
    dcp.async_save(both(*trained(sharded())), checkpoint_id=folder).result()  # type: ignore[union-attr]


def job_load(folder: Path) -> None:
    want = whole(both(*trained(sharded())))
    model, optimizer = trained(sharded(seed=3), 1, seed=9)
    buckets = [bucket for unit in model._units() for bucket in unit.buckets]
    versions = [bucket.stored.version for bucket in buckets]
    states = both(model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    assert_same(whole(states), want)
    assert torch.equal(model.low.full_tensor(), want["/model/low"]), "loaded in place"
    assert all(bucket.stored.version != old for bucket, old in zip(buckets, versions, strict=True))


def test_a_checkpoint_loads_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    run_ranks(job_save, 4, tmp_path, local=2)
    for world_size in (3, 1):
        run_ranks(job_load, world_size, tmp_path, local=1)


# -- laconic's optimizers, whose state has other cuts than the parameters ----------------------------------------------


class Matrices(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(9, 8), nn.Linear(8, 7))


OPTIMIZERS: dict[str, Any] = {
    "adamw8bit": lambda model: AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=64),
    "muon": lambda model: Muon(matrices_and_rest(model), lr=1e-2),
    "shampoo": lambda model: Shampoo(matrices_and_rest(model), lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2, local=1)
def test_state_in_other_cuts_loads(name: str) -> None:
    def with_steps(seed: int) -> tuple[Any, Optimizer]:
        model = shard(build(Matrices, seed=seed), [], granularity=laconic.whole())
        optimizer = OPTIMIZERS[name](model)
        take_steps(model, optimizer, seed)
        return model, optimizer

    want = both(*with_steps(0), full_state_dict=True)
    for broadcast in (True, False):
        model, optimizer = with_steps(1)
        specs = {key: v.spec for key, v in flat(optimizer.state_dict()["state"]).items() if isinstance(v, RaggedTensor)}
        options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        dsd.set_model_state_dict(model, dict(want["model"]), options=options)
        dsd.set_optimizer_state_dict(model, optimizer, copied(want["optim"]), options=options)
        assert_same(both(model, optimizer, full_state_dict=True), want)
        after = flat(optimizer.state_dict()["state"])
        assert {key: after[key].spec for key in specs} == specs
        take_steps(model, optimizer, 2)


# -- state that comes whole is cut, and trains on as without sharding --------------------------------------------------


def tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of everything, gathered. Bits of bfloat16 may differ, where torch's vectorised loops end."""
    states = flat(both(model, optimizer, full_state_dict=True))
    return {path: value.clone() for path, value in states.items() if isinstance(value, Tensor)}


def adamw(model: nn.Module) -> Optimizer:
    return AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, foreach=True, amsgrad=True)


@on_ranks(3, local=1)
def test_whole_state_trains_on_as_without_sharding(tmp_path: Path) -> None:
    """Loaded by the optimizer, or set by code of the user's own after some steps; saved at once, or later."""
    oracle = build(Mixed)
    oracle_optimizer = adamw(oracle)
    take_steps(oracle, oracle_optimizer, 0, 1)
    middle, weights = tensors(oracle, oracle_optimizer), copy.deepcopy(oracle.state_dict())
    plain = copy.deepcopy(oracle_optimizer.state_dict())
    take_steps(oracle, oracle_optimizer, 2, 3)
    after = tensors(oracle, oracle_optimizer)

    def fresh(*seeds: int) -> tuple[Any, Optimizer]:
        model = sharded(seed=5)
        optimizer = adamw(model)
        take_steps(model, optimizer, *seeds)
        model.load_state_dict(weights)
        return model, optimizer

    for is_set in (False, True):
        model, optimizer = fresh(7) if is_set else fresh()
        if is_set:  # and cut by the next step
            for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
                optimizer.state[parameter] = copy.deepcopy(plain["state"][index])
        else:
            optimizer.load_state_dict(copy.deepcopy(plain))  # torch shares `step` with what it loads
            save_checkpoint(tmp_path / "middle", 2, model=model, optimizer=optimizer, extra={})
            torch.testing.assert_close(tensors(model, optimizer), middle)
        take_steps(model, optimizer, 2, 3)
        assert_ragged(model, optimizer)
        torch.testing.assert_close(tensors(model, optimizer), after)
    other, other_optimizer = fresh(8)
    load_checkpoint(tmp_path / "middle", model=other, optimizer=other_optimizer)
    torch.testing.assert_close(tensors(other, other_optimizer), middle)
