"""A record of the work that one rank of a cluster gives to a device that is not there.

[Note: Tensors without elements]
The program's tensors lie on torch's meta device: they have shapes, dtypes, storages and autograd, but no elements. A
mode of torch's functions lets them say that they lie on the rank's device. So the program takes the same paths as
there, at a few microseconds an operation. The host reads 1 from such a tensor, and finds no two that differ. Tensors
that the program makes without naming a device are small messages of the host, and stay as they are. A mode of torch's
operators sees every operation: the bytes that it reads and writes, the memory that it allocates, and, by weak
references, when that memory is freed. Streams and events keep no order here; they are only written down. Collectives do
nothing, but are written down with the bytes that `laconic.comm.traffic` counts for them.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from laconic import _compat
from laconic.codec import blocked
from laconic.comm import cluster as cluster_room
from laconic.comm import collectives
from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.comm.traffic import Level, Purpose, Traffic
from laconic.plan.op_cost import bytes_of, nbytes_of, tensors_of
from laconic.plan.phase import Phase

COMPUTE = 0
"""The stream that is current at first. On a CPU the program itself is the only stream."""
META = torch.device("meta")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Compute:
    """A phase of the model on the compute stream."""

    name: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Peak:
    """A moment at which the phase that runs has this many bytes of activations besides those at its start."""

    extra_bytes: int


@dataclass(frozen=True, slots=True)
class Rest:
    """The end of a phase: its activations that stay, or those of earlier phases that it has freed."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Work:
    """An operation of the program besides the model's, and the bytes that it reads and writes."""

    stream: int
    name: str
    nbytes: float


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between the device and the host."""

    stream: int
    name: str
    nbytes: float
    to_device: bool


@dataclass(frozen=True, slots=True)
class Allocate:
    """New memory, and the file and the function that have asked for it."""

    memory: int
    nbytes: int
    place: str
    on_host: bool


@dataclass(frozen=True, slots=True)
class Free:
    """The end of a memory."""

    memory: int


@dataclass(frozen=True, slots=True)
class Send:
    """A collective. Other ranks send as much."""

    number: int
    stream: int
    name: str
    purpose: Purpose
    sent: Mapping[Level, float]


@dataclass(frozen=True, slots=True)
class Await:
    """The host waits for a collective; on a CPU, compute."""

    number: int


@dataclass(frozen=True, slots=True)
class Record:
    """An event on a stream."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream waits for an event."""

    stream: int
    event: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The begin of a stretch of the program."""

    label: Any


Entry = Compute | Peak | Rest | Work | Copy | Allocate | Free | Send | Await | Record | Wait | Mark


class StepRecorder:
    """Writes down what the program does: [Note: Tensors without elements]."""

    def __init__(self, device_type: str) -> None:
        self.entries: list[Entry] = []
        self.device = torch.device(device_type) if device_type == "cpu" else torch.device(device_type, 0)
        self.stream = _Stream(self)
        self.factor = 1.0
        """The mean of a message's bytes over the ranks of a node, in multiples of this rank's."""
        self.is_silent = False
        """True while operations belong to a phase of the model, which has their cost already."""
        self._times = 1.0
        """The number of operations that each one stands for."""
        self._streams = itertools.count(1)
        self._numbers = itertools.count()
        self._open: tuple[Purpose, dict[Level, float]] | None = None
        self._label = ""
        self._memories: dict[int, tuple[int, int]] = {}
        """The address of a storage -> its number and its bytes."""
        self._on_host: set[int] = set()

    # -- memory --------------------------------------------------------------------------------------------------------

    def number_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's memory; None if that was made before the recording."""
        return self._memories.get(tensor.untyped_storage()._cdata, (None, 0))[0]

    def put_on_host(self, tensor: Tensor) -> Tensor:
        """Say that the memory of `tensor`, which nobody has recorded yet, is the host's."""
        self._on_host.add(tensor.untyped_storage()._cdata)
        self.take(tensor)
        return tensor

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in host memory, beside a device."""
        return tensor.untyped_storage()._cdata in self._on_host

    def take(self, tensor: Tensor) -> bool:
        """Write down the memory of a tensor, if it is new. Returns whether it is."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._memories:
            return False
        self._allocate(storage)
        weakref.finalize(storage, self._forget, storage._cdata).atexit = False
        return True

    def resized(self, storage: Any) -> None:
        """Write down that a storage has another size."""
        if storage._cdata in self._memories:
            self._free(storage._cdata)
            self._allocate(storage)

    def _allocate(self, storage: Any) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._memories[key] = number, _ = next(self._numbers), nbytes
        if nbytes:
            self.entries.append(Allocate(number, nbytes, _place(), key in self._on_host))

    def _free(self, key: int) -> None:
        number, nbytes = self._memories.pop(key)
        if nbytes:
            self.entries.append(Free(number))

    def _forget(self, key: int) -> None:
        self._free(key)
        self._on_host.discard(key)

    # -- operations and collectives ------------------------------------------------------------------------------------

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Write down nothing but memory in the body."""
        before, self.is_silent = self.is_silent, True
        try:
            yield
        finally:
            self.is_silent = before

    @contextmanager
    def times(self, count: float) -> Iterator[None]:
        """Let each operation of the body stand for `count` operations."""
        before, self._times = self._times, count
        try:
            yield
        finally:
            self._times = before

    def work(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Write down an operation that is no view."""
        nbytes = self._times * bytes_of(func, args, kwargs, out)
        if not nbytes or self.is_silent:
            return
        name, stream = func.__name__, self.stream.number
        on_host = [self.is_on_host(each) for each in tensors_of((args, out)) if each.is_meta]
        if any(on_host) and not all(on_host):
            self.entries.append(Copy(stream, name, nbytes / 2, to_device=not on_host[0]))
        elif not any(on_host):
            self.entries.append(Work(stream, name, nbytes))

    def kernel(self, name: str, nbytes: float) -> None:
        """Write down a kernel that reads and writes `nbytes`."""
        self.entries.append(Work(self.stream.number, name, self._times * nbytes))

    def count(self, level: Level, purpose: Purpose, nbytes: float) -> None:
        """Note the bytes of the collective that comes next."""
        if self._open is None:
            self._open = purpose, {}
        self._open[1][level] = self._open[1].get(level, 0) + nbytes * self.factor

    def label(self, name: str) -> None:
        """Name the collective that comes next."""
        self._label = name

    def collective(self, *, waits: bool) -> _Transfer:
        """Write down a collective: the bytes that were counted last."""
        transfer = _Transfer(self, next(self._numbers))
        if self._open is not None:
            (purpose, sent), self._open = self._open, None
            self.entries.append(Send(transfer.number, self.stream.number, self._label, purpose, sent))
            if waits:
                transfer.wait()
        return transfer

    # -- streams -------------------------------------------------------------------------------------------------------

    def new_stream(self, *_: Any, **__: Any) -> _Stream:
        """Make a stream."""
        return _Stream(self, next(self._streams))

    @contextmanager
    def on(self, stream: _Stream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


class _Transfer:
    """A collective under way."""

    def __init__(self, recorder: StepRecorder, number: int) -> None:
        self._recorder, self.number = recorder, number

    def wait(self, timeout: Any = None) -> bool:
        self._recorder.entries.append(Await(self.number))
        return True

    def is_completed(self) -> bool:
        return True


class _Stream:
    """A stream of the device."""

    def __init__(self, recorder: StepRecorder, number: int = COMPUTE) -> None:
        self._recorder, self.number = recorder, number

    def wait_event(self, event: _Event) -> None:
        self._recorder.entries.append(Wait(self.number, event.number))

    def wait_stream(self, other: _Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Any = None) -> _Event:
        return _Event(self._recorder, self.number)

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        """The host may wait; the device goes on."""


class _Event:
    """An event of the device."""

    def __init__(self, recorder: StepRecorder, stream: int) -> None:
        self.device, self.number = recorder.device, next(recorder._numbers)
        recorder.entries.append(Record(stream, self.number))

    def synchronize(self) -> None:
        """The host may wait; the device goes on."""


class _Traffic(Traffic):
    """Counters that show the recorder what they count."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def count(self, level: Level, purpose: Purpose, *, sent_bytes: int, received_bytes: int) -> None:
        super().count(level, purpose, sent_bytes=sent_bytes, received_bytes=received_bytes)
        self._recorder.count(level, purpose, sent_bytes)


# -- modes -------------------------------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Shows the recorder every operation on a tensor without elements."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own operations on plain tensors follow
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and (device.type == "cuda" or any(each.is_meta for each in tensors_of(args))):
            kwargs = {**kwargs, "device": META}  # a ragged tensor asks for its own device
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        results = [each for each in tensors_of(out) if each.is_meta]
        is_new = [self._recorder.take(each) for each in results]
        if any(is_new) or (func._schema.is_mutable and any(each.is_meta for each in tensors_of((args, kwargs)))):
            self._recorder.work(func, args, kwargs, out)
        return out


class _Devices(TorchFunctionMode):
    """Lets tensors without elements say where they lie."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        special = _SPECIAL.get(func)
        if special is None and not kwargs:  # most calls
            return func(*args)
        kwargs = dict(kwargs or {})
        if special is not None and not isinstance(args[0], DTensor) and _is_meta(args[0]):
            return special(self.recorder, func, *args, **kwargs)
        device = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if device is not None and device.type == self.recorder.device.type:
            kwargs["device"] = _CPU if func is torch.tensor and _is_small(args[0]) else META
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _is_small(value: Any) -> bool:
    """Whether a value becomes a tensor that stays as it is: a number, or whole numbers on which ranks agree."""
    return not isinstance(value, list | tuple) or all(isinstance(each, int | list) for each in value)


def _is_meta(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def _is_bare(recorder: StepRecorder, tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device for the program, too: it was there before."""
    return recorder.number_of(tensor) is None


def _to(recorder: StepRecorder, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`, whose device is where the tensor lies already."""
    flags = []
    for value in args:
        if isinstance(value, Tensor | torch.dtype):
            kwargs["dtype"] = value.dtype if isinstance(value, Tensor) else value
        elif isinstance(value, bool):
            flags.append(value)
    kwargs = {"dtype": tensor.dtype, **dict(zip(("non_blocking", "copy"), flags, strict=False)), **kwargs}
    kwargs.pop("device", None)
    return func(tensor, **kwargs)


def _same(recorder: StepRecorder, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


def _one(recorder: StepRecorder, func: Any, tensor: Tensor) -> float:
    """What the host reads."""
    return 1.0


def _zeros(recorder: StepRecorder, func: Any, tensor: Tensor) -> Any:
    return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()


def _places(recorder: StepRecorder, func: Any, tensor: Tensor) -> Tensor:
    """The places of true elements: the first one in a table of numbers, and none where rows are compared."""
    return torch.zeros((int(tensor.ndim < 2), tensor.ndim), dtype=torch.int64)


def _device_of(recorder: StepRecorder, func: Any, tensor: Tensor, *rest: Any) -> torch.device:
    return META if _is_bare(recorder, tensor) else recorder.device


def _address(recorder: StepRecorder, func: Any, tensor: Tensor) -> int:
    """A number that is equal for tensors that begin at one place."""
    return (tensor.untyped_storage()._cdata << 40) + tensor.storage_offset() * tensor.itemsize


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.device.__get__: _device_of,
    torch.Tensor.is_cuda.__get__: lambda recorder, *rest: recorder.device.type == "cuda",  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda recorder, *rest: recorder.device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: lambda recorder, func, tensor, *rest: _is_bare(recorder, tensor),  # type: ignore[attr-defined]
    torch.Tensor.to: _to,
    torch.Tensor.cpu: _same,
    torch.Tensor.cuda: _same,
    torch.Tensor.pin_memory: _same,
    torch.Tensor.is_pinned: lambda *rest: False,
    torch.Tensor.item: _one,
    torch.Tensor.__float__: _one,
    torch.Tensor.__int__: lambda *rest: 1,
    torch.Tensor.__bool__: lambda *rest: True,
    torch.equal: lambda *rest: True,
    torch.Tensor.nonzero: _places,
    torch.Tensor.tolist: _zeros,
    torch.Tensor.data_ptr: _address,
}


def _place() -> str:
    """The file and the function of the library, or of torch's optimizers and FSDP2, that asks for memory."""
    frame = sys._getframe(4)
    while frame is not None:
        file = frame.f_code.co_filename
        for room in ("/laconic/", "/torch/optim/", "/_fully_shard/"):
            if room in file and not file.endswith("plan/recording.py"):
                return f"{file.rpartition(room)[2]}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


# -- the world ---------------------------------------------------------------------------------------------------------


@contextmanager
def record(recorder: StepRecorder, *, world_size: int, num_local: int) -> Iterator[None]:
    """Run the body as rank 0 of a job of `world_size` ranks, `num_local` on each node."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    modules = SimpleNamespace(
        Stream=recorder.new_stream, stream=recorder.on, current_stream=lambda *_: recorder.stream,
        synchronize=lambda *_: None, is_available=lambda: True, is_initialized=lambda: True, current_device=lambda: 0,
    )  # fmt: skip
    devices, device_type = _Devices(recorder), recorder.device.type
    real_backward, real_resize = torch.autograd._engine_run_backward, torch.UntypedStorage.resize_
    real_module, real_issue = torch.get_device_module, collectives.issue

    def backward(*args: Any, **kwargs: Any) -> Any:
        with devices:  # torch leaves the mode for the whole of `backward`, which runs hooks and functions of ours
            return real_backward(*args, **kwargs)

    def resize(storage: Any, nbytes: int) -> Any:
        real_resize(storage, nbytes)
        recorder.resized(storage)
        return storage

    def issue(group: Any, kind: str, unit: str = "", **kwargs: Any) -> Any:
        recorder.label(f"{kind} {unit}".strip())
        return real_issue(group, kind, unit, **kwargs)

    def cluster_of(*args: Any, **kwargs: Any) -> Cluster:
        cluster = real_of(*args, **kwargs)
        cluster.traffic = traffic
        return cluster

    real_of, traffic = _outside(Cluster.of), _Traffic(recorder)
    patches: list[tuple[Any, str, Any]] = [
        (torch.autograd, "_engine_run_backward", backward),
        (torch.UntypedStorage, "resize_", resize),
        (torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(partial(_by_dtype, recorder))),
        (clip_grad, "_group_tensors_by_device_and_dtype", partial(_by_dtype, recorder)),
        (cluster_room, "make_mesh", _outside(cluster_room.make_mesh)),
        (Cluster, "of", staticmethod(cluster_of)),
        (RankGroup, "gather", lambda group, value: [value] * group.size),
        (collectives, "issue", issue),
        (blocked, "_fused", lambda function: partial(_as_one_kernel, recorder, function)),
        (_compat, "backend_of", lambda group, kind: "gloo" if device_type == "cpu" else "nccl"),
        *((target, name, _collective(recorder, name)) for target, name in _COLLECTIVES),
    ]
    if device_type != "cpu":
        patches += [
            (torch, "get_device_module", lambda d=None: real_module(d) if torch.device(d).type == "cpu" else modules),
            (torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(device_type)),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch.accelerator, "set_device_index", lambda index: None),
            (torch.accelerator, "device_count", lambda: 1),
            (torch.accelerator, "current_stream", modules.current_stream),
            (torch.cuda, "is_initialized", lambda: True),
            (torch.cuda, "set_device", lambda device: None),
        ]
    with ExitStack() as stack:
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(mock.patch.dict("os.environ", LOCAL_WORLD_SIZE=str(num_local), LOCAL_RANK="0"))
        stack.enter_context(_another_world(world_size))
        stack.enter_context(_other_tables())
        stack.enter_context(devices)
        stack.enter_context(_Operations(recorder))
        yield


_COLLECTIVES = [
    (dist, "all_gather_into_tensor"), (dist, "all_gather"), (dist, "isend"), (dist, "irecv"),
    (dist, "all_to_all_single"), (dist, "all_reduce"), (dist, "broadcast"), (dist, "reduce_scatter_tensor"),
    (dist, "barrier"), (_compat, "_all_gather_flat"), (_compat, "_reduce_scatter_flat"),
]  # fmt: skip


def _collective(recorder: StepRecorder, name: str) -> Callable[..., Any]:
    """A collective of `name`, in which other ranks send what this one sends, where that has elements."""

    def run(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        has_elements = bool(tensors) and not _is_meta(tensors[0])
        if has_elements and name == "all_to_all_single":
            tensors[0].zero_() if _is_meta(tensors[1]) else tensors[0].copy_(tensors[1])
        is_message = name in ("isend", "irecv")
        on_stream = recorder.device.type != "cpu" and not has_elements
        return recorder.collective(waits=not (async_op or is_message or on_stream))

    return run


def _as_one_kernel(recorder: StepRecorder, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function that torch.compile would make one kernel of: it reads its arguments and writes its results."""
    with _disable_current_modes():
        results = function(*arguments)
    for each in tensors_of(results):
        recorder.take(each)
    recorder.kernel("coding", sum(map(nbytes_of, [*tensors_of(arguments), *tensors_of(results)])))
    return results


def _by_dtype(recorder: StepRecorder, lists: Sequence[Sequence[Any]], with_indices: bool = False) -> Any:
    """Group tensors as torch does for its foreach functions, by dtype: they lie on one device, whatever torch sees."""
    groups: dict[Any, Any] = {}
    for index, first in enumerate(lists[0]):
        columns, indices = groups.setdefault((recorder.device, first.dtype), ([[] for _ in lists], []))
        for column, values in zip(columns, lists, strict=True):
            column.extend(values[index : index + 1])
        indices.append(index)
    return groups


def _outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose tensors have elements."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


@contextmanager
def _other_tables() -> Iterator[None]:
    """Let codecs make their tables anew, since those of the body have no elements."""
    rooms = [
        module for name, module in list(sys.modules.items()) if name.startswith(("laconic.codec", "laconic.optim"))
    ]
    caches = [each for room in rooms for each in vars(room).values() if hasattr(each, "cache_clear")]
    for each in caches:
        each.cache_clear()
    try:
        yield
    finally:
        for each in caches:
            each.cache_clear()


_TABLES: list[dict[Any, Any]] = [
    *(
        getattr(distributed_c10d, name)
        for name in ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
    ),
    cluster_room._made_on,
]
"""What a process knows of its groups."""
_worlds: dict[int, tuple[list[dict[Any, Any]], Any, int]] = {}
"""The worlds of ranks that are not there, by their size: their groups, whose making takes long in large worlds."""


@contextmanager
def _another_world(size: int) -> Iterator[None]:
    """Let `size` ranks that are not there be the world. The process may have a default process group of its own."""
    own = _world_state()
    real_name = distributed_c10d._hash_ranks_to_str
    number = [*_worlds, size].index(size) + 1
    try:
        with mock.patch.object(
            distributed_c10d, "_hash_ranks_to_str", lambda ranks: f"rehearsal-{number}-{real_name(ranks)}"
        ):
            if size in _worlds:
                _enter_world(*_worlds[size])
            else:
                _enter_world([{} for _ in _TABLES], None, number * 10**6)  # no group has a name twice in a process
                dist.init_process_group("fake", rank=0, world_size=size)
            yield
    finally:
        _worlds[size] = _world_state()
        _enter_world(*own)


def _world_state() -> tuple[list[dict[Any, Any]], Any, int]:
    return list(map(dict, _TABLES)), distributed_c10d._world.default_pg, distributed_c10d._world.group_count


def _enter_world(tables: list[dict[Any, Any]], default: Any, count: int) -> None:
    for own, table in zip(_TABLES, tables, strict=True):
        own.clear()
        own.update(table)
    distributed_c10d._update_default_pg(default)
    distributed_c10d._world.group_count = count
