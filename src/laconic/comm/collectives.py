"""Gathers and reductions along one level of a cluster. Every byte is counted.

[Note: Collectives on Gloo]
Gloo implements reduce-scatter as an all-reduce, which moves twice the bytes. Its all-gather needs a buffer as large as
the result. So on CPU tensors laconic builds both from sends and receives, which read and write the tensors themselves:
without copies, with the fewest bytes, and with no buffers but the parts of a sum. Gloo cannot say whether a receive has
arrived unless one waits for it, so nothing here polls. Gloo has no sends of CUDA tensors; for these, a reduction is an
all-to-all and a local sum. Across three or more nodes a thread paces messages: [Note: Rounds of pieces] in
comm/pacing.py.

[Note: Parts of other lengths]
Where ranks have unequal shards, their parts of a gather or a reduction have other lengths, which every rank knows
beforehand. Sends and receives need nothing more. NCCL runs torch's calls with lists of unequal tensors as one group of
broadcasts, or of reductions to one rank each, in place. Gloo refuses them: for CUDA tensors it runs the broadcasts one
by one, and reduces by an all-to-all, as it does with equal parts.

[Note: Messages that nobody awaits]
A model may be dropped while a gather is under way, as after an exception in forward. Gloo loses a connection whose
receive is dropped before its message has come: the bytes stay in the socket, and each later message waits behind them,
for ever. So the journal of the process group has the works of each exchange, too, which keep its tensors. They go when
it has ended, or a later exchange of the group, because messages between two ranks come in the order in which both have
issued them. To wait for those of a dropped exchange would hang if the other rank had dropped its model before it had
begun.

[Note: Collectives on a stream]
NCCL runs a collective with `async_op=True` on a stream of its own, whatever the caller's stream and its priority. With
`async_op=False` it runs on the caller's stream and still does not block the thread (pytorch/pytorch#150398, torch 2.8;
XCCL alike, intel/torch-xpu-ops#1546). So laconic issues such collectives with `async_op=False` on the lane that shall
run them. What this lane does next comes after them, and waiting does nothing. A backend that has no such mode waits for
its own work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.comm.groups import has_peers
from laconic.comm.journal import Ticket, issue
from laconic.comm.messages import HostExchange, start_broadcast, start_exchange, start_to_all
from laconic.comm.moves import NOTHING, Move, Pending, SumTransfer, SumWay, Tensors
from laconic.comm.pacing import start_paced_exchange
from laconic.comm.traffic import Level, LevelBytes, Purpose
from laconic.comm.watch import raise_diagnosis, waiting_for

_ONE_TRIP_BYTES = 1 << 15
"""Messages of so many bytes from all ranks to one take no longer than the latency of a trip."""
_TWO_TRIPS_BYTES = 1 << 20
"""A sum of so many bytes over replicas takes two trips: `Communicator.sum_in_place`."""
_KNOWN = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.uint8))
"""Dtypes that the backends of accelerators gather."""
_UNITED: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
}
"""By operation, the function of all ranks' rows that every rank applies alike."""


class Communicator(SumWay):
    """Sends tensors along one level of a cluster."""

    def __init__(self, cluster: Cluster, level: Level, owner: str = "") -> None:
        """Communicate between the ranks that differ from this one in their place on `level` only, for unit `owner`."""
        self._owner = owner
        self.level: Level = level
        self.rank, self.size = cluster.place_on(level)
        self._cluster, self._traffic = cluster, cluster.traffic
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._gather_group = cluster.gather_groups[level]
        self._reduce_group = cluster.reduce_groups[level]
        group = self._gather_group
        backend = _compat.backend_of(group, cluster.device_type) if group is not None else None
        self._uses_sends = backend == "gloo" and cluster.device_type == "cpu"
        self._has_reduce_scatter = backend != "gloo"
        self.has_peers = group is not None and has_peers(group)
        """True if there are other ranks, and they are there: not in a rehearsal."""
        self._paces = self._uses_sends and level != "local" and self.size > 2 and self.has_peers
        self._moves: dict[tuple[Any, ...], Move] = {}
        """The moves that were bound, by what they depend on."""
        cut, self._levels = cluster.cut, list[Communicator]()
        """Of replicas, the levels that their sums take: `sum_in_place`."""
        if level == "island" and cut is not None and cut.num_nodes > 1 and cut.num_local > 1:
            self._levels = [Communicator(cut, "local", owner), Communicator(cut, "node", owner)]
        self.is_stream_ordered = cluster.device_type != "cpu" and backend != "gloo"
        """True if waiting never blocks the thread, so that one transfer may start right behind another."""

    def all_gather(
        self, whole: Tensor, piece: Tensor, purpose: Purpose = "weights", *, numels: Sequence[int] | None = None
    ) -> Pending:
        """Begin to fill `whole` with the `piece` of every rank, in rank order.

        Shapes: R ranks; piece (C,) -> whole (R * C,), flat, contiguous, one dtype. `piece` may be this rank's part of
            `whole` already; then nothing is copied. What few backends know, such as float8, moves as bytes. With
            `numels` rank r has a piece of `numels[r]` elements, and `whole` has their sum.
        Cost: the bytes of R - 1 pieces like this one out of this rank, and of all others into it.
        Reference: tests/reference/gather.py.
        """
        if numels is not None:  # they may be others each time
            return self._bind_gather(whole, piece, purpose, numels).start(whole, piece)
        key = "gather", purpose, whole.nbytes, whole.dtype
        move = self._moves.get(key)
        if move is None:
            move = self._moves[key] = self._bind_gather(whole, piece, purpose)
        return move.start(whole, piece)

    def _bind_gather(self, whole: Tensor, piece: Tensor, purpose: Purpose, numels: Sequence[int] | None = None) -> Move:
        group, sizes = self._gather_group, None if numels is None else [numel * whole.itemsize for numel in numels]
        if group is None:
            return self._move(partial(self._own_part, sizes), purpose, None, None)
        begin: Callable[..., Any]
        if self._uses_sends:
            begin = partial(self._send_pieces, group, sizes)
        elif sizes is not None:  # [Note: Parts of other lengths]
            begin = partial(self._gather_parts, group, sizes)
        elif self._has_reduce_scatter and whole.dtype in _KNOWN:
            begin = _compat.bound_all_gather(group, async_op=not self.is_stream_ordered)
        else:
            begin = partial(self._gather_bytes, group)
        counted = (self.size - 1) * piece.nbytes, whole.nbytes - piece.nbytes
        return self._move(begin, purpose, counted, group, nbytes=whole.nbytes, sends=self._uses_sends)

    def _own_part(self, sizes: Sequence[int] | None, whole: Tensor, piece: Tensor) -> list[Tensor]:
        """Copy `piece` to its place in `whole`, unless it is there. Returns the parts of all ranks, as bytes."""
        parts = list(self._parts(whole.view(torch.uint8), sizes))
        own = parts[self.rank]
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece.view(torch.uint8))
        return parts

    def _send_pieces(
        self, group: dist.ProcessGroup, sizes: Sequence[int] | None, ticket: Ticket, whole: Tensor, piece: Tensor
    ) -> HostExchange:
        """Gather by sends and receives: [Note: Collectives on Gloo]."""
        _compat.show_collective("_allgather_base_")
        parts = self._own_part(sizes, whole, piece)
        return self._exchange(group, ticket, parts, [piece.view(torch.uint8)] * self.size)

    def _send_terms(self, group: dist.ProcessGroup, ticket: Ticket, terms: Tensors, parts: Tensors) -> HostExchange:
        """Send the terms of a sum to those who add them up, likewise."""
        _compat.show_collective("_reduce_scatter_base_")
        return self._exchange(group, ticket, terms, parts)

    def _gather_parts(self, group: dist.ProcessGroup, sizes: Sequence[int], whole: Tensor, piece: Tensor) -> Any:
        """Gather parts of other lengths: by the backend or, on Gloo, by broadcasts."""
        async_op = not self.is_stream_ordered
        if self._has_reduce_scatter:
            parts = self._parts(whole.view(torch.uint8), sizes)
            return dist.all_gather(list(parts), piece.view(torch.uint8), group=group, async_op=async_op)
        sent = self._own_part(sizes, whole, piece)
        sent[self.rank] = sent[self.rank].clone()  # Gloo writes what it has sent back, into what others may read
        return [dist.broadcast(part, group=group, group_src=rank, async_op=async_op) for rank, part in enumerate(sent)]

    def _gather_bytes(self, group: dist.ProcessGroup, whole: Tensor, piece: Tensor) -> Any:
        """Gather what the backend does not know by its dtype."""
        begin = _compat.bound_all_gather(group, async_op=not self.is_stream_ordered)
        return begin(whole.view(torch.uint8), piece.view(torch.uint8))

    def start_reduce_scatter(self, whole: Tensor, *, numels: Sequence[int] | None = None) -> ReduceScatter:
        """Begin to sum `whole` over the ranks; this rank will get its own part of the sum.

        Shapes: R ranks; whole (R * C,), flat and contiguous -> (C,), part `rank` of the sum, by `ReduceScatter.finish`.
            `whole` must not change until then. With `numels` part r has `numels[r]` elements.
        Cost: the bytes of all other parts out of this rank, those of R - 1 parts like its own into it, and as much
            memory until it is finished.
        Reference: tests/reference/gather.py.
        """
        group = self._reduce_group
        if group is None:
            return ReduceScatter(NOTHING, [whole], whole, numels)
        own_numel = whole.numel() // self.size if numels is None else numels[self.rank]
        key = "sum", whole.nbytes, own_numel, numels is None  # whose bytes hang on this rank's own part alone
        move = self._moves.get(key)
        if move is None:
            move = self._moves[key] = self._bind_sum(group, whole, own_numel, numels)
        if self._uses_sends:  # [Note: Collectives on Gloo]
            parts = self._parts(whole, numels)
            terms = [part if i == self.rank else whole.new_empty(own_numel) for i, part in enumerate(parts)]
            received = terms[1 if self.rank == 0 else 0]  # it may become the sum, unlike the input
            nbytes = (self.size - 1) * received.nbytes
            return ReduceScatter(move.start(terms, parts), terms, whole, numels, nbytes=nbytes, out=received)
        if self._has_reduce_scatter:
            landing = whole.new_empty(own_numel)
            sent = whole if numels is None else list(self._parts(whole, numels))  # [Note: Parts of other lengths]
            return ReduceScatter(move.start(landing, sent), [landing], whole, numels, nbytes=landing.nbytes)
        landing, sizes = whole.new_empty(self.size * own_numel), None if numels is None else list(numels)
        terms = list(landing.view(self.size, -1))
        return ReduceScatter(move.start(landing, whole, None, sizes), terms, whole, numels, nbytes=landing.nbytes)

    def _bind_sum(self, group: dist.ProcessGroup, whole: Tensor, own_numel: int, numels: Sequence[int] | None) -> Move:
        own_bytes, async_op = own_numel * whole.itemsize, not self.is_stream_ordered
        begin: Callable[..., Any]
        if self._uses_sends:
            begin = partial(self._send_terms, group)
        elif not self._has_reduce_scatter:
            begin = partial(dist.all_to_all_single, group=group, async_op=async_op)
        elif numels is None:
            begin = _compat.bound_reduce_scatter(group, async_op=async_op)
        else:
            begin = partial(dist.reduce_scatter, group=group, async_op=async_op)
        counted = whole.nbytes - own_bytes, (self.size - 1) * own_bytes
        return self._move(begin, "gradients", counted, group, nbytes=whole.nbytes, sends=self._uses_sends)

    def _parts(self, whole: Tensor, numels: Sequence[int] | None) -> Sequence[Tensor]:
        """The parts of all ranks: rows, or with `numels` tensors of other lengths: [Note: Parts of other lengths]."""
        return whole.view(self.size, -1).unbind() if numels is None else whole.split(list(numels))

    def start_all_to_all(
        self,
        landings: Tensor,
        messages: Tensor,
        purpose: Purpose = "gradients",
        *,
        numels: Sequence[int] | None = None,
    ) -> Pending:
        """Begin to send row r of `messages` to rank r, and to fill row r of `landings` with what rank r sends.

        This rank's own row of `landings` has no meaning. Nobody uses either tensor until the transfer has ended.

        Shapes: R ranks; landings and messages (R, C), contiguous, of one dtype. With `numels` messages are flat, the
            one to rank r has `numels[r]` elements, this rank's own has none, and landings are (R - 1, C), those of the
            others in their order.
        Cost: the bytes of the messages to others out of this rank, and those of R - 1 landings into it.
        """
        if numels is None:
            key = "to all", purpose, messages.nbytes
            move = self._moves.get(key)
            if move is None:
                sent_bytes = (self.size - 1) * messages.nbytes // self.size
                move = self._moves[key] = self._bind_to_all(purpose, (sent_bytes, sent_bytes), messages.nbytes)
            return move.start(landings, messages)
        move = self._bind_to_all(purpose, (messages.nbytes, landings.nbytes))
        if self._uses_sends:
            rows = list(landings)
            rows.insert(self.rank, landings.new_empty(0))
            return move.start(rows, messages.split(list(numels)))
        comes = [0 if peer == self.rank else landings.shape[1] for peer in range(self.size)]
        return move.start(landings.view(-1), messages, comes, list(numels))

    def _bind_to_all(self, purpose: Purpose, counted: tuple[int, int], nbytes: int | None = None) -> Move:
        group, sends = self._reduce_group, self._uses_sends  # [Note: Collectives on Gloo]
        assert group is not None, "a level of one rank has nobody to send to"
        in_one_call = partial(dist.all_to_all_single, group=group, async_op=not self.is_stream_ordered)
        begin = (lambda *sent: self._exchange(group, *sent)) if sends else in_one_call
        return self._move(begin, purpose, counted, group, nbytes=nbytes, sends=sends)

    def start_all_reduce(
        self, tensor: Tensor, purpose: Purpose = "gradients", op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Pending:
        """Begin to reduce `tensor` over the ranks, in place.

        Every rank gets the same bits. `tensor` is contiguous, and nobody uses it until the transfer has ended.

        Cost: 2 (R - 1) / R of its bytes out of and into each of R ranks, as a ring moves them.
        """
        if self._reduce_group is None:
            return NOTHING
        begin = partial(dist.all_reduce, op=op, group=self._reduce_group, async_op=not self.is_stream_ordered)
        return self._move(begin, purpose, self._bytes_of_ring(tensor), self._reduce_group, is_ring=True).start(tensor)

    def sum_in_place(self, tensor: Tensor) -> Iterator[None]:
        """Sum `tensor` as `start_all_reduce` does. Yields while the sum is under way.

        On Gloo, whose ring takes 2 (R - 1) trips, a small tensor takes two, and between two ranks one: see
        `_reduce_by_sends`. Large ones would fill the queues: [Note: Rounds of pieces] in comm/pacing.py.

        Replicas on several ranks of several nodes sum a part each inside their node, sum that across the nodes, and
        gather the parts inside. So each of N nodes sends 2 (N - 1) / N of the bytes over the wire. In a ring of all R
        ranks it would send 2 (R - 1) / R of them, and in two trips between all ranks L times 2 (N - 1) / N.
        """
        if self._levels:
            yield from self._sum_by_levels(tensor)
            return
        is_small = tensor.nbytes <= _TWO_TRIPS_BYTES and tensor.numel() >= self.size
        if not self._uses_sends or not is_small:
            self._meet(tensor.nbytes)
            pending = self.start_all_reduce(tensor)
            yield
            pending.wait()
            return
        yield from self._reduce_by_sends(tensor, dist.ReduceOp.SUM, "gradients")

    def _sum_by_levels(self, tensor: Tensor) -> Iterator[None]:
        local, node = self._levels
        is_even = len(tensor) % local.size == 0
        numels = None if is_even else [len(part) for part in tensor.tensor_split(local.size)]
        transfer = local.start_reduce_scatter(tensor, numels=numels)
        yield
        part = transfer.finish()
        yield from node.sum_in_place(part)
        pending = local.all_gather(tensor, part, "gradients", numels=numels)
        yield
        pending.wait()

    def _meet(self, nbytes: int) -> None:
        """Let Gloo add up what has one length on all ranks: [Note: Messages that meet their like]."""
        if self._uses_sends and self.has_peers and self._reduce_group is not None:
            word = torch.zeros(self.size + 1, 1, dtype=torch.uint8)
            words = word[1:], [word[0]] * self.size
            self._send("gradients", None, self._reduce_group, *words, paces=False, nbytes=nbytes).wait()

    def _reduce_by_sends(self, tensor: Tensor, op: dist.ReduceOp.RedOpType, purpose: Purpose) -> Iterator[None]:
        """Reduce a small tensor in place, in two trips: each rank unites a part, and all gather the parts.

        Two ranks take one: each sends all that it has, which are as many bytes, and unites it as the other does.
        """
        group = self._reduce_group
        assert group is not None, "several ranks have one"
        counted = self._bytes_of_ring(tensor)
        is_one_trip = self.size == 2
        parts = [tensor.view(-1)] * 2 if is_one_trip else list(tensor.view(-1).tensor_split(self.size))
        own = parts[self.rank]
        terms = [own if peer == self.rank else torch.empty_like(own) for peer in range(self.size)]
        there = self._send(purpose, counted, group, terms, parts, paces=False, nbytes=tensor.nbytes)
        yield
        there.wait()
        own.copy_(_UNITED[op](torch.stack(terms)))
        if is_one_trip:
            return
        sent = [own] * self.size
        back = self._send(purpose, None, group, parts, sent, paces=False, nbytes=tensor.nbytes)
        yield
        back.wait()

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a small tensor in place, now. The traffic is that of a ring: 2 (R - 1) / R of the bytes each way."""
        if self._reduce_group is None:
            return tensor
        if self._uses_sends and self.has_peers and op in _UNITED:  # [Note: Messages that meet their like]
            for _ in self._reduce_by_sends(tensor, op, "control"):
                pass
            return tensor
        self.start_all_reduce(tensor, "control", op).wait()
        return tensor

    def copy_first(self, tensor: Tensor) -> None:
        """Copy a tensor, of buffers, from the level's first rank to the others, in place, now. It is contiguous.

        Cost: its bytes into each other rank, counted as if the first rank sent all of them itself.
        """
        group = self._gather_group
        if group is None:
            return
        is_first = self.rank == 0
        sent_bytes, received_bytes = ((self.size - 1) * tensor.nbytes, 0) if is_first else (0, tensor.nbytes)
        self._traffic.count(self.level, "control", sent_bytes=sent_bytes, received_bytes=received_bytes)
        ticket = issue(group, "buffers", "the first rank", senders=[0], nbytes=tensor.nbytes)
        with self._traffic.waiting(self.level, ticket, ticket):
            if not self._uses_sends:
                dist.broadcast(tensor, group=group, group_src=0)
                return
            start_broadcast(group, ticket, tensor).wait()

    def _bytes_of_ring(self, tensor: Tensor) -> tuple[int, int]:
        """The bytes that a sum of `tensor` over all ranks sends from this rank, and brings to it, as a ring does."""
        nbytes = 2 * (self.size - 1) * tensor.nbytes // self.size
        return nbytes, nbytes

    def _send(
        self,
        purpose: Purpose,
        counted: tuple[int, int] | None,
        group: dist.ProcessGroup,
        landings: Tensors,
        messages: Tensors,
        *,
        paces: bool = True,
        nbytes: int | None = None,
    ) -> Pending:
        """Begin an exchange that is made once: see `_move` and `_exchange`."""
        begin = partial(self._exchange, group, paces=paces)
        return self._move(begin, purpose, counted, group, nbytes=nbytes, sends=True).start(landings, messages)

    def _exchange(
        self,
        group: dist.ProcessGroup,
        ticket: Ticket,
        landings: Tensors,
        messages: Tensors,
        *,
        paces: bool = True,
    ) -> HostExchange:
        """Receive from every peer and send to every peer; both arguments are indexed by rank.

        Small parts that shall go all at once have no pieces: `paces` is False.
        """
        # alike on all ranks, also if this one's part is empty
        if paces and self._paces and any(each.nbytes for each in (*landings, *messages)):
            return HostExchange(ticket, [start_paced_exchange(group, ticket.tag(), list(landings), list(messages))])
        try:
            return start_exchange(group, ticket, landings, messages)
        except RuntimeError as error:  # a lost connection may be an error already
            raise_diagnosis(error)
            raise

    def _move(
        self,
        begin: Callable[..., Any],
        purpose: Purpose,
        counted: tuple[int, int] | None,
        group: dist.ProcessGroup | None,
        *,
        is_ring: bool = False,
        nbytes: int | None = None,
        sends: bool = False,
    ) -> Move:
        """Bind a transfer that `begin` begins: see `Move`.

        `counted` are the bytes that leave this rank and those that enter it; with `is_ring` they go to the next one.
        None stands for a transfer whose bytes an earlier one has. `nbytes` are alike on all ranks; sends have them in
        their name.
        """
        by_level: list[LevelBytes] = []
        if counted is not None:
            sent, received = (self._cluster.bytes_by_level(self.level, size, is_ring=is_ring) for size in counted)
            by_level = [(level, purpose, size, received[level]) for level, size in sent.items()]
        return Move(
            begin, self._traffic, self.level, group, (purpose, self._owner, nbytes if sends else None), tuple(by_level),
            sends=sends, is_stream_ordered=self.is_stream_ordered,
        )  # fmt: skip


class ReduceScatter(SumTransfer):
    """The sum of exact terms."""

    def __init__(
        self,
        pending: Pending,
        terms: Sequence[Tensor],
        whole: Tensor,
        numels: Sequence[int] | None = None,
        *,
        nbytes: int = 0,
        out: Tensor | None = None,
    ) -> None:
        """Take the terms of this rank's part of the sum, in rank order; they are complete once `pending` has ended.

        Terms have the shape (C,). A single term is the sum. `whole` is the input, of equal parts or of those of
        `numels`; the backend may still read it. The terms occupy `nbytes` bytes besides the input. `out` is the term
        that may become the sum.
        """
        self._pending, self._terms, self._out, self._whole, self._numels = pending, terms, out, whole, numels
        self.nbytes = nbytes

    def sent(self) -> Sequence[Tensor]:
        """See `SumTransfer.sent`."""
        return self._whole.split(len(self._terms[0]) if self._numels is None else list(self._numels))

    def received(self) -> Sequence[Tensor] | None:
        """See `SumTransfer.received`."""
        self._pending.wait()
        self._pending = NOTHING
        return None if len(self._terms) == 1 else self._terms

    def finish(self) -> Tensor:
        """Wait, and return this rank's part of the sum, (C,). Every rank adds in the order of ranks.

        The result shares no memory with the input, except on a level of one rank, where it is the input.
        """
        self._pending.wait()
        self._pending = NOTHING
        if len(self._terms) == 1:
            return self._terms[0]
        total = torch.add(self._terms[0], self._terms[1], out=self._out)
        for term in self._terms[2:]:
            total.add_(term)
        return total


def all_reduce(cluster: Cluster, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a small tensor over the whole island, in place, now. Every rank gets the same bits.

    Cost: a ring on each level, inside the nodes and then across them. On CPU, if all of them together have few bytes,
        each rank sends its own to every other in one trip, and all reduce them alike.
    """
    group, united = cluster.flag_group, _UNITED.get(op)
    if cluster.device_type == "cpu" and group is not None and united is not None:
        num_ranks = group.size()
        if num_ranks * tensor.nbytes <= _ONE_TRIP_BYTES:
            arriving = tensor.new_empty(num_ranks, tensor.numel())
            _start_to_all(cluster, group, arriving, tensor.reshape(1, -1).repeat(num_ranks, 1), "control").wait()
            return tensor.copy_(united(arriving).view_as(tensor))
    Communicator(cluster, "local").all_reduce(tensor, op)
    return Communicator(cluster, "node").all_reduce(tensor, op)


def share_first(cluster: Cluster, tensor: Tensor) -> None:
    """Copy the tensor of the cluster's first rank to the ranks of all islands, in place. A tensor on meta stays.

    Cost: its bytes into each rank, counted as "weights" on the farthest level of the cluster.
    """
    if tensor.is_meta:
        return
    if cluster.all_group is not None:
        level: Level = "node" if cluster.num_nodes > 1 else "local"
        cluster.traffic.count(level, "weights", sent_bytes=0, received_bytes=tensor.nbytes)
        with waiting_for("the first weights", issue(cluster.all_group, "the first weights", senders=[0])):
            dist.broadcast(tensor, group=cluster.all_group, group_src=0)
    replicas = cluster.gather_groups["island"]
    if replicas is not None:
        cluster.traffic.count("island", "weights", sent_bytes=0, received_bytes=tensor.nbytes)
        with waiting_for("the first weights", issue(replicas, "the first weights", senders=[0])):
            dist.broadcast(tensor, group=replicas, group_src=0)


def copy_first(cluster: Cluster, tensor: Tensor, *, across_islands: bool) -> None:
    """Copy the tensor of the island's first rank, or with `across_islands` of the mesh's, to all ranks, in place, now.

    It crosses to each island and each node once. `tensor` is contiguous. Collective.

    Cost: its bytes into each other rank, counted as "control" on the level on which they come.
    """
    levels: list[Level] = ["island", "node", "local"] if across_islands else ["node", "local"]
    while levels:
        level = levels.pop(0)
        if not any(cluster.place_on(nearer)[0] for nearer in levels):
            Communicator(cluster, level).copy_first(tensor)


class PendingFlags:
    """Flags on their way."""

    def __init__(self, pending: Pending, arriving: Tensor) -> None:
        """Take the flags of all ranks, (R, K), which are complete once `pending` has ended."""
        self._pending, self._arriving = pending, arriving

    def wait(self) -> Tensor:
        """Wait, and return the flags that some rank has set: (K,), uint8, on the host."""
        self._pending.wait()
        return self._arriving.amax(0)


def start_flags(
    cluster: Cluster, flags: Tensor, *, across_islands: bool = False, purpose: str = "an agreement on flags"
) -> PendingFlags:
    """Begin to unite flags over the ranks of the island, or of all islands. Collective over them.

    Every rank sends its flags to every other, all at once and in host memory. So the agreement takes one trip, and no
    device waits for it.

    Shapes: flags (K,), uint8, on the host -> (K,), by `PendingFlags.wait`.
    Cost: (R - 1) * K bytes out of and into each of R ranks, counted as "control".

    Raises:
        ValueError: `flags` is no vector of uint8 on the host.
    """
    if flags.dtype is not torch.uint8 or flags.ndim != 1 or flags.device.type != "cpu":
        raise ValueError(f"flags are a vector of uint8 on the host, got {flags.dtype} {tuple(flags.shape)}")
    group = cluster.all_flag_group if across_islands else cluster.flag_group
    if group is None or not len(flags):
        return PendingFlags(NOTHING, flags[None])
    arriving = flags.new_empty(group.size(), len(flags))
    return PendingFlags(_start_to_all(cluster, group, arriving, flags.repeat(group.size(), 1), purpose), arriving)


def swap_rows(cluster: Cluster, rows: Tensor, *, across_islands: bool = False) -> Tensor:
    """Send row r to rank r of the island, and return what the ranks sent, in their order. Collective over them.

    With `across_islands` the ranks are those with this rank's place in all islands, in the order of islands.

    Shapes: R ranks; rows (R, K), int64, contiguous, on the host -> (R, K). Row `rank` stays here.
    Cost: 8 (R - 1) K bytes out of and into each rank, counted as "control".
    """
    group = cluster.island_group if across_islands else cluster.flag_group
    if group is None:
        return rows
    arriving = torch.empty_like(rows)
    _start_to_all(cluster, group, arriving, rows, "checksums", are_islands=across_islands).wait()
    return arriving


def pass_on(cluster: Cluster, outgoing: Sequence[Tensor], arriving: Sequence[Tensor]) -> None:
    """Send tensors to the next rank of the island, and fill `arriving` with what the rank before sends. Collective.

    All tensors are contiguous and on the host, and the other rank's have equal shapes and dtypes. The last rank's next
    is the first. The bytes are counted as "control", on the farthest level of the island.
    """
    group = cluster.flag_group
    assert group is not None, "a lone rank has no neighbour"
    rank, size = group.rank(), group.size()
    level: Level = "node" if cluster.num_nodes > 1 else "local"
    sent, received = (sum(each.nbytes for each in tensors) for tensors in (outgoing, arriving))
    cluster.traffic.count(level, "control", sent_bytes=sent, received_bytes=received)
    with waiting_for("a batch for the audit"):
        works = [dist.irecv(each, group=group, group_src=(rank - 1) % size) for each in arriving if each.numel()]
        works += [dist.isend(each, group=group, group_dst=(rank + 1) % size) for each in outgoing if each.numel()]
    Pending(works, cluster.traffic, level).wait()


def _start_to_all(
    cluster: Cluster,
    group: dist.ProcessGroup,
    arriving: Tensor,
    rows: Tensor,
    purpose: str,
    *,
    are_islands: bool = False,
) -> Pending:
    """Begin to send row r of `rows` to rank r of a group on the host, and to fill row r of `arriving` from it.

    The group's ranks are the nearest ones, unless they `are_islands`: one rank of each.

    Shapes: R ranks; rows and arriving (R, K), contiguous.
    """
    if are_islands:
        level: Level = "island"
        size = (len(rows) - 1) * rows[0].nbytes
        cluster.traffic.count(level, "control", sent_bytes=size, received_bytes=size)
    else:
        level = _count_to_all(cluster, len(rows), rows[0].nbytes)
    ticket = issue(group, purpose, nbytes=rows[0].nbytes)
    with waiting_for(ticket):  # a lost connection may be an error already
        exchange = start_to_all(group, ticket, arriving, rows)
    return Pending([exchange], cluster.traffic, level, ticket)


def _count_to_all(cluster: Cluster, num_ranks: int, nbytes: int) -> Level:
    """Count `nbytes` bytes to and from each of the nearest `num_ranks` ranks. Returns the farthest level."""
    farthest: Level = "local"
    nearer, cluster = 1, cluster.cut or cluster
    reaches: dict[Level, int] = {"local": cluster.num_local, "node": cluster.size, "island": num_ranks}
    for level, reach in reaches.items():
        if reach > nearer:
            size = (reach - nearer) * nbytes
            cluster.traffic.count(level, "control", sent_bytes=size, received_bytes=size)
            farthest, nearer = level, reach
    return farthest
