"""Reductions of RaggedTensors equal those of the whole tensor, and move results only. torch itself is the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import laconic
from laconic.ragged.tensor import RaggedTensor
from tests.support.launch import on_ranks

SHAPES = {"matrix": (5, 3), "vector": (7,), "scalar": (), "tall": (9, 1), "cube": (3, 4, 5), "row": (2,)}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def last_changed(x: Tensor) -> Tensor:
    """A plain copy of `x` of which only the last element is another one, which most ranks do not hold."""
    copy = whole(x).clone()
    copy.view(-1)[-1] += 1
    return copy


ROUNDED: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.sum(),
    "sum of dims": lambda x: x.sum(0),
    "sum kept": lambda x: x.sum((-1,), keepdim=True),
    "mean": lambda x: x.mean(),
    "mean of dims": lambda x: x.mean(-1, keepdim=True),
    "mean in double": lambda x: x.mean(0, dtype=torch.float64),
    "std": lambda x: x.std(),
    "var": lambda x: x.var(correction=0),
    "var kept": lambda x: x.var(0, keepdim=True),
    "norm": lambda x: x.norm(),
    "norm kept": lambda x: torch.linalg.vector_norm(x, 3, keepdim=True),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "norm of all dims": lambda x: torch.linalg.vector_norm(x, dim=tuple(range(x.dim()))),
    "norm in double": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
    "1-norm of rows": lambda x: torch.linalg.vector_norm(x, 1, -1),
}
EXACT: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(-1),
    "amin kept": lambda x: x.amin(0, keepdim=True),
    "integers": lambda x: (x * 100).to(torch.int32).sum(),
    "max of integers": lambda x: (x * 100).to(torch.int32).amin(-1),
    "max of booleans": lambda x: (x > 0).max(),
    "count": lambda x: (x > 0).sum(),
    "counts": lambda x: (x > 0).sum(0),
    "close": lambda x: torch.allclose(whole(x), x) and torch.allclose(x, x + 1e-9),
    "not close": lambda x: torch.allclose(x, last_changed(x)),
    "equal": lambda x: torch.equal(x, whole(x)) and torch.equal(x, x),
    "not equal": lambda x: torch.equal(x, last_changed(x)) or torch.equal(x, torch.zeros(17)),
    "any": lambda x: (x > 1).any(),
    "all of dims": lambda x: (x > -0.5).all(-1),
    "any of dims": lambda x: (x > 1).any(0, keepdim=True),
    "inf-norm": lambda x: torch.linalg.vector_norm(x, math.inf, -1),
    "bfloat16": lambda x: x.bfloat16().max(),
    "nan": lambda x: torch.where(x > 0.5, math.nan, x).max(),
    "infinities": lambda x: torch.stack(
        [f(torch.where(x > 0, x, sign * math.inf)) for sign in (1, -1) for f in (torch.amax, torch.amin)]
    ),
    "isnan": lambda x: torch.isnan(x / x.sign().clamp(min=0)).any(),
    "item": lambda x: torch.tensor(float(x.amax())),
}
ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "power": lambda x: x**2,
    "equal": lambda x: x == x.clone(),
    "greater": lambda x: torch.gt(x, -x),
}


class Some(nn.Module):
    """Parameters of odd shapes: on three ranks and more, some ranks hold no part of some."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator), requires_grad=False))

    def forward(self) -> None: ...


ALL = ROUNDED | EXACT | ELEMENTWISE
SOME = ("sum", "mean of dims", "std", "var kept", "norm of rows", "amax", "nan", "any of dims")


def compare(name: str, x: Tensor, ragged: Any, cases: Iterable[str] = ALL) -> None:
    for case in cases:
        function = ALL[case]
        try:
            want = function(x)
        except (IndexError, RuntimeError):  # a dim that a vector or a scalar does not have
            continue
        if case == "norm of rows":
            want = want.view(function(x.detach().to("meta")).shape)  # torch 2.11 keeps a dim of one element there
        got = function(ragged)
        if case in ELEMENTWISE:
            assert isinstance(got, RaggedTensor)
            got = got.full_tensor()
        assert not isinstance(got, DTensor)
        tolerance: Any = {} if case in ROUNDED else {"rtol": 0, "atol": 0}
        got = got + 0 if case in ("norm", "norm kept") else got  # a norm is a tensor of its own kind
        torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m, c=case: f"{name} {c}: {m}", **tolerance)


@on_ranks(3)
def test_reductions_equal_those_of_the_whole_tensor() -> None:
    """Compare on ranks whose borders cut rows."""
    plain, sharded = Some(), laconic.fully_shard(Some(), mesh=laconic.init_mesh("cpu"), granularity=laconic.elements(1))
    for name, x in plain.named_parameters():
        ragged: Any = sharded.get_parameter(name)
        compare(name, x, ragged, ALL if name in ("matrix", "cube") else SOME)
    traffic = sharded.traffic.snapshot()
    sharded.cube.sum(0)
    moved = (sharded.traffic.snapshot() - traffic).total(direction="sent")
    assert moved == (dist.get_world_size() - 1) * 20 * 4, "in one trip, and no part of the tensor"
    sharded.cube.amin(0)
    moved = (sharded.traffic.snapshot() - traffic).total(direction="sent") - moved
    assert moved == (dist.get_world_size() - 1) * 20 * (4 + 1), "and whether there is a NaN"
    plain_total = nn.utils.get_total_norm(list(plain.parameters()))
    for foreach in (True, False):
        torch.testing.assert_close(
            nn.utils.get_total_norm(list(sharded.parameters()), foreach=foreach) + 0, plain_total
        )
        plain.matrix.grad, sharded.matrix.grad = plain.matrix.clone(), sharded.matrix.clone()
        for model in (plain, sharded):
            nn.utils.clip_grad_value_(model.parameters(), 0.3, foreach=foreach)
        torch.testing.assert_close(sharded.matrix.grad.full_tensor(), plain.matrix.grad)
    whole = torch.randn(5, 3)
    torch.testing.assert_close(whole.clone().mul_(sharded.matrix), whole * plain.matrix)
    (changed,) = [whole.clone()]
    torch._foreach_mul_([changed, sharded.vector], [sharded.matrix, sharded.vector.clone()])
    torch.testing.assert_close(changed, whole * plain.matrix)
    torch.testing.assert_close(sharded.vector.full_tensor(), plain.vector * plain.vector)
    vector = torch.randn(sum(p.numel() for p in plain.parameters()))
    for model in (plain, sharded):  # assigns to `.data`
        nn.utils.vector_to_parameters(vector, model.parameters())
    for name, x in plain.named_parameters():
        assert torch.equal(sharded.get_parameter(name).full_tensor(), x)
    with pytest.raises(TypeError, match="convert the model"):
        sharded.matrix.data = sharded.matrix.data.double()
    with pytest.raises(NotImplementedError, match="full_tensor"):
        nn.utils.parameters_to_vector(sharded.parameters())
    with pytest.raises(RuntimeError, match="mean"):
        (sharded.matrix > 0).mean()


@on_ranks(4)
def test_reductions_over_outer_axes() -> None:
    """Parameters that another axis cuts or replicates first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, sharded = Some(), Some()
    for name, parameter in list(sharded.named_parameters()):
        placement = Replicate() if name in ("vector", "scalar") else Shard(parameter.ndim - 1)
        cut = distribute_tensor(parameter.detach(), mesh["tp"], [placement])
        setattr(sharded, name, nn.Parameter(cut, requires_grad=False))
    laconic.fully_shard(sharded, mesh=mesh["dp"])
    for name, x in plain.named_parameters():
        compare(name, x, sharded.get_parameter(name), SOME)
