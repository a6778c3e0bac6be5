"""The two modes of torch that let a program believe in the machine's accelerator, and the functions that they replace.

The function mode moves to host memory whatever asks for device "cuda", and lets such tensors say that they are on
"cuda". The dispatch mode sees every operation. It runs the operation at once, and gives it to the machine's recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.nn.parallel import distributed
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from laconic.codec import blocked, lossless_sums
from laconic.layers import scaled
from laconic.rehearse import kernels
from laconic.rehearse.machine import CPU, CUDA, Event, Machine, Run, Stream, aten
from laconic.rehearse.operations import Inputs, Kind, inputs_of, kind_of, run, stands_for, value_without
from laconic.rehearse.tape import HOST
from laconic.rehearse.threads import threads_of
from laconic.rehearse.world import COLLECTIVES
from laconic.shard import api, cache, crossing

_DEVICE = torch.Tensor.device.__get__
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_OF_PLACES = {_DEVICE, _IS_CUDA, _IS_CPU, _IS_META}


@contextmanager
def accelerator(
    *, has_values: bool = True, device_type: str = "cuda", cost_of: Callable[[Any, Any, Any, Any], Any] | None = None
) -> Iterator[Machine]:
    """Yield a machine. In the body it is what torch finds as its accelerator; with "cpu" it has none.

    Without values, tensors have shapes and places only: [Note: Data without values] in operations.py. `cost_of`: see
    `Machine`; for machines without values.
    """
    machine = Machine(has_values=has_values, device_type=device_type, cost_of=cost_of)

    class OwnStream(Stream):  # classes, since torch asks for instances of them
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            super().__init__(machine)

    class OwnEvent(Event):
        def __init__(self, **flags: Any) -> None:
            super().__init__(machine)

    driver = SimpleNamespace(cudaHostRegister=machine.register_pages, cudaHostUnregister=machine.unregister_pages)
    cuda = {
        "Stream": OwnStream,
        "Event": OwnEvent,
        "current_stream": lambda device=None: machine.current,
        "stream": machine.stream,
        "synchronize": lambda device=None: machine.synchronize(),
        "is_initialized": lambda: True,
        "cudart": lambda: driver,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }
    any_accelerator = {
        "current_accelerator": lambda check_available=False: CUDA,
        "current_device_index": lambda: 0,
        "set_device_index": lambda index: None,
        **{name: cuda[name] for name in ("device_count", "current_stream", "synchronize")},
    }
    real_module, real_resize, real_save = torch.get_device_module, torch.UntypedStorage.resize_, torch.save
    real_part, real_hooks = torch.UntypedStorage.__getitem__, torch.autograd.graph.saved_tensors_hooks.__init__
    devices = _Devices(machine)
    operations = _Operations(machine, devices)
    run_backward = torch.autograd._engine_run_backward

    def module_of(device: Any = None) -> Any:
        if torch.device(device or CUDA).type != "cuda":
            return real_module(device)
        none = dict.fromkeys(("get_rng_state", "set_rng_state"), lambda *_: None)  # nothing is drawn there
        return SimpleNamespace(**cuda, **none, is_available=lambda: True)

    def resize(storage: Any, nbytes: int) -> Any:
        before = machine.before_resize(storage)
        real_resize(storage, nbytes)
        machine.after_resize(storage, before)
        return storage

    def part_of(storage: Any, index: Any) -> Any:
        if not isinstance(index, slice):
            return real_part(storage, index)
        begin, end, _ = index.indices(storage.nbytes())
        is_meta = storage.device.type == "meta"
        part = torch.UntypedStorage(end - begin, device="meta") if is_meta else real_part(storage, index)
        machine.cut(storage, part, begin)
        return part

    def save(values: Any, *args: Any, **kwargs: Any) -> None:
        for tensor in pytree.tree_leaves(values):
            if isinstance(tensor, Tensor):
                machine.read_by_host(tensor, "save")
        real_save(values, *args, **kwargs)

    def backward(*args: Any, **kwargs: Any) -> Any:
        def run_here() -> Any:
            with operations, devices:  # modes are a thread's own, and torch leaves those of functions in `backward`
                return run_backward(*args, **kwargs)

        # In another thread of the host, as torch runs the backward of an accelerator: it has none of the caller's
        # thread-local state, which our hooks and functions must not need.
        with futures.ThreadPoolExecutor(1, "backward") as pool:
            return pool.submit(run_here).result()

    def hooks_of_saved_tensors(hooks: Any, pack: Any, unpack: Any) -> None:
        real_hooks(hooks, _within(devices, pack), _within(devices, unpack))  # torch has left the mode for the operation

    def make_slab(nbytes: int, device: torch.device, **texts: Any) -> Tensor:
        with _placing(machine, (False, True)):  # of any size, in no memory
            return torch.empty(nbytes, dtype=torch.uint8)

    replaced: list[tuple[Any, str, Any]] = []
    if not has_values:
        replaced += [
            (cache, "make_slab", make_slab),
            (torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(_by_device_and_dtype)),
            (distributed, "_verify_param_shape_across_processes", lambda *_: None),  # it reads what others have
            (dist, "_compute_bucket_assignment_by_size", _buckets_of_backward),
            (dist.Reducer, "_rebuild_buckets", lambda reducer: False),
            (dist.Logger, "set_runtime_stats_and_log", lambda logger: None),  # of devices that are there
        ]
    if cost_of is not None:
        replaced.append((clip_grad, "_group_tensors_by_device_and_dtype", _by_device_and_dtype))
        replaced.append((_fsdp_param, "_chunk_with_empty", _Chunks))
    if device_type == "cuda":
        replaced.append((torch, "get_device_module", module_of))
        replaced += [(torch.cuda, name, value) for name, value in cuda.items()]
        replaced += [(torch.accelerator, name, value) for name, value in any_accelerator.items()]
    with ExitStack() as patches:
        for target, name, value in (
            *replaced,
            (torch.autograd.graph.saved_tensors_hooks, "__init__", hooks_of_saved_tensors),
            (torch, "save", save),
            (torch.UntypedStorage, "resize_", resize),
            (torch.UntypedStorage, "__getitem__", part_of),
            (torch.autograd, "_engine_run_backward", backward),
            *((module, "kernels_for", kernels.kernels_of(machine)) for module in (blocked, scaled)),
            (crossing, "encode_in_pieces", partial(kernels.encode_difference, machine)),
            (crossing, "decode_in_pieces", partial(kernels.decode_difference, machine)),
            (api, "coder_on", lambda *_: None),  # which this machine needs not have
            (lossless_sums, "encode", partial(kernels.encode_gradients, machine)),
            (lossless_sums, "decode", partial(kernels.decode_gradients, machine)),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        patches.enter_context(threads_of(machine))
        patches.enter_context(devices)
        with operations:
            yield machine
    machine.is_recording = False
    machine.memory_of.clear()


_assign = dist._compute_bucket_assignment_by_size


def _buckets_of_backward(parameters: list[Tensor], limits: Any, *rest: Any) -> tuple[list[list[int]], list[int]]:
    """The buckets that DDP makes after its first step, in the order of forward.

    It makes them as gradients have come, which is the reverse of the order of parameters: the first takes tensors until
    it has 1 MiB, each following one until it has 25 MiB. Here they are made at once, since ranks agree on them through
    values. Source: torch's csrc/distributed/c10d/reducer.cpp.
    """
    found, sizes = _assign(parameters[::-1], [2**20, 25 * 2**20], *rest)
    last = len(parameters) - 1
    return [[last - index for index in bucket] for bucket in reversed(found)], sizes[::-1]


class _Chunks:
    """The chunks of a tensor as FSDP2 cuts it. It takes one or two of them, and makes those of all ranks."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = max(1, -(-tensor.shape[dim] // num_chunks))

    def __getitem__(self, index: int) -> Tensor:
        begin, rows = index * self._size, self._tensor.shape[self._dim]
        if begin >= rows and index:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._size, rows - begin))


def _by_device_and_dtype(lists: Sequence[Sequence[Any]], with_indices: bool = False) -> Any:
    """Group tensors as torch does for its foreach functions, by what they say of themselves."""
    groups: dict[Any, Any] = {}
    for index, first in enumerate(lists[0]):
        columns, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for column, values in zip(columns, lists, strict=True):
            column.extend(values[index : index + 1])
        indices.append(index)
    return groups


# -- every operation ---------------------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Runs every operation at once, and gives it to the recorder."""

    def __init__(self, machine: Machine, devices: _Devices) -> None:
        super().__init__()
        self._machine, self._devices = machine, devices

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No. Nothing compiles here, and to tell torch's compiler so takes longer than some operations."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and write down what it touches."""
        machine, kwargs = self._machine, kwargs or {}
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return function(
                *args, **kwargs
            )  # DTensor, for one, tries shapes on torch's fake tensors: no work of a device
        own = next((each for each in types if issubclass(each, DTensor)), None)
        if own is DTensor or (own is not None and machine.has_values):
            return NotImplemented  # its own operations on plain tensors follow
        if own is not None:  # they ask where tensors lie
            with self, self._devices:
                return own.__torch_dispatch__(function, types, args, kwargs)
        if function.namespace in COLLECTIVES:
            with self, self._devices:
                return COLLECTIVES[function.namespace](function, *args, **kwargs)
        if machine.has_values:
            return self._run(function, args, kwargs)
        with torch._C.DisableTorchFunction():
            return self._run(function, args, kwargs)

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        machine = self._machine
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":  # a ragged tensor asks for its own device
            with _placing(machine, (True, False)):
                return self._run(function, args, {**kwargs, "device": CPU})
        kind = kind_of(function)
        given = inputs_of(kind, args, kwargs)
        inputs = [pair for pair in given if machine.knows(pair[0])]
        if (device is not None and device.type == "meta") or (device is None and given and not inputs):
            return function(*args, **kwargs)  # tensors on meta that the program itself has made
        if function is aten.lift_fresh.default:  # one of Python's numbers, in `torch.tensor`
            is_elsewhere = not machine.has_values and any(machine.placing or ())
            number = torch.empty_like(args[0], device="meta") if is_elsewhere else function(*args, **kwargs)
            machine.take(number, is_new=False)
            if is_elsewhere:
                machine.memory(number).stands_for = args[0]
            return number
        for tensor, _ in inputs:
            machine.memory(tensor)
        if kind.is_view:
            return function(*args, **kwargs)
        state = generator_of(kwargs).get_state() if kind.is_random and machine.has_values else None
        result = function(*args, **kwargs) if machine.has_values else run(machine, kind, function, args, kwargs, inputs)
        fresh = self._take_new(inputs, result)
        if not machine.has_values:
            self._note_values(kind, args, inputs, fresh)
        if not machine.is_recording:
            return result
        if machine.cost_of is not None:
            cost = machine.cost_of(function, args, kwargs, result) if fresh or kind.writes_any else None
            if cost is not None:
                machine.add_step(kind.name, [*inputs, *((tensor, True) for _, tensor in fresh)], None, cost)
            return result
        is_view = not fresh and not any(is_write for _, is_write in inputs)
        if (is_view and not kind.needs_host) or kind.is_empty:
            return result
        touched = inputs if kind.reads_values else [pair for pair in inputs if pair[1]]
        touched = [*touched, *((tensor, True) for _, tensor in fresh)]
        by_value, waits = self._host_side(kind, function, args, kwargs, touched)
        if not machine.has_values:
            timeline = machine.add_step(kind.name, touched, None)
            if waits:
                machine.join(timeline)
            return result
        if by_value:
            machine.add_step(kind.name, [(tensor, False) for tensor in by_value], None)
            touched = [pair for pair in touched if machine.is_on_device(pair[0])]

        def reference(tensor: Tensor) -> Any:
            return value_of(tensor) if any(tensor is each for each in by_value) else machine.reference(tensor)

        step = Run(
            function,
            replace_tensors(args, reference),
            dict(zip(kwargs, replace_tensors([*kwargs.values()], reference), strict=True)),
            [(index, machine.reference(tensor)) for index, tensor in fresh],
            state,
            gives_value=kind.gives_value,
        )
        timeline = machine.add_step(kind.name, touched, step)
        if waits:
            machine.join(timeline)
        return result

    def _note_values(
        self, kind: Kind, args: Sequence[Any], inputs: Inputs, fresh: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Note what the results without values stand for."""
        value = stands_for(self._machine, kind, args, inputs)
        for tensor in (*(each for each, is_write in inputs if is_write), *(each for _, each in fresh)):
            self._machine.memory(tensor).stands_for = value

    def _host_side(
        self, kind: Kind, function: Any, args: Any, kwargs: Any, touched: Sequence[tuple[Tensor, bool]]
    ) -> tuple[list[Tensor], bool]:
        """The numbers in host memory that torch reads when it issues an operation, and whether it waits for its end."""
        machine = self._machine
        on_host = [tensor for tensor, _ in touched if not machine.is_on_device(tensor)]
        if len(on_host) == len(touched):  # no work of the device
            return [], False
        if function not in (aten.copy_.default, aten._to_copy.default):
            return on_host, kind.needs_host
        is_late = _is_non_blocking(function, args, kwargs) and all(machine.memory(each).is_pinned for each in on_host)
        return [], bool(on_host) and not is_late

    def _take_new(self, inputs: Inputs, result: Any) -> list[tuple[int, Tensor]]:
        """Register the new memory of an operation's results; return the results that have some, with their numbers."""
        machine = self._machine
        is_device = any(machine.is_on_device(tensor) for tensor, _ in inputs)
        results = [result] if isinstance(result, Tensor) else pytree.tree_leaves(result)
        tensors = [pair for pair in enumerate(results) if isinstance(pair[1], Tensor)]
        return [
            (index, each)
            for index, each in tensors
            if not (machine.has_values and each.is_meta) and machine.take(each, is_device=is_device)
        ]


def replace_tensors(values: Sequence[Any], replacement: Callable[[Any], Any], kind: type = Tensor) -> list[Any]:
    """Replace each tensor, or what is of another `kind`, in the arguments of an operation."""
    return [
        replacement(each)
        if isinstance(each, kind)
        else (replace_tensors(each, replacement, kind) if type(each) in (list, tuple) else each)
        for each in values
    ]


def value_of(tensor: Tensor) -> Tensor:
    """A copy of a tensor, which the machine does not see."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return tensor.clone()


def generator_of(kwargs: dict[str, Any]) -> torch.Generator:
    """The generator from which an operation draws."""
    return kwargs.get("generator") or torch.default_generator


def _is_non_blocking(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    return function is aten.copy_.default and len(args) > 2 and bool(args[2])


# -- every device ------------------------------------------------------------------------------------------------------


class _Devices(TorchFunctionMode):
    """Lets tensors of the accelerator say so, and makes those that the program asks for."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        special = _SPECIAL.get(function)
        if special is None and not kwargs:  # most calls
            return function(*args)
        kwargs = dict(kwargs or {})
        if function in _OF_PLACES and type(args[0]) is DTensor:
            args = (args[0]._local_tensor, *args[1:])
        if function is torch.Tensor.to and type(args[0]) is DTensor and not kwargs and _is_there(self._machine, *args):
            return args[0]
        if special is not None and not isinstance(args[0], DTensor) and self._machine.knows(args[0]):
            return special(self._machine, function, *args, **kwargs)
        device, is_pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if (device is None or torch.device(device).type == "meta") and not is_pinned:
            return function(*args, **kwargs)
        if device is not None:
            kwargs["device"] = CPU
        is_device = device is not None and torch.device(device).type == "cuda"
        with _placing(self._machine, (is_device, is_pinned)):
            result = function(*args, **kwargs)
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                    self._machine.take(tensor, is_new=False)
        return result


def _within(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function, assigned=())
    def call(*args: Any) -> Any:
        with mode:
            return function(*args)

    return call


@contextmanager
def _placing(machine: Machine, where: tuple[bool, bool]) -> Iterator[None]:
    before, machine.placing = machine.placing, where
    try:
        yield
    finally:
        machine.placing = before


def _device_of(machine: Machine, function: Any, tensor: Tensor, *rest: Any) -> torch.device:
    return CUDA if machine.is_on_device(tensor) else CPU


def _is_there(machine: Machine, tensor: DTensor, *wanted: Any) -> bool:
    """Whether `to` asks for no more than the device on which a tensor lies already."""
    is_device = len(wanted) == 1 and isinstance(wanted[0], torch.device | str)
    return is_device and (torch.device(wanted[0]).type == "cuda") == machine.is_on_device(tensor._local_tensor)


def _to(machine: Machine, function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    flags = []
    for value in args:
        if isinstance(value, Tensor):
            device, dtype = _device_of(machine, None, value), value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, bool):
            flags.append(value)
        elif value is not None:
            device = value
    is_late = flags[0] if flags else kwargs.get("non_blocking", False)
    must_copy = flags[1] if len(flags) > 1 else kwargs.get("copy", False)
    dtype = dtype or tensor.dtype
    goes_to_device = machine.is_on_device(tensor) if device is None else torch.device(device).type == "cuda"
    if device is not None and torch.device(device).type == "meta":
        return function(tensor, device=device, dtype=dtype)
    if goes_to_device == machine.is_on_device(tensor):
        return function(tensor, dtype=dtype, non_blocking=is_late, copy=must_copy)
    with _placing(machine, (goes_to_device, not goes_to_device and is_late)):
        target = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
    with torch.no_grad():
        return target.copy_(tensor, non_blocking=is_late)


def _pin(machine: Machine, function: Any, tensor: Tensor, *rest: Any) -> Tensor:
    with _placing(machine, (False, True)):
        target = torch.empty_like(tensor, requires_grad=False)
    return target.copy_(tensor)


def _read(machine: Machine, function: Any, tensor: Tensor, **kwargs: Any) -> Any:
    """Read memory, which torch does past its dispatcher."""
    machine.read_by_host(tensor, function.__name__)
    return function(tensor if machine.has_values or not tensor.is_meta else value_without(machine, tensor), **kwargs)


def _address(machine: Machine, function: Any, tensor: Tensor) -> int:
    """A background thread takes the address of host memory to read it."""
    if machine.thread != HOST and not machine.is_on_device(tensor):
        machine.read_by_host(tensor, "data_ptr")
    return machine.address(tensor) if tensor.is_meta else function(tensor)


_Special = Callable[..., Any]
_SPECIAL: dict[Any, _Special] = {
    _DEVICE: _device_of,
    _IS_CUDA: lambda machine, function, tensor, *rest: machine.is_on_device(tensor),
    _IS_META: lambda machine, function, tensor, *rest: False,
    _IS_CPU: lambda machine, function, tensor, *rest: not machine.is_on_device(tensor),
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda machine, function, tensor: _to(machine, torch.Tensor.to, tensor, CPU),
    torch.Tensor.cuda: lambda machine, function, tensor: _to(machine, torch.Tensor.to, tensor, CUDA),
    torch.Tensor.is_pinned: lambda machine, function, tensor, *rest: machine.memory(tensor).is_pinned,
    torch.Tensor.pin_memory: _pin,
    torch.Tensor.tolist: _read,
    torch.Tensor.numpy: _read,
    torch.Tensor.data_ptr: _address,
}
