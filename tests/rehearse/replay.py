"""A recorded program, run again in other orders: every order that streams and events allow, in memory that is reused.

[Note: Orders]
An operation may run once the earlier ones of its timeline have run, and what its timeline has waited for, and what the
thread that issued it had done by then. An executor picks one of those that may run, at random, until all have run. Real
tensors are read and written, in an arena where a caching allocator for each stream gives freed memory to the next
allocation at once. So an order that is missing shows as other bits, and so does memory that is freed too early.

[Note: Bits that mean something]
Some bits come from memory that nobody has written, such as padding. Two runs in the recorded order, without reuse of
memory, begin with different garbage: bits in which they differ mean nothing, and are not compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from laconic.rehearse.machine import Machine, Reference, Run
from laconic.rehearse.modes import generator_of, replace_tensors
from laconic.rehearse.tape import Record, Step, Tape, Wait

_ALIGNMENT = 512
_Values = dict[int, Any]


class _Arena:
    """Addresses for all memories of a tape, as a caching allocator for each stream would give them."""

    def __init__(self, tape: Tape, *, reuses: bool) -> None:
        self.end = 0
        self.address: dict[int, int] = {}
        self._free: dict[int, list[tuple[int, int]]] = {}  # by timeline: (size, address), in the order of frees
        for memory in tape.memories.values():  # those that were there before come first
            if memory.id not in tape.allocated or not memory.nbytes:
                self._put_at_end(memory.id, memory.nbytes)
        for entry in tape.entries:
            if isinstance(entry, Step) and entry.accesses:
                memory = tape.memories[entry.accesses[0].memory]
                if entry.name == "allocation":
                    self._allocate(memory.id, memory.nbytes, entry.timeline)
                elif entry.is_reuse and memory.is_device and reuses:
                    size = _round_up(memory.nbytes)
                    self._free.setdefault(entry.timeline, []).append((size, self.address[memory.id]))

    def _put_at_end(self, memory: int, nbytes: int) -> None:
        self.address[memory] = self.end
        self.end += _round_up(nbytes)

    def _allocate(self, memory: int, nbytes: int, timeline: int) -> None:
        blocks, size = self._free.get(timeline, []), _round_up(nbytes)
        fitting = [block for block in reversed(blocks) if block[0] >= size]
        if not fitting:
            self._put_at_end(memory, nbytes)
            return
        best = min(fitting, key=lambda block: block[0])  # of equal ones the one that was freed last
        blocks.remove(best)
        self.address[memory] = best[1]
        if best[0] > size:
            blocks.append((best[0] - size, best[1] + size))


class _Plan:
    """The operations of a tape, and which of them each comes after: [Note: Orders]."""

    def __init__(self, tape: Tape) -> None:
        self.runs: list[Run] = []
        self.queues: dict[int, list[int]] = {timeline: [] for timeline in range(len(tape.timelines))}
        self.followers: list[list[int]] = []
        self.num_before: list[int] = []
        after: list[set[int]] = [set() for _ in tape.timelines]
        at_event: dict[int, set[int]] = {}
        for entry in tape.entries:
            own = after[entry.timeline]
            if isinstance(entry, Record):
                at_event[entry.event] = set(own)
            elif isinstance(entry, Wait):
                own |= at_event.get(entry.event, set())
            elif isinstance(entry, Step) and entry.run is not None:
                number = len(self.runs)
                before = own | after[entry.thread]
                for each in before:
                    self.followers[each].append(number)
                self.num_before.append(len(before))
                self.followers.append([])
                self.queues[entry.timeline].append(number)
                self.runs.append(entry.run)
                after[entry.timeline] = {number}


class Replay:
    """A program that runs again and again."""

    def __init__(self, machine: Machine, plan: _Plan, *, reuses: bool = True) -> None:
        self.tape, self._plan = machine.tape, plan
        arena = _Arena(machine.tape, reuses=reuses)
        self._memory = torch.empty(arena.end, dtype=torch.uint8)
        self._memory_as: dict[torch.dtype, Tensor] = {}
        self._address = arena.address
        self._first = [(self._bytes(memory), content) for memory, content in machine.first_contents.items()]
        self.values: _Values = {}
        """What the host has read, by the number of the operation."""
        self._results = [(memory, self._bytes(memory)) for memory in machine.last_contents]
        self._operations = [self._bind(number, run) for number, run in enumerate(plan.runs)]

    def _bytes(self, memory: int) -> Tensor:
        begin = self._address[memory]
        return self._memory[begin : begin + self.tape.memories[memory].nbytes]

    def _view(self, place: Reference) -> Tensor:
        memory, offset, size, stride, dtype = place
        begin = self._address[memory] + offset
        if dtype not in self._memory_as:
            self._memory_as[dtype] = self._memory.view(dtype)
        return torch.as_strided(self._memory_as[dtype], size, stride, begin // dtype.itemsize)

    def _bind(self, number: int, run: Run) -> Callable[[], None]:
        args = replace_tensors(run.args, self._view, Reference)
        kwargs = dict(zip(run.kwargs, replace_tensors([*run.kwargs.values()], self._view, Reference), strict=True))
        outputs = [(index, self._view(place)) for index, place in run.outputs]
        return partial(_run, self.values, number, run, args, kwargs, outputs)

    def restore(self, garbage: int) -> None:
        """Put the memory back to the beginning, with `garbage` in each byte that nobody has written yet."""
        self._memory.fill_(garbage)
        for own, content in self._first:
            own.copy_(content)
        self.values.clear()

    def run_in_order(self) -> None:
        """Run in the recorded order."""
        for operation in self._operations:
            operation()

    def run_at_random(self, seed: int) -> None:
        """Run in a random order. Most of them favour some timelines for a while, so that others fall far behind."""
        chance = random.Random(seed)
        is_uniform = seed % 4 == 0
        num_before = list(self._plan.num_before)
        heads = {timeline: iter(queue) for timeline, queue in self._plan.queues.items() if queue}
        head = {timeline: next(queue) for timeline, queue in heads.items()}
        urgency = {timeline: chance.random() for timeline in head}
        while head:
            ready = [timeline for timeline, number in head.items() if not num_before[number]]
            if is_uniform:
                timeline = chance.choice(ready)
            else:
                if chance.random() < 0.02:
                    urgency[chance.choice(list(urgency))] = chance.random()
                timeline = max(ready, key=urgency.__getitem__)
            number = head[timeline]
            self._operations[number]()
            for follower in self._plan.followers[number]:
                num_before[follower] -= 1
            following = next(heads[timeline], None)
            if following is None:
                del head[timeline]
            else:
                head[timeline] = following

    def results(self) -> tuple[dict[int, Tensor], _Values]:
        """What all memory that is alive at the end holds, and what the host has read."""
        return {memory: own.clone() for memory, own in self._results}, dict(self.values)


class Orders:
    """The results that every order of a program must have: [Note: Bits that mean something]."""

    def __init__(self, machine: Machine) -> None:
        plan = _Plan(machine.tape)
        plain = Replay(machine, plan, reuses=False)
        runs = []
        for garbage in (0x55, 0xAA):
            plain.restore(garbage)
            plain.run_in_order()
            runs.append(plain.results())
        (memories, values), (others, other_values) = runs
        self._means = {memory: own == others[memory] for memory, own in memories.items()}
        self._memories = memories
        self._values = {number: value for number, value in values.items() if _same(value, other_values[number])}
        self._replay = Replay(machine, plan)
        self.differs_from_recording = [
            memory
            for memory, own in machine.last_contents.items()
            if not torch.equal(own[self._means[memory]], memories[memory][self._means[memory]])
        ]
        """Memories that a run in the recorded order leaves with other bits than the program did."""

    @property
    def compared_bytes(self) -> int:
        """The bytes that are compared after each run."""
        return sum(int(mask.sum()) for mask in self._means.values())

    def is_equal(self, seed: int) -> bool:
        """Run in a random order. True if the host reads the same, and the memory ends with the same bits."""
        self._replay.restore(0xFF)
        self._replay.run_at_random(seed)
        memories, values = self._replay.results()
        return all(_same(values[number], value) for number, value in self._values.items()) and all(
            torch.equal(memories[memory][mask], self._memories[memory][mask]) for memory, mask in self._means.items()
        )


def _run(values: _Values, number: int, run: Run, args: Any, kwargs: Any, outputs: list[tuple[int, Tensor]]) -> None:
    if run.random_state is not None:
        generator_of(run.kwargs).set_state(run.random_state)
    result = run.function(*args, **kwargs)
    if outputs:
        leaves = pytree.tree_leaves(result)
        for index, place in outputs:
            place.copy_(leaves[index])
    if run.gives_value:
        values[number] = result


def _same(value: Any, other: Any) -> bool:
    return torch.equal(value, other) if isinstance(value, Tensor) else repr(value) == repr(other)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
