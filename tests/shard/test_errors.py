"""Mistakes of a user: every rank refuses them before a step, with the cause and the remedy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from laconic import Cache, Prefetch, Wire, fully_shard
from laconic.shard.policies import Placement, ShardPolicy
from tests.support.launch import on_ranks
from tests.support.sharded_net import Net, build, inputs, shard, squared_error, train_step


def tied() -> Any:
    model: Any = build(lambda: Net(d=5))
    model.blocks[0].up.weight = model.blocks[1].up.weight
    return model


def tied_to_a_unit() -> Any:
    model = tied()
    fully_shard(model.blocks[0])
    return model


def with_weight(weight: Tensor) -> nn.Module:
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(weight)
    return layer


def converting() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.fsdp_pre_all_gather = lambda mesh: ()  # type: ignore[attr-defined]
    return layer


def on_cuda_mesh() -> Any:
    mesh = laconic.init_mesh("cpu")
    laconic.Cluster.of(mesh).device_type = "cuda"
    return mesh


def running_inside_out() -> Any:
    model = shard(build())
    with torch.no_grad():
        model.blocks[1](torch.zeros(1, 17))
    return model(inputs(0, 0)[0])


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).sum()


class Hidden:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Hides(nn.Linear):
    """Returns a tensor inside an opaque object: without a refusal, backward would find the weights freed."""

    def forward(self, x: Tensor) -> Any:
        return Hidden(super().forward(x))


@dataclass(frozen=True)
class LaterPolicy(MixedPrecisionPolicy):
    """That of a torch to come."""

    grad_dtype: torch.dtype | None = None


class Encoder(nn.Linear):
    """Has another entrance than forward."""

    def encode(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def layer() -> nn.Module:
    return nn.Linear(3, 4)


def layers() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(3, 3)])


UNDEFINED = r"not defined on a RaggedTensor.*to_local.*full_tensor.*call the sharded module"
BAD_CALLS: dict[type[BaseException], list[tuple[Callable[[], Any], str]]] = {
    AssertionError: [
        (lambda: fully_shard(shard(build())), "ShardedNet is sharded already; call fully_shard once per module"),
        (lambda: copy.deepcopy(shard(build())), "ShardedNet cannot be deep-copied.*copy the model before fully_shard"),
    ],
    NotImplementedError: [
        (
            lambda: fully_shard(with_weight(torch.randn(3, 4).t())),
            r"weight of shape \(4, 3\) is not contiguous \(strides \(1, 4\)\).*param.contiguous\(\)",
        ),
        (
            lambda: fully_shard(converting()),
            r"weight is a Parameter with fsdp_pre_all_gather, and consists of 0 tensors.*ignored_params",
        ),
        (
            lambda: fully_shard(layer(), mp_policy=LaterPolicy(grad_dtype=torch.float32)),
            r"LaterPolicy\(grad_dtype=torch.float32\): laconic does not know this field; it has cast_forward_inputs, ",
        ),
        (lambda: shard(build()).inp.weight.prod(), UNDEFINED),
        (lambda: nn.functional.linear(torch.zeros(1, 5), shard(build()).inp.weight), UNDEFINED),
        (lambda: shard(build()).inp(torch.zeros(1, 5)), UNDEFINED),  # a part of a unit, used alone
        (
            lambda: shard(build()).inp(torch.zeros(1, 5)),
            r"inp.weight, \(17, 5\)\. Linear.forward ran outside .*: make Linear a unit of its own",
        ),
        (
            lambda: fully_shard(Encoder(3, 4)).encode(torch.zeros(1, 3)),
            r"ShardedEncoder.encode ran outside .*register_fsdp_forward_method\(module, 'encode'\) first",
        ),
    ],
    RuntimeError: [
        (running_inside_out, "Block ran before Net, which contains it; run the outermost sharded module first")
    ],
    TypeError: [(lambda: pickle.dumps(shard(build()).inp.weight), "cannot be pickled")],
    ValueError: [
        (lambda: fully_shard(nn.Linear(3, 3, dtype=torch.complex64)), "weight is complex"),
        (lambda: fully_shard(nn.Embedding(3, 3, max_norm=1.0)), "has max_norm=1.0.* scale the rows of the sharded"),
        (
            lambda: fully_shard(tied_to_a_unit().blocks[1]),
            r"up.weight is tied to up.weight, which an inner unit shards already.*or untie them",
        ),
        (lambda: fully_shard(tied_to_a_unit()), "blocks.1.up.weight is tied to"),
        (lambda: fully_shard(layer(), cache="disk"), r"Cache\(where='disk'\) is not known"),  # type: ignore[arg-type]
        (
            lambda: fully_shard(layer(), cache="rank", reshard_after_forward=True),
            "cache='rank' keeps them; leave it out",
        ),
        (lambda: fully_shard(layer(), reshard_after_forward=3), "as an int, it should be a factor of 2, not 3"),
        (lambda: fully_shard([]), "got an empty list"),
        (lambda: fully_shard([layer(), "head"]), "a list of modules, got str"),  # type: ignore[list-item]
        (lambda: fully_shard(nn.LazyLinear(3)), "weight of LazyLinear is not initialised yet; run one forward of the"),
        (lambda: fully_shard(layer(), granularity=lambda *_: 13), "granularity of weight is 13; it must be 1 to 12 e"),
        (
            lambda: fully_shard(nn.ModuleDict({"a": layers()})),
            "ModuleDict has no forward, so nothing would ever",
        ),
        (
            lambda: fully_shard(Lookup())(torch.tensor([1, 2])).backward(),
            "table.weight got a sparse gradient.*=False",
        ),
        (lambda: fully_shard(Hides(3, 3))(torch.ones(1, 3)), "Hides returns a Hidden, in which its tensors cannot be"),
        (
            lambda: fully_shard(layer(), mesh=init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))),
            "fully_shard needs a mesh with axes",
        ),
        (  # last: this mesh is the default, too
            lambda: fully_shard(layer(), mesh=on_cuda_mesh()),
            r"weight is on cpu, but the mesh is for cuda: move the model with .to\('cuda'\), or build it on",
        ),
    ],
}


BAD_POLICIES: dict[type, list[tuple[dict[str, Any], str]]] = {
    Cache: [
        ({"where": "disk"}, r"Cache\(where='disk'\) is not known; use one of 'none', 'host', 'device', 'rank'"),
        ({"where": "host", "device_budget_bytes": -1}, r"Cache\(device_budget_bytes=-1\) must not be negative"),
        ({"where": "device", "device_budget_bytes": 5}, r"bytes=5\) needs where='host'.*got Cache\(where='device'\)"),
        ({"device_budget_bytes": 5}, r"Cache\(device_budget_bytes=5\) needs where='host'.*got Cache\(where='none'\)"),
        ({"until": "step"}, r"Cache\(until='step'\) is not known; use one of 'change', 'backward'"),
        ({"until": "backward"}, r"Cache\(until=.backward.\) says how long .* where=.none. keeps nothing"),
        ({"where": "rank", "until": "backward"}, "until='backward'"),
        ({"where": "device", "pin_memory": False}, r"Cache\(pin_memory=False\) is for the host cache: it needs where="),
        ({"where": "device", "device_bytes": 5}, r"Cache\(device_bytes=5\) limits what where='auto' may take"),
        ({"host_bytes": 0}, r"Cache\(host_bytes=0\) limits what where='auto' may take; got Cache\(where='none'\)"),
        ({"where": "auto", "device_bytes": -1}, r"Cache\(device_bytes=-1\) must not be negative"),
        ({"where": "auto", "gradients": "rank"}, r"gradients='rank'\) is what where='auto' chooses itself; leave it"),
        ({"where": "auto", "until": "backward"}, r"lets weights go after backward, but .*where='auto'\) keeps them"),
        ({"gradients": "host"}, r"Cache\(gradients='host'\) is not known; use one of 'node', 'rank'"),
    ],
    ShardPolicy: [
        (
            {"cache": Cache(where="rank"), "reshard_after_forward": True},
            r"cache='rank'\} keeps them|cache='rank' keeps",
        ),
    ],
    Wire: [
        ({"weights": "int5"}, r"Wire\(weights='int5'\) is not known; use one of 'exact', 'lossless', 'bf16', 'int8'"),
        ({"gradients": "int1"}, r"Wire\(gradients='int1'\) is not known"),
        ({"weights": "int4", "as_values": True}, "values need 8 bits or more; use 'int8'"),
        ({"exact_every": 0, "weights": "int4"}, r"exact_every=0\) must be at least 1"),
        ({"feedback": True}, "needs gradients in a codec that loses something"),
        ({"feedback": True, "gradients": "lossless"}, "needs gradients in a codec that loses something"),
    ],
    Prefetch: [
        ({"units": 0}, r"Prefetch\(units=0\) must be at least 1"),
        ({"units": 2, "budget_bytes": 5}, r"\(units=2\) and Prefetch\(budget_bytes=5\) are two limits; give one"),
    ],
    Placement: [
        ({"weights": "disk"}, r"Placement\(weights='disk'\) is not known; use one of '\w+'"),
        ({"weights": "auto"}, r"Placement\(weights='auto'\) is not known; use one of '\w+'"),
        ({"weights": "host", "gradients": "host"}, r"Placement\(gradients='host'\) is not known; use one of '\w+'"),
    ],
}


@pytest.mark.parametrize("policy", BAD_POLICIES)
def test_policies_that_make_no_sense_are_refused(policy: type) -> None:
    for options, message in BAD_POLICIES[policy]:
        with pytest.raises(ValueError, match=message):
            policy(**options)


@on_ranks(2, local=1)
def test_mistakes_are_refused_by_name() -> None:
    for error, calls in BAD_CALLS.items():
        for call, message in calls:
            with pytest.raises(error, match=message):
                call()


@on_ranks(2, local=1)
def test_what_is_near_a_mistake_works() -> None:
    refused = layer()
    with pytest.raises(ValueError, match="not known"):
        fully_shard(refused, cache="disk")  # type: ignore[arg-type]
    fully_shard(refused, mp_policy=LaterPolicy())
    assert isinstance(refused.weight, laconic.RaggedTensor), "a refused call leaves the module as it was"
    with torch.no_grad():
        assert fully_shard(Hides(3, 3))(torch.ones(1, 3)).x.shape == (1, 3), "without a graph"


@on_ranks(2, local=1)
def test_the_dtype_of_a_cached_model_stays_and_a_loss_may_be_thrown_away() -> None:
    model = shard(build(), cache="host")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, optimizer)
    for change in (model.half, model.double, lambda: model.to(torch.bfloat16)):
        message = r"cannot change sharded parameters from torch.float32.*the cache has memory.*call .to.*before.*Mixed"
        with pytest.raises(ValueError, match=message):
            change()
        assert all(isinstance(p, laconic.RaggedTensor) and p.dtype == torch.float32 for p in model.parameters())
    train_step(model, optimizer)  # the model still works
    squared_error(model, inputs(1, dist.get_rank()))
    train_step(model, optimizer)


def test_the_first_lines_of_the_readme_work_without_a_launcher_but_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set.*torchrun"):
        laconic.fully_shard(nn.Linear(2, 2))
