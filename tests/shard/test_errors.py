"""Mistakes of a user: every rank refuses them before a step, with the cause and the remedy."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from tests.support.launch import on_ranks, run_ranks
from tests.support.sharded_net import Net, build, inputs, shard, squared_error, train_step


def cpu() -> Any:
    return laconic.init_mesh("cpu")


def refused(message: str, call: Callable[[], Any], error: type[BaseException] = ValueError) -> None:
    with pytest.raises(error, match=message):
        call()


def tied() -> Any:
    model: Any = build(lambda: Net(d=5))
    model.blocks[0].up.weight = model.blocks[1].up.weight
    return model


def transposed() -> nn.Module:
    layer = nn.Linear(3, 4)
    layer.weight = nn.Parameter(torch.randn(3, 4).t())
    return layer


def job_bad_calls() -> None:
    mesh = cpu()

    model = shard(build(), mesh=mesh)
    refused(
        "ShardedNet is sharded already; call fully_shard once per module",
        lambda: laconic.fully_shard(model, mesh=mesh),
        AssertionError,
    )
    block = model.blocks[0]
    refused("ShardedBlock is sharded already", lambda: laconic.fully_shard(block, mesh=mesh), AssertionError)

    refused(
        r"weight of shape \(4, 3\) is not contiguous \(strides \(1, 4\)\).*param.contiguous\(\)",
        lambda: laconic.fully_shard(transposed(), mesh=mesh),
        NotImplementedError,
    )
    layer = nn.Linear(3, 3)
    layer.weight.fsdp_pre_all_gather = lambda mesh: ()  # type: ignore[attr-defined]
    refused(
        r"weight is a Parameter with fsdp_pre_all_gather, and consists of 0 tensors.*ignored_params",
        lambda: laconic.fully_shard(layer, mesh=mesh),
        NotImplementedError,
    )
    refused(
        "weight is complex",
        lambda: laconic.fully_shard(nn.Linear(3, 3, dtype=torch.complex64), mesh=mesh),
    )

    both: Any = tied()
    laconic.fully_shard(both.blocks[0], mesh=mesh)
    refused(
        r"up.weight is tied to up.weight, which an inner unit shards already.*or untie them",
        lambda: laconic.fully_shard(both.blocks[1], mesh=mesh),
    )
    refused("blocks.1.up.weight is tied to", lambda: laconic.fully_shard(both, mesh=mesh))
    one: Any = tied()  # both in one unit is allowed
    laconic.fully_shard(one, mesh=mesh)
    assert one.blocks[0].up.weight is one.blocks[1].up.weight

    layer = nn.Linear(3, 4)
    refused(r"Cache\(where='disk'\) is not known", lambda: laconic.fully_shard(layer, mesh=mesh, cache="disk"))  # type: ignore[arg-type]
    wrong = dist.get_world_size() + 1
    refused(
        f"reshard_after_forward as an int, it should be a factor of {wrong - 1}, not {wrong}",
        lambda: laconic.fully_shard(layer, mesh=mesh, reshard_after_forward=wrong),
    )
    refused("got an empty list", lambda: laconic.fully_shard([], mesh=mesh))
    refused("a list of modules, got str", lambda: laconic.fully_shard([layer, "head"], mesh=mesh))  # type: ignore[list-item]
    refused(
        "weight of LazyLinear is not initialised yet; run one forward of the model",
        lambda: laconic.fully_shard(nn.LazyLinear(3), mesh=mesh),
    )
    for block_size in (0, 13):
        refused(
            f"granularity of weight is {block_size}; it must be 1 to 12 elements",
            lambda size=block_size: laconic.fully_shard(layer, mesh=mesh, granularity=lambda name, p: size),
        )
    laconic.fully_shard(layer, mesh=mesh)
    assert isinstance(layer.weight, laconic.RaggedTensor), "a refused call leaves the module as it was"


def job_wrong_device() -> None:
    """A parameter on another device than the mesh."""
    refused(
        r"weight is on cpu, but the mesh is for cuda: move the model with .to\('cuda'\), or build it on",
        lambda: laconic.fully_shard(nn.Linear(3, 3), mesh=_cuda_mesh()),
    )


def _cuda_mesh() -> Any:
    mesh = cpu()
    laconic.Cluster.of(mesh).device_type = "cuda"
    return mesh


def job_ignored() -> None:
    model: Any = build()
    ignored = model.blocks[1].up.weight
    laconic.fully_shard(model, mesh=cpu(), ignored_params=[ignored])
    assert model.blocks[1].up.weight is ignored
    assert isinstance(model.blocks[1].down.weight, laconic.RaggedTensor)
    torch.testing.assert_close(model(inputs(0, 0)[0]), build()(inputs(0, 0)[0]))


def job_dtype_after_sharding() -> None:
    model = shard(build(), mesh=laconic.init_mesh("cpu", local=1), cache="host")
    train_step(model)
    for change in (model.half, model.double, lambda: model.to(torch.bfloat16)):
        refused(r"cannot change sharded parameters from torch.float32.*call .to.*before.*MixedPrecisionPolicy", change)
        assert all(isinstance(p, laconic.RaggedTensor) and p.dtype == torch.float32 for p in model.parameters())
    train_step(model)  # the model still works


def job_unsupported() -> None:
    model = shard(build())
    for operation in (
        lambda: model.inp.weight.prod(),
        lambda: nn.functional.linear(torch.zeros(1, 5), model.inp.weight),
        lambda: model.inp(torch.zeros(1, 5)),  # a part of a unit, used alone
    ):
        refused(
            r"not defined on a RaggedTensor.*to_local.*full_tensor.*call the sharded module",
            operation,
            NotImplementedError,
        )


def job_run_inside_out() -> None:
    model = shard(build())
    with torch.no_grad():
        model.blocks[1](torch.zeros(1, 17))
    refused(
        "Block ran before Net, which contains it; run the outermost sharded module first",
        lambda: model(inputs(0, 0)[0]),
        RuntimeError,
    )


def job_sparse() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 3, sparse=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sum()

    model = laconic.fully_shard(Lookup(), mesh=cpu())
    refused("table.weight got a sparse gradient.*sparse=False", lambda: model(torch.tensor([1, 2])).backward())


class Hidden:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def job_hidden_output() -> None:
    """Tensors inside an opaque object: without a refusal, backward would find the weights freed."""

    class Hides(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Hidden(super().forward(x))

    model = laconic.fully_shard(Hides(3, 3), mesh=cpu())
    refused("Hides.*Hidden", lambda: model(torch.ones(1, 3)))
    with torch.no_grad():
        assert model(torch.ones(1, 3)).x.shape == (1, 3), "without a graph it is allowed"


def job_containers() -> None:
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    refused("ModuleList.*forward", lambda: laconic.fully_shard(layers, mesh=cpu()))
    refused("ModuleDict.*forward", lambda: laconic.fully_shard(nn.ModuleDict({"a": layers}), mesh=cpu()))


def job_copies() -> None:
    model = shard(build())
    refused(
        "ShardedNet cannot be deep-copied.*copy the model before fully_shard",
        lambda: copy.deepcopy(model),
        AssertionError,
    )
    refused("cannot be pickled", lambda: pickle.dumps(model.inp.weight), TypeError)


JOBS = {
    job.__name__.removeprefix("job_"): job
    for job in (
        job_bad_calls,
        job_wrong_device,
        job_ignored,
        job_dtype_after_sharding,
        job_unsupported,
        job_run_inside_out,
        job_sparse,
        job_hidden_output,
        job_containers,
        job_copies,
    )
}


@pytest.mark.parametrize("name", JOBS)
def test_mistakes_are_refused_by_name(name: str) -> None:
    run_ranks(JOBS[name], 2, local=1)


def job_fails_on_one_rank() -> None:
    model = shard(build())
    train_step(model)
    if dist.get_rank() == 1:
        raise ValueError("the batch of rank 1 is bad")
    train_step(model)


def test_one_ranks_exception_ends_all_ranks_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed:(.|\n)*ValueError: the batch of rank 1 is bad"):
        run_ranks(job_fails_on_one_rank, 4, local=2, timeout_s=60)


SCRIPT = """
import torch, laconic
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    mesh = laconic.init_mesh("cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for layer in model:
        laconic.fully_shard(layer, mesh=mesh, cache="host")
    laconic.fully_shard(model, mesh=mesh, cache="host")
    for step in range(3):
        if step == 1 and torch.distributed.get_rank() == 1:
            raise ValueError("the batch of rank 1 is bad")
        model(torch.ones(2, 4)).sum().backward()

main()
"""


@pytest.mark.machine
def test_under_torchrun_one_ranks_exception_ends_the_job(tmp_path: Path) -> None:
    """The other ranks wait for a collective that never comes. torchrun ends them and shows the first failure."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert "ValueError: the batch of rank 1 is bad" in done.stderr
    assert "rank      : 1" in done.stderr, "the root cause is the rank that failed"


def test_the_first_lines_of_the_readme_work_without_a_launcher_but_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set.*torchrun"):
        laconic.fully_shard(nn.Linear(2, 2))


@on_ranks(2, local=1)
def test_a_skipped_loss_is_no_mistake() -> None:
    """It is no mistake to throw a loss away on all ranks."""
    model = shard(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = squared_error(model, inputs(step, dist.get_rank()))
        if step == 1:
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    train_step(model)
