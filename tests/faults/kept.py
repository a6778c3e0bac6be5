"""Models that are built, trained and dropped: nothing of them may stay.

A job of two ranks builds, trains and drops models under one strategy, round after round. Each round tries every ending:
after a step, with gradients and partial sums left, after a forward without a backward, and after an exception in
forward and in backward. After the first rounds, which fill caches, nothing may grow. What is counted: objects of
laconic, tensors, threads, descriptors, files in /dev/shm, process groups, and the memory of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
from laconic.checkpoint.asynchronous import AsyncSaver
from laconic.optim import AdamW8bit, Muon, Shampoo, matrices_and_rest
from laconic.partial.patterns import sliced_layer
from tests.faults.bench import Bench, campaign_row
from tests.support.launch import launch
from tests.support.record import Row
from tests.support.sharded_net import Block, Net

ROUNDS = 50
WARM_UP = 6
MAX_GROWTH_BYTES = 1_000_000
_THREAD_S = 10.0
_RECORDED = 2_000  # collectives that torch's flight recorder keeps, in 800 bytes each
WIDTH, HIDDEN = 48, 96


class PlannedError(Exception):
    """Raised by a hook of a model."""


def _make() -> Net:
    return Net(d=WIDTH, h=HIDDEN)


MLPS = sliced_layer(Block, kind="mlp", rows=["up"], columns=["down"])
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(matrices_and_rest(model), lr=1e-3)


def _loss(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return model(torch.randn(4, 5, generator=generator)).float().square().mean()


# -- what a round does with its model ----------------------------------------------------------------------------------


def _after_a_step(model: Any, optimizer: Any) -> None:
    for seed in range(2):
        _loss(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()


def _with_gradients(model: Any, optimizer: Any) -> None:
    _loss(model, 0).backward()
    optimizer.step()
    if hasattr(model, "no_sync"):
        with model.no_sync():
            _loss(model, 1).backward()


def _without_backward(model: Any, optimizer: Any) -> None:
    _loss(model, 0)


def _fail(*_: Any) -> None:
    raise PlannedError


def _after_an_exception(when: str, model: Any, optimizer: Any) -> None:
    _loss(model, 0).backward()
    if when == "in forward":
        model.blocks[1].register_forward_pre_hook(_fail)
    else:
        model.blocks[1].register_forward_hook(lambda block, given, output: output.register_hook(_fail) and None)
    with contextlib.suppress(PlannedError):
        _loss(model, 1).backward()


ENDINGS: dict[str, Callable[[Any, Any], None]] = {
    "after a step": _after_a_step,
    "with gradients": _with_gradients,
    "without backward": _without_backward,
    "after an exception in forward": partial(_after_an_exception, "in forward"),
    "after an exception in backward": partial(_after_an_exception, "in backward"),
}


def _sharded(
    mesh: Callable[[], DeviceMesh],
    optimizer: Optimizers = _adamw,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **policies: Any,
) -> Iterator[tuple[nn.Module, Callable[[], None]]]:
    """Yield models, and what to do with each: one for every ending."""
    for end in ENDINGS.values():
        model = _make()
        prepare(model)
        for module in (*model.blocks, model):
            laconic.fully_shard(module, mesh=mesh(), **policies)
        yield model, partial(end, model, optimizer(model))


def _two_nodes() -> DeviceMesh:
    return laconic.init_mesh("cpu", nodes=2, local=1)


def _two_islands() -> DeviceMesh:
    return laconic.init_mesh("cpu", islands=2, nodes=1, local=1)


class _Averaged:
    """An optimizer with an EMA of its model."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer, self.averages, self.model = _adamw(model), laconic.EMA(model), model
        self.zero_grad = self.optimizer.zero_grad

    def step(self) -> None:
        """Take a step, and move the averages."""
        self.optimizer.step()
        self.averages.update()


def _local_steps(model: nn.Module, **options: Any) -> Any:
    return laconic.LocalSteps(model, _adamw(model), mesh=_two_islands(), **{"every": 1} | options)


def _plain_islands(**options: Any) -> Iterator[tuple[nn.Module, Callable[[], None]]]:
    for end in ENDINGS.values():
        model = _make()
        yield model, partial(end, model, _local_steps(model, **options))


def _cyclic(*, closes: bool) -> Iterator[tuple[nn.Module, Callable[[], None]]]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
    run = laconic.CyclicDataParallel(list(model), nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), _line())

    def train() -> None:
        for _ in range(3):
            run.step((torch.ones(2, WIDTH), torch.zeros(2, WIDTH)))
        run.drain()
        if closes:
            run.close()

    yield model, train


def _line() -> DeviceMesh:
    return _two_nodes()["node"]


def _saved() -> Iterator[tuple[nn.Module, Callable[[], None]]]:
    for model, train in _sharded(_two_nodes):
        folder = [tempfile.mkdtemp(prefix="laconic-kept-")] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(folder)

        def save(model: nn.Module = model, train: Callable[[], None] = train, folder: Any = folder[0]) -> None:
            train()
            saver = AsyncSaver(folder, keep=2)
            saver.save(1, model=model, optimizer=None, extra={})
            saver.wait()  # a save that goes on holds its copies

        yield model, save


def _own_groups() -> Iterator[tuple[nn.Module, Callable[[], None]]]:
    """Models on meshes that the user makes anew each time: equal ranks find laconic's groups again."""
    return _sharded(_fresh_mesh)


_fresh: list[DeviceMesh] = []


def _fresh_mesh() -> DeviceMesh:
    """A new object for the same ranks, which shares the groups of the first."""
    if not _fresh:
        _fresh.append(torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    return DeviceMesh.from_group(_fresh[0].get_group(), "cpu", mesh_dim_names=("dp",))


def _sliced(model: nn.Module) -> object:
    return laconic.partial_updates(model, slice_index=0, num_slices=2, include=["mlp"], patterns=[MLPS])


STRATEGIES: dict[str, Callable[[], Iterator[tuple[nn.Module, Callable[[], None]]]]] = {
    "cache none": partial(_sharded, _two_nodes),
    "cache host": partial(_sharded, _two_nodes, cache="host"),
    "cache device": partial(_sharded, _two_nodes, cache="device"),
    "wire 8bit": partial(_sharded, _two_nodes, cache="host", wire="8bit"),
    "wire 4bit": partial(_sharded, _two_nodes, cache="host", wire="4bit"),
    "offload": partial(_sharded, _two_nodes, offload_policy=CPUOffloadPolicy()),
    "checks": partial(_sharded, _two_nodes, cache="host", checks=laconic.Checks(interval=1, unnoticed_edits=True)),
    "bfloat16": partial(_sharded, _two_nodes, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "one node": partial(_sharded, partial(laconic.init_mesh, "cpu", nodes=1, local=2)),
    "replicas": partial(_sharded, _two_islands, cache="host"),
    "replicas, wire 8bit": partial(_sharded, _two_islands, wire="8bit"),
    "the user's mesh": _own_groups,
    "partial updates": partial(_sharded, _two_nodes, prepare=_sliced),
    "Muon": partial(_sharded, _two_nodes, _muon),
    "Shampoo": partial(_sharded, _two_nodes, lambda model: Shampoo(model.parameters())),
    "AdamW8bit": partial(_sharded, _two_nodes, lambda model: AdamW8bit(model.parameters())),
    "EMA": partial(_sharded, _two_nodes, _Averaged),
    "islands": partial(_sharded, _two_islands, _local_steps),
    "islands in few bits": partial(_sharded, _two_islands, partial(_local_steps, codec="int4", every=2, fragments=2)),
    "plain islands": _plain_islands,
    "cyclic": partial(_cyclic, closes=True),
    "cyclic, not closed": partial(_cyclic, closes=False),
    "asynchronous checkpoints": _saved,
}


# -- what stays --------------------------------------------------------------------------------------------------------


def _held() -> Counter[str]:
    """Count what this process holds, by kind."""
    _end_savers()
    for _ in range(3):  # finalizers may free what only the next pass finds
        gc.collect()
    objects = gc.get_objects()
    types = [type(each) for each in objects if each is not objects]
    world: Any = dist.distributed_c10d._world
    held = Counter[str](f"{kind.__module__}.{kind.__name__}" for kind in types if _is_ours(kind))
    held["tensors"] = sum(issubclass(kind, Tensor) for kind in types)
    held["weak references"] = sum(issubclass(kind, weakref.ref) for kind in types)
    held["threads"] = max(threading.active_count(), len(os.listdir("/proc/self/task")))
    held["descriptors"] = len(os.listdir("/proc/self/fd"))
    held["files in /dev/shm"] = sum("/dev/shm/" in line for line in Path("/proc/self/maps").read_text().splitlines())
    held["process groups"] = len(world.pg_map)
    held["names of process groups"] = len(world.pg_names)
    return held


def _end_savers() -> None:
    """Wait for the threads of savers that are gone: they end soon, but not at once. Hold none of them afterwards."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("save step"):
            thread.join(_THREAD_S)


def _is_ours(kind: type) -> bool:
    return str(kind.__module__).startswith("laconic")


def _resident_bytes() -> int:
    """The memory of this process that no file backs, after the allocator has given back what is free."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def _round(strategy: str) -> list[weakref.ref[Tensor]]:
    """Build, train and drop the models of a strategy; return weak references to all of their tensors."""
    watched = []
    for model, train in STRATEGIES[strategy]():
        train()
        gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        watched += [weakref.ref(tensor) for tensor in chain(model.parameters(), gradients)]
        dist.barrier()
    return watched


def count_growth(strategy: str, rounds: int, warm_up: int) -> dict[str, int]:
    """Return what has grown on this rank in `rounds` rounds, by kind, and the growth of memory as `resident bytes`."""
    for _ in range(_RECORDED):
        dist.all_to_all_single(torch.empty(2), torch.empty(2))
    for _ in range(warm_up):
        _round(strategy)
    _held()  # Python keeps what it has found out about classes
    before = _held()
    resident, alive = _resident_bytes(), 0
    for _ in range(rounds):
        watched = _round(strategy)
        gc.collect()
        alive += sum(reference() is not None for reference in watched)
        del watched
    after = _held()
    growth = {kind: count - before[kind] for kind, count in after.items() if count > before[kind]}
    if alive:
        growth["tensors of dropped models"] = alive
    return growth | {"resident bytes": _resident_bytes() - resident}


def growth_of(strategy: str, rounds: int = ROUNDS, warm_up: int = WARM_UP) -> dict[str, int]:
    """Return the largest growth of the two ranks, by kind."""
    by_rank = launch(count_growth, strategy, rounds, warm_up, num_ranks=2, num_local=1, timeout_s=120 + 20 * rounds)
    return {kind: max(growth.get(kind, 0) for growth in by_rank) for growth in by_rank for kind in growth}


@campaign_row("kept", section="mend")
def row(bench: Bench) -> Row:
    """Build, train and drop models under every strategy, and report what has grown."""
    rounds = 5 if bench.quick else ROUNDS
    grown, largest = [], 0
    for strategy in STRATEGIES:
        growth = growth_of(strategy, rounds)
        largest = max(largest, growth.pop("resident bytes"))
        grown += [f"{strategy}: {count} {kind}" for kind, count in growth.items()]
        print(f"{strategy}: {growth or 'nothing'}, {largest:,} B at most", flush=True)
    return Row(
        claim=f"build, train, drop: growth after {rounds} rounds of {len(ENDINGS)} endings, every strategy",
        required=f"0 objects, threads, descriptors, groups; <= {MAX_GROWTH_BYTES / 1e6:g} MB",
        measured=f"{len(grown)} in {len(STRATEGIES)} strategies; {largest / 1e6:.2f} MB at most",
        is_met=not grown and largest <= MAX_GROWTH_BYTES,
        note=f"on two ranks, after {WARM_UP} rounds that fill caches" + "".join(f"; {each}" for each in grown),
    )
