"""The order in which the units of one root run, and what each of them lets begin ahead.

[Note: Prefetching]
A forward under a root records the order in which its units run. The next forward begins the gathers of the units that
came after this one last time, even if some before it are skipped now; backward takes the same order in reverse.

A gather has two stages. The first yields the node shard, by a copy from host memory or by the gather across nodes; the
second is the gather inside the node. With the next unit alone begun ahead, its stages follow each other, and compute
waits where they take longer together than it does. If the first stage of the unit after the next one begins, too, on
other lanes, then the slowest stage alone must keep up with compute. A node shard that comes early waits in the cache's
own memory, if collectives can use that, or else in memory of its own, 1 / L of the unit.

The unit after may be tiny: then one is too few. What hides a gather is the time of the matmuls before it, and copies,
gathers and matmuls all take time by the bytes of the weights. So bytes stand for time here. Measured times would differ
between ranks, which would have to agree on them, and from run to run. The sizes and the recorded order are equal on all
ranks and in all runs, and so is what they decide: [Note: The same order on every rank]. By default,

- as many units are whole at once as fit in the bytes that two neighbours take at most, and one ahead at least. So
  small units come several at a time, and no more memory is full of weights than with one unit ahead;
- the first stage of the unit after them begins if that takes no memory, as under a cache on the device.

A budget of bytes buys more: what whole units leave of it goes to the node shards of those after them, in memory of
their own. Two of them wait while a unit computes, one of them in use by its second stage. Between two units there are
three: not before compute has waited may that of the unit that begins go. It is not the default, because a host cache
shall leave room for batches as large as ZeRO-3's: with three node shards it was 3 to 5 % less on the machines of the
FCDP paper, by the planner.

Units whose whole weights stay on the rank need no memory for that: two of them begin ahead at least, so the next gather
is under way when one ends. (All at once were no quicker on an unshaped wire.)

A unit that stays gathered while others run, as the root does, takes part as the largest of the others. `Prefetch` sets
other limits. If a rank's forward takes another order than the last one, gathers may begin in vain, and are freed.

[Note: Itineraries]
The units of the last forward, in their order, are an itinerary. At each of its places the engine chooses once what to
gather ahead. As long as forwards take the same way, a unit that begins only looks up its place. Units that were chosen
at the place before have begun already, and are left out. A forward that takes another way finds its place again behind
the units that it skips, and begins all that is chosen there. Backward's itinerary are the forwards of the step,
backwards. It stays as long as steps are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, takewhile
from typing import NamedTuple

import torch

from laconic import _compat
from laconic.shard.gather import UnitGather
from laconic.shard.states import GatherState


class _Ahead(NamedTuple):
    """The gathers that begin ahead when a unit begins."""

    whole: Sequence[UnitGather] = ()
    """Units to gather whole."""
    early: Sequence[UnitGather] = ()
    """Units of whose gathers only the first stage begins."""
    late: Sequence[UnitGather] = ()
    """Those of `whole` whose second stage may begin late: [Note: Lengths come with messages] in gather.py."""


_NOTHING = _Ahead()


_Choose = Callable[[UnitGather, Sequence[UnitGather]], _Ahead]
"""Chooses what a unit lets begin ahead, of the units that follow it."""


class _Itinerary:
    """Units in the order in which they run, and what each lets begin: [Note: Itineraries]."""

    def __init__(self, units: list[UnitGather], choose: _Choose) -> None:
        self.units, self._choose = units, choose
        self._chosen: list[_Ahead | None] = [None for _ in units]
        self._new: list[_Ahead | None] = [None for _ in units]
        self._visits_each_once = len(set(units)) == len(units)
        self.begin()

    def begin(self) -> None:
        """Begin again at the first unit."""
        self.next_place = 0
        """Of the unit that is to run next."""
        self._has_begun = False  # what was chosen at the place before

    def visit(self, unit: UnitGather, *, begins: bool = True) -> _Ahead:
        """What `unit`, which runs now, lets begin; nothing if it is not on the way that is left.

        Without `begins` the caller begins something else.
        """
        place, has_begun = self.next_place, self._has_begun
        if place == len(self.units) or self.units[place] is not unit:
            has_begun = False
            try:
                place = self.units.index(unit, place)
            except ValueError:
                return _NOTHING
        self.next_place, self._has_begun = place + 1, begins
        return (self._new[place] or self._choose_new(place)) if has_begun else self._at(place)

    def _at(self, place: int) -> _Ahead:
        chosen = self._chosen[place]
        if chosen is None:
            chosen = self._chosen[place] = self._choose(self.units[place], self.units[place + 1 :])
        return chosen

    def _choose_new(self, place: int) -> _Ahead:
        """The gathers chosen at a place, without those of the place before; all of them if units run several times."""
        new = self._at(place)
        if place and self._visits_each_once:
            before = self._at(place - 1)
            new = _Ahead(
                whole=[each for each in new.whole if each not in before.whole],
                early=[each for each in new.early if each not in before.early],
                late=[each for each in new.late if each not in before.late],
            )
        self._new[place] = new
        return new


class Order:
    """The order in which the units of one root run, and the gathers that begin early by it: [Note: Prefetching]."""

    def __init__(self) -> None:
        self._is_recording = False
        self._forward: list[UnitGather] = []  # the present forward so far
        self._left: list[UnitGather] = []  # finished forwards of this step; backward visits them in reverse
        self._open: list[UnitGather] = []  # whose forward has begun and not ended
        self._around: set[UnitGather] = set()  # in whose forward others begin
        self._late: Sequence[UnitGather] = ()  # whose second stage begins when the present unit's forward is issued
        self._pair_bytes = self._largest_bytes = 0  # of units that are not around others
        self._way = _Itinerary([], self._choose)  # of the last forward
        self._way_back: _Itinerary | None = None  # of the present backward
        self._last_way_back = _Itinerary([], self._choose_back)

    @property
    def has_run(self) -> bool:
        """True once a unit has run in a forward of the root."""
        return bool(self._way.units or self._forward)

    def begin_forward(self, *, keeps: bool) -> None:
        """Begin a forward of the root: record its order from now on. With `keeps`, that of earlier forwards stays, too.

        Several forwards may come before one backward. A forward that backward recomputes belongs to the present step.
        """
        self._is_recording = True
        self._forward, self._open = [], []
        self._way.begin()
        if torch.is_grad_enabled() and not keeps and not _compat.in_backward():
            self.end_backward()

    def end_forward(self) -> None:
        """End a forward of the root: the recorded order serves the next one."""
        self._is_recording = False
        if self._forward != self._way.units:
            sizes_bytes = [gather.whole_bytes for gather in self._forward if gather not in self._around]
            self._largest_bytes = max(sizes_bytes, default=0)
            self._pair_bytes = max(map(sum, pairwise(sizes_bytes)), default=self._largest_bytes)
            self._way = _Itinerary(self._forward, self._choose)
            self.choose_anew()
        self._forward, self._open = [], []

    def choose_anew(self) -> None:
        """Choose again what to gather ahead: units rest elsewhere, or run in another order."""
        self._way = _Itinerary(self._way.units, self._choose)
        self._way_back, self._last_way_back = None, _Itinerary([], self._choose_back)

    def enter_forward(self, gather: UnitGather, prefetch: Sequence[UnitGather] | None) -> None:
        """Begin the gather of a unit whose forward begins, and those of `prefetch`; None takes the recorded order."""
        gather.begin()
        ahead = _NOTHING
        if self._is_recording:
            self._around.update(self._open)
            self._open.append(gather)
            self._forward.append(gather)
            ahead = self._way.visit(gather, begins=prefetch is None)
        self._begin_others(gather, ahead if prefetch is None else _ahead(prefetch))

    def leave_forward(self, gather: UnitGather, *, returns: bool) -> None:
        """Record that a unit's forward has ended. It `returns` if the backward of its outputs will gather it."""
        late, self._late = self._late, ()
        for other in late:
            if other.is_late:
                other.go_on()
        if gather in self._open:
            self._open.remove(gather)
        if returns and torch.is_grad_enabled():
            self._left.append(gather)
            self._way_back = None

    def enter_backward(self, gather: UnitGather, prefetch: Sequence[UnitGather] | None) -> None:
        """Begin the gather of a unit whose backward begins, and those of `prefetch`; None takes the recorded order."""
        gather.begin()
        if prefetch is not None:
            self._begin_others(gather, _ahead(prefetch))
            return
        if self._way_back is None:
            units = self._left[::-1]
            if units != self._last_way_back.units:
                self._last_way_back = _Itinerary(units, self._choose_back)
            self._way_back = self._last_way_back
            self._way_back.begin()
        # a root whose last unit made its output begins after that unit, which left it out
        ahead = self._way_back.visit(gather)
        del self._left[len(self._way_back.units) - self._way_back.next_place :]
        self._begin_others(gather, ahead)

    def end_backward(self) -> None:
        """End a backward that is finished or abandoned."""
        self._left, self._way_back = [], None

    def _begin_others(self, gather: UnitGather, ahead: _Ahead) -> None:
        if gather.state is GatherState.NODE:
            gather.start_local()
        for other in ahead.whole:
            other.begin()
        self._late = ahead.late
        for other in ahead.early:
            other.begin(is_early=True)

    def _choose(self, gather: UnitGather, following: Sequence[UnitGather]) -> _Ahead:
        """Choose the next units to gather whole, and those after them whose first stage begins: [Note: Prefetching]."""
        policy = gather.prefetch
        if policy.units is not None:
            return _ahead(following[: policy.units])
        room = policy.budget_bytes
        if room is None:
            room = self._pair_bytes - (self._largest_bytes if gather in self._around else gather.whole_bytes)
        at_least = 2 if all(each.stays_whole for each in following[:2]) else 1
        num_whole = max(at_least, _fitting(following, lambda each: each.whole_bytes, room))
        whole, after = following[:num_whole], following[num_whole:]
        if policy.budget_bytes is None:
            return _ahead(whole, [each for each in after[:1] if each.begins_without_memory and each.can_begin_early])
        room -= sum(each.whole_bytes for each in whole)
        num_early = _fitting(after, lambda each: each.node_bytes, room)
        return _ahead(whole, list(takewhile(lambda each: each.can_begin_early, after[:num_early])))

    def _choose_back(self, gather: UnitGather, following: Sequence[UnitGather]) -> _Ahead:
        """As `_choose`, without units whose weights stay whole: the forward has gathered them."""
        whole, early, _ = self._choose(gather, following)
        return _ahead(*([each for each in chosen if not each.stays_whole] for chosen in (whole, early)))


def _ahead(whole: Sequence[UnitGather], early: Sequence[UnitGather] = ()) -> _Ahead:
    return _Ahead(whole, early, [each for each in whole if each.may_be_late and each.is_stream_ordered])


def _fitting(gathers: Sequence[UnitGather], bytes_of: Callable[[UnitGather], int], room_bytes: int) -> int:
    """The number of the first gathers that fit in `room_bytes` together."""
    return sum(1 for _ in takewhile(lambda total: total <= room_bytes, accumulate(map(bytes_of, gathers))))
