"""A machine with an accelerator that is not there: device memory lies in host memory, and streams only keep order.

The machine keeps the streams, the threads and the memory, and writes down which bytes each operation reads and writes
on which timeline ([Note: Timelines] in order.py). The modes of modes.py run programs on it. No program knows.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard as fully_shard_of_torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from laconic.comm.traffic import Level
from laconic.rehearse.tape import HOST, Access, Free, Mark, Memory, Record, Site, Step, Tape, Transfer, Wait

aten: Any = torch.ops.aten
COMPUTE = 1
"""The timeline of the stream that is current at first."""
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
_LIBRARY = str(Path(__file__).parents[1])
_OWN = str(Path(__file__).parent)
FSDP2 = str(Path(fully_shard_of_torch.__file__).parent)
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_NOT_THE_PROGRAM = (str(Path(torch.__file__).parent), sysconfig.get_path("stdlib"), "<")
_BELOW_SITES = ("shard/lanes.py", "comm/collectives.py", "comm/messages.py", "comm/moves.py")
_MAX_RUNS = 4096
_FEW_BYTES = 1024
"""Tensors with values that are no larger are single numbers of the program, of which no cost is told."""


class Event:
    """An event of the machine, which may be recorded again."""

    def __init__(self, machine: Machine, timeline: int | None = None, site: Site | None = None) -> None:
        self.device = CUDA
        self._machine = machine
        self.number = -1 if timeline is None else machine.record(timeline, site)
        """That of its last record; -1 before the first, when it is no event to wait for."""
        self._awaited = -1

    def record(self, stream: Stream | None = None) -> None:
        """Let the event complete when all work so far of a stream is done, by default the current one."""
        self.number = self._machine.record(
            (stream or self._machine.current).timeline, self._machine.site("record_event")
        )

    def query(self) -> bool:
        """Nobody knows before somebody has waited."""
        return False

    def wait(self, stream: Any = None) -> None:
        """Let the current stream wait."""
        (stream or self._machine.current).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait."""
        self._machine.wait(self._machine.thread, self.number, self._machine.site("synchronize"))
        self._awaited = self.number

    def elapsed_time(self, end: Event) -> float:
        """The milliseconds between two events, of which the host has waited for the later: none pass here.

        Raises:
            RuntimeError: nobody has waited, so that a real device may not be there yet.
        """
        if -1 in (self.number, end.number) or end._awaited != end.number:
            raise RuntimeError("both events must be recorded and completed before calculating elapsed time")
        return 0.0


class Stream:
    """A stream of the machine."""

    def __init__(self, machine: Machine, name: str | None = None) -> None:
        self._machine = machine
        place = machine.site("")
        self.timeline = machine.new_timeline(name or "stream" + (f" ({place.function})" if place else ""))

    def wait_event(self, event: Event) -> None:
        """Let later work of this stream wait for an event."""
        self._machine.wait(self.timeline, event.number, self._machine.site("wait", event))

    def wait_stream(self, other: Stream) -> None:
        """Let later work of this stream wait for all that another has been given so far."""
        number = self._machine.record(other.timeline, None)
        self._machine.wait(self.timeline, number, self._machine.site("wait_stream"))

    def record_event(self, event: Any = None) -> Event:
        """An event that completes when all work so far is done."""
        if event is None:
            return Event(self._machine, self.timeline, self._machine.site("record_event"))
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """No graph is captured."""
        return False

    def synchronize(self) -> None:
        """Let the host wait for all work so far."""
        number = self._machine.record(self.timeline, None)
        self._machine.wait(self._machine.thread, number, self._machine.site("synchronize"))


class Machine:
    """The machine and its recorder. See the docstring of this file."""

    def __init__(
        self,
        *,
        has_values: bool = True,
        device_type: str = "cuda",
        cost_of: Callable[[Any, Any, Any, Any], Any] | None = None,
    ) -> None:
        self.tape = Tape()
        self.device = CPU if device_type == "cpu" else CUDA
        """The device that computes."""
        self.has_values = has_values
        """False if tensors have shapes and places only: [Note: Data without values] in operations.py."""
        self.is_recording = False
        self.cost_of = cost_of
        """Says what an operation costs, of (function, args, kwargs, result), or None if nothing. Then the tape has the
        steps that cost something, and no order of them: no sites, and what steps access is left out."""
        self.factor = 1.0
        """The bytes of the next transfer that laconic counts, of all ranks that it stands for, in multiples of its own.
        """
        self.alike = 1
        """The messages for which each one stands that is sent now."""
        self._counted: tuple[str, dict[Level, float]] | None = None
        """The purpose and the bytes by level that laconic has counted for the next transfer."""
        self.letters: list[Tensor] = []
        """Messages that other ranks send: [Note: Messages of the machine] in world.py."""
        self._transfer: Transfer | None = None
        self.memory_of: dict[int, Memory] = {}  # by the address of torch's storage
        self._begin_of: dict[
            int, int
        ] = {}  # of storages that are parts of another one's memory: their first byte there
        self.storages: dict[int, Any] = {}  # weak references to the storages, by the number of their memory
        self.first_contents: dict[int, Tensor] = {}
        self.last_contents: dict[int, Tensor] = {}
        self._numbers = itertools.count()
        self._events = itertools.count()
        self.compute = self.current = Stream(self, "compute")
        self.thread = HOST
        """The timeline of the thread whose code runs now."""
        self.placing: tuple[bool, bool] | None = None
        """Where new memory lies, (is_device, is_pinned), if the program has said so."""
        self._free_blocks: dict[int, list[tuple[Memory, str]]] = {}

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Record the body, which begins and ends with an idle device and idle threads."""
        if self.has_values:
            self.first_contents = {m.id: contents(self.storages[m.id]()) for m in self.memory_of.values()}
        self.is_recording = True
        yield self.tape
        for timeline in range(len(self.tape.timelines)):
            self.join(timeline)
        self.is_recording = False

    def keep_last_contents(self) -> None:
        """Remember what all memory holds now."""
        alive = [(memory.id, self.storages[memory.id]()) for memory in self.memory_of.values()]
        self.last_contents = {number: contents(storage) for number, storage in alive if storage is not None}

    # -- order ---------------------------------------------------------------------------------------------------------

    def new_timeline(self, name: str, *, is_thread: bool = False) -> int:
        """Add a stream or a thread."""
        self.tape.timelines.append(name)
        timeline = len(self.tape.timelines) - 1
        if is_thread:
            self.tape.threads.add(timeline)
        return timeline

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Make a stream current."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def running_thread(self, timeline: int) -> Iterator[None]:
        """Let the body be the work of a thread. A thread begins with the compute stream as its current one."""
        before = self.thread, self.current
        self.thread, self.current = timeline, self.compute
        try:
            yield
        finally:
            self.thread, self.current = before

    def record(self, timeline: int, site: Site | None) -> int:
        """Record an event on a timeline; return its number."""
        number = next(self._events)
        if self.is_recording:
            self.tape.entries.append(Record(timeline, number, site))
        return number

    def wait(self, timeline: int, event: int, site: Site | None) -> None:
        """Let a timeline wait for an event."""
        if self.is_recording:
            self.tape.entries.append(Wait(timeline, event, site))

    def join(self, timeline: int) -> None:
        """Let the present thread wait for a timeline."""
        self.wait(self.thread, self.record(timeline, None), None)

    def synchronize(self) -> None:
        """Let the present thread wait for all streams."""
        for timeline in range(len(self.tape.timelines)):
            if timeline not in self.tape.threads:
                self.join(timeline)

    def site(self, call: str, event: Event | None = None) -> Site | None:
        """The call in laconic or torch's FSDP2 that makes this wait or event; None if the program itself makes it."""
        if self.cost_of is not None:
            return None
        for frame, line in walk_stack(sys._getframe(2)):
            file, code = frame.f_code.co_filename, frame.f_code
            root = _LIBRARY if file.startswith(_LIBRARY) and not file.startswith(_OWN) else FSDP2
            if file.startswith(root):
                if file.endswith("shard/lanes.py") and code.co_name in ("running", "going_on"):
                    after = frame.f_locals.get("after", ())
                    index = next((i for i, each in enumerate(after) if each is event is not None), None)
                    call = f"{code.co_name} after " + ("compute" if index is None else f"[{index}]")
                is_below = file.endswith(_BELOW_SITES) or (file.endswith("cyclic/links.py") and code.co_name == "_wait")
                if not is_below:
                    return Site(file[len(root) + 1 :], line, code.co_name, call)
        return None

    # -- memory --------------------------------------------------------------------------------------------------------

    def memory(self, tensor: Tensor) -> Memory:
        """The memory of a tensor; memory that no operation made is host memory."""
        storage = tensor.untyped_storage()
        found = self.memory_of.get(storage._cdata)
        return found or self._register(storage, is_device=False)

    def knows(self, tensor: Tensor) -> bool:
        """False for tensors on meta that the program itself has made."""
        return not tensor.is_meta or (not self.has_values and tensor.untyped_storage()._cdata in self.memory_of)

    def address(self, tensor: Tensor) -> int:
        """A number for the place of a tensor without values: equal for equal places."""
        part = self._begin_of.get(tensor.untyped_storage()._cdata, 0)
        return (self.memory(tensor).id << 48) + part + int(tensor.storage_offset()) * tensor.itemsize

    def is_on_device(self, tensor: Tensor) -> bool:
        """True for tensors of the accelerator."""
        found = self.memory_of.get(tensor.untyped_storage()._cdata)
        return found is not None and found.is_device

    def take(self, tensor: Tensor, *, is_device: bool = False, is_new: bool = True) -> bool:
        """Register the memory of a tensor, if it is not known. Returns whether it is not.

        It `is_new` if an operation has made it, unlike one of Python's numbers.
        """
        storage = tensor.untyped_storage()
        if storage._cdata in self.memory_of:
            return False
        is_device, is_pinned = self.placing or (is_device, False)
        self._register(storage, is_device=is_device, is_new=is_new).is_pinned = is_pinned
        return True

    def cut(self, storage: Any, part: Any, begin: int) -> None:
        """Note that a storage is a part of another one's memory, and at which byte it begins."""
        if storage._cdata in self.memory_of:
            self.memory_of[part._cdata] = self.memory_of[storage._cdata]
            self._begin_of[part._cdata] = begin
            weakref.finalize(part, self._forget_part, part._cdata).atexit = False

    def _forget_part(self, address: int) -> None:
        self.memory_of.pop(address, None)
        self._begin_of.pop(address, None)

    def _register(self, storage: Any, *, is_device: bool, is_new: bool = False) -> Memory:
        timeline = self.current.timeline if is_device else self.thread
        place = self._place() if self.cost_of is None else _origin()
        memory = Memory(next(self._numbers), storage.nbytes(), is_device, timeline, place)
        address = storage._cdata
        self.memory_of[address] = self.tape.memories[memory.id] = memory
        self.storages[memory.id] = weakref.ref(storage, lambda _: self._free(address, memory))
        if self.is_recording and self.cost_of is not None:
            if is_new and memory.nbytes > (0 if storage.device.type == "meta" else _FEW_BYTES):
                self.tape.entries.append(Step(timeline, self.thread, "allocation", "", (), allocates=memory.id))
        elif self.is_recording:
            for freed, place in self._free_blocks.pop(timeline, []) if is_new else []:
                self._touch_all(freed, "next allocation after the free", place, is_reuse=True)
            if not is_new and memory.nbytes and self.has_values:
                self.first_contents[memory.id] = contents(storage)
            self._touch_all(memory, "allocation" if is_new else "first sight", allocates=memory.id if is_new else None)
            if is_new:
                self.tape.allocated.add(memory.id)
        return memory

    def _free(self, address: int, memory: Memory) -> None:
        if self.memory_of.get(address) is memory:
            del self.memory_of[address]
        if self.is_recording and not memory.is_freed:
            self.tape.entries.append(Free(memory.id, memory.timeline))
            if not memory.is_pinned and self.cost_of is None:
                self._free_blocks.setdefault(memory.timeline, []).append((memory, self._place()))
        memory.is_freed = True

    def _touch_all(
        self, memory: Memory, name: str, place: str = "", *, is_reuse: bool = False, allocates: int | None = None
    ) -> None:
        accesses = [Access(memory.id, 0, memory.nbytes, is_write=True)] if memory.nbytes else []
        step = Step(memory.timeline, self.thread, name, place or self._place(), accesses, None, is_reuse, allocates)
        self.tape.entries.append(step)

    def before_resize(self, storage: Any) -> Memory:
        """Free the memory of a storage that is about to have another size. Returns what it was."""
        memory = self.memory_of.get(storage._cdata) or self._register(storage, is_device=False)
        if memory.nbytes:
            self._free(storage._cdata, memory)
        else:
            memory.is_freed = True
            self.memory_of.pop(storage._cdata)
        return memory

    def after_resize(self, storage: Any, before: Memory) -> None:
        """Register the new memory of a storage that was resized."""
        self._register(storage, is_device=before.is_device, is_new=True)

    def register_pages(self, pointer: int, nbytes: int, flags: int) -> int:
        """CUDA's call that locks pages of host memory."""
        self._host_memory_at(pointer).is_pinned = True
        return 0

    def unregister_pages(self, pointer: int) -> int:
        """CUDA's call that unlocks them."""
        memory = self._host_memory_at(pointer)
        if self.is_recording:
            self._touch_all(memory, "free of locked pages")
        return 0

    def _host_memory_at(self, pointer: int) -> Memory:
        alive = ((memory, self.storages[memory.id]()) for memory in self.memory_of.values())
        return next(m for m, each in alive if each is not None and each.nbytes() and _begin(m, each) == pointer)

    # -- accesses ------------------------------------------------------------------------------------------------------

    def mark(self, label: Any) -> None:
        """Give a name to this place in the program, or tell a reader something."""
        if self.is_recording:
            self.tape.entries.append(Mark(label, self.thread))

    def count(self, level: Level, purpose: str, sent_bytes: int) -> None:
        """Note what laconic counts for its next transfer. Islands count theirs when they have ended."""
        if purpose == "outer":
            return
        if self._counted is None:
            self._counted = purpose, {}
        sent = self._counted[1]
        sent[level] = sent.get(level, 0.0) + sent_bytes

    def take_counted(self) -> tuple[str, dict[Level, float]] | None:
        """The purpose and the bytes by level of the transfer that begins now; None if laconic has not counted it."""
        counted, self._counted = self._counted, None
        if counted is not None and self.factor != 1.0:
            counted = counted[0], {level: self.factor * nbytes for level, nbytes in counted[1].items()}
            self.factor = 1.0
        return counted

    def transfer(
        self, transfer: Transfer, outputs: Sequence[Tensor], inputs: Sequence[Tensor], body: Callable[[], Any]
    ) -> None:
        """Run a transfer on the current stream. What it does to the data is `body`, if there are values."""
        before, self._transfer = self._transfer, transfer
        try:
            is_whole = self.cost_of is not None
            if self.has_values or self._are_real([*outputs, *inputs]):
                with self._paused() if is_whole else nullcontext():
                    body()
            else:
                is_whole = True
            if is_whole and self.is_recording and (self.cost_of is None or transfer.route.sent or transfer.message):
                touched = [*((each, True) for each in outputs), *((each, False) for each in inputs)]
                self.add_step(transfer.op, touched, None)
        finally:
            self._transfer = before

    @contextmanager
    def _paused(self) -> Iterator[None]:
        before, self.is_recording = self.is_recording, False
        try:
            yield
        finally:
            self.is_recording = before

    def _are_real(self, tensors: Sequence[Tensor]) -> bool:
        with torch._C.DisableTorchFunction():
            return not any(tensor.is_meta for tensor in tensors)

    def add_step(self, name: str, touched: Sequence[tuple[Tensor, bool]], run: Run | None, cost: Any = None) -> int:
        """Write down an operation that touches these tensors, and whether it writes them. Returns its timeline."""
        is_on_device = any(self.is_on_device(tensor) for tensor, _ in touched)
        timeline = self.current.timeline if is_on_device else self.thread
        accesses: Sequence[Access] = ()
        place = ""
        if self.cost_of is None:
            accesses = [each for tensor, is_write in touched for each in self._accesses(tensor, is_write)]
            place = self._place()
        step = Step(timeline, self.thread, name, place, accesses, run, transfer=self._transfer, cost=cost)
        self.tape.entries.append(step)
        return timeline

    def note_read(self, tensor: Tensor, name: str) -> int:
        """Write down that somebody reads memory, which torch does not show to a mode. Returns the timeline."""
        if not self.is_recording or self.cost_of is not None:
            return self.thread
        run = Run(aten.clone.default, (self.reference(tensor),), {}, [], None, gives_value=True)
        return self.add_step(name, [(tensor, False)], run if self.has_values else None)

    def read_by_host(self, tensor: Tensor, name: str) -> None:
        """Write down that the present thread reads a tensor's memory. It waits for the device, if that has it."""
        timeline = self.note_read(tensor, name)
        if timeline != self.thread:
            self.join(timeline)

    def reference(self, tensor: Tensor) -> Any:
        """Where a tensor lies: memory, byte offset, size, stride, dtype. Tensors on meta stay."""
        if tensor.device.type == "meta":
            return tensor
        offset = tensor.storage_offset() * tensor.itemsize + self._begin_of.get(tensor.untyped_storage()._cdata, 0)
        return Reference(self.memory(tensor).id, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _accesses(self, tensor: Tensor, is_write: bool) -> list[Access]:
        """The bytes of a tensor, exactly unless it has thousands of runs."""
        if tensor.numel() == 0:
            return []
        memory, first = self.memory(tensor), self._begin_of.get(tensor.untyped_storage()._cdata, 0)
        return [Access(memory.id, first + begin, first + end, is_write) for begin, end in byte_runs(tensor)]

    def _place(self) -> str:
        for frame, number in walk_stack(sys._getframe(2)):
            file, line = frame.f_code.co_filename, f":{number} ({frame.f_code.co_name})"
            if file.startswith(_LIBRARY) and not file.startswith(_OWN):
                return file[len(_LIBRARY) + 1 :] + line
            if not file.startswith((_OWN, *_NOT_THE_PROGRAM)):
                return Path(file).name + line
        return "?"


def _origin() -> str:
    """The file and the function of the library, or of torch's FSDP2 or optimizers, that asks for memory."""
    origins = (_origin_of(frame.f_code) for frame, _ in walk_stack(sys._getframe(2)))
    return next(filter(None, origins), "")


@functools.cache
def _origin_of(code: CodeType) -> str:
    file = _file_of(code.co_filename)
    return f"{file}:{code.co_name}" if file else ""


def _file_of(path: str) -> str:
    if path.startswith(_LIBRARY) and not path.startswith(_OWN):
        return path[len(_LIBRARY) + 1 :]
    for root in (FSDP2, _OPTIMIZERS):
        if path.startswith(root):
            return f"{Path(root).name}{path[len(root) :]}"
    return ""


def origin_of(owner: ModuleType | Callable[..., Any]) -> str:
    """The `place` of memory that a module asks for, or a function of it, on a machine that asks for costs."""
    return _file_of(str(owner.__file__)) if isinstance(owner, ModuleType) else _origin_of(owner.__code__)


@dataclass(frozen=True, slots=True)
class Run:
    """What it takes to run an operation again, with a `Reference` in place of each tensor."""

    function: Any
    args: Any
    kwargs: Any
    outputs: list[tuple[int, Reference]]
    """Which of its results, counted as leaves, are new, and where they lie."""
    random_state: Tensor | None
    gives_value: bool
    """True if the host reads the result."""


class Reference(tuple):
    """Where a tensor lies: (memory, byte offset, size, stride, dtype)."""

    __slots__ = ()

    def __new__(cls, *parts: Any) -> Reference:
        """Take the parts as they are."""
        return super().__new__(cls, parts)


def byte_runs(tensor: Tensor) -> list[tuple[int, int]]:
    """The runs [begin, end) of bytes of its storage that a tensor covers; one that holds them all, if they are many."""
    first, width = int(tensor.storage_offset()), tensor.itemsize
    if tensor.is_contiguous():
        return [(first * width, (first + int(tensor.numel())) * width)]
    dims = sorted((int(s), int(n)) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s)
    run = 1
    while dims and dims[0][0] == run:  # a contiguous inner part
        run *= dims.pop(0)[1]
    starts = [0]
    if len(dims) and math.prod(n for _, n in dims) <= _MAX_RUNS:
        for stride, size in reversed(dims):
            starts = [start + i * stride for start in starts for i in range(size)]
    elif dims:
        run = 1 + sum(stride * (size - 1) for stride, size in dims) + run - 1
    return [((first + start) * width, (first + start + run) * width) for start in starts]


def _begin(memory: Memory, storage: Any) -> int:
    return memory.id << 48 if storage.device.type == "meta" else storage.data_ptr()


def contents(storage: Any) -> Tensor:
    """A copy of a storage's bytes, which the machine does not see."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=torch.uint8).set_(storage).clone()
