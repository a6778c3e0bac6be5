"""The islands of a job: their number, the slice that each of them trains, and their syncs."""

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.comm.launch import RankInfo
from laconic.config import JobError, SyncConfig
from laconic.islands.outer_optimizer import check_slices
from laconic.islands.recovery import trained_slices
from laconic.partial.updates import partial_updates
from laconic.store.files import write_text

RUN_ID = "run-id"
"""The file of the output folder with the name of the run."""


def num_islands(sync: SyncConfig, ranks: RankInfo) -> int:
    """The number of islands of this launch; 1 with sync.mode `every-step` or sync.rendezvous.

    Raises:
        JobError: islands would have unequal sizes, or there are more slices than islands.
    """
    if not sync.is_local:
        return 1
    with sync.in_own_words():
        islands = sync.membership.count(ranks.num_nodes)
    if sync.membership.recovery is None:
        holders = Counter(assign_slices([None] * islands, sync.slices))
        try:
            check_slices([holders[index] for index in range(sync.slices)], may_join=False)
        except ValueError as problem:
            raise JobError(f"sync.slices = {sync.slices} on {islands} islands: {problem}") from None
    return islands


def num_launches(sync: SyncConfig) -> int:
    """The number of launches that share a global batch: with sync.rendezvous the islands that start, else 1."""
    return 1 if sync.membership.rendezvous is None else sync.membership.num_founders


def run_id_of(sync: SyncConfig, output: Path) -> str | None:
    """The name of the run. With sync.recovery rank 0 keeps one in the output folder `output`. Collective.

    A run whose output folder is new has a new name, so it does not go on from what another run has left on a machine.
    """
    if sync.membership.recovery is None:
        return sync.membership.run_id
    path = output / RUN_ID

    def read() -> str:
        name = path.read_text(encoding="ascii", errors="replace").strip() if path.exists() else ""
        if re.fullmatch("[0-9a-f]{32}", name):
            return name
        if name:
            warnings.warn(f"{path} is damaged; the run gets a new name, and finds no earlier sync", stacklevel=2)
        name = uuid4().hex
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, f"{name}\n")
        return name

    return RankGroup().on_rank_0(read, f"the name of the run, {path}, cannot be kept")


# -- slices of partial updates -----------------------------------------------------------------------------------------


def slice_model(model: nn.Module, sync: SyncConfig, output: Path, mesh: DeviceMesh) -> None:
    """Make this island train its slice only, before the model is sharded. Collective.

    `output` is the run's output folder.

    Raises:
        ValueError: the model cannot be divided into sync.slices slices.
    """
    if sync.slices == 1:
        return
    recovered = RankGroup().gather(_recovered_slice(sync, output))
    first_ranks = mesh.mesh.flatten(1)[:, 0].tolist()
    slices = assign_slices([recovered[rank] for rank in first_ranks], sync.slices)
    slice_index = slices[Cluster.of(mesh).island_rank]
    partial_updates(model, slice_index=slice_index, num_slices=sync.slices, include=sync.slice_include)


def _recovered_slice(sync: SyncConfig, output: Path) -> int | None:
    """The slice that this machine trained at its last sync; None if it has kept no sync. Collective."""
    folder, run = sync.membership.folder, run_id_of(sync, output)
    slices = None if folder is None or run is None else trained_slices(folder, run)
    return slices[0] if slices and slices[0] < sync.slices else None


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
