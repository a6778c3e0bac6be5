"""The device mesh of I islands x N nodes x L local ranks, this rank's place in it, and the process groups.

In torchtitan's words, `dp_replicate` is the island axis, and `dp_shard` is the node and local axes together.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laconic.comm.traffic import IslandLevel, Traffic

AXES = ("island", "node", "local")


def init_mesh(device_type: str, *, islands: int = 1, nodes: int | None = None, local: int | None = None) -> DeviceMesh:
    """Build the mesh (island, node, local) from torchrun's environment; start the default process group if needed.

    Collective over all ranks of the job. On CUDA it also selects this rank's device.

    Args:
        device_type: "cpu" or "cuda".
        islands: the number of islands, which must divide the number of nodes. More than one needs `LocalSteps`.
        nodes: the number of nodes in one island. Default: all nodes divided by `islands`.
        local: the number of ranks per node. Default: torchrun's LOCAL_WORLD_SIZE.

    Raises:
        ValueError: the ranks do not fill the mesh, nodes have unequal numbers of ranks, or torchrun's environment is
            missing and there is no process group.
    """
    _start_process_group(device_type)
    world = dist.get_world_size()
    local = local if local is not None else _local_world_size(world)
    if min(islands, local) < 1 or (nodes is not None and nodes < 1):
        raise ValueError(f"a mesh needs positive sizes, got islands={islands}, nodes={nodes}, local={local}")
    if nodes is None:
        nodes = max(1, world // (islands * local))
    if islands * nodes * local != world:
        raise ValueError(
            f"{islands} islands x {nodes} nodes x {local} local ranks make {islands * nodes * local} ranks, but the "
            f"job has {world}; start every node with the same --nproc-per-node, or give sizes whose product is {world}"
        )
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", dist.get_rank() % local)) % torch.cuda.device_count())
    return init_device_mesh(device_type, (islands, nodes, local), mesh_dim_names=AXES)


def _start_process_group(device_type: str) -> None:
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"init_mesh needs torchrun's environment, but {', '.join(missing)} is not set; start the script with "
            "`torchrun --nproc-per-node=...`, or call torch.distributed.init_process_group first"
        )
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")


def _local_world_size(world: int) -> int:
    """The number of ranks on this node. Collective: every rank checks that all nodes have equally many."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if device == "cuda":  # NCCL needs the device before its first collective
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([num_local], device=device))
    by_rank = [int(size) for size in sizes]
    if len(set(by_rank)) > 1:
        raise ValueError(
            f"nodes of unequal size: ranks per node, rank by rank, are {by_rank}; laconic needs the same number of "
            "ranks on every node"
        )
    return num_local


class Cluster:
    """One island as one rank sees it: the places of the ranks, their process groups, and this rank's traffic.

    Gathers and reductions have process groups of their own, so that a prefetched gather never queues behind a
    reduction. `Cluster.of` makes one cluster per mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Make the process groups. Collective over the ranks of `mesh`.

        Args:
            mesh: has the axes (island, node, local), or (node, local), or one axis. A mesh of one axis crosses the wire
                unless the axis is named "local".

        Raises:
            ValueError: the mesh has other axes, or this rank is not in the mesh.
        """
        islands = _islands(mesh)
        position = (islands == dist.get_rank()).nonzero()
        if len(position) != 1:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}")
        self.mesh = mesh
        self.device_type = mesh.device_type
        self.traffic = Traffic()
        self.num_islands, self.num_nodes, self.num_local = islands.shape
        self.island_rank, self.node_rank, self.local_rank = position[0].tolist()
        self.size = self.num_nodes * self.num_local
        """The number of ranks in the island."""
        self._ranks: list[list[int]] = islands[self.island_rank].tolist()  # by node, then by local rank
        self.gather_groups = _axis_groups(islands)
        """By level, the ranks of this island whose places differ on that level only; None if the level has one rank."""
        self.reduce_groups = _axis_groups(islands)
        """The same ranks in other process groups."""
        is_world = self.size == dist.get_world_size()
        self.all_group = dist.group.WORLD if is_world else _own_group(islands.flatten(1).tolist())
        """All ranks of the island, in rank order; None if the island has one rank and the job has several."""
        # on every device, islands exchange tensors in host memory
        self.island_group = _own_group(islands.flatten(1).T.tolist(), backend="gloo")
        """The ranks with the same place in every island, in the order of islands; None if there is one island."""

    @staticmethod
    def of(mesh: DeviceMesh) -> Cluster:
        """The cluster of `mesh`; the same object for the same mesh. The first call is collective over all ranks.

        Raises:
            ValueError: see `Cluster`.
        """
        cluster = getattr(mesh, "_laconic_cluster", None)
        if cluster is None:
            cluster = Cluster(mesh)
            mesh._laconic_cluster = cluster  # type: ignore[attr-defined]
        return cluster

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)

    @property
    def shard_index(self) -> int:
        """The shard that this rank owns. Rank (n, l) owns l * N + n: [Note: A bucket's order] in shard/bucket.py."""
        return self.local_rank * self.num_nodes + self.node_rank

    @property
    def ranks(self) -> set[int]:
        """All ranks of the island, by their numbers in the whole job."""
        return {rank for node in self._ranks for rank in node}

    def level_to(self, shard: int) -> IslandLevel:
        """The level of a transfer between this rank and the owner of `shard`."""
        return "local" if shard % self.num_nodes == self.node_rank else "node"

    def global_rank(self, shard: int) -> int:
        """The rank, in the whole job, that owns `shard`."""
        return self._ranks[shard % self.num_nodes][shard // self.num_nodes]


def _islands(mesh: DeviceMesh) -> torch.Tensor:
    """The ranks of all islands, (I, N, L): every rank takes part in making every group."""
    names = mesh.mesh_dim_names
    ranks = mesh.mesh.cpu()
    if ranks.ndim == 3 and names == AXES:
        return ranks
    if ranks.ndim == 2 and names in (None, AXES[1:]):
        return ranks[None]
    if ranks.ndim == 1:
        return ranks[None, None, :] if names == ("local",) else ranks[None, :, None]
    raise ValueError(
        f"fully_shard needs a mesh with axes {AXES}, {AXES[1:]} or a single axis, got shape {tuple(ranks.shape)} with "
        f"axes {names}; laconic.init_mesh builds one from torchrun's environment"
    )


def _axis_groups(islands: torch.Tensor) -> dict[IslandLevel, dist.ProcessGroup | None]:
    _, num_nodes, num_local = islands.shape
    node = _own_group(islands.transpose(1, 2).reshape(-1, num_nodes).tolist())
    return {"node": node, "local": _own_group(islands.reshape(-1, num_local).tolist())}


def _own_group(lists_of_ranks: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """Make a process group of each list, and return the group that holds this rank; None for lists of one rank."""
    if len(lists_of_ranks[0]) == 1:
        return None
    if sum(map(len, lists_of_ranks)) < dist.get_world_size():  # part of a larger mesh: other ranks make other groups
        own = next(ranks for ranks in lists_of_ranks if dist.get_rank() in ranks)
        return dist.new_group(own, backend=backend, use_local_synchronization=True)
    group, _ = dist.new_subgroups_by_enumeration(lists_of_ranks, backend=backend)
    return group
