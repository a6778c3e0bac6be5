"""Memory that is allocated and copied: gathers land where kernels read, gradients where they are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import laconic
from laconic.shard.reduce import BucketGradients
from tests.support import sharded_net
from tests.support.launch import on_ranks

_COPIES = {"copy_", "cat", "clone", "_to_copy", "stack", "split_with_sizes_copy", "add_", "_foreach_copy_"}

_ENOUGH = mock.patch("laconic.shard.full._TINY_NUMEL", new=1 << 12)
"""Gradients of more elements are written in place: the layers of these tests are large enough."""


@pytest.fixture(autouse=True)
def enough() -> Iterator[None]:
    with _ENOUGH:
        yield


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
    _ENOUGH.start()  # in a process of this test's own
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
    vectors = sum(slot.numel * 4 for slot in slots if len(slot.shape) == 1 or slot.numel <= _ENOUGH.new)
    shards = sum(bucket.shard.nbytes for bucket in all_buckets)
    assert max(nbytes for _, nbytes in watches[3].copied) <= min(sizes) / 2
    # Shards are copied into node shards, and node shards from the host cache. No whole bucket is copied.
    slices = sum(bucket.form.geometry.node_numel * 4 for bucket in all_buckets)
    flags = 16 * sum(len(bucket.layout.slots) for bucket in all_buckets)  # of used parameters: padded messages
    gathers = {"none": 2 * shards, "host": shards + 2 * slices, "rank": shards + flags}[cache]
    assert sum(nbytes for _, nbytes in watches[3].copied) <= gathers + vectors, watches[3].copied


class Uses(nn.Module):
    """Uses a layer three times."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 65, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        again = self.layer(self.layer(x).sum(-1, keepdim=True).expand(*x.shape))
        return again.square().sum() + self.layer(x).sum()


@pytest.mark.parametrize("bias", [True, False])
@on_ranks(1)
def test_gradients_are_those_of_a_plain_linear_layer(bias: bool) -> None:
    """Products are written where they are reduced, three for three uses, unless they cannot be."""
    make, mesh, add_product = partial(Uses, bias=bias), laconic.init_mesh("cpu"), BucketGradients.add_product
    half = partial(torch.autocast, "cpu", torch.bfloat16)
    summed_in_64_bits = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    with mock.patch.object(BucketGradients, "add_product", autospec=True, side_effect=add_product) as written:
        for shape, policy, mode, num_written in (
            ((64,), None, nullcontext, 3),
            ((4, 64), None, nullcontext, 3),
            ((2, 3, 64), None, nullcontext, 3),
            ((0, 64), None, nullcontext, 3),
            ((4, 64), None, half, 0),
            ((4, 64), summed_in_64_bits, nullcontext, 0),
        ):
            plain, model = sharded_net.build(make), sharded_net.build(make)
            laconic.fully_shard(model, mesh=mesh, mp_policy=policy)
            written.reset_mock()
            xs = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2)]
            for module, x in zip((plain, model), xs, strict=True):
                with mode():
                    loss = module(x)
                loss.backward()
            assert written.call_count == num_written, (shape, policy, mode)
            if mode is half:
                continue  # rounding hides the rest
            torch.testing.assert_close(xs[1].grad, xs[0].grad, rtol=1e-4, atol=1e-4)
            want = {name: parameter.grad for name, parameter in plain.named_parameters()}
            torch.testing.assert_close(sharded_net.full_gradients(model), want, rtol=1e-4, atol=1e-4)
        written.reset_mock()
        model.unshard()  # type: ignore[operator]
        layer: Any = model.layer
        per_row = torch.func.vmap(torch.func.grad(lambda row: layer(row).sum()))(torch.randn(4, 64))
        torch.testing.assert_close(per_row, layer.weight.detach().sum(0).expand(4, 64))
        assert not written.called
