"""The peers of PyTorch itself: FSDP2 in its forms, HSDP and DDP."""

from __future__ import annotations

from functools import partial

from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError
from laconic.plan.buckets import Shape
from laconic.plan.candidate import Candidate
from laconic.plan.machine import Machine
from laconic.plan.peers_ddp import Ddp
from laconic.plan.peers_fsdp2 import Fsdp2, Fsdp2Options, Sharded
from laconic.plan.program import Program, StepWork
from laconic.strategies.checks import check_job


def refuse_unfit(config: Config, shape: Shape) -> None:
    """Refuse a job that `laconic train` refuses under its shard.strategy.

    Raises:
        JobError: other sections or the ranks do not allow the strategy.
    """
    ranks = shape.ranks * shape.islands
    nodes = shape.nodes * shape.islands
    check_job(config, RankInfo(rank=0, world_size=ranks, local_rank=0, num_local=shape.local, num_nodes=nodes))


def _fsdp2(
    machine: Machine,
    config: Config,
    work: StepWork,
    shape: Shape,
    *,
    sharded: Sharded,
    is_gloo: bool = False,
    syncs_always: bool = False,
) -> Program:
    refuse_unfit(config, shape)
    if syncs_always and config.train.accumulation == 1:
        raise JobError("train.accumulation = 1 has one reduction a step anyway")
    if is_gloo and machine.device_type != "cpu":
        raise JobError(
            f"'fsdp2-gloo' keeps Gloo's own collectives, which are for CPU; use 'fsdp2' on {machine.device_type}"
        )
    if sharded == "hpz" and shape.local < 2:
        raise JobError(
            f"'fsdp2-hpz' keeps parameters on the ranks of one node, so it needs at least 2 ranks per node, got "
            f"{shape.local}; use 'fsdp2' or more ranks per node"
        )
    reshards = config.shard.reshard_after_forward is not False
    options = Fsdp2Options(sharded=sharded, reshards=reshards, is_gloo=is_gloo, syncs_always=syncs_always)
    return Fsdp2(machine, work, shape, options)


def _ddp(machine: Machine, config: Config, work: StepWork, shape: Shape) -> Program:
    refuse_unfit(config, shape)
    return Ddp(machine, work, shape)


def _of_fsdp2(name: str, label: str, source: str, sharded: Sharded = "flat", *, is_gloo: bool = False) -> Candidate:
    return Candidate(
        name=name, label=label, make=partial(_fsdp2, sharded=sharded, is_gloo=is_gloo), is_peer=True,
        source=f"{source}; torch 2.13's torch/distributed/fsdp/_fully_shard", keys={"strategy": name},
    )  # fmt: skip


_REDUCED: tuple[tuple[str, str, Sharded, str], ...] = (
    ("fsdp2", "FSDP2", "flat", "PyTorch FSDP, arXiv 2304.11277, section 3.4: without no_sync"),
    ("hsdp", "HSDP", "hsdp", "hybrid sharding, arXiv 2304.11277, section 3.2.2: without no_sync"),
)
"""Baselines that reduce in every micro-batch, as a user takes them whose device cannot keep whole gradients."""

TORCH_PEERS = (
    _of_fsdp2("fsdp2", "FSDP2", "PyTorch FSDP, arXiv 2304.11277"),
    _of_fsdp2("fsdp2-gloo", "FSDP2 on Gloo's own", "PyTorch FSDP, arXiv 2304.11277", is_gloo=True),
    _of_fsdp2("fsdp2-hpz", "FSDP2 hpZ", "reshard_after_forward = an integer, as hpZ of arXiv 2306.10209", "hpz"),
    _of_fsdp2("hsdp", "HSDP", "hybrid sharding, arXiv 2304.11277, section 3.2.2", "hsdp"),
    *(
        Candidate(  # what `laconic train` does not run: its baselines reduce once per step, which spares the wire
            name=f"{name}-reduced", label=f"{label}, reduced always", is_peer=True, keys=None,
            make=partial(_fsdp2, sharded=sharded, syncs_always=True), source=source,
        )
        for name, label, sharded, source in _REDUCED
    ),
    Candidate(
        name="ddp", label="DDP", make=_ddp, is_peer=True, source="PyTorch Distributed, arXiv 2006.15704",
        keys={"strategy": "ddp"},
    ),
)  # fmt: skip
"""The peers that come with torch."""
