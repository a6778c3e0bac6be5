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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
from laconic.checkpoint.asynchronous import AsyncSaver
from laconic.optim import AdamW8bit, Muon, Shampoo, matrices_and_rest
from laconic.partial.patterns import sliced_layer
from tests.faults.bench import Bench, Found, campaign
from tests.support.launch import launch
from tests.support.sharded_net import Block, Net, shard

ROUNDS, WARM_UP = 50, 6
MAX_GROWTH_BYTES = 1_000_000
_THREAD_S = 10.0
_WORKERS = ("save step", "laconic-islands", "laconic-ring")
_RECORDED = 2_000  # collectives that torch's flight recorder keeps, in 800 bytes each
_WIDTH, _HIDDEN = 48, 96

Pairs = Iterator[tuple[nn.Module, Callable[[], object]]]
"""Models, and what to do with each."""


class PlannedError(Exception):
    """Raised by a hook of a model."""


def _fail(*_: Any) -> None:
    raise PlannedError


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _loss(model: nn.Module) -> Tensor:
    return model(torch.randn(4, 5)).float().square().mean()


# -- what a round does with its model ----------------------------------------------------------------------------------


def _after_a_step(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def _with_gradients(model: Any, optimizer: Any) -> None:
    _loss(model).backward()
    optimizer.step()
    if hasattr(model, "no_sync"):
        with model.no_sync():
            _loss(model).backward()


def _after_an_exception(model: Any, optimizer: Any, *, forward: bool) -> None:
    _loss(model).backward()
    if forward:
        model.blocks[1].register_forward_pre_hook(_fail)
    else:
        model.blocks[1].register_forward_hook(lambda block, given, output: output.register_hook(_fail) and None)
    with contextlib.suppress(PlannedError):
        _loss(model).backward()


ENDINGS: tuple[Callable[[Any, Any], object], ...] = (
    _after_a_step,
    _with_gradients,
    lambda model, optimizer: _loss(model),
    partial(_after_an_exception, forward=True),
    partial(_after_an_exception, forward=False),
)


class _Averaged:
    """An optimizer with an EMA of its model."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer, self.averages = _adamw(model), laconic.EMA(model)
        self.zero_grad = self.optimizer.zero_grad

    def step(self) -> None:
        """Take a step, and move the averages."""
        self.optimizer.step()
        self.averages.update()


def _mesh(**axes: int) -> DeviceMesh:
    return laconic.init_mesh("cpu", **{"nodes": 2, "local": 1} | axes)


def _islands() -> DeviceMesh:
    return _mesh(islands=2, nodes=1)


def _fresh_mesh() -> DeviceMesh:
    """A mesh that the user makes anew, of the first one's groups: equal ranks find laconic's groups again."""
    if not _first_mesh:
        _first_mesh.append(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    return DeviceMesh.from_group(_first_mesh[0].get_group(), "cpu", mesh_dim_names=("dp",))


_first_mesh: list[DeviceMesh] = []


def _sharded(
    mesh: Callable[[], DeviceMesh] | None = _mesh,
    optimizer: Callable[[nn.Module], Any] = _adamw,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **policies: Any,
) -> Pairs:
    """A model for every ending; without a mesh it is not sharded."""
    for end in ENDINGS:
        model: Any = Net(d=_WIDTH, h=_HIDDEN)
        prepare(model)
        if mesh is not None:
            shard(model, mesh=mesh(), **policies)
        yield model, partial(end, model, optimizer(model))


def _local_steps(model: nn.Module, **options: Any) -> Any:
    return laconic.LocalSteps(model, _adamw(model), mesh=_islands(), **{"every": 1} | options)


def _cyclic(*, closes: bool) -> Pairs:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(2)))
    run = laconic.CyclicDataParallel(
        list(model), nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), _mesh()["node"]
    )

    def train() -> None:
        for _ in range(3):
            run.step((torch.ones(2, _WIDTH), torch.zeros(2, _WIDTH)))
        run.drain()
        if closes:
            run.close()

    yield model, train


def _saved() -> Pairs:
    for model, train in _sharded():
        folder = [tempfile.mkdtemp(prefix="laconic-kept-")] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(folder)

        def save(model: nn.Module = model, train: Any = train, folder: Any = folder[0]) -> None:
            train()
            saver = AsyncSaver(folder, keep=2)
            saver.save(1, model=model, optimizer=None, extra={})
            saver.wait()  # a save that goes on holds its copies

        yield model, save


def _sliced(model: nn.Module) -> object:
    mlps = sliced_layer(Block, kind="mlp", rows=["up"], columns=["down"])
    return laconic.partial_updates(model, slice_index=0, num_slices=2, include=["mlp"], patterns=[mlps])


STRATEGIES: dict[str, Callable[[], Pairs]] = {
    "cache none": _sharded,
    "cache host": partial(_sharded, cache="host"),
    "cache device": partial(_sharded, cache="device"),
    "wire 4bit": partial(_sharded, cache="host", wire="4bit"),
    "offload": partial(_sharded, offload_policy=CPUOffloadPolicy()),
    "checks": partial(_sharded, cache="host", checks=laconic.Checks(interval=1, unnoticed_edits=True)),
    "bfloat16": partial(_sharded, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "one node": partial(_sharded, partial(_mesh, nodes=1, local=2)),
    "replicas": partial(_sharded, _islands, cache="host"),
    "replicas, wire 8bit": partial(_sharded, _islands, wire="8bit"),
    "the user's mesh": partial(_sharded, _fresh_mesh),
    "partial updates": partial(_sharded, prepare=_sliced),
    "Muon": partial(_sharded, optimizer=lambda model: Muon(matrices_and_rest(model), lr=1e-3)),
    "Shampoo": partial(_sharded, optimizer=lambda model: Shampoo(model.parameters())),
    "AdamW8bit": partial(_sharded, optimizer=lambda model: AdamW8bit(model.parameters())),
    "EMA": partial(_sharded, optimizer=_Averaged),
    "islands": partial(_sharded, _islands, _local_steps),
    "islands in few bits": partial(_sharded, _islands, partial(_local_steps, codec="int4", every=2, fragments=2)),
    "plain islands": partial(_sharded, None, _local_steps),
    "cyclic": partial(_cyclic, closes=True),
    "cyclic, not closed": partial(_cyclic, closes=False),
    "asynchronous checkpoints": _saved,
}


# -- what stays --------------------------------------------------------------------------------------------------------


def _join_workers() -> None:
    """Wait for the threads of executors that are gone: they end soon, but not at once.

    A function of its own: a variable that still held the last thread would count as two weak references.
    """
    for thread in threading.enumerate():
        if thread.name.startswith(_WORKERS):
            thread.join(_THREAD_S)


def _held() -> Counter[str]:
    """Count what this process holds, by kind."""
    gc.collect()
    _join_workers()
    for _ in range(3):  # finalizers may free what only the next pass finds
        gc.collect()
    objects = gc.get_objects()
    types = [type(each) for each in objects if each is not objects]
    world: Any = dist.distributed_c10d._world
    ours = (kind for kind in types if str(kind.__module__).startswith("laconic"))
    held = Counter[str](f"{kind.__module__}.{kind.__name__}" for kind in ours)
    held["tensors"] = sum(issubclass(kind, Tensor) for kind in types)
    held["weak references"] = sum(issubclass(kind, weakref.ref) for kind in types)
    held["threads"] = max(threading.active_count(), len(os.listdir("/proc/self/task")))
    held["descriptors"] = len(os.listdir("/proc/self/fd"))
    held["files in /dev/shm"] = Path("/proc/self/maps").read_text().count("/dev/shm/")
    held["process groups"], held["names of process groups"] = len(world.pg_map), len(world.pg_names)
    return held


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
    growth = {kind: count - before[kind] for kind, count in _held().items() if count > before[kind]}
    if alive:
        growth["tensors of dropped models"] = alive
    return growth | {"resident bytes": _resident_bytes() - resident}


def growth_of(strategy: str, rounds: int = ROUNDS, warm_up: int = WARM_UP) -> dict[str, int]:
    """Return the largest growth of the two ranks, by kind."""
    by_rank = launch(count_growth, strategy, rounds, warm_up, num_ranks=2, num_local=1, timeout_s=120 + 20 * rounds)
    return {kind: max(growth.get(kind, 0) for growth in by_rank) for growth in by_rank for kind in growth}


@campaign(
    "kept",
    f"build, train, drop, with {len(ENDINGS)} endings: growth of objects, threads, descriptors, groups and memory",
    harms=("growth",),
    section="mend",
)
def dropped(bench: Bench) -> Found:
    """Build, train and drop models under every strategy, and report what has grown."""
    found, most = [], 0
    for strategy in STRATEGIES:
        growth = growth_of(strategy, 5 if bench.quick else ROUNDS)
        most = max(most, growth["resident bytes"])
        if growth["resident bytes"] <= MAX_GROWTH_BYTES:
            del growth["resident bytes"]
        found += [f"growth of {count} {kind}: {strategy}" for kind, count in growth.items()]
    return len(STRATEGIES), found, f"on two ranks, after {WARM_UP} rounds that fill caches; {most / 1e6:.2f} MB at most"
