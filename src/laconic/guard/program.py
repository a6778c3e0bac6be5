"""What the units of one root issue in each step, which all ranks must issue alike.

[Note: One program on all ranks]
A process group matches transfers by their order alone. If one rank calls unit a where another calls unit b of equal
shape, the transfers fit, and both ranks compute nonsense. So a root keeps a number that stands for all gathers and
reductions so far, with their units, and compares it over the ranks at the end of each backward, and of each forward
without gradients. Each rank sends 16 bytes to each other. It begins before the last reductions are awaited, and so it
costs no trip of its own where the host waits for these. Where the device waits, the host awaits the message before an
optimizer's step, or before the next forward. If the numbers differ, ranks exchange the names, and each raises the
first difference, before an optimizer has used the gradients.

Islands that train on their own compare among their own ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.comm.journal import issue
from laconic.comm.watch import waiting_for
from laconic.errors import RanksDifferError

_MOST_KEPT = 2_000  # names of a step
_MOST_SHOWN = 4  # ranks that differ
_WHAT = "the comparison of what ranks have issued"


class Program:
    """The gathers and reductions that one root has issued: [Note: One program on all ranks]."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._count = self._agreed = 0
        self._digest = 0
        self._names: list[str] = []  # since the ranks last agreed
        self._arriving: Tensor | None = None
        self._work: Any = None

    def note(self, name: str) -> None:
        """Note what this rank issues next, such as "the gather of layers.0"."""
        self._count += 1
        self._digest = zlib.crc32(name.encode(), self._digest)
        if len(self._names) < _MOST_KEPT:
            self._names.append(name)

    def start_comparison(self, *, diverges: bool) -> None:
        """Begin to compare over the ranks, if anything was issued. With `diverges`, over those of this island."""
        self.settle()
        self._group = self._cluster.flag_group if diverges else self._cluster.all_flag_group
        if self._group is None or self._count == self._agreed:
            return
        own = torch.tensor([self._count, self._digest], dtype=torch.int64)
        sent = own.repeat(self._group.size())
        self._arriving = sent.clone()
        self._ticket = issue(self._group, _WHAT)
        with waiting_for(_WHAT):
            self._work = dist.all_to_all_single(self._arriving, sent, group=self._group, async_op=True)
        self._sent = sent
        _unsettled.add(self)

    def settle(self) -> None:
        """Finish the comparison that has begun, if any.

        Raises:
            RanksDifferError: ranks have issued different things; on all of them.
        """
        _unsettled.discard(self)
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return
        with waiting_for(_WHAT, self._ticket):
            self._work.wait()
        self._work = None
        first, names, self._names = self._agreed, self._names, []
        self._agreed = self._count
        own = arriving.view(-1, 2)
        if bool((own == own[0]).all()):
            return
        assert self._group is not None
        by_rank = RankGroup(self._group).gather(names)
        self._digest = 0
        self._count = self._agreed = 0
        raise RanksDifferError(_described(by_rank, dist.get_process_group_ranks(self._group), first))

    def forget(self) -> None:
        """Begin anew after a forward or backward that raised."""
        self._arriving = self._work = None
        self._names, self._count, self._agreed, self._digest = [], 0, 0, 0
        _unsettled.discard(self)


def _described(by_rank: Sequence[Sequence[str]], ranks: Sequence[int], first: int) -> str:
    reasons = []
    for rank, names in zip(ranks, by_rank, strict=True):
        base = by_rank[0]
        place = next((i for i, pair in enumerate(zip(names, base, strict=False)) if pair[0] != pair[1]), None)
        if place is None and len(names) != len(base):
            place = min(len(names), len(base))
        if place is not None:
            here, there = (each[place] if place < len(each) else "nothing more" for each in (names, base))
            reasons.append(
                f"rank {rank} differs from rank {ranks[0]} at transfer {first + place + 1}, number {place + 1} since "
                f"they last agreed: it issued {here} where rank {ranks[0]} issued {there}"
            )
    more = f" (and {len(reasons) - _MOST_SHOWN} more ranks)" if len(reasons) > _MOST_SHOWN else ""
    return (
        f"{'; '.join(reasons[:_MOST_SHOWN])}{more}. So weights and gradients of different units were mixed: all ranks "
        "must call the same units in the same order. Go on from the last checkpoint"
    )


_unsettled: WeakSet[Program] = WeakSet()


def _settle_all(*_: Any) -> None:
    for program in list(_unsettled):
        program.settle()


register_optimizer_step_pre_hook(_settle_all)
