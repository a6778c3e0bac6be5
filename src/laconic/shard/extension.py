"""What rooms above add to the engine: methods of sharded modules, and an observer of each root.

This file imports no torch, so that rooms above can add their part before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

overrides: dict[str, Callable[..., Any]] = {}
"""Methods that a sharded class gets if the plain class has a method of the same name. Rooms above fill it, so that this
room does not know them."""


class Observer:
    """Hears what the engine does, in the order in which all ranks do it, and may raise. This one does nothing.

    The engine makes one for each root. Class methods hear of what happens before a root leads. Here `root` is a
    `Root`, `unit` a `Unit`, `bucket` a `Bucket`, `gather` a `UnitGather`, `transfer` a `SumTransfer`; this file
    cannot import them.
    """

    inspects = False
    """True if this observer looks at weights and sums: hears of `before_gather`, `gathered`, `arrived`, `sum_begun`,
    `sum_arrived` and `replicas_summed`."""

    def __init__(self, root: Any) -> None:
        """Observe `root`, which is about to lead its units."""

    @classmethod
    def sharding(cls, module: Any) -> None:
        """`fully_shard` was given a module."""

    @classmethod
    def broadcasting(cls, module: Any, managed: Sequence[Any]) -> None:
        """`fully_shard` is about to give all ranks the first rank's parameters."""

    @classmethod
    def cut(cls, bucket: Any, whole: Sequence[Any]) -> None:
        """This rank has taken its shard from whole parameters."""

    @classmethod
    def loaded(cls, buckets: Sequence[Any]) -> None:
        """`load_state_dict` has run; it may have replaced parameters."""

    def leading(self) -> None:
        """The root has found its units. It has sent nothing yet."""

    def begin_forward(self) -> None:
        """A forward of the root begins."""

    def sharing(self, buffers: Mapping[str, str]) -> None:
        """Ranks are about to share buffers with these shapes and dtypes, which are new to this rank."""

    def before_gather(self, gather: Any) -> Sequence[Any]:
        """A unit is about to be gathered. Returns the buckets whose caches must not be used."""
        return ()

    def gather_begun(self, gather: Any) -> None:
        """The gather of a unit has begun, and needs other ranks."""

    def arrived(self, gather: Any) -> None:
        """The full buffers of a unit have been filled, and its caches with them."""

    def gathered(self, gather: Any) -> None:
        """Compute is about to use the full buffers of a unit."""

    def mistrusts_copies(self, bucket: Any) -> bool:
        """True if nodes shall compare their copies of a bucket before the next difference."""
        return False

    def different_copies(self, cluster: Any, buckets: Sequence[Any]) -> list[Any]:
        """The buckets whose cached node shards differ between the nodes of `cluster`. Collective."""
        return []

    def reducing(self, unit: Any, *, across_nodes: bool) -> None:
        """A unit is about to reduce the gradients of a bucket."""

    def sum_begun(self, bucket: Any, level: Any, transfer: Any) -> None:
        """The parts of a sum are on their way."""

    def sum_arrived(self, bucket: Any, level: Any, transfer: Any) -> None:
        """The parts of a sum are about to be awaited and added."""

    def replicas_summed(self, bucket: Any, shard: Any) -> None:
        """A sum over the islands, (C,), is complete."""

    def all_issued(self) -> None:
        """A backward, or a forward that none follows, has issued all its transfers, but has not awaited them."""

    def settled(self, *, ends_step: bool, is_last: bool) -> None:
        """A backward, or a forward that none follows, is complete.

        `ends_step` says whether the next forward begins another step; `is_last` is False if transfers may be under way.
        """

    def abandoned(self) -> None:
        """A forward or backward that raised was given up."""


def _no_guard() -> type[Observer]:
    return Observer


observer_class: Callable[[], type[Observer]] = _no_guard
"""Finds the class of observers. The package sets it to that of the room `guard`."""
