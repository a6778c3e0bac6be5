"""The ways in which a bucket's buffers move between ranks: exactly, or in few bits.

[Note: Spreads] in buffer.py says how each buffer lies over the ranks. Weights cross from shard to node shard as a
`WeightCrossing`, and sums of gradients in the ways of `ways_of_sums`.

[Note: Differences]
A cache still has the node shard of the version before. The owner of a shard codes the difference between its weights
and its part of that node shard, and sends it to all nodes. Every node, the owner's too, adds the decoded difference to
its node shard. So all nodes compute with equal weights, which lag behind the optimizer's by what the codec lost. The
next difference contains that, so nothing is lost for good: the error feeds back by itself, without memory. The
optimizer always moves the exact shard. Source: SDP4Bit (arXiv 2410.15526), which keeps a full replica on every rank;
here the copy is the cache's.

[Note: Exact crossings]
A difference is small only if an optimizer's step has made it, and means something only if all nodes have the same copy.
So weights cross exactly when there is no copy yet, or it was lost; after any edit that was not an optimizer's step, as
a load is; after a backward that failed; when a state dict is taken, so that a resumed run goes on with the same bits;
and every `exact_every` steps. Before the first crossing of new weights the ranks agree on it, bucket by bucket, in one
small message: a crossing is exact if any rank needs that. The message has the number of differences since the last
exact crossing, too, in which ranks must not differ. Every `exact_every` steps they compare the copies themselves, and
in the steps of `Checks(on_damage="regather")`. If they differ, they cross exactly. If they differ again, training
stops, since something else changes weights.

[Note: Lossless crossings]
Gathered weights of 16 bits or fewer can be equal to the optimizer's to the bit, and cross in few bits all the same: the
owner sends by how many units in the last place each pattern has moved (codec/lossless.py). Then copies never lag. Any
patterns may become any others, so an edit or a state dict asks for no exact crossing: a difference to the copy is as
good, if maybe longer. What is left of [Note: Exact crossings] is about copies that are not there, or may be damaged.
Lengths vary with what has changed: [Note: Lengths that vary] in codec/messages.py.

[Note: Versions of the optimizer]
`Bucket.version` counts all edits. Hooks before and after each optimizer's step tell its edits from others: the version
after the step is trusted if the version before was.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from enum import Enum, auto
from operator import attrgetter
from typing import ClassVar
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.codec import CODECS, Codec
from laconic.codec.coding import PartCoding
from laconic.codec.lossless import Ulps
from laconic.codec.lossless_gradients import Exponents
from laconic.codec.messages import KnownLengths, ToldLengths, UnderWay
from laconic.codec.payload import Part, few_bits_of, parts_of_islands, shards_of_nodes
from laconic.codec.sums import CodedSum
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import Communicator, start_flags
from laconic.comm.moves import NOTHING, SumWay
from laconic.comm.traffic import WIRE_LEVELS, Level
from laconic.ragged.steps import OptimizerStep, after_step, before_step
from laconic.shard.bucket import Bucket
from laconic.shard.buffer import LEVELS
from laconic.shard.extension import Observer

_EDITS_BEFORE_WARNING = 8


class CopyState(Enum):
    """The use of the node shard in a cache as the base of a difference."""

    LOST = auto()
    """It is no base: it was never written, it is being written, or `forget` was called."""
    EXACT = auto()
    """It is equal to the weights of the version that crossed last."""
    DECODED = auto()
    """It is equal on all nodes, and lags behind the weights by the error of the codec."""


class WeightCrossing:
    """The gather of a bucket's shards across the nodes: they cross as they are, or as values in a coding.

    Of a coding that loses something every node, the owner's too, uses the decoded values (qwZ of ZeRO++).
    """

    sends_differences: ClassVar[bool] = False
    """True if `prepare` has something to decide."""

    def __init__(self, bucket: Bucket, node: Communicator, messages: KnownLengths | ToldLengths | None = None) -> None:
        """Without `messages` shards cross as they are."""
        self.bucket, self._node, self._messages = bucket, node, messages
        self._is_coded = messages is not None
        """Whether the present version crosses in the coding."""
        self._pending = NOTHING
        self._under_way: UnderWay | None = None
        self.may_make_host_wait = messages is not None and messages.tells_lengths
        """True if `makes_host_wait` may ever be."""

    @property
    def most_bytes(self) -> int:
        """The bytes that a gather brings from other nodes, the most of any rank: alike on all ranks."""
        form = self.bucket.form
        numel = form.geometry.most_others_numel
        return numel * form.dtype.itemsize if self._messages is None else self._messages.others_bytes(numel)

    @property
    def makes_host_wait(self) -> bool:
        """Whether the host must wait for what has been started before it can `finish`, also on an accelerator."""
        return self._is_coded and self.may_make_host_wait

    def prepare(self) -> bool:
        """Decide how the weights of the bucket's present version cross. Returns whether the old node shard is needed.

        Collective over the cluster, if they may cross as differences.
        """
        return False

    def start(self, node_shard: Tensor) -> None:
        """Begin the gather. With True from `prepare`, `node_shard`, (N * C,), has the old node shard."""
        form, messages = self.bucket.form, self._messages
        if self._under_way is not None:  # an exception has cut the last crossing short
            self._free()
        if messages is None or not self._is_coded:
            own = form.as_stored(node_shard)
            if own is None:
                own = form.own_part(node_shard)
                form.write(own)
            self._pending = self._node.all_gather(node_shard, own, numels=form.geometry.numels_on["node"])
            return
        held, loses = form.own_part(node_shard), messages.coding.loses
        part = self.bucket.stored.shard if loses else form.as_stored(held)
        if part is None:
            part = torch.empty_like(held)
            form.write(part)
        self._under_way = messages.start_gather(part, base=held if self.sends_differences else None)
        self.bucket.ledger.hold(self._under_way.nbytes)
        if not loses:
            held.copy_(part)

    def finish(self, node_shard: Tensor) -> None:
        """Finish the gather: `node_shard` has the shards of all nodes. Padding may keep what it has."""
        if self._is_coded:
            assert self._under_way is not None
            self._under_way.finish(self.bucket.form.peers_of(node_shard), adds=self.sends_differences)
            self._free()
        else:
            pending, self._pending = self._pending, NOTHING
            pending.wait()

    def _free(self) -> None:
        if self._under_way is not None:
            self.bucket.ledger.device_bytes -= self._under_way.nbytes  # no peak rises, so without a call
            self._under_way = None

    def forget(self) -> None:
        """Count the copies of all nodes as lost: the weights cross exactly next time."""

    def settle(self) -> None:
        """Let the weights cross exactly next time if copies lag behind them.

        Raises:
            ValueError: the last messages did not fit the copies, which count as lost now.
        """


class DifferenceCrossing(WeightCrossing):
    """The gather of one bucket as differences to the copies of all nodes: [Note: Differences].

    If the coding loses something, copies lag, and the versions of the optimizer count. If it loses nothing, they are
    exact: [Note: Lossless crossings].
    """

    sends_differences = True
    _messages: KnownLengths | ToldLengths

    def __init__(
        self, bucket: Bucket, node: Communicator, messages: KnownLengths | ToldLengths, copies: Copies
    ) -> None:
        super().__init__(bucket, node, messages)
        self._copies = copies
        self.coding: PartCoding = messages.coding
        self.state = CopyState.LOST
        self.number = 0
        """The differences since the last exact crossing."""
        self.edits = 0
        """The exact crossings in a row that an edit has caused."""
        self.version_before_step: int | None = None
        self.trusted_version: int | None = None
        """See [Note: Versions of the optimizer]."""
        if self.coding.loses:
            _lagging.add(ref(self, _lagging.discard))
        copies.add(self)

    @property
    def was_edited(self) -> bool:
        """True if something else than an optimizer's step has changed the weights, and asks for an exact crossing."""
        may_lag, stored = self.coding.loses and self.state is not CopyState.LOST, self.bucket.stored
        return may_lag and stored.epoch + stored.shard._version != self.trusted_version  # as in `_begin_step`

    def prepare(self) -> bool:
        """See `WeightCrossing.prepare`. Collective, once for each version of the weights under one root."""
        self._is_coded = not self.bucket.stored.is_frozen and self._copies.may_differ(self)
        return self._is_coded

    def start(self, node_shard: Tensor) -> None:
        """See `WeightCrossing.start`."""
        stored = self.bucket.stored
        self.state, self.trusted_version = CopyState.LOST, stored.epoch + stored.shard._version  # as in `_begin_step`
        super().start(node_shard)

    def finish(self, node_shard: Tensor) -> None:
        """See `WeightCrossing.finish`. Until it has ended, the copy counts as lost."""
        if not self.coding.loses:
            self.coding.check()  # the messages before, with which a device is done
        super().finish(node_shard)
        if self._is_coded:
            self.state = CopyState.DECODED if self.coding.loses else CopyState.EXACT
            self.number += 1
        else:  # on all ranks
            self._messages.forget()
            self.state, self.number = CopyState.EXACT, 0

    def forget(self) -> None:
        """See `WeightCrossing.forget`."""
        self.coding.forget()
        self.state = CopyState.LOST
        self._copies.ask_again(self)

    def settle(self) -> None:
        """See `WeightCrossing.settle`. No run is saved that a damaged message has misled."""
        try:
            self.coding.check()
        except ValueError:
            self.bucket.node_shard.version = None
            self.forget()
            raise
        if self.coding.loses:
            self.forget()


_edits_of = attrgetter("edits")
_lagging: set[ref[DifferenceCrossing]] = set()
"""Those whose copies lag. A WeakSet would take calls in Python for what a set of references does without."""


@before_step
def _begin_step(_: OptimizerStep) -> None:
    for reference in tuple(_lagging):
        if (each := reference()) is not None:
            stored = each.bucket.stored
            each.version_before_step = stored.epoch + stored.shard._version  # often, so without a call


@after_step
def _end_step(_: Optimizer) -> None:
    for reference in tuple(_lagging):
        if (each := reference()) is not None and each.version_before_step == each.trusted_version:
            stored = each.bucket.stored
            each.trusted_version = stored.epoch + stored.shard._version


class Copies:
    """The copies of all buckets of one cluster under one root, and what its ranks agree on: [Note: Exact crossings]."""

    def __init__(self, cluster: Cluster, observer: Observer) -> None:
        self._cluster, self._observer = cluster, observer
        self._members: list[DifferenceCrossing] = []
        self._exact_every = sys.maxsize
        self._decided: dict[DifferenceCrossing, tuple[int, bool]] = {}  # the version, and whether it is a difference
        self._steps = 0  # since the last exact crossing of all
        self._has_differed = False

    def add(self, member: DifferenceCrossing) -> None:
        """Add a bucket, in the same order on all ranks."""
        self._members.append(member)
        self._exact_every = min(self._exact_every, member.bucket.wire.exact_every)

    def may_differ(self, member: DifferenceCrossing) -> bool:
        """Whether the bucket's present version crosses as a difference, on all ranks alike.

        Collective when asked for a version for the first time.

        Raises:
            RuntimeError: nodes have different copies for the second time.
        """
        if self._decided.get(member, (None,))[0] != member.bucket.stored.version:
            self._decide()
        _, may_differ = self._decided.pop(member)  # a gather that is begun anew asks anew
        return may_differ

    def ask_again(self, member: DifferenceCrossing) -> None:
        """Drop what was agreed on for a bucket that has not crossed since."""
        self._decided.pop(member, None)

    def _decide(self) -> None:
        """Agree on the next crossing of each bucket. Collective over the cluster."""
        edited = {each for each in self._members if each.was_edited}
        self._warn_of(edited)
        must_be_exact, differing, is_due = self._ask_all_ranks(edited)
        is_mistrusted = True in [self._observer.mistrusts_copies(each.bucket) for each in self._members]
        if (is_due or is_mistrusted) and not differing:
            known = {each.bucket: each for each in self._members if each not in must_be_exact}
            differing = [known[bucket] for bucket in self._observer.different_copies(self._cluster, list(known))]
        self._note_differences(differing)
        if is_due or differing:
            must_be_exact = set(self._members)
        self._steps = 0 if len(must_be_exact) == len(self._members) else self._steps + 1
        self._decided = {each: (each.bucket.stored.version, each not in must_be_exact) for each in self._members}

    def _ask_all_ranks(
        self, edited: set[DifferenceCrossing]
    ) -> tuple[set[DifferenceCrossing], list[DifferenceCrossing], bool]:
        """Return, alike on all ranks, three answers in one small message.

        They are the buckets that some rank must send exactly; those of the others in whose differences ranks have come
        to different numbers; and whether it is time to compare copies, and to cross exactly.
        """
        needs = [each.state is CopyState.LOST or each in edited for each in self._members]
        numbers = [each.number % 256 for each in self._members]
        is_due = self._steps + 1 >= self._exact_every
        mine = [*needs, *numbers, *[255 - number for number in numbers], is_due]
        flags = start_flags(self._cluster, torch.tensor(mine, dtype=torch.uint8)).wait().tolist()  # the largest of each
        some_need, highest, lowest_from_255 = (flags[i : i + len(needs)] for i in range(0, 3 * len(needs), len(needs)))
        must_be_exact = {each for each, flag in zip(self._members, some_need, strict=True) if flag}
        differing = [
            each
            for each, high, low in zip(self._members, highest, lowest_from_255, strict=True)
            if high != 255 - low and each not in must_be_exact
        ]
        return must_be_exact, differing, bool(flags[-1])

    def _note_differences(self, differing: list[DifferenceCrossing]) -> None:
        if not differing:
            return
        names = ", ".join(each.bucket.layout.slots[0].name for each in differing[:3])
        if self._has_differed:
            raise RuntimeError(
                f"nodes have different copies of {len(differing)} buckets, those of {names}, though they were made "
                "equal before: something changes gathered weights, or memory is damaged. Train with wire='exact', and "
                "look at what runs between the forwards"
            )
        self._has_differed = True
        warnings.warn(
            f"nodes have different copies of {len(differing)} buckets, those of {names}; the weights cross exactly "
            "now, which makes them equal",
            stacklevel=2,
        )

    def _warn_of(self, edited: set[DifferenceCrossing]) -> None:
        for each in self._members:
            each.edits = each.edits + 1 if each in edited else 0
        worst = max(self._members, key=_edits_of)
        if worst.edits == _EDITS_BEFORE_WARNING:
            warnings.warn(
                f"the weights of {worst.bucket.layout.slots[0].name} cross the wire exactly, not in few bits, because "
                f"something else than an optimizer's step() has edited them {worst.edits} times in a row; change "
                "weights inside an optimizer of torch, or train with wire='exact'",
                stacklevel=2,
            )


CopiesOf = Callable[[Cluster], Copies]
"""A function that finds the copies of a cluster under one root."""


def crossing_of(bucket: Bucket, node: Communicator, copies_of: CopiesOf) -> WeightCrossing:
    """The way in which a bucket's weights cross between nodes."""
    wire, codec, cluster = bucket.wire, bucket.wire.weight_codec, bucket.cluster
    if wire.weights == "exact":
        return WeightCrossing(bucket, node)
    messages: KnownLengths | ToldLengths = ToldLengths(node, Ulps(), "weights")
    if codec is not None:
        parts, plain = shards_of_nodes(bucket.layout, bucket.geometry.peers), bucket.form.compute_dtype
        coding = few_bits_of(bucket.layout, parts, codec, plain=plain, device_type=cluster.device_type)
        messages = KnownLengths(node, coding, cluster.device)
    if wire.sends_differences:
        return DifferenceCrossing(bucket, node, messages, copies_of(cluster))
    return WeightCrossing(bucket, node, messages)


def ways_of_sums(bucket: Bucket) -> dict[Level, SumWay]:
    """The ways in which a bucket's gradients are summed on each level, as its wire says.

    A rank's own term stays exact. The second trip of a sum over islands has eight bits (bf16 if gradients cross in
    bf16). That of qgZ has four; a sum that all ranks use is worth more.
    """
    cluster, wire, layout, codec = bucket.cluster, bucket.wire, bucket.layout, bucket.wire.gradient_codec
    exact = {level: Communicator(cluster, level, bucket.unit_name) for level in LEVELS}
    ways: dict[Level, SumWay] = {**exact}

    def messages(level: Level, parts: Sequence[Part], codec: Codec, *, rotates: bool) -> KnownLengths:
        plain, kind = bucket.reduce_dtype, cluster.device_type
        coding = few_bits_of(layout, parts, codec, plain=plain, device_type=kind, rotates=rotates)
        return KnownLengths(exact[level], coding, cluster.device, "gradients")

    for level in (level for level in WIRE_LEVELS if exact[level].size > 1):
        if wire.gradients == "lossless":
            told = ToldLengths(exact[level], Exponents(), "gradients")
            ways[level] = CodedSum(told, bucket.ledger.hold)
        elif codec is not None:
            parts, back = shards_of_nodes(layout, bucket.geometry.peers), None
            if level == "island":
                parts = parts_of_islands(layout, cluster.shard_index, cluster.num_islands)
                of_sums = CODECS["bf16" if wire.gradients == "bf16" else "int8"]
                back = messages(level, parts, of_sums, rotates=False)
            there = messages(level, parts, codec, rotates=wire.rotates_gradients)
            ways[level] = CodedSum(there, bucket.ledger.hold, back=back, feedback=wire.feedback)
    return ways
