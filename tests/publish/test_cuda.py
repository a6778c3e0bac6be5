"""Publishing from a GPU and reading on one: bits of every encoding, steps that follow at once, and device memory.

One GPU is enough: one rank on NCCL, or several that share it over Gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
from laconic.publish import FolderSource, Publisher, Reader
from tests.support.launch import launch, on_ranks
from tests.support.published import assert_same, write
from tests.support.sharded_net import Net, build, shard

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
LATE = 20_000_000
"""Some 10 ms in clock cycles, by which the optimizer's kernels lag behind `publish`."""
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make_net() -> Net:
    """Units of 34 MB in fp32, which take several pieces."""
    return Net(2, 1024, 4096)


def sharded(**policies: Any) -> Any:
    """A model with fp32 weights that computes in bf16."""
    return shard(build(make_net).to(DEVICE), mesh=laconic.init_mesh(DEVICE), mp_policy=BF16, **policies)


def train(model: nn.Module, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(16, 5, generator=generator).to(DEVICE)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def wanted_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights as they must be read. The host does not wait for the device. Collective."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    wholes = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in parameters.items()}
    return {name: whole.detach().to(torch.bfloat16, copy=True) for name, whole in wholes.items()}


def on_host(held: Any) -> dict[str, Tensor]:
    tensors = dict(held.named_parameters()) if isinstance(held, nn.Module) else held
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def readers() -> dict[str, nn.Module]:
    """Models to read into, in bf16."""
    return {device: build(make_net, seed=1).to(device, torch.bfloat16) for device in (DEVICE, "cpu")}


def follow(placement: dict[str, Any], encoding: Any, folder: Path) -> None:
    """Publish each step, train on at once, and read on rank 0."""
    model = sharded(**placement)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused="cache" in placement)
    publisher = Publisher(model, folder, keep=6, encoding=encoding, base_every=2)
    read = [(Reader(folder), held) for held in readers().values()]
    for step in range(3):
        train(model, optimizer, 10 * step)
        wanted = wanted_of(model)
        version = publisher.publish(step=step)
        for more in (1, 2):
            train(model, optimizer, 10 * step + more)
        publisher.wait()
        if dist.get_rank() == 0:
            for reader, held in read:
                assert reader.update(held) == version
                assert_same(on_host(held), on_host(wanted))
        dist.barrier()
    newest = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in wanted.items()}
    Reader(folder).update(newest)  # whole values, and the patches since
    assert_same(newest, on_host(wanted))
    assert FolderSource(folder).manifest(2).base == 1


@pytest.mark.parametrize("encoding", ["gaps", "lossless", "smallest"])
def test_versions_equal_the_cast_weights(encoding: str, tmp_path: Path) -> None:
    launch(follow, {"cache": "host"}, encoding, tmp_path, num_ranks=1, backend="nccl")


PLACEMENTS: dict[str, dict[str, Any]] = {
    "rank": {"cache": "rank"},
    "lossless": {"cache": "host", "wire": "lossless"},
    "4bit": {"cache": "host", "wire": "4bit"},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(4, local=2)
def test_every_placement(placement: str, tmp_path: Path) -> None:
    """Ranks share the GPU over Gloo."""
    follow(PLACEMENTS[placement], "gaps", tmp_path)


def overwrite_at_once(folder: Path) -> list[int]:
    """Return the versions that are not the weights of their call. The device lags behind the host."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    publisher = Publisher(model, folder, keep=10)
    held, wrong = readers()[DEVICE], []
    for version in range(1, 5):
        train(model, optimizer, version)
        torch.cuda._sleep(LATE)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(1 + 2**-6)  # all elements change, and late
        wanted = wanted_of(model)
        publisher.publish()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().mul_(1 - 2**-6)
        for step in (1, 2, 3):
            train(model, optimizer, 10 * version + step)
        publisher.wait()
        Reader(folder).update(held)
        try:
            assert_same(on_host(held), on_host(wanted))
        except AssertionError:
            wrong.append(version)
    return wrong


def test_steps_that_follow_at_once_change_no_version(tmp_path: Path) -> None:
    assert launch(overwrite_at_once, tmp_path, num_ranks=1, backend="nccl") == [[]]


def test_device_memory_of_tensors_that_lie_otherwise(tmp_path: Path) -> None:
    """A transposed tensor leaves the device as one copy of it; then it is compared on the host.

    Others: test_upkeep.py, and `python -m benchmarks.gpu --rows publish-memory`.
    """
    model = nn.ParameterDict({"weight": nn.Parameter(torch.randn(1024, 512, device=DEVICE).t())})
    publisher = Publisher(model, tmp_path)
    for _ in range(3):
        with torch.no_grad():
            model["weight"].mul_(1.5)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        write(publisher)
        assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before <= model["weight"].nbytes
        held = {"weight": torch.zeros(512, 1024, dtype=torch.bfloat16, device=DEVICE)}
        Reader(tmp_path).update(held)
        assert torch.equal(held["weight"], model["weight"].detach().bfloat16())
