"""The sizes of the jobs, and the training that every contestant runs: plain PyTorch, FSDP2 and laconic's caches."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_shard

import laconic
from benchmarks.llama import Llama, decoder_layers, loss_of
from tests.support.launch import launch

NODES, LOCAL = 2, 2
TIMEOUT_S = 300.0
WARMUP_STEPS = 3
BLOCKS, STEPS_PER_BLOCK = 9, 4
"""The number of timed blocks of each contestant, and their steps; blocks of all contestants alternate."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The models of the rows."""

    step: Llama
    """The model of the rows about step time and overlap."""
    memory: Llama
    """The model of the rows about memory, and of overlap over Gloo."""
    loss: Llama
    """The model of the rows about losses."""


FULL = Sizes(
    step=Llama(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocab=32_000, batch=4, sequence=2048),
    memory=Llama(hidden=1024, intermediate=2816, layers=12, heads=16, kv_heads=16, vocab=8192, batch=1, sequence=512),
    loss=Llama(hidden=256, intermediate=688, layers=4, heads=4, kv_heads=2, vocab=512, batch=2, sequence=128),
)
_TOY = Llama(hidden=64, intermediate=176, layers=3, heads=4, kv_heads=2, vocab=128, batch=1, sequence=32)
TOY = Sizes(step=_TOY, memory=_TOY, loss=_TOY)


class Bench:
    """The measurements that several rows share; each runs once, when a row first needs it."""

    def __init__(self, sizes: Sizes, device_type: str) -> None:
        self.sizes, self.device_type = sizes, device_type

    def launch(self, function: Callable[..., Any], *args: Any, num_ranks: int, backend: str | None) -> list[Any]:
        """Run `function(sizes, device type, *args)` on ranks of this machine, two per emulated node."""
        return launch(
            function, self.sizes, self.device_type, *args, num_ranks=num_ranks, num_local=min(num_ranks, LOCAL),
            backend=backend, timeout_s=TIMEOUT_S,
        )  # fmt: skip

    @cached_property
    def step_times(self) -> dict[str, tuple[list[float], list[float]]]:
        """The result of `step_time.step_rank`, on one rank."""
        from benchmarks.gpu.step_time import step_rank

        return self.launch(step_rank, num_ranks=1, backend=None)[0]

    @cached_property
    def peaks(self) -> list[dict[str, Any]]:
        """The result of `memory.memory_rank`, by rank: four ranks share the device over Gloo."""
        from benchmarks.gpu.memory import KINDS, memory_rank

        return self.launch(memory_rank, KINDS, False, num_ranks=NODES * LOCAL, backend="gloo")

    @cached_property
    def losses_on_cpu(self) -> list[dict[str, list[float]]]:
        """The result of `losses.loss_rank` on CPU, by rank."""
        return self._losses("cpu")

    @cached_property
    def losses_on_device(self) -> list[dict[str, list[float]]]:
        """The result of `losses.loss_rank` on the device, by rank."""
        return self.losses_on_cpu if self.device_type == "cpu" else self._losses(self.device_type)

    def _losses(self, device_type: str) -> list[dict[str, list[float]]]:
        from benchmarks.gpu.losses import loss_rank

        return Bench(self.sizes, device_type).launch(loss_rank, num_ranks=NODES * LOCAL, backend="gloo")


class Training:
    """The training of one model by one contestant: "plain", "fsdp2", or one of laconic's caches."""

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        shape: Llama,
        mesh: DeviceMesh | None = None,
        policy: MixedPrecisionPolicy | None = None,
        *,
        learning_rate: float = 1e-4,
    ) -> None:
        self.model: Any = model
        self._shape = shape
        self._device = next(model.parameters()).device
        policy = policy or MixedPrecisionPolicy()
        for module in (*decoder_layers(model), model) if kind != "plain" else ():
            if kind == "fsdp2":
                fsdp2_shard(module, mesh=mesh, mp_policy=policy)
            else:
                laconic.fully_shard(module, mesh=mesh, mp_policy=policy, cache=kind)  # type: ignore[arg-type]
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
        self._steps = 0

    def warm_up(self) -> list[float]:
        """Take the first steps, and return their losses."""
        return [float(self.step()) for _ in range(WARMUP_STEPS)]

    def step(self) -> Tensor:
        """Take a step on a new batch, different on every rank, and return its loss."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        tokens = self._shape.tokens(self._device, seed=1000 * self._steps + rank)
        self._steps += 1
        loss = loss_of(self.model, tokens)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def device_of(device_type: str) -> torch.device:
    """Return the device of this rank: all ranks share one GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")


def seconds_per_step(training: Training, device: torch.device) -> float:
    """Return the mean seconds over the steps of a block, by CUDA events on a GPU."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        for _ in range(STEPS_PER_BLOCK):
            training.step()
        return (time.perf_counter() - start_s) / STEPS_PER_BLOCK
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(STEPS_PER_BLOCK):
        training.step()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / 1e3 / STEPS_PER_BLOCK


def become_rank_0() -> None:
    """Make this process rank 0 of a cluster without other processes: collectives carry nothing and take no time."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", rank=0, world_size=NODES * LOCAL)
