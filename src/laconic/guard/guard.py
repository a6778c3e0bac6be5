"""The checks and audits at each event of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from laconic.guard.comparison import IssuedProgram, compare, compare_broadcast, describe_units, num_parts
from laconic.guard.inspection import Inspection
from laconic.guard.traps import (
    Strays,
    check_embeddings,
    check_unwrapped,
    note_first_weights,
    refuse_ties,
    refuse_unequal_weights,
    take_loaded_values,
    take_values_and_warn,
    warn_of_overwritten_values,
)
from laconic.shard.bucket import Bucket, ManagedParameter
from laconic.shard.gather import UnitGather
from laconic.shard.unit import Root, Unit


class Guard(Inspection):
    """Looks for mistakes and damage in the training of one root: see `Observer` for the events."""

    def __init__(self, root: Root) -> None:
        """See `Observer`."""
        super().__init__(root)
        self._root, self._units, self._buckets = root, root.units, root.buckets
        self._program = IssuedProgram(root.cluster)
        self._strays: Strays | None = None
        self._trained: list[list[bool]] = []
        """Of each bucket, the parameters that were trained when it was gathered last."""

    @classmethod
    def sharding(cls, module: nn.Module) -> None:
        """See `Observer`.

        Raises:
            ValueError: see `check_unwrapped` and `check_embeddings`.
        """
        check_unwrapped(module)
        check_embeddings(module)

    @classmethod
    def broadcasting(cls, module: nn.Module, managed: Sequence[ManagedParameter]) -> None:
        """See `Observer`.

        Raises:
            RanksDifferError: ranks give other parameters.
        """
        compare_broadcast(module, managed)
        warn_of_overwritten_values(managed)

    @classmethod
    def cut(cls, bucket: Bucket, whole: Sequence[Tensor]) -> None:
        """See `Observer`."""
        note_first_weights(bucket, whole)

    @classmethod
    def loaded(cls, buckets: Sequence[Bucket]) -> None:
        """See `Observer`.

        Raises:
            RuntimeError: see `take_loaded_values`.
        """
        take_loaded_values(buckets)

    def leading(self) -> None:
        """Look for all mistakes that the first forward can show. Collective over the mesh.

        Raises:
            RuntimeError: see `refuse_ties` and `take_values_and_warn`.
            RanksDifferError: a setting differs between ranks, or the weights that they began with.
        """
        refuse_ties(self._buckets)
        for bucket in self._buckets:
            take_values_and_warn(bucket)
        cluster = self._root.cluster
        compare(
            cluster.all_flag_group, f"the first forward of {type(self._root.top.modules[0]).__name__}",
            describe_units(self._units), island=cluster.island_rank, parts=num_parts(self._units),
        )  # fmt: skip
        self._strays = Strays(self._root.top.modules, [unit.origin for unit in self._units], self._buckets)
        refuse_unequal_weights(self._buckets)

    def begin_forward(self) -> None:
        """See `Observer`."""
        if self._strays is not None:
            self._strays.look_again()
        self._program.settle()
        super().begin_forward()

    def sharing(self, buffers: Mapping[str, str]) -> None:
        """See `Observer`. Collective over the mesh.

        Raises:
            RanksDifferError: ranks have other buffers.
        """
        name = type(self._root.top.modules[0]).__name__
        described = {"the model": {f"the buffer {name}": text for name, text in buffers.items()}}
        compare(self._root.cluster.all_flag_group, f"the exchange of the buffers of {name}", described)

    def gather_begun(self, gather: UnitGather) -> None:
        """See `Observer`."""
        self._program.note(f"the gather of {gather.buckets[0].unit_name}")

    def reducing(self, unit: Unit, *, across_nodes: bool) -> None:
        """See `Observer`."""
        self._program.note(f"the reduction of {unit.progress.name}{'' if across_nodes else ' inside the node'}")

    def all_issued(self) -> None:
        """See `Observer`."""
        self._note_frozen()
        self._program.start_comparison(diverges=any([bucket.replicas_diverge for bucket in self._buckets]))  # noqa: C419  a generator takes a call for each

    def _note_frozen(self) -> None:
        """Let the ranks compare what was frozen, or trains again, since the last backward."""
        trained, before = [bucket.full.trained for bucket in self._buckets], self._trained
        self._trained = trained
        if trained == before:
            return
        for bucket, now, then in zip(self._buckets, trained, before, strict=False):
            for slot, trains, trained_then in zip(bucket.layout.slots, now, then, strict=False):
                if trains != trained_then:
                    self._program.note(f"{bucket.unit_name}: {slot.name} {'trains' if trains else 'is frozen'}")

    def settled(self, *, ends_step: bool, is_last: bool) -> None:
        """See `Observer`."""
        if not self._root.top.gather.is_stream_ordered:  # transfers let the host wait anyway
            self._program.settle()
        super().settled(ends_step=ends_step, is_last=is_last)

    def abandoned(self) -> None:
        """See `Observer`."""
        super().abandoned()
        self._program.forget()
