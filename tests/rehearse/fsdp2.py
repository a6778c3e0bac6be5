"""Programs of torch's own FSDP2 and HSDP: the checker on code that is not ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.rehearse.engine import (
    Program,
    adapt,
    batch,
    loss_of,
    prefetch,
    recompute,
    training,
    without_reading,
)  # fmt: skip


def without_unshard_after_backward(model: Any) -> None:
    """Keep gathered weights between micro-batches."""
    model.set_reshard_after_backward(False)


def clipped(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Clip gradients: their norm is a DTensor's."""
    for step in range(2):
        loss_of(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def evaluated(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Evaluate between steps, edit weights, and gather whole ones."""
    for _ in range(2):
        training(steps=1)(model, optimizer)
        with torch.no_grad():
            loss_of(model, 99).item()
            model.reshard()  # the root's weights stay gathered
            next(iter(model.parameters())).mul_(0.5)
        for parameter in model.parameters():
            parameter.full_tensor()
        model.state_dict()


def unsharded_early(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Start the gather of the first block before its forward."""
    for step in range(2):
        handle = model.blocks[0].unshard(async_op=True)
        loss = loss_of(model, step)
        if handle is not None:
            handle.wait()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def edited_by_host(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The host edits weights that rest with it, right after an evaluation has used them."""
    training(steps=1)(model, optimizer)
    with torch.no_grad():
        model(batch(8))
        model.reshard()
        for parameter in model.parameters():
            parameter.mul_(0.5)


@dataclass(frozen=True, kw_only=True)
class Fsdp2(Program):
    """A program under torch's `fully_shard`; with several islands it is HSDP, and each is a replica."""

    width: int = 16

    def make_mesh(self) -> Any:
        """See `Program.make_mesh`."""
        ranks = self.nodes * self.local
        if self.islands == 1:
            return init_device_mesh("cuda", (ranks,), mesh_dim_names=("shard",))
        return init_device_mesh("cuda", (self.islands, ranks), mesh_dim_names=("replicate", "shard"))

    def shard(self, module: nn.Module, mesh: Any) -> None:
        """See `Program.shard`."""
        fully_shard(module, mesh=mesh, **self.options)


_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_OFFLOAD = CPUOffloadPolicy()

RACING: dict[str, Fsdp2] = {
    "FSDP2, offload, edited by the host": Fsdp2(options={"offload_policy": _OFFLOAD}, train=edited_by_host),
}
"""Programs that race: a forward of FSDP2 may end before offloaded weights have been copied to the device."""

FSDP2: dict[str, Fsdp2] = {
    "FSDP2": Fsdp2(),
    "FSDP2, not read by the host": Fsdp2(train=without_reading),
    "FSDP2, accumulation with sums": Fsdp2(train=training(micro_batches=2, syncs_all=True)),
    "FSDP2, no reshard": Fsdp2(options={"reshard_after_forward": False}),
    "FSDP2, reshard to 2": Fsdp2(options={"reshard_after_forward": 2}),
    "FSDP2, mixed precision": Fsdp2(options={"mp_policy": _HALF}, train=training(micro_batches=2)),
    "FSDP2, offload": Fsdp2(options={"offload_policy": _OFFLOAD}),
    "FSDP2, offload, pageable": Fsdp2(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "FSDP2, LoRA": Fsdp2(prepare=adapt, train=training(micro_batches=2)),
    "FSDP2, prefetch": Fsdp2(sharded=prefetch),
    "FSDP2, recomputation": Fsdp2(prepare=recompute),
    "FSDP2, clipping": Fsdp2(train=clipped),
    "FSDP2, evaluation": Fsdp2(train=evaluated),
    "FSDP2, gathered early": Fsdp2(train=unsharded_early),
    "FSDP2, weights kept": Fsdp2(sharded=without_unshard_after_backward, train=training(micro_batches=2)),
    "HSDP": Fsdp2(islands=2, nodes=1),
    "HSDP, late sums": Fsdp2(islands=2, nodes=1, train=training(micro_batches=2, late_sums=True)),
}
