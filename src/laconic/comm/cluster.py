"""The device mesh of I islands x N nodes x L local ranks, this rank's place in it, and the process groups.

In torchtitan's words, `dp_replicate` is the island axis, and `dp_shard` is the node and local axes together.

[Note: What is made once]
Meshes and clusters are made once for each default process group, by value: equal arguments find them again. All ranks
find or make them alike, so no call makes groups on some ranks only. When a rank starts another default process group,
what it made on the last one is forgotten. Where threads play the ranks, each has a default group, and so clusters, of
its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from laconic import _compat
from laconic.comm.agreement import RankGroup
from laconic.comm.failure import watch_peers
from laconic.comm.groups import counting_started, has_peers, new_group
from laconic.comm.launch import start_process_group
from laconic.comm.traffic import IslandLevel, Level, Traffic
from laconic.comm.watch import waiting_for, watch_progress
from laconic.errors import RanksDifferError

_T = TypeVar("_T")
AXES = ("island", "node", "local")

_made_on: dict[dist.ProcessGroup, dict[Any, Any]] = {}
"""The meshes, the clusters and the shared groups that were made on each default process group."""


def _once(key: Any, make: Callable[[], _T]) -> _T:
    """Return what `make` has made for `key` on the default process group: [Note: What is made once]."""
    world, thread = dist.group.WORLD, threading.get_ident()
    assert world is not None
    if world not in _made_on:
        for group in [group for group, earlier in _made_on.items() if earlier["thread"] == thread]:
            del _made_on[group]
        _made_on[world] = {"thread": thread}
    made = _made_on[world]
    if key not in made:
        made[key] = make()
    return cast(_T, made[key])


def default_mesh(device_type: str | None = None) -> DeviceMesh:
    """Return the mesh of all ranks for the machine's accelerator, or for the CPU if there is none; see `init_mesh`.

    Args:
        device_type: the type of another device.

    Raises:
        ValueError: see `init_mesh`.
    """
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = "cpu" if accelerator is None else accelerator.type
    return init_mesh(device_type)


def init_mesh(
    device_type: str,
    *,
    islands: int = 1,
    nodes: int | None = None,
    local: int | None = None,
    timeout: timedelta | None = None,
) -> DeviceMesh:
    """Build the mesh (island, node, local) from torchrun's environment; start the default process group if needed.

    Collective over all ranks of the job. Equal arguments give the same mesh again: [Note: What is made once]. On an
    accelerator it also selects this rank's device.

    Args:
        device_type: "cpu" or the type of an accelerator, such as "cuda".
        islands: the number of islands, which must divide the number of nodes. Islands hold the same parameters and
            average their gradients in every step, unless `LocalSteps` lets them train on their own.
        nodes: the number of nodes in one island. Default: all nodes divided by `islands`.
        local: the number of ranks per node. Default: torchrun's LOCAL_WORLD_SIZE.
        timeout: the longest that a collective may take, in all groups that laconic makes, if this call starts the
            default process group. Otherwise the timeout is that of the default process group. Default: torch's.

    Raises:
        ValueError: the ranks do not fill the mesh, nodes have unequal numbers of ranks, the machine has no such
            device, or torchrun's environment is missing and there is no process group.
    """
    _select_device(device_type)
    _start_process_group(device_type, timeout)
    world = dist.get_world_size()
    local = local if local is not None else _ranks_per_node(world)
    if min(islands, local) < 1 or (nodes is not None and nodes < 1):
        raise ValueError(f"a mesh needs positive sizes, got islands={islands}, nodes={nodes}, local={local}")
    if nodes is None:
        nodes = max(1, world // (islands * local))
    if islands * nodes * local != world:
        raise ValueError(
            f"{islands} islands x {nodes} nodes x {local} local ranks make {islands * nodes * local} ranks, but the "
            f"job has {world}; start every node with the same --nproc-per-node, or give sizes whose product is {world}"
        )
    sizes = islands, nodes, local

    def make() -> DeviceMesh:
        _refuse_other_shapes("the mesh", [device_type, *sizes])
        return make_mesh(device_type, sizes, AXES)

    return _once(("init", device_type, sizes), make)


def _refuse_other_shapes(what: str, shape: list[Any]) -> None:
    """Raise on all ranks if one of them is about to make groups for another shape. Collective over all ranks."""
    if not has_peers():
        return
    made = [
        f"{each[0]} {each[1]}" if isinstance(each, list) and len(each) == 2 else "another collective call"
        for each in RankGroup().gather([what, shape])
    ]
    for rank, theirs in enumerate(made):
        if theirs != made[0]:
            raise RanksDifferError(
                f"rank {rank} differs from rank 0: it makes {theirs}, and rank 0 makes {made[0]}. All ranks must make "
                "one mesh, with equal arguments, in the same order"
            )


def make_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Make a mesh of all ranks, whose groups are those of gathers: [Note: Communicators] in groups.py. Collective.

    Those that torch makes would be further communicators. They have a timeout of their own, of half an hour on Gloo.
    In a rehearsal torch would make the groups of all ranks, which takes long for many. A single axis needs no name.
    """
    if len(shape) == 1:
        assert dist.group.WORLD is not None
        return DeviceMesh.from_group(dist.group.WORLD, device_type, mesh_dim_names=names)
    ranks = torch.arange(dist.get_world_size()).view(shape)
    with waiting_for(f"the process groups of the mesh {shape}"):
        along = [_device_group(_rows(ranks, axis), device_type, "gather") for axis in range(ranks.ndim)]
        alone = [new_group([dist.get_rank()], None)] if None in along else []  # it begins only if somebody uses it
    groups = [alone[0] if group is None else group for group in along]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)


def _start_process_group(device_type: str, timeout: timedelta | None) -> None:
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"init_mesh needs torchrun's environment, but {', '.join(missing)} is not set; start the script with "
            "`torchrun --nproc-per-node=...`, or call torch.distributed.init_process_group first"
        )
    device = None if device_type == "cpu" else torch.device(device_type, torch.accelerator.current_device_index())
    start_process_group(dist.get_default_backend_for_device(device_type), timeout, device)


def _select_device(device_type: str) -> None:
    """Make an accelerator's device current, by LOCAL_RANK. NCCL needs it before its first collective."""
    if device_type == "cpu":
        return
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device_type:
        raise ValueError(
            f"init_mesh({device_type!r}) needs such a device, but torch finds {accelerator or 'none'} here"
        )
    rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", 0)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())


def _ranks_per_node(world: int) -> int:
    """The number of ranks on this node. Collective: every rank checks that all nodes have equally many."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world))

    def check() -> int:
        by_rank = RankGroup().gather(num_local)
        if len(set(by_rank)) > 1:
            raise ValueError(
                f"nodes of unequal size: ranks per node, rank by rank, are {by_rank}; laconic needs the same number of "
                "ranks on every node"
            )
        return num_local

    return _once(("ranks per node", num_local), check)


class Cluster:
    """One island as one rank sees it: the places of the ranks, their process groups, and this rank's traffic.

    Gathers and reductions have process groups of their own, so that a prefetched gather never queues behind a
    reduction. `Cluster.of` makes one cluster for each arrangement of ranks, so models on equal meshes share the groups
    and the traffic counters.
    """

    def __init__(self, mesh: DeviceMesh, islands: Tensor | None = None) -> None:
        """Make the process groups. Collective over the ranks of `mesh`.

        Args:
            mesh: has one of these forms:

                - axes (island, node, local) or (node, local), or two axes without names, which are node and local;
                - two axes with other names: the first replicates, as islands do, and the second shards;
                - one axis, which shards.

                An axis that shards is one level if its name is "node", which crosses the wire, or "local", which does
                not. Any other is arranged into nodes and local ranks by torchrun's LOCAL_WORLD_SIZE, provided that each
                node has equally many ranks of the axis, side by side. Otherwise it is one level that crosses the wire.
            islands: the ranks of all islands, (I, N, L), if they are known already.

        Raises:
            ValueError: the mesh has other axes, or this rank is not in the mesh.
        """
        islands = _arrange(mesh) if islands is None else islands
        watch_peers()
        watch_progress()
        if islands.numel() == dist.get_world_size():
            _refuse_other_shapes("a mesh of islands, nodes and local ranks", [mesh.device_type, *islands.shape])
        self.mesh = mesh
        self.device_type = mesh.device_type
        self.traffic = Traffic()
        self.cut: Cluster | None = None
        """The same ranks as one island, if these are its `replicas`."""
        self.num_islands, self.num_nodes, self.num_local = islands.shape
        self.island_rank, self.node_rank, self.local_rank = (islands == dist.get_rank()).nonzero()[0].tolist()
        self.size = self.num_nodes * self.num_local
        """The number of ranks in the island."""
        self._ranks: list[list[int]] = islands[self.island_rank].tolist()  # by node, then by local rank
        _adopt_groups(mesh)
        by_island = islands.flatten(1)
        is_world = self.size == dist.get_world_size()
        self.all_group = dist.group.WORLD if is_world else _device_group(by_island.tolist(), self.device_type, "gather")
        """Every rank of the island, in the order of ranks; None for an island of one rank among several."""
        # on every device, islands that train on their own exchange tensors in host memory
        self.island_group = _own_group(by_island.T.tolist(), _compat.host_backend())
        """The ranks with this rank's place in all islands, in the order of islands; None if there is one island."""
        replicas = self.island_group
        if self.device_type != "cpu":  # nothing but sums goes over replicas, so the group of the mesh suits them
            replicas = _device_group(_rows(islands, 0), self.device_type, "gather")
        self.gather_groups: dict[Level, dist.ProcessGroup | None] = {}
        """For each level the ranks that differ on this level only; None if it has one rank."""
        self.reduce_groups: dict[Level, dist.ProcessGroup | None] = {}
        """The same ranks; inside an island in other process groups."""
        for groups, use in ((self.gather_groups, "gather"), (self.reduce_groups, "reduce")):
            groups["node"] = _device_group(_rows(islands, 1), self.device_type, use)
            groups["local"] = _device_group(_rows(islands, 2), self.device_type, use)
            groups["island"] = replicas
        self.flag_group = _host_group(islands[self.island_rank])
        """Every rank of the island, for small messages in host memory; None if there is one."""
        self.all_flag_group = _host_group(islands)
        """Every rank of all islands, in the order of the mesh, for small messages in host memory."""

    @staticmethod
    def of(mesh: DeviceMesh, *, num_local: int | None = None) -> Cluster:
        """The cluster of `mesh`; the same object for meshes of one device type that arrange the same ranks alike.

        `num_local` is the number of ranks per node, side by side, for a mesh that does not say so: one whose last axis
        is not "node" or "local". The first call for a mesh is collective over its ranks. `Cluster.mesh` is the mesh of
        the first call. See [Note: What is made once].

        Raises:
            ValueError: see `Cluster`.
        """

        def make() -> Cluster:
            islands = _arrange(mesh, num_local)
            return _once(("cluster", mesh.device_type, *_places(islands)), lambda: Cluster(mesh, islands))

        return _once(("mesh", mesh.device_type, mesh.mesh_dim_names, *_places(mesh.mesh), num_local), make)

    @staticmethod
    def over(ranks: Iterable[int], beside: Cluster) -> Cluster:
        """The cluster of one island of `ranks`, arranged into nodes by LOCAL_WORLD_SIZE. Collective over them.

        A new one counts its traffic in that of `beside`, a cluster of this rank.
        """
        members = sorted(ranks)

        def make() -> Cluster:
            is_world = len(members) == dist.get_world_size()
            group = dist.group.WORLD if is_world else _device_group([members], beside.device_type, "gather")
            assert group is not None, "the ranks are several"
            mesh = DeviceMesh.from_group(group, beside.device_type)
            cluster = Cluster.of(mesh)
            if cluster.mesh is mesh:
                cluster.traffic = beside.traffic
            return cluster

        return _once(("over", beside.device_type, *members), make)

    @cached_property
    def replicas(self) -> Cluster | None:
        """The same ranks, each an island of one rank that holds all; their traffic is counted here, too.

        None if there are islands already, or further ranks in the job. The first use is collective over the ranks.
        """
        if self.num_islands > 1 or self.size == 1 or self.size < dist.get_world_size():
            return None
        shape = self.size, 1, 1
        replicas = Cluster(make_mesh(self.device_type, shape, AXES), torch.arange(self.size).view(shape))
        replicas.traffic, replicas.cut = self.traffic, self
        return replicas

    def bytes_by_level(self, level: Level, nbytes: int, *, is_ring: bool = False) -> dict[Level, int]:
        """The levels that `nbytes` bytes take which each rank sends along `level`, as a mean over the ranks.

        They go to all other ranks in equal parts, or with `is_ring` to the next one.
        """
        if self.cut is None:
            return {level: nbytes}
        num_nodes, num_local, size = self.cut.num_nodes, self.cut.num_local, self.cut.size
        if is_ring:  # one rank of each node sends to another node
            crossing = nbytes // num_local if num_nodes > 1 else 0
        else:
            crossing = nbytes * (size - num_local) // (size - 1)
        parts: dict[Level, int] = {"node": crossing, "local": nbytes - crossing}
        return {each: part for each, part in parts.items() if part}

    @property
    def communicators(self) -> dict[str, dist.ProcessGroup]:
        """The process groups of the device that this rank has for this cluster, each once, by what they are for.

        Each takes device memory on an accelerator: `laconic.comm.groups.started_bytes`.
        """
        named = {"default": dist.group.WORLD, "all": self.all_group}
        named |= {f"gather {level}": group for level, group in self.gather_groups.items()}
        named |= {f"reduce {level}": group for level, group in self.reduce_groups.items()}
        uses: dict[dist.ProcessGroup, list[str]] = {}
        for name, group in named.items():
            if group is not None:
                uses.setdefault(group, []).append(name)
        return {", ".join(names): group for group, names in uses.items()}

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.accelerator.current_device_index())

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks of the island as a mesh of one axis. The first use is collective over the island."""
        if self.mesh.ndim == 1:
            return self.mesh
        if self.all_group is None:  # one rank among several
            return self.mesh[(self.mesh.mesh_dim_names or AXES)[-1]]
        return DeviceMesh.from_group(self.all_group, self.device_type)

    @property
    def num_cutting_axes(self) -> int:
        """The number of the mesh's last axes that cut parameters. An axis before them replicates parameters."""
        has_replicas = self.mesh.ndim == 3 or (self.mesh.mesh_dim_names or AXES[1:]) != AXES[1:]
        return self.mesh.ndim - 1 if has_replicas and self.mesh.ndim > 1 else self.mesh.ndim

    @property
    def shard_index(self) -> int:
        """The shard that this rank owns. Rank (n, l) owns l * N + n: [Note: A bucket's order] in shard/bucket.py."""
        return self.local_rank * self.num_nodes + self.node_rank

    @property
    def ranks(self) -> set[int]:
        """All ranks of all islands, by their numbers in the whole job."""
        return set(self.mesh.mesh.flatten().tolist())

    def place_on(self, level: Level) -> tuple[int, int]:
        """This rank's place on `level`, and the number of places."""
        return {
            "island": (self.island_rank, self.num_islands),
            "node": (self.node_rank, self.num_nodes),
            "local": (self.local_rank, self.num_local),
        }[level]

    def level_to(self, shard: int) -> IslandLevel:
        """The level of a transfer between this rank and the owner of `shard`."""
        return "local" if shard % self.num_nodes == self.node_rank else "node"

    def global_rank(self, shard: int) -> int:
        """The rank, in the whole job, that owns `shard`."""
        return self._ranks[shard % self.num_nodes][shard // self.num_nodes]


def _arrange(mesh: DeviceMesh, ranks_per_node: int | None = None) -> Tensor:
    """The ranks of all islands, (I, N, L). Collective over the ranks of a mesh whose names are not ours."""
    ranks, names = mesh.mesh.cpu(), mesh.mesh_dim_names or ()
    if ranks.ndim > 2 and names != AXES:
        raise ValueError(
            f"fully_shard needs a mesh with axes {AXES}, {AXES[1:]}, two axes of which the first replicates and the "
            f"second shards, or a single axis, got shape {tuple(ranks.shape)} with axes {names}; slice the mesh, as in "
            "mesh['dp'], or let laconic.init_mesh build one"
        )
    if not (ranks == dist.get_rank()).any():
        raise ValueError(f"rank {dist.get_rank()} is not in the mesh {mesh}")
    if any((ranks.diff(dim=dim) <= 0).any() for dim in range(ranks.ndim)):  # torch sorts the ranks of a group
        raise ValueError(f"the ranks of a mesh must ascend along each of its axes, got {ranks.tolist()}")
    if ranks.ndim == 3:
        return ranks
    if ranks.ndim == 2 and names in ((), AXES[1:]):
        return ranks[None]
    rows = ranks.view(-1, ranks.shape[-1])
    if names and names[-1] in ("node", "local"):
        num_local = 1 if names[-1] == "node" else rows.shape[1]
    elif ranks_per_node is not None:
        num_local = ranks_per_node
    else:
        size = _agreed_local_size(mesh)
        num_local = 1 if size is None else _side_by_side(rows, size)
    return rows.unflatten(1, (-1, num_local))


def _agreed_local_size(mesh: DeviceMesh) -> int | None:
    """LOCAL_WORLD_SIZE if torchrun has told all ranks of the mesh the same; else None. Collective over the mesh."""
    size: Any = os.environ.get("LOCAL_WORLD_SIZE")
    for axis in reversed(range(mesh.ndim)):
        sizes = RankGroup(mesh.get_group(axis)).gather(size)
        size = sizes[0] if len(set(sizes)) == 1 else None
    return None if size is None else int(size)


def _side_by_side(rows: Tensor, ranks_per_node: int) -> int:
    """The ranks of a row on one node, if they are as many for all rows (I, S) and nodes, side by side; else 1."""
    nodes = rows // ranks_per_node
    num_local = int((nodes[0] == nodes[0, 0]).sum())
    if rows.shape[1] % num_local:
        return 1
    blocks = nodes.unflatten(1, (-1, num_local))
    are_whole = bool((blocks == blocks[:, :, :1]).all())
    are_distinct = all(len(set(row)) == len(row) for row in blocks[:, :, 0].tolist())
    return num_local if are_whole and are_distinct else 1


def _places(ranks: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of an arrangement of ranks, and its ranks in order: equal for equal arrangements."""
    return tuple(ranks.shape), tuple(ranks.flatten().tolist())


def _rows(ranks: Tensor, axis: int) -> list[list[int]]:
    """The ranks along an axis, for each place on the other axes."""
    return ranks.movedim(axis, -1).flatten(0, -2).tolist() if ranks.ndim > 1 else [ranks.tolist()]


def _shares_groups(device_type: str) -> bool:
    """True if process groups are communicators with device memory: [Note: Communicators] in groups.py."""
    assert dist.group.WORLD is not None
    with contextlib.suppress(RuntimeError):  # no backend of the default group is for this device
        return device_type != "cpu" and _compat.backend_of(dist.group.WORLD, device_type) != "gloo"
    return False


def _device_group(lists_of_ranks: list[list[int]], device_type: str, use: str) -> dist.ProcessGroup | None:
    """The process group of this rank's list, to "gather" or to "reduce" in; None for lists of one rank.

    The same lists have the same group again, where groups are shared. All ranks of the lists have asked for them then.
    """
    if len(lists_of_ranks[0]) == 1 or not _shares_groups(device_type):
        return _own_group(lists_of_ranks)
    if use == "gather" and len(lists_of_ranks[0]) == dist.get_world_size():
        return dist.group.WORLD
    return _once(_key(lists_of_ranks, use), lambda: _own_group(lists_of_ranks))


def _key(lists_of_ranks: list[list[int]], use: str) -> tuple[Any, ...]:
    return use, *sorted(map(tuple, lists_of_ranks))


def _adopt_groups(mesh: DeviceMesh) -> None:
    """Let transfers along an axis of a mesh use its group, as FSDP2's do."""
    if _shares_groups(mesh.device_type):
        for axis in range(mesh.ndim):
            rows = _rows(mesh.mesh, axis)
            if len(rows[0]) > 1:
                _once(_key(rows, "gather"), partial(mesh.get_group, axis))


def _host_group(ranks: Tensor) -> dist.ProcessGroup | None:
    """The group of ranks in host memory: one for all clusters of these ranks, however arranged.

    So ranks that arrange them differently find it out there, instead of waiting on different groups.
    """
    members = sorted(ranks.flatten().tolist())
    return _once(("host", *members), lambda: _own_group([members], _compat.host_backend()))


def _own_group(lists_of_ranks: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """Make the process group of this rank's list, with the default group's timeout; None for lists of one rank.

    All ranks of the lists call this. If they are those of the job, groups of a device are split: [Note: Communicators].
    """
    if len(lists_of_ranks[0]) == 1:
        return None
    assert dist.group.WORLD is not None
    timeout = _compat.timeout_of(dist.group.WORLD)
    is_part = sum(map(len, lists_of_ranks)) < dist.get_world_size()  # of a larger mesh, with other groups elsewhere
    own = next(ranks for ranks in lists_of_ranks if dist.get_rank() in ranks)
    device = _compat.splitting_device() if backend is None else None
    with waiting_for(f"the process group of ranks {own}"), counting_started(device):
        if device is not None and not is_part:
            return _compat.split_group(lists_of_ranks, timeout)
        return new_group(own, timeout, backend, device)
