"""The peers that train in islands: torchft's DiLoCo."""

from __future__ import annotations

import dataclasses

from laconic.config import Config, JobError, SyncConfig
from laconic.plan.buckets import Shape
from laconic.plan.candidate import Candidate
from laconic.plan.machine import Machine
from laconic.plan.peers_torch import refuse_unfit
from laconic.plan.peers_torchft import TorchftDiloco
from laconic.plan.program import Program, StepWork


def _torchft(machine: Machine, config: Config, work: StepWork, shape: Shape) -> Program:
    sync = config.sync
    if sync.slices > 1:
        raise JobError(f"sync.slices = {sync.slices} and torchft's DiLoCo, which trains whole layers; leave it out")
    if sync.overlap:
        raise JobError(
            f"sync.overlap = {sync.overlap} and torchft's DiLoCo, which sends a fragment earlier instead of applying "
            "it later; leave it out"
        )
    plain = dataclasses.replace(config, sync=SyncConfig(), shard=dataclasses.replace(config.shard, strategy="fsdp2"))
    refuse_unfit(plain, shape)
    return TorchftDiloco(machine, work, shape, sync, reshards=config.shard.reshard_after_forward is not False)


ISLAND_PEERS = (
    Candidate(
        name="torchft-diloco", label="torchft DiLoCo", make=_torchft, is_peer=True, keys=None, sync={},
        source="DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512; torchft 0.2's local_sgd.py",
    ),
)  # fmt: skip
"""The peers that sync now and then."""
