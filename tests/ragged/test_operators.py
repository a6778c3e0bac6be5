"""Each operation of torch's own database is right on RaggedTensors, refused by name, or raises as torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import laconic
from laconic.ragged.operations import _is_elementwise
from laconic.ragged.tensor import RaggedTensor
from tests.kernels.apart import told
from tests.support.launch import on_ranks
from tests.support.sharded_net import cut

SAMPLE = (
    "add", "lt", "masked_select", "sum", "norm", "var", "amax", "any", "select", "index_select", "split", "rand_like",
    "frexp", "to", "index_put", "masked_fill", "lerp",
)  # fmt: skip
NOT_ELEMENTWISE = {"_foreach_max", "_foreach_mm", "_foreach_norm", "_foreach_powsum"}
CALLS: dict[str, Callable[[Any], Any]] = {
    "a dim that is not there": lambda x: x.sum(dim=5),
    "a dim from the end that is not there": lambda x: x.amax(dim=-7),
    "a dim twice": lambda x: x.mean(dim=(0, 0)),
    "a norm over no such dim": lambda x: torch.linalg.vector_norm(x, dim=2),
    "a row that is not there": lambda x: x.select(0, 5),
    "rows that are not there": lambda x: x.index_select(0, torch.tensor([0, 5])),
    "a row": lambda x: x * torch.arange(3.0),
    "a column": lambda x: x + torch.arange(5.0).view(5, 1),
    "a tensor that does not fit": lambda x: x < torch.ones(5),
    "a mask of rows": lambda x: x.masked_select(torch.tensor([True, False, True, False, False]).view(5, 1)),
    "a mask of numbers": lambda x: x.masked_select(torch.ones(5, 3)),
    "two results": lambda x: torch.frexp(x),
    "random numbers": lambda x: torch.randn_like(x),
    "random numbers in float64": lambda x: torch.rand_like(x, dtype=torch.float64),
    "a format of memory": lambda x: x.to(torch.float64, memory_format=torch.contiguous_format),
    "an output": lambda x: torch.add(x, 1, out=torch.zeros_like(x)),
    "bfloat16": lambda x: x.bfloat16().norm(),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "a larger shape": lambda x: x + torch.ones(1, 1, 1),
    "a mask that repeats the tensor": lambda x: x.masked_select(torch.ones(2, 5, 3, dtype=torch.bool)),
    "rows into an output": lambda x: torch.index_select(x, 0, torch.tensor([0]), out=torch.zeros(1, 3)),
}


def whole(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return list(map(whole, value))
    return value.full_tensor() if isinstance(value, RaggedTensor) else value


@on_ranks(3)
def test_calls_are_right_or_raise_as_torch_does() -> None:
    value = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    tensor = cut(value, laconic.Cluster.of(laconic.init_mesh("cpu")))
    for name, call in CALLS.items():
        torch.manual_seed(0)
        try:
            want = call(value)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                call(tensor)
            continue
        torch.manual_seed(0)
        found, wanted = (each if isinstance(each, list) else [each] for each in (whole(call(tensor)), whole(want)))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one + 0, other, msg=lambda text, name=name: f"{name}: {text}")
    for name, call in REFUSED.items():
        with pytest.raises((NotImplementedError, ValueError), match="full_tensor"):
            raise AssertionError(f"{name}: {call(tensor)}")


@pytest.mark.machine
def test_a_sample_of_the_database() -> None:
    found = told("tests.ragged.operators", "2", "float32", *SAMPLE)
    assert found["problems"] == []
    assert found["calls"] > 400


@pytest.mark.campaign(seconds=120)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_of_the_database(dtype: str, num_ranks: int) -> None:
    found = told("tests.ragged.operators", str(num_ranks), dtype)
    assert found["problems"] == []
    assert found["calls"] > 4000


def test_functions_on_lists_are_elementwise_but_those_that_reduce_or_multiply() -> None:
    every = (name.removeprefix("aten::").split(".")[0] for name in torch._C._dispatch_get_all_op_names())
    packets = {name: getattr(torch.ops.aten, name) for name in every if name.startswith("_foreach_")}
    others = {
        name
        for name, packet in packets.items()
        if not all(_is_elementwise(getattr(packet, overload)) for overload in packet.overloads())
    }
    assert len(packets) > 50
    assert others <= NOT_ELEMENTWISE
