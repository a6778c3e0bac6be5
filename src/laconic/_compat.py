"""Differences between the torch releases that laconic supports (2.11 to 2.15), and private functions of torch."""

import contextlib
import ctypes
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch._C._dynamo import eval_frame
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_F = TypeVar("_F", bound=Callable[..., Any])
_R = TypeVar("_R")


# torch 2.13 renamed these two methods of process groups.
_ALL_GATHER, _REDUCE_SCATTER = (
    new if hasattr(dist.ProcessGroup, new) else old
    for new, old in (("all_gather_single", "_allgather_base"), ("reduce_scatter_single", "_reduce_scatter_base"))
)


def _gathering(*, async_op: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = async_op
    return options


_GATHERING = {async_op: _gathering(async_op=async_op) for async_op in (False, True)}
"""Options, which take longer to make than all else that the host does for a gather."""


def all_gather_flat(output: Tensor, input: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> dist.Work | None:
    """Gather equal flat pieces into `output` in rank order; `input` may be this rank's piece of `output`."""
    work = bound_all_gather(group, async_op=async_op)(output, input)
    if not async_op and work is not None:  # else a stream orders it
        work.wait()
    return work


def bound_all_gather(group: dist.ProcessGroup, *, async_op: bool) -> Callable[[Tensor, Tensor], dist.Work | None]:
    """The group's own call of `all_gather_flat`: the function of torch.distributed takes seven more in Python."""
    return functools.partial(getattr(group, _ALL_GATHER), opts=_GATHERING[async_op])


@functools.cache
def _summing(op: dist.ReduceOp.RedOpType, *, async_op: bool) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, async_op  # type: ignore[assignment]
    return options


def bound_reduce_scatter(
    group: dist.ProcessGroup, *, async_op: bool, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Callable[[Tensor, Tensor], dist.Work | None]:
    """The group's own call that sums an input over the ranks, and scatters equal flat pieces. Not on Gloo.

    It takes the output, which is this rank's piece, and the input.
    """
    return functools.partial(getattr(group, _REDUCE_SCATTER), opts=_summing(op, async_op=async_op))


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the backend of a group on a device, such as "nccl"; `dist.get_backend` may say "cpu:gloo,cuda:nccl"."""
    return group._get_backend(torch.device(device_type)).name().lower()


def host_backend() -> str:
    """Return the default group's backend for CPU tensors, or "gloo" if it has none."""
    by_device = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    return by_device.get("cpu", "gloo")


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the time that a collective of a group may take; None if no backend of the group says."""
    for device in group._device_types:
        try:
            return group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):  # backends of third parties need not have options
            continue
    return None


def gloo_group(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    """Connect ranks that need not be of one job. Unlike a group of torch.distributed's, this one may lose members.

    It has the point-to-point methods of a ProcessGroup. Blocks until all ranks are there; RuntimeError if they are not.
    """
    try:
        group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    except (MemoryError, ValueError, LookupError, ArithmeticError) as error:  # what C++ makes of damaged addresses
        raise RuntimeError(f"the addresses of the ranks in the store are damaged ({error})") from error
    return cast(dist.ProcessGroup, group)


def splitting_device() -> torch.device | None:
    """Return the accelerator to which the default group is bound, if groups can be split from it there; else None.

    Its communicator has begun then. Gloo says that it can, but takes no part in what torch does with bound groups.
    """
    world = dist.group.WORLD
    device = None if world is None else world.bound_device_id
    if world is None or device is None or not torch.accelerator.is_available():
        return None
    can_split = backend_of(world, device.type) != "gloo" and world._get_backend(device).supports_splitting
    return device if can_split else None


def split_group(lists_of_ranks: list[list[int]], timeout: timedelta | None) -> dist.ProcessGroup:
    """Split groups from the default one, and return that of this rank. Collective; there is a `splitting_device`."""
    world = dist.group.WORLD
    assert world is not None
    group = dist.split_group(world, lists_of_ranks, timeout or timeout_of(world))
    assert group is not None, "the lists have all ranks"
    return group


@contextlib.contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[None]:
    """Let torch make a group by itself in the body, not split it from the default group.

    A split takes all ranks of the default group. From a bound group torch splits every group of NCCL. And those that
    are no members of another backend's group take part in a split of which its members know nothing.
    """
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def named_group(
    name: str,
    ranks: list[int],
    timeout: timedelta | None,
    backend: str | None = None,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """Make a group of ranks under a name that no group has had. `dist.new_group` takes no name.

    Only the ranks of the group call this. None stands for the backend, or the time-out, of the default group. With
    `device` the group is bound to that accelerator, and begins at once.
    """
    world, state = dist.group.WORLD, dist.distributed_c10d._world
    assert world is not None
    default_backend, store = state.pg_map[world]
    backend = backend or default_backend
    with _unbound(world):
        group, _ = dist.distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            backend,
            store,
            group_name=cast(Any, name),
            timeout=timeout or timeout_of(world) or dist.distributed_c10d._get_default_timeout(cast(Any, backend)),
            device_id=device,
        )
    state.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return cast(dist.ProcessGroup, group)


def isend(tensor: Tensor, group: dist.ProcessGroup, rank: int, tag: int = 0) -> dist.Work:
    """Send to a rank of a group, which may be one of `gloo_group`."""
    return group.send([tensor], rank, tag)


def irecv(tensor: Tensor, group: dist.ProcessGroup, rank: int, tag: int = 0) -> dist.Work:
    """Receive from a rank of a group, which may be one of `gloo_group`."""
    return group.recv([tensor], rank, tag)


def all_gather(outputs: list[Tensor], tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Gather tensors of one shape from all ranks of a group, which may be one of `gloo_group`."""
    group.allgather([outputs], [tensor]).wait()


def abort(group: dist.ProcessGroup) -> None:
    """Close the connections of a group of `gloo_group`, so that no other rank waits for this one."""
    group.abort()


def break_connections(group: dist.ProcessGroup) -> None:
    """End all waits on a group of Gloo with an error, from another thread, here and on the ranks of the group.

    Gloo has no call for this: its `abort` leaves those who wait alone. But it closes all connections of a group when
    one receive takes too long. Other backends stay as they are.
    """
    cpu = torch.device("cpu")
    if cpu not in group._device_types or backend_of(group, "cpu") != "gloo":
        return
    tag, moment = 0x6C61636F, timedelta(milliseconds=1)  # nobody sends with this tag
    with contextlib.suppress(RuntimeError):
        group.recv([torch.zeros(1, dtype=torch.uint8)], (group.rank() + 1) % group.size(), tag).wait(moment)


def device_of_messages(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which a group sends small messages: the CPU if a backend carries it, else its first."""
    devices = group._device_types
    return devices[0] if devices and torch.device("cpu") not in devices else torch.device("cpu")


class _Shown:
    """An operator that does nothing, under the name of one of c10d's."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, name)

    def __call__(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"{self._overloadpacket}.default"


set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter
"""Sets the numbers by which autograd knows whether tensors that it has saved are as they were."""


def show_collective(name: str) -> None:
    """Let CommDebugMode, where it is active, count c10d's collective `name`: it does not count sends and receives."""
    debug = sys.modules.get("torch.distributed.tensor.debug._comm_mode")
    if debug is not None:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, debug.CommDebugMode):
                mode.__torch_dispatch__(_Shown(name), ())


def storage_info(**fields: Any) -> Any:
    """Return the record of where DCP's writer has put a value; DCP has no public name for it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(**fields)


def register_as_sharded(module: torch.nn.Module, state: object) -> None:
    """Let torch's other composable calls, such as `replicate`, leave the parameters of a module alone.

    `fully_shard.state(module)` of torch, by which its pipelines end a step, returns `state`.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
    from torch.distributed.fsdp import fully_shard

    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
    module.__dict__.setdefault(STATE_KEY, {})[fully_shard.__wrapped__] = state  # type: ignore[attr-defined]


def axes_of(mesh: DeviceMesh, *axes: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh with the named axes of `mesh`; several names in one tuple become one axis. Collective over `mesh`.

    torch has no public function that flattens axes or puts meshes side by side.
    """
    parts = [mesh[names] if len(names) == 1 else mesh[names]._flatten("_".join(names)) for names in axes]
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


def local_box(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard of a DTensor, and the global coordinates at which it begins.

    torch's own function is private, and the arithmetic of several axes that cut one dim is not for copying.
    """
    with torch.device("cpu"):  # torch reads numbers from a tensor of the default device, which may be meta
        local_shape, offset = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
    return tuple(local_shape), tuple(offset)


plain_results: Any = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of `Parameter`, with which operations return plain tensors. torch has no public name for it.
"""


if torch.__version__ < "2.12":
    _OPERATIONS_LIKE_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag", "data"}
    """The attributes of a tensor that run an operation; most do not."""

    class _OwnDispatch(TorchDispatchMode):
        """Runs the `__torch_dispatch__` of a `SelfDispatchedDTensor`, which this torch's C++ passes over."""

        def __torch_dispatch__(
            self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            for each in types:
                if issubclass(each, SelfDispatchedDTensor):
                    with self:  # for the operations of the handler
                        return each.__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))

    class SelfDispatchedDTensor(DTensor):
        """A DTensor whose class has a `__torch_dispatch__` of its own.

        torch 2.11 runs its C++ for DTensors on subclasses, too (pytorch #177716). Only a mode comes before it.
        """

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func.__name__ in ("__get__", "__set__") and func.__self__.__name__ not in _OPERATIONS_LIKE_ATTRIBUTES:
                return super().__torch_function__(func, types, args, kwargs or {})
            with _OwnDispatch():
                return super().__torch_function__(func, types, args, kwargs or {})

else:
    SelfDispatchedDTensor = DTensor  # type: ignore[misc, assignment]


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors lie in one storage. Unlike pointers, tensors that torch.compile traces can tell."""
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]


def let_optimizers_batch(tensor_type: type[torch.Tensor]) -> None:
    """Let optimizers and `clip_grad_norm_` choose their foreach implementations for this type."""
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_utils

    for types in (of_optimizers, of_utils):
        if tensor_type not in types:
            types.append(tensor_type)


def outside_compilation(function: _F) -> _F:
    """Stop torch.compile from tracing a function. Unlike `torch.compiler.disable`, import dynamo at the call only.

    Where nothing is compiled, the function is called at once: torch's way takes six calls more, at each hook.
    """
    disabled, callback = torch._disable_dynamo(function), eval_frame.get_eval_frame_callback

    def outside(*args: Any, **kwargs: Any) -> Any:
        return (function if callback() is None else disabled)(*args, **kwargs)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]  # when a caller is traced
    action: Any = eval_frame._FrameAction  # when a caller that was traced runs, and calls this
    eval_frame.set_code_exec_strategy(outside.__code__, eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT))
    return cast(_F, functools.update_wrapper(outside, function))


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the call that applies an autograd function. Call it outside of torch.func transforms only.

    The function's own `apply` reads the signature of `forward` first, in some fifty calls.
    """
    applied: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return applied


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply an autograd function, also in a torch.func transform. See `plain_apply`."""
    return function.apply(*arguments) if in_transform() else plain_apply(function)(*arguments)


def is_dynamo_tracing() -> bool:
    """True while torch.compile traces a function, also in code that it runs to look at a value."""
    return torch._guards.TracingContext.try_get() is not None


def is_transforming() -> bool:
    """True if torch.compile traces or a torch.func transform runs; neither can look into an autograd function."""
    is_traced = torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag  # `is_compiling` in one call
    return is_traced or torch._C._functorch.peek_interpreter_stack() is not None


def in_transform() -> bool:
    """True inside a torch.func transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_of_transform(tensor: Tensor) -> bool:
    """True if a torch.func transform has wrapped the tensor."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def outside_transforms(function: Callable[..., _R], *arguments: Any) -> _R:
    """Call `function` outside of torch.func transforms: tensors made in one are wrappers without a storage."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return function(*arguments)
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        return function(*arguments)


def in_backward() -> bool:
    """True while the autograd engine runs a graph on this thread, also in a forward that the backward recomputes."""
    return torch._C._current_graph_task_id() != -1


def may_pack_saved_tensors(own: type) -> bool:
    """True if hooks on saved tensors are allowed here, and those that are in force are of the class `own`, or none."""
    if in_transform() or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is None or isinstance(inspect.unwrap(hooks[0]), own)


def post_accumulate_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the hooks of `Tensor.register_post_accumulate_grad_hook`, in order."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def share_post_accumulate_hooks(given: Tensor, other: Tensor) -> None:
    """Let a parameter have the hooks of another; what a handle removes from one is removed from both."""
    hooks = getattr(given, "_post_accumulate_grad_hooks", None)
    if hooks:
        other._post_accumulate_grad_hooks = hooks


def is_composite(func: Any) -> bool:
    """True for aten functions that torch writes in terms of others."""
    is_there: bool = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return is_there


def is_fake(tensor: Tensor) -> bool:
    """True for tensors without elements, as programs are rehearsed and traced with."""
    return isinstance(tensor, FakeTensor)


def have_post_accumulate_hooks(parameters: Sequence[Tensor]) -> bool:
    """True if one of the parameters has hooks of `Tensor.register_post_accumulate_grad_hook`."""
    for parameter in parameters:  # noqa: SIM110  a generator takes a call for each
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            return True
    return False


class GradientUse(Enum):
    """The fate of a leaf's gradient in the running backward."""

    UNUSED = auto()
    """Nothing: `autograd.grad` or `backward(inputs=)` asks for other tensors."""
    ACCUMULATED = auto()
    """It adds the gradient to `.grad`."""
    RETURNED = auto()
    """`autograd.grad` returns the gradient."""


class _Edge(torch.autograd.Function):
    """A node behind a leaf, made without an operation on it."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


def accumulator_of(leaf: torch.Tensor) -> Any:
    """Return the AccumulateGrad node of a leaf. torch makes a view of it, which other classes of tensors may lack."""
    if type(leaf) is torch.nn.Parameter:
        return torch.autograd.graph.get_gradient_edge(leaf).node
    with torch.enable_grad():
        edge = _Edge.apply(leaf)  # its node lives no longer than it does
        return edge.grad_fn.next_functions[0][0]


def gradient_use(accumulator: Any) -> GradientUse:
    """Say what the running backward does with the gradient of a leaf, given by its AccumulateGrad node."""
    try:
        is_executed = torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # torch's answer for leaves among the inputs of autograd.grad
        return GradientUse.RETURNED
    return GradientUse.ACCUMULATED if is_executed else GradientUse.UNUSED


def after_this_backward(callback: Callable[[], None]) -> None:
    """Call `callback` on this thread when the current autograd graph has run, before `backward` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


@contextlib.contextmanager
def count_in_all_threads() -> Iterator[bool]:
    """Let torch's CPU allocator count the memory of every thread in the body; yields whether this torch can.

    The allocator counts in threads that a profiler watches, and, if this flag of its library is set, in all others.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    except (OSError, ValueError):  # other systems name the library otherwise, and may hide the flag
        yield False
        return
    before, flag.value = flag.value, True
    try:
        yield True
    finally:
        flag.value = before


class AllocatorEvent(NamedTuple):
    """An allocation by torch's CPU allocator, or a free."""

    time_ns: int
    address: int
    nbytes: int
    """Negative for a free."""
    total_bytes: int
    """All that the allocator has counted, after this event."""


def allocator_events(profiler: torch.profiler.profile) -> list[AllocatorEvent]:
    """Return the events of torch's CPU allocator that a profiler with `profile_memory` has seen, by time."""
    found: list[AllocatorEvent] = []
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    pending: list[Any] = list(results.experimental_event_tree()) if results is not None else []
    while pending:
        event = pending.pop()
        pending += event.children
        fields = event.extra_fields
        if event.tag == torch._C._profiler._EventType.Allocation and fields.device.type == "cpu":
            size = fields.alloc_size
            found.append(AllocatorEvent(event.start_time_ns, fields.ptr, size, fields.total_allocated))
    return sorted(found)


def refuse_constants_between_stages(forms: Sequence[Any]) -> None:
    """Refuse tensors without gradients between the stages of a pipeline, where torch has no room for them.

    torch 2.11 asks for gradients of all that one stage hands to the next.

    Raises:
        ValueError: there is such a tensor, and this torch is older.
    """
    from torch.distributed.pipelining import stage

    unfit = [form for form in forms if not form.requires_grad]
    if unfit and not hasattr(stage, "InferenceMode"):
        raise ValueError(
            f"a stage hands on {unfit[0]}, which needs no gradient, and the pipelines of torch {torch.__version__} "
            "have room for others only; install torch 2.13, or make such tensors anew in each stage"
        )


def expect_given_shapes(stage: Any) -> None:
    """Let a stage of torch's pipelines take the shapes that it was given, whatever its neighbours have voted for.

    torch 2.11 does so by itself.
    """
    from torch.distributed.pipelining import stage as stages

    if hasattr(stages, "InferenceMode"):
        stage._inference_mode = stages.InferenceMode.STATIC
