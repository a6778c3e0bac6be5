"""The two modes of torch that let a program believe in the machine's accelerator, and the functions that they replace.

The function mode moves to host memory whatever asks for device "cuda", and lets such tensors say that they are on
"cuda". The dispatch mode sees every operation. It runs the operation at once, and gives it to the machine's recorder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from laconic.rehearse.machine import CPU, CUDA, Machine, Run, Stream, aten
from laconic.rehearse.tape import HOST
from laconic.rehearse.threads import threads_of

_EMPTY = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
_LIKE = {
    *("aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like", "aten::randn_like"),
    *("aten::new_zeros", "aten::new_ones", "aten::new_full"),
}
_DEVICE = torch.Tensor.device.__get__
_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]


@contextmanager
def accelerator() -> Iterator[Machine]:
    """Yield a machine. In the body it is what torch finds as its accelerator."""
    machine = Machine()
    streams = SimpleNamespace(
        Stream=lambda device=None, priority=0: Stream(machine),
        current_stream=lambda device=None: machine.current,
        stream=machine.stream,
        synchronize=lambda device=None: machine.synchronize(),
        is_available=lambda: True,
        is_initialized=lambda: True,
    )
    real_module, real_resize, real_save = torch.get_device_module, torch.UntypedStorage.resize_, torch.save
    real_part = torch.UntypedStorage.__getitem__
    driver = SimpleNamespace(cudaHostRegister=machine.register_pages, cudaHostUnregister=machine.unregister_pages)
    devices = _Devices(machine)
    run_backward = torch.autograd._engine_run_backward

    def module_of(device: Any = None) -> Any:
        return streams if torch.device(device or CUDA).type == "cuda" else real_module(device)

    def resize(storage: Any, nbytes: int) -> Any:
        before = machine.before_resize(storage)
        real_resize(storage, nbytes)
        machine.after_resize(storage, before)
        return storage

    def part_of(storage: Any, index: Any) -> Any:
        part = real_part(storage, index)
        if isinstance(index, slice):
            machine.cut(storage, part)
        return part

    def save(values: Any, *args: Any, **kwargs: Any) -> None:
        for tensor in pytree.tree_leaves(values):
            if isinstance(tensor, Tensor):
                machine.read_by_host(tensor, "save")
        real_save(values, *args, **kwargs)

    def backward(*args: Any, **kwargs: Any) -> Any:
        with devices:  # torch leaves the mode for the whole of `backward`, which runs hooks and functions of ours
            return run_backward(*args, **kwargs)

    with ExitStack() as patches:
        for target, name, value in (
            (torch, "get_device_module", module_of),
            (torch, "save", save),
            (torch.UntypedStorage, "resize_", resize),
            (torch.UntypedStorage, "__getitem__", part_of),
            (torch.autograd, "_engine_run_backward", backward),
            (torch.accelerator, "current_device_index", lambda: 0),
            (torch.accelerator, "current_accelerator", lambda check_available=False: CUDA),
            (torch.accelerator, "set_device_index", lambda index: None),
            (torch.accelerator, "device_count", lambda: 1),
            (torch.accelerator, "current_stream", streams.current_stream),
            (torch.accelerator, "synchronize", streams.synchronize),
            (torch.cuda, "cudart", lambda: driver),
            (torch.cuda, "is_initialized", lambda: True),
            (torch.cuda, "synchronize", streams.synchronize),
            (torch.cuda, "current_stream", streams.current_stream),
            (torch.cuda, "stream", machine.stream),
            (torch.cuda, "set_device", lambda device: None),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        patches.enter_context(mock.patch("laconic.codec.blocked._fused", lambda function: function))
        patches.enter_context(threads_of(machine))
        patches.enter_context(devices)
        with _Operations(machine):
            yield machine
    machine.is_recording = False
    machine.memory_of.clear()


# -- every operation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What the schema of an operation says of it."""

    name: str
    writes: tuple[bool, ...]
    """By the position of the argument: whether the operation writes it."""
    writes_by_name: dict[str, bool]
    is_view: bool
    """True if it touches no memory, and its results are views of its arguments."""
    is_empty: bool
    """True if its result is memory that it does not write."""
    reads_values: bool
    is_random: bool
    gives_value: bool
    needs_host: bool


@functools.cache
def _kind(function: Any) -> _Kind:
    schema, tags = function._schema, function.tags
    by_name = {each.name: each.alias_info is not None and each.alias_info.is_write for each in schema.arguments}
    gives_value = torch.Tag.data_dependent_output in tags
    aliases = [each.alias_info is not None for each in schema.returns]
    return _Kind(
        name=schema.name,
        writes=tuple(by_name.values()),
        writes_by_name=by_name,
        is_view=bool(aliases) and all(aliases) and not any(by_name.values()) and not gives_value,
        is_empty=schema.name in _EMPTY,
        reads_values=schema.name not in _EMPTY | _LIKE,
        is_random=torch.Tag.nondeterministic_seeded in tags,
        gives_value=gives_value,
        needs_host=gives_value or torch.Tag.dynamic_output_shape in tags,
    )


class _Operations(TorchDispatchMode):
    """Runs every operation at once, and gives it to the recorder."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and write down what it touches."""
        machine, kwargs = self._machine, kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own operations on plain tensors follow
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":  # a ragged tensor asks for its own device
            with _placing(machine, (True, False)):
                return self.__torch_dispatch__(function, types, args, {**kwargs, "device": CPU})
        kind = _kind(function)
        inputs = _inputs(kind, args, kwargs)
        for tensor, _ in inputs:
            if function is aten.lift_fresh.default:  # one of Python's numbers, in `torch.tensor`
                machine.adopt(tensor)
            machine.memory(tensor)
        if kind.is_view:
            return function(*args, **kwargs)
        if not machine.is_recording:
            result = function(*args, **kwargs)
            self._take_new(inputs, result)
            return result
        state = generator_of(kwargs).get_state() if kind.is_random else None
        result = function(*args, **kwargs)
        fresh = self._take_new(inputs, result)
        is_view = not fresh and not any(is_write for _, is_write in inputs)
        if (is_view and not kind.needs_host) or kind.is_empty:
            return result
        touched = inputs if kind.reads_values else [pair for pair in inputs if pair[1]]
        touched = [*touched, *((tensor, True) for _, tensor in fresh)]
        by_value, waits = self._host_side(kind, function, args, kwargs, touched)
        if by_value:
            machine.add_step(kind.name, [(tensor, False) for tensor in by_value], None)
            touched = [pair for pair in touched if machine.is_on_device(pair[0])]

        def reference(tensor: Tensor) -> Any:
            return value_of(tensor) if any(tensor is each for each in by_value) else machine.reference(tensor)

        run = Run(
            function,
            replace_tensors(args, reference),
            dict(zip(kwargs, replace_tensors([*kwargs.values()], reference), strict=True)),
            [(index, machine.reference(tensor)) for index, tensor in fresh],
            state,
            gives_value=kind.gives_value,
        )
        timeline = machine.add_step(kind.name, touched, run)
        if waits:
            machine.join(timeline)
        return result

    def _host_side(
        self, kind: _Kind, function: Any, args: Any, kwargs: Any, touched: Sequence[tuple[Tensor, bool]]
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

    def _take_new(self, inputs: Sequence[tuple[Tensor, bool]], result: Any) -> list[tuple[int, Tensor]]:
        """Register the new memory of an operation's results; return the results that have some, with their numbers."""
        results = [result] if isinstance(result, Tensor) else pytree.tree_leaves(result)
        is_device = any(self._machine.is_on_device(tensor) for tensor, _ in inputs)
        return [
            (index, each)
            for index, each in enumerate(results)
            if isinstance(each, Tensor) and each.device.type != "meta" and self._machine.take(each, is_device=is_device)
        ]


def _inputs(kind: _Kind, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Tensor, bool]]:
    """The tensors that an operation gets, and whether it writes them."""
    found: list[tuple[Tensor, bool]] = []
    given = [*zip(args, kind.writes, strict=False), *((value, kind.writes_by_name[k]) for k, value in kwargs.items())]
    for value, is_write in given:
        if isinstance(value, Tensor):
            found.append((value, is_write))
        elif isinstance(value, (list, tuple)):
            found += [(each, is_write) for each in value if isinstance(each, Tensor)]
    return [pair for pair in found if pair[0].device.type != "meta"]


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
        if special is not None and not isinstance(args[0], DTensor) and args[0].device.type != "meta":
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
                    self._machine.adopt(tensor)
        return result


@contextmanager
def _placing(machine: Machine, where: tuple[bool, bool]) -> Iterator[None]:
    before, machine.placing = machine.placing, where
    try:
        yield
    finally:
        machine.placing = before


def _device_of(machine: Machine, function: Any, tensor: Tensor, *rest: Any) -> torch.device:
    return CUDA if machine.is_on_device(tensor) else CPU


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
    return function(tensor, **kwargs)


def _address(machine: Machine, function: Any, tensor: Tensor) -> int:
    """A background thread takes the address of host memory to read it."""
    if machine.thread != HOST and not machine.is_on_device(tensor):
        machine.read_by_host(tensor, "data_ptr")
    return function(tensor)


_Special = Callable[..., Any]
_SPECIAL: dict[Any, _Special] = {
    _DEVICE: _device_of,
    _IS_CUDA: lambda machine, function, tensor, *rest: machine.is_on_device(tensor),
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
