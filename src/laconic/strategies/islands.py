"""The islands of a job: their number, the slice that each of them trains, and their syncs."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError, SyncConfig
from laconic.islands.local_steps import LocalSteps
from laconic.islands.outer_optimizer import outer_sgd
from laconic.partial.updates import partial_updates
from laconic.ragged.parts import slice_of_parameters


def num_islands(config: Config, ranks: RankInfo) -> int:
    """The number of islands of this launch; 1 with sync.mode `every-step`.

    Raises:
        JobError: islands would have unequal sizes, or there are more slices than islands.
    """
    sync = config.sync
    if not sync.is_local:
        return 1
    islands = sync.islands if sync.islands is not None else ranks.num_nodes
    if ranks.num_nodes % islands:
        raise JobError(
            f"sync.islands = {islands} does not divide the {ranks.num_nodes} nodes of this launch; an island is made "
            "of whole nodes, so use a divisor, or leave the key out to make every node an island"
        )
    if sync.slices > islands and sync.recovery is None:  # with recovery, islands may join later
        raise JobError(
            f"sync.slices = {sync.slices}, but there are {islands} islands: a slice that no island trains never moves; "
            f"use at most {islands} slices, or more islands"
        )
    return islands


def make_local_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, sync: SyncConfig, mesh: DeviceMesh
) -> LocalSteps:
    """Wrap the inner optimizer. Collective: islands start from equal parameters, or from their last sync.

    Raises:
        ValueError: the model cannot be divided into these fragments, or has no trainable parameter.
    """
    outer = outer_sgd(
        lr=sync.outer_lr,
        momentum=sync.outer_momentum,
        sliced_lr=sync.outer_sliced_lr,
        sliced_momentum=sync.outer_sliced_momentum,
    )
    return LocalSteps(
        model,
        optimizer,
        mesh=mesh,
        outer=outer,
        recovery=_recovery_folder(sync, _trained_slice(model)),
        **sync.pick("every", "fragments", "pattern", "overlap", "mixing", "codec", "error_feedback"),
    )


# -- slices of partial updates -----------------------------------------------------------------------------------------


def slice_model(model: nn.Module, sync: SyncConfig, mesh: DeviceMesh) -> None:
    """Make this island train its slice only, before the model is sharded. Collective.

    Raises:
        ValueError: the model cannot be divided into sync.slices slices.
    """
    if sync.slices == 1:
        return
    recovered = RankGroup().gather(_recovered_slice(sync))
    first_ranks = mesh.mesh.flatten(1)[:, 0].tolist()
    slices = assign_slices([recovered[rank] for rank in first_ranks], sync.slices)
    slice_index = slices[Cluster.of(mesh).island_rank]
    partial_updates(model, slice_index=slice_index, num_slices=sync.slices, include=sync.slice_include)


def assign_slices(recovered: Sequence[int | None], num_slices: int) -> list[int]:
    """The slice of each island, so that islands keep their slices where they can and every slice has a holder.

    `recovered` has the slice that each island trained before; None for a new island. An island keeps its slice, because
    the inner optimizer's state belongs to the slice. A new island gets the slice that fewest islands hold; if all are
    new, island i gets slice i mod `num_slices`. Finally, while the commonest slice has at least two holders more than
    the rarest, its last holder takes the rarest.
    """
    num_holders = Counter(dict.fromkeys(range(num_slices), 0))
    num_holders.update(index for index in recovered if index is not None)

    def rarest() -> int:
        return min(num_holders, key=num_holders.__getitem__)

    assigned = []
    for index in recovered:
        if index is None:
            index = rarest()
            num_holders[index] += 1
        assigned.append(index)
    while True:
        commonest, least = max(num_holders, key=num_holders.__getitem__), rarest()
        if num_holders[commonest] - num_holders[least] <= 1:
            return assigned
        last_holder = max(island for island, index in enumerate(assigned) if index == commonest)
        assigned[last_holder] = least
        num_holders[commonest] -= 1
        num_holders[least] += 1


def _recovery_folder(sync: SyncConfig, slice_index: int | None) -> Path | None:
    """The folder on this machine that keeps the last sync; None without sync.recovery.

    Every slice has its own folder: no state is loaded for another slice, and the newest file tells the machine's slice.
    """
    if sync.recovery is None:
        return None
    folder = Path(os.path.expandvars(sync.recovery)).expanduser()
    return folder if slice_index is None else folder / f"slice-{slice_index}-of-{sync.slices}"


def _recovered_slice(sync: SyncConfig) -> int | None:
    """The slice that this machine trained at its last sync; None if it has kept no sync."""
    kept: dict[int, float] = {}
    for index in range(sync.slices):
        folder = _recovery_folder(sync, index)
        for file in folder.glob("island-state-*.pt") if folder is not None else ():
            kept[index] = max(kept.get(index, 0.0), file.stat().st_mtime)
    return max(kept, key=kept.__getitem__, default=None)


def _trained_slice(model: nn.Module) -> int | None:
    """The slice that this island trains; None if the model is not sliced."""
    slices = slice_of_parameters(model)
    trained = (slices[name] for name, parameter in model.named_parameters() if parameter.requires_grad)
    return next((index for index in trained if index is not None), None)
