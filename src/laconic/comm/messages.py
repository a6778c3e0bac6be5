"""Messages of the host between all ranks of a group, each of which meets only its like.

[Note: Messages that meet their like]
Gloo matches the collectives of a group by their number alone. If one rank calls another collective than the others, its
message may be longer than what they expect, and a thread of Gloo ends their processes, without an error that Python
could catch. Ranks that run different programs come to this: one sends the flags of its parameters, another a digest of
what it has issued. So small messages are sends and receives, whose tag is made of the transfer's number, its name and
the length of the message. Different ones never meet. Then both ranks wait, and within seconds a proof ends the wait and
says by name what each of them has called: [Note: Proof that a transfer never ends] in journal.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.comm.groups import is_rehearsed, new_group
from laconic.comm.journal import Ticket, issue
from laconic.comm.watch import waiting_for


def uses_sends(group: dist.ProcessGroup) -> bool:
    """True if messages of the host travel on a group as sends and receives: with Gloo, to ranks that are there."""
    on_host = torch.device("cpu") in group._device_types and _compat.backend_of(group, "cpu") == "gloo"
    return on_host and not is_rehearsed(group)


class HostExchange:
    """Messages under way: [Note: Messages that nobody awaits] in collectives.py."""

    __slots__ = ("_ticket", "_works")

    def __init__(self, ticket: Ticket, works: Sequence[Any]) -> None:
        """Take what `wait` waits for."""
        self._ticket, self._works = ticket, works
        ticket.journal.under_way.append((ticket.number, works))

    def wait(self) -> None:
        """Wait for the messages that come, and until those that go may change."""
        for work in self._works:
            work.wait()
        self._works = ()
        under_way, number = self._ticket.journal.under_way, self._ticket.number
        while under_way and under_way[0][0] <= number:
            under_way.popleft()


def start_exchange(
    group: dist.ProcessGroup, ticket: Ticket, landings: Sequence[Tensor] | Tensor, messages: Sequence[Tensor] | Tensor
) -> HostExchange:
    """Begin to fill landing r with what rank r sends, and to send message r to rank r; this rank's own stay.

    Both arguments are indexed by rank; the tensors are contiguous and on the host.
    """
    peers, tags = list(range(group.size())), dict[int, int]()
    del peers[group.rank()]
    works = []
    for begin, tensors in ((group.recv, landings), (group.send, messages)):
        for peer in peers:
            tensor = tensors[peer]
            tag = tags.get(tensor.nbytes)
            if tag is None:
                tag = tags[tensor.nbytes] = ticket.tag(tensor.nbytes)
            works.append(begin([tensor], peer, tag))
    return HostExchange(ticket, works)


def start_broadcast(group: dist.ProcessGroup, ticket: Ticket, tensor: Tensor) -> HostExchange:
    """Begin to send a tensor of the group's first rank to the others, in place. It is contiguous and on the host."""
    tag = ticket.tag(tensor.nbytes)
    if group.rank() == 0:
        return HostExchange(ticket, [_compat.isend(tensor, group, peer, tag) for peer in range(1, group.size())])
    return HostExchange(ticket, [_compat.irecv(tensor, group, 0, tag)])


def start_to_all(group: dist.ProcessGroup, ticket: Ticket, arriving: Tensor, rows: Tensor) -> HostExchange:
    """Begin to send row r of `rows` to rank r of a group, and to fill row r of `arriving` from it, the own one too.

    Shapes: R ranks; rows and arriving (R, K), contiguous, on the host.
    """
    # a row of one element may have any stride
    arriving, rows = (each if each.stride(-1) == 1 else each.view(-1).view(each.shape) for each in (arriving, rows))
    if not uses_sends(group):
        work = dist.all_to_all_single(arriving.view(-1), rows.view(-1), group=group, async_op=True)
        return HostExchange(ticket, [] if work is None else [work])
    _compat.show_collective("alltoall_base_")
    arriving[group.rank()].copy_(rows[group.rank()])
    return start_exchange(group, ticket, arriving, rows)


def new_host_group(like: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Make a Gloo group of the ranks of another, for messages of the host that must not mix with those of others.

    Default: all ranks; None if torch.distributed is not initialised. Only its ranks call this: see `new_group`. They
    meet first. A rank that came alone would wait in the rendezvous store, where no proof could end its wait.
    """
    like = like or dist.group.WORLD
    if like is None:
        return None
    if uses_sends(like):
        ticket = issue(like, "the start of a group for messages", nbytes=1)
        words = torch.zeros(like.size(), 1, dtype=torch.uint8)
        with waiting_for(ticket, ticket):
            start_to_all(like, ticket, torch.empty_like(words), words).wait()
    return new_group(dist.get_process_group_ranks(like), _compat.timeout_of(like), "gloo")
