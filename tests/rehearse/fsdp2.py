"""Programs of torch's own FSDP2 and HSDP: the checker on code that is not ours."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from laconic.rehearse import Machine, rehearsal
from tests.rehearse.engine import Body, Net, adapt, batch, freeze_blocks, loss_of, recompute, training, without_reading

_WIDTH = 16


def prefetching(model: Any) -> None:
    """Set what each block prefetches."""
    for block, following in pairwise(model.blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


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
class Fsdp2:
    """A model, how FSDP2 shards it, and how it is trained."""

    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of torch's `fully_shard`."""
    replicas: int = 1
    """With more than one it is HSDP."""
    ranks: int = 4
    """The ranks of a replica: two on each node."""
    train: Body = field(default_factory=training)
    prepare: Callable[[Net], None] = lambda model: None
    sharded: Callable[[Any], None] = lambda model: None

    def record(self, *, has_values: bool = True) -> Machine:
        """Run the program on a machine, which has its tape."""
        torch.manual_seed(0)
        nodes = self.replicas * self.ranks // 2
        with rehearsal(nodes=nodes, local=2, has_values=has_values) as machine:
            model = Net(_WIDTH).to("cuda")
            self.prepare(model)
            if self.replicas > 1:
                mesh = init_device_mesh("cuda", (self.replicas, self.ranks), mesh_dim_names=("replicate", "shard"))
            else:
                mesh = init_device_mesh("cuda", (self.ranks,), mesh_dim_names=("shard",))
            for block in model.blocks:
                fully_shard(block, mesh=mesh, **self.options)
            fully_shard(model, mesh=mesh, **self.options)
            self.sharded(model)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            with machine.recording():
                self.train(model, optimizer)
            if has_values:
                machine.keep_last_contents()
            del model, optimizer
            gc.collect()
        return machine


_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_OFFLOAD = CPUOffloadPolicy()

RACING: dict[str, Fsdp2] = {
    "FSDP2, offload, edited by the host": Fsdp2(options={"offload_policy": _OFFLOAD}, train=edited_by_host),
}
"""Programs that race: a forward of FSDP2 may end before offloaded weights have been copied to the device."""

FSDP2: dict[str, Fsdp2] = {
    "FSDP2": Fsdp2(),
    "FSDP2, not read by the host": Fsdp2(train=without_reading),
    "FSDP2, accumulation": Fsdp2(train=training(micro_batches=3)),
    "FSDP2, accumulation with sums": Fsdp2(train=training(micro_batches=2, syncs_all=True)),
    "FSDP2, no reshard": Fsdp2(options={"reshard_after_forward": False}),
    "FSDP2, reshard to 2": Fsdp2(options={"reshard_after_forward": 2}),
    "FSDP2, mixed precision": Fsdp2(options={"mp_policy": _HALF}, train=training(micro_batches=2)),
    "FSDP2, offload": Fsdp2(options={"offload_policy": _OFFLOAD}),
    "FSDP2, offload, pageable": Fsdp2(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "FSDP2, offload, mixed precision": Fsdp2(options={"offload_policy": _OFFLOAD, "mp_policy": _HALF}),
    "FSDP2, frozen": Fsdp2(prepare=freeze_blocks),
    "FSDP2, LoRA": Fsdp2(prepare=adapt, train=training(micro_batches=2)),
    "FSDP2, prefetch": Fsdp2(sharded=prefetching),
    "FSDP2, recomputation": Fsdp2(prepare=recompute),
    "FSDP2, clipping": Fsdp2(train=clipped),
    "FSDP2, evaluation": Fsdp2(train=evaluated),
    "FSDP2, gathered early": Fsdp2(train=unsharded_early),
    "FSDP2, weights kept": Fsdp2(sharded=without_unshard_after_backward, train=training(micro_batches=2)),
    "HSDP": Fsdp2(replicas=2, ranks=2),
    "HSDP, not read by the host": Fsdp2(replicas=2, ranks=2, train=without_reading),
    "HSDP, accumulation": Fsdp2(replicas=2, ranks=2, train=training(micro_batches=2)),
    "HSDP, late sums": Fsdp2(replicas=2, ranks=2, train=training(micro_batches=2, late_sums=True)),
    "HSDP, mixed precision": Fsdp2(replicas=2, ranks=2, options={"mp_policy": _HALF}),
}
