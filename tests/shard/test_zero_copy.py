"""Memory that is allocated and copied: gathers land where kernels read, gradients where they are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from laconic.shard import linear
from laconic.shard.bucket import _TINY_NUMEL
from tests.support import sharded_net
from tests.support.launch import on_ranks

_COPIES = {"copy_", "cat", "clone", "_to_copy", "stack", "split_with_sizes_copy", "add_", "_foreach_copy_"}


class Watch(TorchDispatchMode):
    """Every operation's new memory and copied bytes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[tuple[str, int]] = []
        self.copied: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        known = {leaf.untyped_storage().data_ptr() for leaf in _plain((args, kwargs))}
        for leaf in _plain(result):
            if leaf.untyped_storage().data_ptr() not in known:
                self.allocated.append((name, leaf.nbytes))
            if name in _COPIES:
                self.copied.append((name, leaf.nbytes))
        return result


def _plain(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if type(leaf) in (Tensor, nn.Parameter)]


@pytest.mark.machine
@pytest.mark.parametrize("cache", ["none", "host", "rank"])
@on_ranks(4, local=2)
def test_nothing_as_large_as_a_bucket_is_allocated_or_copied(cache: str) -> None:
    model = sharded_net.shard(sharded_net.build(lambda: sharded_net.Net(2, 64, 96)), cache=cache)
    optimizer = torch.optim.AdamW(model.parameters())
    watches = []
    for _ in range(4):
        watch = Watch()
        with watch:
            sharded_net.squared_error(model, sharded_net.inputs(0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        watches.append(watch)
    assert watches[2].allocated == watches[3].allocated, "the pattern is steady"
    assert watches[2].copied == watches[3].copied

    all_buckets = sharded_net.buckets(model)
    sizes = [bucket.layout.numel * 4 for bucket in sharded_net.buckets(model.blocks)]
    big = [entry for entry in watches[3].allocated if entry[1] > min(sizes) / 2]
    assert big == [("empty", size) for size in sizes], (
        f"one gradient bucket each, and nothing else above half of one: {big}"
    )

    slots = [slot for bucket in all_buckets for slot in bucket.layout.slots]
    vectors = sum(slot.numel * 4 for slot in slots if len(slot.shape) == 1 or slot.numel <= _TINY_NUMEL)
    shards = sum(bucket.shard.nbytes for bucket in all_buckets)
    assert max(nbytes for _, nbytes in watches[3].copied) <= min(sizes) / 2
    # Shards are copied into node shards, and node shards from the host cache. No whole bucket is copied.
    slices = sum(bucket.node_shard_numel * 4 for bucket in all_buckets)
    flags = 16 * sum(len(bucket.layout.slots) for bucket in all_buckets)  # of used parameters: padded messages
    gathers = {"none": 2 * shards, "host": shards + 2 * slices, "rank": shards + flags}[cache]
    assert sum(nbytes for _, nbytes in watches[3].copied) <= gathers + vectors, watches[3].copied


class Sink:
    """A gradient sink for one parameter."""

    def __init__(self, weight: nn.Parameter, dtype: torch.dtype = torch.float32) -> None:
        self.gradient = torch.zeros_like(weight, dtype=dtype)
        self.written = 0
        linear.set_sink(weight, self, 0)

    def accepts(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> bool:
        return linear.is_gradient(shape, self.gradient.shape) and dtype == self.gradient.dtype

    def collect(self, index: int, parameter: nn.Parameter) -> None:
        raise AssertionError("not under test")

    def add_product(self, index: int, left: Tensor, right: Tensor) -> None:
        self.written += 1
        self.gradient.addmm_(left, right)


def layer(bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """A plain layer, and its twin that writes in place."""
    torch.manual_seed(0)
    plain, twin = nn.Linear(5, 3, bias=bias), nn.Linear(5, 3, bias=bias)
    twin.load_state_dict(plain.state_dict())
    linear.write_gradient_in_place(twin)
    return plain, twin


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (0, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_a_plain_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    plain, twin = layer(bias)
    sink = Sink(twin.weight)
    x = torch.randn(shape)
    xs = [x.clone().requires_grad_() for _ in range(2)]
    for module, value in zip((plain, twin), xs, strict=True):
        (module(module(value).sum(-1, keepdim=True).expand(*shape)).square().sum() + module(value).sum()).backward()
    assert sink.written == 3, "three uses, three products"
    assert twin.weight.grad is None
    torch.testing.assert_close(sink.gradient, plain.weight.grad)
    torch.testing.assert_close(xs[1].grad, xs[0].grad)
    if bias:
        torch.testing.assert_close(twin.bias.grad, plain.bias.grad)


def test_the_plain_path_is_taken_where_the_product_cannot_be_written() -> None:
    plain, twin = layer()
    x = torch.randn(4, 5)
    sink = Sink(twin.weight, torch.bfloat16)
    twin(x).square().sum().backward()
    plain(x).square().sum().backward()
    assert sink.written == 0
    assert torch.equal(twin.weight.grad, plain.weight.grad)  # type: ignore[arg-type]

    twin.weight.grad = None
    sink = Sink(twin.weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert twin(x).dtype == torch.bfloat16
    twin(x).square().sum()
    with torch.no_grad():
        assert not twin(x).requires_grad
    per_row = torch.func.vmap(torch.func.grad(lambda row: twin(row).sum()))(x)
    torch.testing.assert_close(per_row, twin.weight.detach().sum(0).expand(4, 5))
    assert sink.written == 0
