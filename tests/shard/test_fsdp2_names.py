"""FSDP2's names: what its users call on modules, and torch's own functions on FSDP modules."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.tensor import Shard

import laconic
from laconic.shard.sharded_module import ShardedModule
from tests.support import sharded_net
from tests.support.launch import on_ranks


def test_every_method_of_fsdp2_is_ours() -> None:
    """FSDP2's own implementation would look for its own state."""
    names = [name for name, _ in inspect.getmembers(FSDPModule, inspect.isfunction) if not name.startswith("_")]
    assert [name for name in names if getattr(ShardedModule, name) is getattr(FSDPModule, name)] == []


def test_fully_shard_has_all_arguments_of_fsdp2() -> None:
    theirs, ours = (set(inspect.signature(each).parameters) for each in (fully_shard, laconic.fully_shard))
    assert theirs - ours == set()
    assert {"cache", "granularity", "shares"} <= ours - theirs


@on_ranks(4, local=1)
def test_fully_shard_takes_torchs_own_policies() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model, plain = (sharded_net.build() for _ in range(2))
    dims = getattr(torch.distributed.fsdp, "DataParallelMeshDims", SimpleNamespace)  # torch 2.11 has no such class
    options = {
        "mesh": mesh, "reshard_after_forward": True, "shard_placement_fn": lambda parameter: Shard(0),
        "mp_policy": MixedPrecisionPolicy(), "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "ignored_params": {model.inp.bias.requires_grad_(False)},
        "dp_mesh_dims": dims(shard="shards", replicate="replicas"),
    }  # fmt: skip
    laconic.fully_shard(list(model.blocks), **options)
    laconic.fully_shard(model, **options)
    plain.inp.bias.requires_grad_(False)
    for net in (model, plain):
        net(torch.ones(2, 5)).square().sum().backward()
        torch.optim.SGD([each for each in net.parameters() if each.requires_grad], lr=0.01).step()
    for name, parameter in plain.named_parameters():
        got: Any = model.get_parameter(name)
        whole = got.full_tensor() if isinstance(got, laconic.RaggedTensor) else got
        torch.testing.assert_close(whole, parameter, msg=name)


@on_ranks(2, local=1)
def test_a_full_state_dict_that_torch_has_loaded_is_copied_for_another_model() -> None:
    options = StateDictOptions(full_state_dict=True)
    first, second, third = (sharded_net.shard(sharded_net.build(seed=seed)) for seed in range(3))
    state = get_model_state_dict(first, options=options)
    set_model_state_dict(second, dict(state), options=options)
    set_model_state_dict(third, state, options=options)
    for model in (second, third):
        for name, parameter in first.named_parameters():
            assert torch.equal(model.get_parameter(name).full_tensor(), parameter.full_tensor()), name
    with pytest.raises(ValueError, match="Cannot distribute a DTensor with placements"):
        set_model_state_dict(second, state, options=options)


@on_ranks(1)
def test_names() -> None:
    model: Any = sharded_net.shard(sharded_net.build())
    assert isinstance(model, FSDPModule)
    assert isinstance(model, sharded_net.Net)
    assert not isinstance(model.inp, FSDPModule)
    theirs: Any = fully_shard(sharded_net.build(), mesh=init_device_mesh("cpu", (1,)))
    assert model._fsdp_use_orig_params == theirs._fsdp_use_orig_params, "the compiler is told what FSDP2 tells it"
    container = laconic.fully_shard(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)))
    assert type(container[:2]) is nn.Sequential, "a slice is plain"
    assert container[:2][0] is container[0]
    with pytest.raises(NotImplementedError, match=r"set_separate_reduce_scatter_group\(False\): laconic"):
        model.set_separate_reduce_scatter_group(False)
    with pytest.warns(UserWarning, match="one reduction in flight"):
        model.set_reduce_scatter_max_input_buffers(2)
    for value, error in ((0, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error):
            model.set_reduce_scatter_max_input_buffers(value)
    with pytest.raises(ValueError, match=r"expected modules of laconic\.fully_shard, got Linear"):
        model.set_modules_to_forward_prefetch([model.inp])
    with pytest.raises(ValueError, match="should be a bool"):
        model.set_reshard_after_forward(2)
    with pytest.raises(RuntimeError, match="root"):
        model(torch.ones(1, 5)), model.blocks[0].reset_iter_state()


@on_ranks(2)
def test_torch_registers_other_forward_methods() -> None:
    model: Any = sharded_net.build(lambda: nn.Sequential(nn.Linear(5, 3)))
    expected = model(torch.ones(2, 5))
    model.encode = lambda x: model[0](x)
    laconic.fully_shard(model)
    register_fsdp_forward_method(model, "encode")
    found = model.encode(torch.ones(2, 5))
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert torch.equal(model[0].bias.grad.full_tensor(), torch.full((3,), 2.0))
    sharded_net.assert_nothing_gathered(model)


class Tied(nn.Module):
    """An embedding and a head that share a weight, with blocks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(sharded_net.Block(7, 9) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@on_ranks(2)
def test_lists_are_gathered_by_hand_but_are_no_roots() -> None:
    """A list of modules may be gathered by hand before any forward, but cannot be a root."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    laconic.fully_shard([first, second])
    first.unshard()  # type: ignore[operator]
    assert type(second.weight) is nn.Parameter
    second.reshard()  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="the root of sharded modules must be one module, got Linear, Linear"):
        first(torch.ones(1, 3))
    model = laconic.fully_shard(nn.Sequential(first, second))
    model(torch.ones(1, 3)).sum().backward()


@on_ranks(2)
def test_torch_shares_lanes_among_roots() -> None:
    models = [laconic.fully_shard(nn.Linear(3, 3)) for _ in range(2)]
    share_comm_ctx(models)
    for model in models:
        model(torch.ones(1, 3)).sum().backward()
    contexts = [model._laconic_unit.root for model in models]
    assert contexts[0].lanes is contexts[1].lanes
    with pytest.raises(RuntimeError, match="before the first forward"):
        share_comm_ctx([laconic.fully_shard(nn.Linear(3, 3)), models[0]])


@on_ranks(2, local=1)
def test_a_list_of_modules_is_one_unit() -> None:
    """Two modules in one unit; in the second step the head runs twice, outside the model's forward."""
    model: Any = sharded_net.build(Tied)
    for block in model.blocks:
        laconic.fully_shard(block)
    both = laconic.fully_shard([model.embedding, model.head])
    assert both == [model.embedding, model.head]
    laconic.fully_shard(model)
    assert model.embedding._laconic_unit is model.head._laconic_unit

    def loss_of(module: Any, batch: tuple[int, Tensor]) -> Tensor:
        step, ids = batch
        if step == 0:
            return module(ids).logsumexp(-1).sum()
        head, module.head = module.head, nn.Identity()
        hidden = module(ids)
        if module is model:  # the unit ends with the root's forward, although its head did not run in it
            sharded_net.assert_nothing_gathered(model.embedding)
        module.head = head
        return sum(head(part).logsumexp(-1).sum() for part in hidden.chunk(2))  # type: ignore[return-value]

    oracle = sharded_net.oracle_of(model, Tied, loss_of)
    for step in range(2):
        draws = [torch.Generator().manual_seed(7 * step + rank) for rank in range(2)]
        batches = [[(step, torch.randint(11, (4, 3), generator=draw)) for draw in draws]]
        sharded_net.accumulate(model, batches, loss_of)
        sharded_net.assert_gradients(model, oracle, batches)
        sharded_net.assert_nothing_gathered(model)
        model.zero_grad()


@on_ranks(4, local=1)
def test_integers_reshard_to_a_node() -> None:
    """FSDP2's integer keeps the parameters among the ranks of a node until backward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    weights = {}
    for value in (True, 1, 2, 4):
        model = sharded_net.shard(sharded_net.build(), mesh=mesh, reshard_after_forward=value)
        with sharded_net.moved(model) as moved:
            sharded_net.train_step(model)
        weights[str(value)] = moved.weights  # 1 == True
        sharded_net.assert_nothing_gathered(model)
    assert weights["4"] == weights["True"] == 2 * weights["2"], "4 is the whole mesh"
    assert weights["1"] == weights["2"], "they stay on each rank"
    flat = sharded_net.shard(sharded_net.build(), mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)
    with sharded_net.moved(flat) as moved:
        sharded_net.train_step(flat)
    assert moved.weights == weights["2"], "the integer says which ranks are on a node"
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("node",))
    with pytest.raises(ValueError, match="laconic keeps parameters among the 1 ranks of a node"):
        laconic.fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=2)


@on_ranks(2, local=1)
def test_reduced_shards_pass_a_hook() -> None:
    model: Any = sharded_net.shard(sharded_net.build())
    sizes = []

    def double(shard: Tensor) -> None:
        sizes.append(shard.numel())
        shard.mul_(2)

    model.set_all_reduce_hook(double)
    oracle, batches = sharded_net.oracle_of(model), sharded_net.micro_batches(1)
    sharded_net.accumulate(model, batches)
    assert sizes == [bucket.layout.shard_numel for bucket in model._laconic_unit.buckets]
    _, want = oracle.gradients(batches)
    for name, gradient in sharded_net.full_gradients(model).items():
        torch.testing.assert_close(gradient, want[name] * (1 if name.startswith("blocks") else 2), msg=name)
    with pytest.raises(NotImplementedError, match="stream"):
        model.set_all_reduce_hook(double, stream=object())
