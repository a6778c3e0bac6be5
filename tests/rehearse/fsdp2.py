"""Programs of torch's own FSDP2 and HSDP: the checker on code that is not ours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.rehearse.engine import (
    Program,
    adapt,
    batch,
    clipped,
    halve,
    loss_of,
    prefetch,
    program,
    recompute,
    take,
    training,
    without_reading,
)  # fmt: skip


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
        take(optimizer)


def edited_by_host(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """The host edits weights that rest with it, right after an evaluation has used them."""
    training(steps=1)(model, optimizer)
    with torch.no_grad():
        model(batch(8))
        model.reshard()
    halve(model.parameters())


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
_fsdp2 = partial(program, Fsdp2)

RACING: dict[str, Fsdp2] = {
    "FSDP2, offload, edited by the host": _fsdp2(offload_policy=CPUOffloadPolicy(), train=edited_by_host),
}
"""Programs that race: a forward of FSDP2 may end before offloaded weights have been copied to the device."""

FSDP2: dict[str, Fsdp2] = {
    "FSDP2": _fsdp2(),
    "FSDP2, not read by the host": _fsdp2(train=without_reading),
    "FSDP2, accumulation with sums": _fsdp2(train=training(micro_batches=2, syncs_all=True)),
    "FSDP2, no reshard": _fsdp2(reshard_after_forward=False),
    "FSDP2, reshard to 2": _fsdp2(reshard_after_forward=2),
    "FSDP2, mixed precision": _fsdp2(mp_policy=_HALF, micro_batches=2),
    "FSDP2, offload": _fsdp2(offload_policy=CPUOffloadPolicy()),
    "FSDP2, offload, pageable": _fsdp2(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "FSDP2, LoRA": _fsdp2(prepare=adapt, micro_batches=2),
    "FSDP2, prefetch": _fsdp2(sharded=prefetch),
    "FSDP2, recomputation": _fsdp2(prepare=recompute),
    "FSDP2, clipping": _fsdp2(train=clipped),
    "FSDP2, evaluation": _fsdp2(train=evaluated),
    "FSDP2, gathered early": _fsdp2(train=unsharded_early),
    "FSDP2, weights kept": _fsdp2(sharded=lambda model: model.set_reshard_after_backward(False), micro_batches=2),
    "HSDP": _fsdp2(islands=2, nodes=1),
    "HSDP, late sums": _fsdp2(islands=2, nodes=1, train=training(micro_batches=2, late_sums=True)),
}
