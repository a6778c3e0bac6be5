"""The job's islands: how many there are, which slice each of them trains, and how they agree."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from laconic.comm.cluster import Cluster
from laconic.comm.launch import RankInfo
from laconic.config.job import Config, JobError, SyncConfig
from laconic.islands.local_steps import LocalSteps
from laconic.partial.updates import partial_updates
from laconic.ragged.parts import slice_of_parameters

_NONE = -1


def require_sync(config: Config) -> None:
    """Refuse islands that the rest of the job cannot have."""
    sync = config.sync
    if not sync.is_local:
        return
    if config.shard.strategy != "laconic":
        raise JobError(
            f"sync.mode = 'local' needs shard.strategy = 'laconic', got {config.shard.strategy!r}, which synchronises "
            "all ranks in every step; change one of the two"
        )
    if sync.slices > 1 and config.lora.enabled:
        raise JobError(
            f"sync.slices = {sync.slices} and lora.enabled = true: adapters train, and they are not sliced; leave "
            "sync.slices out"
        )
    if sync.recovery is not None and not config.train.resume:
        raise JobError(
            f"sync.recovery = {sync.recovery!r} is for a run that torchrun starts again, and which then goes on; set "
            "train.resume = true (where there is nothing yet, it starts from step 0)"
        )


def num_islands(config: Config, ranks: RankInfo) -> int:
    """Islands of this launch; 1 with sync.mode `every-step`. Raises: JobError."""
    sync = config.sync
    if not sync.is_local:
        return 1
    islands = sync.islands if sync.islands is not None else ranks.num_nodes
    if ranks.num_nodes % islands:
        raise JobError(
            f"sync.islands = {islands} does not divide the {ranks.num_nodes} nodes of this launch; an island is made "
            "of whole nodes, so use a divisor, or leave it out to make every node an island"
        )
    if sync.slices > islands and sync.recovery is None:  # with recovery others may join
        raise JobError(
            f"sync.slices = {sync.slices}, but there are {islands} islands: a slice that no island trains never moves; "
            f"use at most {islands} slices, or more islands"
        )
    return islands


def make_local_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, sync: SyncConfig, mesh: DeviceMesh
) -> LocalSteps:
    """Around the model and its inner optimizer. Collective: islands begin equal, or where they were."""
    outer = partial(torch.optim.SGD, lr=sync.outer_lr, momentum=sync.outer_momentum, nesterov=sync.outer_momentum > 0)
    return LocalSteps(
        model,
        optimizer,
        mesh=mesh,
        every=sync.every,
        outer=outer,
        fragments=sync.fragments,
        pattern=sync.pattern,
        overlap=sync.overlap,
        mixing=sync.mixing,
        codec=sync.codec,
        error_feedback=sync.error_feedback,
        recovery=_folder(sync, _trained_slice(model)),
    )


# -- who trains which slice --------------------------------------------------------------------------------------------


def slice_model(model: nn.Module, sync: SyncConfig, mesh: DeviceMesh) -> None:
    """Have this island train its slice, before the model is sharded. Collective."""
    if sync.slices == 1:
        return
    cluster = Cluster.of(mesh)
    own = torch.tensor([_remembered(sync)], device=cluster.device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    first_ranks = mesh.mesh.flatten(1)[:, 0].tolist()  # what an island's first rank remembers counts
    remembered = [int(everyone[rank]) for rank in first_ranks]
    slices = deal_slices([None if slice == _NONE else slice for slice in remembered], sync.slices)
    partial_updates(model, slice=slices[cluster.island_rank], slices=sync.slices, include=sync.slice_include)


def deal_slices(remembered: Sequence[int | None], slices: int) -> list[int]:
    """Each island's slice: the one it trained before; the least-held for those who trained none; then evened out.

    Where nobody remembers any, that is island mod slices. Evening out, which makes a slice's inner optimizer state be
    lost, only happens where a slice would be held by two islands fewer than another.
    """
    counts = Counter(slice for slice in remembered if slice is not None)

    def least_held() -> int:
        return min(range(slices), key=lambda slice: counts[slice])

    dealt = []
    for slice in remembered:
        if slice is None:
            slice = least_held()
            counts[slice] += 1
        dealt.append(slice)
    while max(counts.values()) - counts[least_held()] > 1:
        most_held = max(range(slices), key=lambda slice: counts[slice])
        giver, taken = len(dealt) - 1 - dealt[::-1].index(most_held), least_held()
        dealt[giver] = taken
        counts[most_held] -= 1
        counts[taken] += 1
    return dealt


def _folder(sync: SyncConfig, slice: int | None) -> Path | None:
    """Where the last agreement is kept on this machine. One folder per slice, so that inner optimizer state is never
    taken for that of another slice, and the newest folder says which slice was trained."""
    if sync.recovery is None:
        return None
    folder = Path(os.path.expandvars(sync.recovery)).expanduser()
    return folder if slice is None else folder / f"slice-{slice}-of-{sync.slices}"


def _remembered(sync: SyncConfig) -> int:
    """The slice that this machine trained when it last agreed with others."""
    kept: dict[int, float] = {}
    for slice in range(sync.slices):
        folder = _folder(sync, slice)
        for file in folder.glob("island-state-*.pt") if folder is not None else ():
            kept[slice] = max(kept.get(slice, 0.0), file.stat().st_mtime)
    return max(kept, key=lambda slice: kept[slice], default=_NONE)


def _trained_slice(model: nn.Module) -> int | None:
    """None: the model is not sliced."""
    slices = slice_of_parameters(model)
    trained = (slices[name] for name, parameter in model.named_parameters() if parameter.requires_grad)
    return next((slice for slice in trained if slice is not None), None)
