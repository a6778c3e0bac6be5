"""The programs of PyTorch's own strategies: FSDP2 in its forms, HSDP and DDP. Each function is a `Make`."""

from __future__ import annotations

from laconic import registry
from laconic.plan.buckets import Shape
from laconic.plan.machine import Machine
from laconic.plan.peers_ddp import Ddp
from laconic.plan.peers_fsdp2 import Fsdp2, Fsdp2Options, Sharded
from laconic.plan.program import Program, StepWork


def fsdp2(machine: Machine, work: StepWork, shape: Shape) -> Program:
    """FSDP2 over all ranks."""
    return _fsdp2(machine, work, shape, "flat")


def fsdp2_on_gloo(machine: Machine, work: StepWork, shape: Shape) -> Program:
    """FSDP2 with Gloo's own collectives."""
    return _fsdp2(machine, work, shape, "flat", is_gloo=True)


def fsdp2_hpz(machine: Machine, work: StepWork, shape: Shape) -> Program:
    """FSDP2 that keeps parameters on the ranks of a node after forward."""
    return _fsdp2(machine, work, shape, "hpz")


def hsdp(machine: Machine, work: StepWork, shape: Shape) -> Program:
    """FSDP2 inside each node, and replicas between nodes."""
    return _fsdp2(machine, work, shape, "hsdp")


def ddp(machine: Machine, work: StepWork, shape: Shape) -> Program:
    """DDP."""
    return Ddp(machine, work, shape)


def _fsdp2(machine: Machine, work: StepWork, shape: Shape, sharded: Sharded, *, is_gloo: bool = False) -> Program:
    options = Fsdp2Options(
        sharded=sharded,
        reshards=work.job.shard.policy.reshard_after_forward is not False,
        is_gloo=is_gloo,
        syncs_always=registry.named(work.job.shard.strategy).reduces_always,
    )
    return Fsdp2(machine, work, shape, options)
