"""Buffers, such as the statistics of BatchNorm: those of the first rank on all ranks, or each rank's own.

[Note: Buffers]
A module's buffers are on every rank, and forward may change them with what this rank's batch says. FSDP2 leaves them
so. DDP gives all ranks the first rank's at the start of a forward, if the forward before it was one that trains and
syncs gradients, so also at the start of an evaluation. `broadcast_buffers=True` does the same, by these rules:

- It covers all buffers below the modules of its call of `fully_shard`, those of inner units too.
- The root sends them, with one message for each dtype, however many units ask for it. Ranks compare the names, shapes
  and dtypes before the first message, and again when this rank's have changed: a message of another length would end
  processes, and one of another order would fill the wrong buffers.
- A buffer goes to the ranks that share the parameters of the innermost unit around it, and so sum their gradients. If
  islands train on their own, each island has a first rank.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from laconic.comm.cluster import Cluster
from laconic.comm.collectives import copy_first
from laconic.ragged.dtensor import is_torch_dtensor


class Owner(NamedTuple):
    """A unit, as its buffers see it."""

    modules: Sequence[nn.Module]
    cluster: Cluster
    shares: bool
    """True if all ranks get the first rank's buffers."""


class Buffers:
    """The buffers of all units of one root: [Note: Buffers]."""

    def __init__(self, units: Sequence[Owner], diverges: Callable[[Cluster], bool]) -> None:
        """Take the units of one tree, outermost first.

        `diverges` says whether a cluster's islands train on their own.
        """
        owners: dict[nn.Module, Owner] = {}
        covered: set[nn.Module] = set()
        self._names: dict[nn.Module, str] = {}
        for unit in units:
            for module in unit.modules:
                for name, child in module.named_modules():
                    self._names.setdefault(child, name)
                    owners[child] = unit
                    if unit.shares:
                        covered.add(child)
        self._owners, self._diverges = owners, diverges
        self._shared: dict[Cluster, list[nn.Module]] = defaultdict(list)
        for child in owners:
            if child in covered:
                self._shared[owners[child].cluster].append(child)
        self._own = [child for child in owners if child not in covered]
        self._described: dict[str, str] = {}
        self._is_due = True
        self._is_watching = bool(self._own)
        self._before: list[tuple[str, Tensor, Tensor]] = []  # name, buffer, values: BatchNorm changes no version

    def begin_forward(self, *, syncs: bool, compare: Callable[[Mapping[str, str]], None]) -> None:
        """Share the buffers if it is time. Collective.

        Args:
            syncs: whether backward will sync gradients.
            compare: called with the shapes and dtypes of the buffers, by name, if they are new. It raises if ranks have
                others.
        """
        if self._is_due and self._shared:
            shared = {cluster: self._of(modules) for cluster, modules in self._shared.items()}
            described = {
                name: f"{tuple(buffer.shape)} {buffer.dtype}" for own in shared.values() for name, buffer in own.items()
            }
            if described != self._described:
                compare(described)
                self._described = described
            for cluster, buffers in shared.items():
                _share(cluster, buffers.values(), across_islands=not self._diverges(cluster))
        self._is_due = torch.is_grad_enabled() and syncs
        if self._is_watching and torch.is_grad_enabled():
            self._before = [(name, buffer, buffer.clone()) for name, buffer in self._watched()]
            self._is_watching = bool(self._before)

    def end_forward(self) -> None:
        """After the first forward that trains, say if it has changed buffers that ranks do not share."""
        if not self._before:
            return
        self._is_watching = False
        changed = [name for name, buffer, values in self._before if not torch.equal(buffer, values)]
        self._before = []
        if changed:
            others = f" and {len(changed) - 1} more buffers change" if len(changed) > 1 else " changes"
            warnings.warn(
                f"{changed[0]}{others} in forward, by each rank's own batches, and so will differ between ranks, as "
                "under FSDP2. Pass broadcast_buffers=True to give all ranks those of the first rank, as DDP does, or "
                "use torch.nn.SyncBatchNorm",
                stacklevel=2,
            )

    def _of(self, modules: Sequence[nn.Module]) -> dict[str, Tensor]:
        """The buffers of modules by their names in the root, of a DTensor this rank's part; none on the meta device."""
        found: dict[int, tuple[str, Tensor]] = {}
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    local = buffer._local_tensor if is_torch_dtensor(buffer) else buffer
                    found.setdefault(id(buffer), (f"{self._names[module]}.{name}".lstrip("."), local))
        return dict(found.values())

    def _watched(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that may come to differ, with their names; only on a first rank, which alone says so."""
        for module in self._own:
            cluster = self._owners[module].cluster
            is_first = cluster.island_rank == cluster.node_rank == cluster.local_rank == 0
            if not module._buffers or not is_first or isinstance(module, nn.SyncBatchNorm):
                continue
            if cluster.size * (1 if self._diverges(cluster) else cluster.num_islands) == 1:
                continue
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and not buffer.is_meta:
                    yield f"{self._names[module]}.{name}".lstrip("."), buffer


@torch.no_grad()
def _share(cluster: Cluster, buffers: Iterable[Tensor], *, across_islands: bool) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for buffer in buffers:
        if buffer.numel():
            by_dtype[buffer.dtype].append(buffer)
    for equal in by_dtype.values():
        message = torch.cat([buffer.reshape(-1).to(cluster.device) for buffer in equal])
        copy_first(cluster, message, across_islands=across_islands)
        # as DDP does: a graph that has saved a buffer may still run backward
        with torch.autograd._unsafe_preserve_version_counter(tuple(equal)):
            for buffer, part in zip(equal, message.split([each.numel() for each in equal]), strict=True):
                buffer.copy_(part.view(buffer.shape))
