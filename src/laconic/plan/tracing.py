"""One forward and one backward of a model on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from traceback import walk_tb
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional

from laconic.plan.fake_kernels import CudaChoices
from laconic.plan.phase import Phase
from laconic.plan.recorder import Recorder
from laconic.shard.hooks import AwaitedHooks, OutputGradients, map_tensors, tensors_in
from laconic.shard.linear import LinearInPlace, set_sink


class TraceError(RuntimeError):
    """A model cannot be traced."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"{module} cannot be traced on fake tensors: {reason}; laconic compare measures such a model")


class Tracing:
    """A trace of `model`, cut into units: see `laconic.plan.model_trace`."""

    def __init__(
        self,
        *,
        model: nn.Module,
        modules: Sequence[nn.Module],
        arguments: Mapping[str, Any],
        loss: Callable[[nn.Module, Mapping[str, Any]], Tensor],
        compute_dtype: torch.dtype | None,
        device_type: str,
        gradients_in_place: bool,
    ) -> None:
        self._model, self._modules, self._loss = model, modules, loss
        self.root = len(modules) - 1
        self.arguments = arguments
        self._compute_dtype, self._in_place = compute_dtype, gradients_in_place
        self._recorder, self._device_type = Recorder(device_type), device_type
        self._is_backward = False
        self._names: dict[int, str] = {}
        """The id of every parameter, and of the fake one in its place -> its name in its unit."""
        for module in modules:
            for name, parameter in module.named_parameters():
                self._names.setdefault(id(parameter), name)

    def run(self) -> list[Phase]:
        """Trace; return the phases in the order of execution.

        Raises:
            TraceError: an operation has no fake kernel, or needs the elements of a tensor.
        """
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with ExitStack() as stack:
            stack.enter_context(fake)
            stack.enter_context(self._faked())
            stack.enter_context(self._hooked())
            arguments = map_tensors(_fake_of, dict(self.arguments))
            for tensor in tensors_in(arguments):
                self._recorder.exclude(tensor)
            stack.enter_context(self._recorder)
            if self._device_type == "cuda":
                stack.enter_context(CudaChoices())
            try:
                self._recorder.begin(self.root, is_backward=False)
                loss = self._loss(self._model, arguments)
                self._recorder.begin(self.root, is_backward=True)
                self._is_backward = True
                _run_backward(loss)
                del loss
            except Exception as error:
                reason = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
                raise TraceError(self._running_in(error), reason) from error
            self._recorder.end()
        return _without_empty(self._recorder.phases)

    # -- fake parameters -----------------------------------------------------------------------------------------------

    @contextmanager
    def _faked(self) -> Iterator[None]:
        """Show fake parameters, as the engine gathers them, and fake buffers."""
        swapped: list[tuple[dict[str, Any], str, Any]] = []
        fakes: dict[int, Tensor] = {}
        forwards: list[nn.Module] = []
        try:
            for module in self._model.modules():
                tables: list[dict[str, Any]] = [module._parameters, module._buffers]
                for table in tables:
                    for name, tensor in table.items():
                        if tensor is not None:
                            if id(tensor) not in fakes:
                                fakes[id(tensor)] = self._fake(tensor)
                            swapped.append((table, name, tensor))
                            table[name] = fakes[id(tensor)]
                if self._in_place and type(module).forward is nn.Linear.forward and "forward" not in vars(module):
                    module.forward = MethodType(partial(_linear, self), module)
                    forwards.append(module)
            yield
        finally:
            for table, name, tensor in swapped:
                table[name] = tensor
            for module in forwards:
                del module.forward

    def _fake(self, tensor: Tensor) -> Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        cast = self._compute_dtype if is_parameter and tensor.is_floating_point() else None
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=cast or tensor.dtype)
        self._recorder.exclude(fake)
        if not is_parameter:
            return fake
        parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        self._names[id(parameter)] = self._names[id(tensor)]
        if tensor.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._collect)
            if self._in_place:  # for parts of a sliced weight: partial/sliced.py
                set_sink(parameter, self, parameter)  # type: ignore[arg-type]  # it stands for its index
        return parameter

    def _collect(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._recorder.hand_over(self._names[id(parameter)], parameter.grad)

    # -- the sink of gradients that are written in place ---------------------------------------------------------------

    def accepts(self, parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
        """See `laconic.shard.linear.GradientSink`; a parameter stands for its index."""
        return len(shape) == 2 and tuple(shape) == tuple(parameter.shape)

    def add_product(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """See `laconic.shard.linear.GradientSink`."""
        self._recorder.add_product(self._names[id(parameter)], left, right, parameter.element_size())

    # -- borders of phases ---------------------------------------------------------------------------------------------

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles = []
        try:
            for index, module in enumerate(self._modules):
                unit = _Unit(self, index)
                handles.append(module.register_forward_pre_hook(unit.enter, with_kwargs=True))
                handles.append(module.register_forward_hook(unit.leave))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _running_in(self, error: Exception) -> str:
        """The name of the innermost module whose forward an error has left."""
        names = {id(module): name for name, module in self._model.named_modules() if name}
        left = [names.get(id(frame.f_locals.get("self"))) for frame, _ in walk_tb(error.__traceback__)]
        return next((name for name in reversed(left) if name), type(self._model).__name__)


class _Unit:
    """The hooks of one unit: of a layer, or of the root, whose phases are before, between and after those of layers."""

    def __init__(self, tracing: Tracing, index: int) -> None:
        self._tracing, self._index, self._is_layer = tracing, index, index != tracing.root
        self._awaited = AwaitedHooks(lambda: None, self._reach_inputs)
        self._recorder = tracing._recorder

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Begin a forward, unless backward recomputes it."""
        dtype = self._tracing._compute_dtype
        if not self._tracing._is_backward and self._is_layer:
            self._recorder.begin(self._index, is_backward=False)
        if dtype is not None:
            args, kwargs = map_tensors(
                lambda each: each.to(dtype) if each.is_floating_point() else each, (args, kwargs)
            )
        if self._tracing._is_backward or not torch.is_grad_enabled():
            return args, kwargs
        return self._awaited.watch_inputs(args, kwargs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a forward, unless backward recomputes it."""
        if self._tracing._is_backward:
            return
        if torch.is_grad_enabled() and self._is_layer:
            hook = OutputGradients(AwaitedHooks(self._begin_backward(), lambda: None))
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(hook)
        self._recorder.begin(self._tracing.root, is_backward=False)

    def _begin_backward(self) -> Callable[[], None]:
        """A function whose first call begins a backward."""
        begin = iter([partial(self._recorder.begin, self._index, is_backward=True)])
        return lambda: next(begin, lambda: None)()

    def _reach_inputs(self) -> None:
        """End a backward at the gradients of the inputs."""
        if self._is_layer:
            self._recorder.begin(self._tracing.root, is_backward=True)


def _linear(tracing: Tracing, module: nn.Linear, input: Tensor) -> Tensor:
    """The forward of a linear layer under the engine: see `laconic.shard.linear`."""
    weight = module.weight
    is_whole = isinstance(weight, nn.Parameter)  # a sliced weight is no parameter, and multiplies in its own way
    if is_whole and weight.requires_grad and torch.is_grad_enabled() and input.dtype == weight.dtype:
        output: Tensor = LinearInPlace.apply(input, weight, module.bias, tracing, weight)
        return output
    return functional.linear(input, weight, module.bias)


def _run_backward(loss: Tensor) -> None:
    """`loss.backward()`, but inside the modes of torch functions, which torch leaves for the public call."""
    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _fake_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, requires_grad=tensor.requires_grad)


def _without_empty(phases: list[Phase]) -> list[Phase]:
    """Drop phases without operations. What one frees, the phase before it frees."""
    kept: list[Phase] = []
    for each in phases:
        if each.work or each.peak_bytes or each.arrivals:
            kept.append(each)
        elif kept:
            kept[-1] = replace(kept[-1], end_bytes=kept[-1].end_bytes + each.end_bytes)
    return kept
