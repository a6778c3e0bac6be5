"""Mesh and groups: where this rank stands in I islands x N nodes x L local ranks.

Axis names elsewhere: `dp_shard` is nodes x local ranks, `dp_replicate` is islands.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laconic.comm.traffic import Traffic

AXES = ("island", "node", "local")


def init_mesh(device_type: str, *, islands: int = 1, nodes: int | None = None, local: int | None = None) -> DeviceMesh:
    """Build the mesh (island, node, local) from torchrun's environment, starting the default process group if needed.

    Args:
        device_type: "cpu" or "cuda".
        islands: groups of nodes that synchronise only now and then (`dp_replicate`); must divide the number of nodes.
        nodes: nodes in one island. Default: all nodes divided by `islands`.
        local: ranks per node. Default: torchrun's LOCAL_WORLD_SIZE.

    Raises:
        ValueError: the ranks do not fill the mesh, nodes have unequal numbers of ranks, or there is no launcher.
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
    """This node's number of ranks, after making sure that every node has as many."""
    mine = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    if device == "cuda":  # NCCL needs the device before its first collective
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([mine], device=device))
    by_rank = [int(size) for size in sizes]
    if len(set(by_rank)) > 1:
        raise ValueError(
            f"nodes of unequal size: ranks per node, rank by rank, are {by_rank}; laconic needs the same number of "
            "ranks on every node"
        )
    return mine


class Cluster:
    """One island as one rank sees it: positions, groups and counters. Made once per mesh by `Cluster.of`.

    Gathering and reducing use process groups of their own, so that a prefetched gather never queues behind a reduction.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Raises ValueError for meshes that are not (island, node, local), (node, local) or one axis."""
        self.mesh = mesh
        self.traffic = Traffic()
        self.device_type = mesh.device_type
        sharding = _sharding_ranks(mesh)  # (N, L), global ranks
        self.num_nodes, self.num_local = sharding.shape
        self._ranks: list[list[int]] = sharding.tolist()
        position = (sharding == dist.get_rank()).nonzero()
        if len(position) != 1:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}")
        self.node_rank, self.local_rank = (int(index) for index in position[0])
        self.size = self.num_nodes * self.num_local
        families = _families(mesh)
        self.gather_groups = _axis_groups(families)
        self.reduce_groups = _axis_groups(families)
        is_world = families[0].numel() == dist.get_world_size()
        self.all_group = dist.group.WORLD if is_world else _own_group(families.flatten(1).tolist())
        """Every rank of the island, in global order."""
        self.num_islands = len(families)
        self.island_rank = int((families == dist.get_rank()).nonzero()[0, 0])
        # Islands exchange what rests in host memory, whatever device they compute on.
        across = families.flatten(1).T.tolist()
        self.island_group = _own_group(across, backend="gloo")
        """The ranks at this rank's place in all islands, in the order of islands; None if there is one island."""

    @staticmethod
    def of(mesh: DeviceMesh) -> Cluster:
        """The cluster of `mesh`; the same object for the same mesh. The first call is collective over all ranks."""
        cluster = getattr(mesh, "_laconic_cluster", None)
        if cluster is None:
            cluster = Cluster(mesh)
            mesh._laconic_cluster = cluster  # type: ignore[attr-defined]
        return cluster

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device_type)

    @property
    def shard_index(self) -> int:
        """Rank (n, l) owns shard l * N + n: see [Note: A bucket's order] in shard/bucket.py."""
        return self.shard_index_of(self.node_rank, self.local_rank)

    @property
    def ranks(self) -> set[int]:
        """All ranks of the island, by their numbers in the whole job."""
        return {rank for node in self._ranks for rank in node}

    def node_of(self, shard: int) -> int:
        """The node of the rank that owns `shard`."""
        return shard % self.num_nodes

    def global_rank(self, shard: int) -> int:
        """The rank, in the whole job, that owns `shard`."""
        return self._ranks[self.node_of(shard)][shard // self.num_nodes]

    def shard_index_of(self, node_rank: int, local_rank: int) -> int:
        """The shard that rank (node_rank, local_rank) owns."""
        return local_rank * self.num_nodes + node_rank


def _sharding_ranks(mesh: DeviceMesh) -> torch.Tensor:
    """The global ranks of this rank's island, (N, L)."""
    names = mesh.mesh_dim_names
    ranks = mesh.mesh.cpu()
    if ranks.ndim == 3 and names == AXES:
        island = (ranks == dist.get_rank()).nonzero()
        return ranks[int(island[0, 0])] if len(island) else ranks[0]
    if ranks.ndim == 2 and names in (None, AXES[1:]):
        return ranks
    if ranks.ndim == 1:  # one level: a mesh named "local" says that no wire is crossed
        return ranks[None, :] if names == ("local",) else ranks[:, None]
    raise ValueError(
        f"fully_shard needs a mesh with axes {AXES}, {AXES[1:]} or a single axis, got shape {tuple(ranks.shape)} with "
        f"axes {names}; laconic.init_mesh builds one from torchrun's environment"
    )


def _families(mesh: DeviceMesh) -> torch.Tensor:
    """All islands of the mesh, (I, N, L): every rank must take part in making every group."""
    own = _sharding_ranks(mesh)
    return mesh.mesh.cpu().reshape(-1, *own.shape)


def _axis_groups(families: torch.Tensor) -> dict[str, dist.ProcessGroup | None]:
    """This rank's process group along each axis; None along an axis of one rank, where there is nobody to talk to."""
    along_node = families.transpose(1, 2).reshape(-1, families.shape[1]).tolist()
    along_local = families.reshape(-1, families.shape[2]).tolist()
    return {"node": _own_group(along_node), "local": _own_group(along_local)}


def _own_group(lists_of_ranks: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    if len(lists_of_ranks[0]) == 1:
        return None
    if sum(map(len, lists_of_ranks)) < dist.get_world_size():  # a part of a larger mesh: nobody knows the other parts
        own = next(ranks for ranks in lists_of_ranks if dist.get_rank() in ranks)
        return dist.new_group(own, backend=backend, use_local_synchronization=True)
    group, _ = dist.new_subgroups_by_enumeration(lists_of_ranks, backend=backend)
    return group
