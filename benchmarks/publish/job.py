"""The training job of benchmarks.publish, and what its ranks do in the lab.

laconic lab --nodes 2 -- -m benchmarks.publish.job PART JOB.json ANSWER.json
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fully_shard_fsdp2

import laconic
from benchmarks.llama import Llama, decoder_layers, loss_of
from laconic.lab.counters import interface_bytes
from laconic.lab.wire import node_address
from laconic.publish import HttpSource, Publisher, Reader, WeightServer

_ROOT = Path(__file__).parents[2]
_FIRST_RATE, _RATE = 1e-3, 1e-6
_PORT = 18377


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, and the training that it has behind it."""

    llama: Llama
    first_steps: int
    """The steps at 1e-3."""
    warm_up_steps: int = 10
    """The steps that a new AdamW takes at another rate, before anything is measured."""

    @functools.cached_property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(
            parameter.numel() for parameter in self.llama.build(torch.device("meta"), torch.float32).parameters()
        )


@functools.cache
def _text() -> Tensor:
    files = sorted([*_ROOT.glob("docs/*.md"), *_ROOT.glob("src/laconic/**/*.py")])
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def train_step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Take a step on rows of the texts."""
    shape, text = job.llama, _text()
    generator = torch.Generator().manual_seed(step)
    begins = torch.randint(len(text) - shape.sequence, (shape.batch,), generator=generator)
    loss_of(model, torch.stack([text[begin : begin + shape.sequence] for begin in begins])).backward()
    optimizer.step()
    optimizer.zero_grad()


def fine_tuned(job: Job, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model after its first steps and those of a new AdamW at a rate, and the latter: a copy for each caller."""
    return copy.deepcopy(_fine_tuned(job, rate))


@functools.cache
def _fine_tuned(job: Job, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = copy.deepcopy(_pretrained(job))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(job.warm_up_steps):
        train_step(job, model, optimizer, 2000 + step)
    return model, optimizer


@functools.cache
def _pretrained(job: Job) -> nn.Module:
    model = job.llama.build(torch.device("cpu"), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_FIRST_RATE, weight_decay=0.0)
    for step in range(job.first_steps):
        train_step(job, model, optimizer, 1000 + step)
    return model


def _timed(action: Callable[[], object]) -> float:
    """The seconds of an action that begins on all ranks at once, until the last rank has ended it."""
    dist.barrier()
    begun_s = time.perf_counter()
    action()
    took = torch.tensor([time.perf_counter() - begun_s], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _sharded(job: Job, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = job.llama.build(torch.device("cpu"), torch.float32)
    mesh = laconic.init_mesh("cpu")
    for layer in decoder_layers(model):
        laconic.fully_shard(layer, mesh=mesh, cache="host", **options)
    laconic.fully_shard(model, mesh=mesh, cache="host", **options)
    return model, torch.optim.AdamW(model.parameters(), lr=_RATE)


def standstill(job: Job, versions: int, out: Path) -> dict[str, Any]:
    """The seconds in `publish`, and those of a gather of FSDP2's weights to rank 0."""
    model, optimizer = _sharded(job)
    peer = job.llama.build(torch.device("cpu"), torch.float32)
    for layer in decoder_layers(peer):
        fully_shard_fsdp2(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard_fsdp2(peer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def gather() -> None:
        found = get_model_state_dict(peer, options=options)
        for tensor in found.values():  # empty on other ranks
            tensor.bfloat16()

    times: dict[str, list[float]] = {"publish_s": [], "gather_s": []}
    publisher = Publisher(model, out / "versions", base_every=versions + 2)
    for version in range(versions + 2):
        train_step(job, model, optimizer, 100 * version + dist.get_rank())
        published, gathered = _timed(publisher.publish), 0.0
        publisher.wait()
        gathered = _timed(gather)
        if version > 1:  # the first one has all values, and the second one makes what is kept
            times["publish_s"].append(published)
            times["gather_s"].append(gathered)
    return {name: statistics.median(each) for name, each in times.items()}


def memory(job: Job, versions: int, out: Path) -> dict[str, Any]:
    """The bytes of the tensors that only a publisher holds, over all ranks."""
    found = {}
    coded = {"wire": "lossless", "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    cases: dict[str, dict[str, Any]] = {"held_bytes": {}, "held_bytes_lossless": coded}
    for name, options in cases.items():
        model, optimizer = _sharded(job, **options)
        publisher = Publisher(model, out / name)
        for version in range(3):
            train_step(job, model, optimizer, version)
            publisher.publish()
            publisher.wait()
        held = torch.tensor([_held_bytes(publisher, model)])
        dist.all_reduce(held)
        found[name] = int(held)
    return found


def _held_bytes(publisher: Publisher, model: nn.Module) -> int:
    """The bytes of the storages that can be reached from a publisher and not from its model."""
    own = _storages(publisher, without=model)
    return sum(nbytes for pointer, nbytes in own.items() if pointer not in _storages(model, without=publisher))


def _storages(root: object, *, without: object) -> dict[int, int]:
    seen, todo, found = {id(without)}, [root], {}
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | type(gc) | type(_storages)):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor) and type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu":
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        todo += gc.get_referents(each)
    return found


def sync(job: Job, versions: int, out: Path) -> dict[str, Any]:
    """Seconds and bytes of both ways from the trainer, rank 0, to readers on all other ranks."""
    rank = dist.get_rank()
    model, optimizer = job.llama.build(torch.device("cpu"), torch.bfloat16), None
    if rank == 0:
        model, optimizer = fine_tuned(job, _RATE)
    alone = dist.new_group([0])  # that of the publisher: the trainer
    held = {name: copy.deepcopy(model) for name in ("http", "whole")} if rank else {}
    address, token = node_address(0), "benchmark"
    publisher = server = None
    if rank == 0:
        publisher = Publisher(model, out, group=alone, encoding="gaps", base_every=versions + 3)
        server = WeightServer(out, host=address, port=_PORT, token=token)
        server.start()
    dist.barrier()
    reader = Reader(HttpSource(f"http://{address}:{_PORT}", token=token), verify="first") if rank else None

    def by_http() -> None:
        if publisher is not None:
            publisher.publish()
            publisher.wait()
        else:
            assert reader is not None
            reader.wait(60, poll_s=0.005)
            reader.update(held["http"])

    def whole() -> None:
        target = held["whole"] if rank else model
        if rank == 0:
            flat = torch.cat([parameter.detach().view(-1).bfloat16() for parameter in target.parameters()])
        else:
            flat = torch.empty(job.numel, dtype=torch.bfloat16)
        dist.broadcast(flat, src=0)
        if rank:
            parameters = list(target.parameters())
            for parameter, part in zip(parameters, flat.split([each.numel() for each in parameters]), strict=True):
                parameter.data.copy_(part.view(parameter.shape))

    ways = {"http": by_http, "whole": whole}
    times: dict[str, list[float]] = {name: [] for name in ways}
    sent: dict[str, list[int]] = {name: [] for name in ways}
    for version in range(versions + 2):
        if rank == 0:
            train_step(job, model, optimizer, version)  # type: ignore[arg-type]
        for name, way in ways.items():
            before = interface_bytes()
            took = _timed(way)
            after = interface_bytes()
            if version > 1:
                times[name].append(took)
                sent[name].append(after.sent - before.sent if after and before else 0)
    if rank:
        first, other = (dict(each.named_parameters()) for each in held.values())
        assert all(torch.equal(first[name], parameter) for name, parameter in other.items())
    if server:
        server.close()
    return {
        name: {"seconds": statistics.median(times[name]), "sent_bytes": statistics.median(sent[name])} for name in ways
    }


PARTS = {"standstill": standstill, "memory": memory, "sync": sync}


def main(part: str, given: Path, answer: Path) -> None:
    """Run a part, and write its answer on rank 0."""
    torch.set_num_threads(1)
    options = json.loads(given.read_text())
    job = Job(**{**options["job"], "llama": Llama(**options["job"]["llama"])})
    dist.init_process_group("gloo")
    out = answer.with_suffix("")
    found = PARTS[part](job, options["versions"], out)
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
