"""The other ranks of a cluster, which are not there: a process group for torch.distributed that this rank has alone.

[Note: Collectives of the machine]
A collective with `async_op=False` runs on the stream that is current, as NCCL's does. With `async_op=True` it runs on
a stream of its group, after everything on the current stream, and keeps its tensors alive; `wait` lets the current
stream wait for it. Tensors of the host go through a thread of Gloo: then the host waits. Every other rank has the data
of this rank.

Gloo's collectives of host memory work as ProcessGroupGloo.cpp has them. An all-gather arrives in a flat buffer of its
thread, which copies it to where it belongs. A reduce-scatter is the all-reduce of a copy of its input.

[Note: Messages of the machine]
Messages between this rank and another one have a stream of their own on NCCL. On Gloo each message is a timeline: it is
read or written at any time until somebody has waited for it. What arrives is made up: the letter that the program has
of this size; the number 4 where a message is one integer; else bytes that are small numbers in fp32, others each time.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from laconic._compat import after_this_backward
from laconic.comm import cluster
from laconic.comm.agreement import RankGroup
from laconic.comm.groups import REHEARSED
from laconic.comm.journal import last_label
from laconic.comm.traffic import Traffic
from laconic.rehearse.machine import FSDP2, Event, Machine, Stream
from laconic.rehearse.rings import Places, Ring, Route
from laconic.rehearse.tape import MessageName, Site, Transfer

_BUSY_BYTES = (0x3C, 0xBB, 0x3D)
"""What messages bring: [Note: Messages of the machine]."""
_PURPOSES = {"foreach_all_gather": "weights", "foreach_reduce": "gradients", "_sync_params": "weights"}
"""What transfers of FSDP2 and of ZeroRedundancyOptimizer are for, by the function that issues them."""
_HOOKS = {default_hooks.__file__, powerSGD_hook.__file__}
"""Where DDP's hooks are, which sum gradients."""
_OF_PIPELINES = {"_batch_p2p": "activations", "Tie._exchange": "gradients"}
"""What messages between the stages of a pipeline are for, by the function of torch's schedules or of laconic's ties."""


@dataclass(frozen=True, kw_only=True)
class World:
    """A cluster of which one rank is there."""

    machine: Machine
    places: Places
    """Where the ranks are."""
    rank: int = 0
    backend: str = "nccl"
    """The backend that its groups say they have on the accelerator: "nccl" or "gloo"."""
    _contents: Iterator[int] = field(default_factory=lambda: itertools.cycle(_BUSY_BYTES))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.places.islands * self.places.ranks

    def letter(self, numel: int) -> Tensor | None:
        """The letter of this size, if there is one."""
        return next((letter for letter in self.machine.letters if letter.numel() == numel), None)

    def busy_byte(self) -> int:
        """The content of the next message's bytes."""
        return next(self._contents)


_FIRST_NAME = 10**6
"""The number that is the name of a rehearsal's first group: no other group of the process has it."""
_worlds: list[World] = []
"""The world in which this process is a rank; empty outside of rehearsals."""


class Work(dist.Work):
    """A collective under way."""

    def __init__(self, machine: Machine, stream: Stream, tensors: Sequence[Tensor], *, is_device: bool) -> None:
        super().__init__()
        self._machine, self._tensors, self._is_device = machine, list(tensors), is_device
        self._stream, self._event = stream, Event(machine, stream.timeline, None)
        self.end: Callable[[], Any] | None = None
        """What the host does after the first wait."""

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream, or the host for tensors in host memory, wait."""
        self.finish(self._machine.site("wait" if self._is_device else "wait on the host"))
        end, self.end = self.end, None
        if end is not None:
            end()
        return True

    def finish(self, site: Site | None) -> None:
        """Wait, at a call in the library that can be taken out, or as a part of the collective."""
        machine = self._machine
        machine.wait(machine.current.timeline if self._is_device else machine.thread, self._event.number, site)
        self._tensors.clear()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that is complete, for DDP, which asks in backward. Who began backward waits at its end."""
        after_this_backward(self._wait_in_backward)
        return _Future(self, list(self._tensors))

    def _wait_in_backward(self) -> None:
        self.wait()

    def go_on(self, callback: Callable[[], Any]) -> Any:
        """Call a function behind the collective, on its stream or in its thread; later waits are for its end, too."""
        machine, timeline = self._machine, self._stream.timeline
        with (
            nullcontext() if self._is_device else machine.running_thread(timeline),
            machine.stream(self._stream),
            mock.patch.object(torch.cuda, "is_available", return_value=self._is_device),  # then PowerSGD waits for it
        ):
            result = callback()
        self._event = Event(machine, timeline, None)
        return result

    def is_completed(self) -> bool:
        """Nobody knows before somebody has waited."""
        return not self._tensors


class _Future(torch.futures.Future[Any]):
    """A future of a collective: complete, so a callback runs at once, but where the collective ran."""

    def __init__(self, work: Work, value: Any) -> None:
        super().__init__()
        self._work = work
        self.set_result(value)

    def wait(self) -> Any:
        """Let the current stream, or the host, wait for the collective and its callbacks."""
        self._work.wait()
        return self.value()

    def then(self, callback: Callable[[Any], Any]) -> _Future:
        """The future of a callback."""
        return _Future(self._work, self._work.go_on(partial(callback, self)))


_ProcessGroup: Any = dist.ProcessGroup  # its stubs have other signatures than torch.distributed's calls


class PythonGroup(_ProcessGroup):
    """A process group in Python. Its methods have the names under which torch 2.11 to 2.15 calls them."""

    plug: str
    """What the group says its backend is."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        """Take the name that torch.distributed knows, the numbers of the ranks, and the own place."""
        super().__init__(rank, len(ranks))
        self._name, self._ranks, self._rank, self._size = name, ranks, rank, len(ranks)

    @property
    def group_name(self) -> str:
        """The name under which torch.distributed knows the group."""
        return self._name

    group_desc = group_name

    def getBackendName(self) -> str:
        """The name of the plug."""
        return self.plug


class Group(PythonGroup):
    """A process group whose other ranks are not there: [Note: Collectives of the machine]."""

    plug = REHEARSED

    def __init__(self, world: World, name: str, ranks: Sequence[int], rank: int) -> None:
        super().__init__(name, ranks, rank)
        self._world = world
        self._level = world.places.level_between(min(self._ranks), max(self._ranks))
        self._streams: dict[Any, Stream] = {}
        self._numbers: dict[str, Counter[int]] = {"send": Counter(), "receive": Counter()}
        """The messages so far, by the place of the other rank."""

    # -- what torch.distributed asks of a group --------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        name = "gloo" if torch.device(device).type == "cpu" else self._world.backend
        return SimpleNamespace(name=lambda: name, supports_tensor_alloc=lambda device: False)

    def barrier(self, opts: Any = None) -> None:
        """The others are here at once."""

    # -- collectives -----------------------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work | None:
        """Every rank has sent what this one sends: [Note: Collectives of the machine]."""

        def body() -> None:
            for part in output.view(self._size, -1):
                if not _is_same(part, input):
                    part.copy_(input.reshape(-1))

        return self._run("gather", opts, [output], [input], body)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work | None:
        """Every rank has sent what this one sends or, to fill another size, the same over and over."""

        def body() -> None:
            for output in outputs[0]:
                if not _is_same(output, inputs[0]):
                    _fill(output, inputs[0])

        return self._run("gather", opts, outputs[0], inputs, body)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work | None:
        """The sum, or the mean, of equal inputs: [Note: Collectives of the machine]."""
        factor = self._factor(opts)

        def body() -> None:
            torch.mul(input.view(self._size, -1)[0].view_as(output), factor, out=output)

        if self._is_on_gloo(input):
            copied = input.clone()
            work = self.allreduce([copied], opts)
            end = partial(output.copy_, copied.view(self._size, -1)[self._rank].view_as(output))
            if work is None:
                end()
            else:
                work.end = end
            return work
        return self._run("reduce-scatter", opts, [output], [input], body)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        """The sum, or the mean, of equal inputs, of which each rank gets the part in its place of the list."""
        factor = self._factor(opts)

        def body() -> None:
            torch.mul(inputs[0][self._rank], factor, out=outputs[0])

        return self._run("reduce-scatter", opts, outputs, inputs[0], body)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work | None:
        """The sum, the mean or the largest of equal tensors."""
        factor = self._factor(opts)

        def body() -> None:
            for tensor in tensors:
                tensor.mul_(factor)

        return self._run("all-reduce", opts, tensors, tensors, body)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work | None:
        """The tensor of this rank; or that of another one, which is made up: [Note: Messages of the machine]."""
        is_own = opts is None or opts.rootRank == self._rank

        def body() -> None:
            for tensor in tensors:
                if is_own:
                    tensor.mul_(1)
                else:
                    tensor.view(-1).view(torch.uint8).fill_(self._world.busy_byte())

        return self._run("broadcast", opts, tensors, tensors, body)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Work | None:
        """Each rank has sent what this rank sends to it or, to fill another size, this rank's input over and over."""

        def body() -> None:
            if not output_sizes and not input_sizes:
                output.copy_(input.view_as(output))
                return
            for part in output.split(output_sizes or len(output) // self._size):
                _fill(part, input)

        return self._run("all-to-all", opts, [output], [input], body)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    # -- messages --------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> Work:
        """Another rank reads the tensor: [Note: Messages of the machine]."""
        tensor = tensors[0]
        transfer = self._message("send", tensor, rank)
        return self._start(
            self._link(tensor, rank), transfer, [], tensors, lambda: self._machine.note_read(tensor, "send")
        )

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> Work:
        """Another rank writes the tensor: [Note: Messages of the machine]."""
        tensor, world = tensors[0], self._world
        letter = world.letter(len(tensor)) if tensor.dim() else None

        if not self._machine.has_values and tensor.dtype == torch.int64:
            self._machine.memory(tensor).stands_for = 4
        elif not self._machine.has_values and letter is not None:
            self._machine.memory(tensor).stands_for = letter

        def body() -> None:
            if tensor.dtype == torch.int64:
                tensor.fill_(4)
            elif letter is not None:
                tensor.copy_(letter)
            else:
                tensor.view(torch.uint8).fill_(world.busy_byte())

        transfer = self._message("receive", tensor, rank)
        return self._start(self._link(tensor, rank), transfer, tensors, [], body)

    def _message(self, op: str, tensor: Tensor, peer: int) -> Transfer:
        number = self._numbers[op][peer] = self._numbers[op][peer] + 1
        sender, receiver = (self._rank, peer) if op == "send" else (peer, self._rank)
        sent, received = (tensor.nbytes, 0) if op == "send" else (0, tensor.nbytes)
        distance = (receiver - sender) % self._size
        route = self._ring.message(tensor.nbytes, distance).times(self._machine.alike) if sent else Route()
        return self._transfer(op, sent, received, route, MessageName(self._name, sender, receiver, number))

    def _link(self, tensor: Tensor, peer: int) -> Stream:
        if self._machine.cost_of is not None:  # nobody asks for their order
            peer = 0
        elif not self._machine.is_on_device(tensor):
            return Stream(self._machine, f"Gloo, a message of {peer}")
        if peer not in self._streams:
            self._streams[peer] = Stream(self._machine, f"NCCL {self._name}, messages of {peer}")
        return self._streams[peer]

    # -- the machine -----------------------------------------------------------------------------------------------

    @property
    def _machine(self) -> Machine:
        return self._world.machine

    def _factor(self, opts: Any) -> float:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._size if op == dist.ReduceOp.SUM else 1

    def _is_on_gloo(self, tensor: Tensor) -> bool:
        """True for host memory that others have, too."""
        return self._size > 1 and not self._machine.is_on_device(tensor)

    @cached_property
    def _ring(self) -> Ring:
        # NCCL goes through one node after the other, whatever the order of ranks
        return Ring(self._ranks if self._world.backend == "gloo" else sorted(self._ranks), self._world.places)

    def _transfer(
        self, op: str, sent_bytes: int, received_bytes: int, route: Route, message: MessageName | None = None
    ) -> Transfer:
        purpose, unit = label = (last_label(self) or ("", ""))[:2]
        counted = self._machine.take_counted()
        if counted is not None and (message is None or any(label)):
            purpose, sent = counted
            route, message = Route(sent=sent), None
        else:
            of_torch = _label_of_torch()
            own = label if any(label) else ("control" if counted is None else counted[0], "")
            purpose, unit = of_torch or own
            if of_torch is None and any(label):  # laconic's own, counted with another one, or not at all
                route, message = Route(), None
        return Transfer(
            op=op, group=self._name, size=self._size, level=self._level, purpose=purpose, unit=unit,
            sent_bytes=sent_bytes, received_bytes=received_bytes, route=route, message=message,
        )  # fmt: skip

    def _run(
        self,
        op: str,
        opts: Any,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        body: Callable[[], None],
    ) -> Work | None:
        machine, is_async = self._machine, opts is None or opts.asyncOp  # as torch's own groups
        is_device = machine.is_on_device(outputs[0])
        whole = max(sum(each.nbytes for each in outputs), sum(each.nbytes for each in inputs))
        nbytes = (2 if op == "all-reduce" else 1) * whole * (self._size - 1) // self._size
        route = self._ring.all_reduce(whole) if op == "all-reduce" else self._ring.gather(whole)
        transfer = self._transfer(op, nbytes, nbytes, route)
        if not is_async and is_device:
            machine.transfer(transfer, outputs, inputs, body)
            return None
        if is_device not in self._streams:
            self._streams[is_device] = Stream(machine, f"{'NCCL' if is_device else 'Gloo'} {self._name}")
        work = self._start(self._streams[is_device], transfer, outputs, inputs, body)
        if is_async:
            return work
        work.finish(None)
        return None

    def _start(
        self,
        stream: Stream,
        transfer: Transfer,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        body: Callable[[], Any],
    ) -> Work:
        """Begin a transfer on a stream, or on a thread of Gloo for tensors of the host."""
        machine, tensors = self._machine, [*outputs, *inputs]
        is_device = machine.is_on_device(tensors[0])
        issuer = machine.current.timeline if is_device else machine.thread
        machine.wait(stream.timeline, machine.record(issuer, None), None)
        with ExitStack() as place:
            if not is_device:
                place.enter_context(machine.running_thread(stream.timeline))
            place.enter_context(machine.stream(stream))
            if transfer.op == "gather" and self._is_on_gloo(outputs[0]):
                _ = torch.empty(sum(each.numel() for each in outputs), dtype=outputs[0].dtype)
            machine.transfer(transfer, outputs, inputs, body)
        return Work(machine, stream, tensors, is_device=is_device)


def _label_of_torch() -> tuple[str, str] | None:
    """The purpose and the unit of a transfer of torch's own strategies, or of a pipeline; None for those of others."""
    caller = sys._getframe(4)
    if caller.f_code is _engine_run_backward.__code__:  # DDP's reducer, which is C++
        return "gradients", ""
    purpose = None
    for frame, _ in walk_stack(caller):
        if frame.f_code.co_qualname in _OF_PIPELINES:
            return _OF_PIPELINES[frame.f_code.co_qualname], ""
        if frame.f_code.co_filename in _HOOKS:
            return "gradients", ""
        purpose = purpose or _PURPOSES.get(frame.f_code.co_name)
        if frame.f_code.co_name == "_sync_params":
            return "weights", ""
        if purpose is not None and frame.f_code.co_filename.startswith(FSDP2):
            owner = frame.f_locals.get("self")
            if isinstance(owner, FSDPParamGroup):
                return purpose, owner._module_fqn or ""
    return None


def _fill(whole: Tensor, part: Tensor) -> None:
    """Fill a tensor with another one over and over; with zeros if that has no elements."""
    flat, source = whole.view(-1), part.reshape(-1)
    for begin in range(0, len(flat) if len(source) else 0, max(len(source), 1)):
        run = flat[begin : begin + len(source)]
        run.copy_(source[: len(run)])
    if not len(source):
        flat.zero_()


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """True if two tensors begin at the same place."""
    begins = [(each.untyped_storage()._cdata, each.storage_offset()) for each in (tensor, other)]
    return begins[0] == begins[1]


# -- collectives that are operations ------------------------------------------------------------------------------


def _functional(function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """One of torch's functional collectives, which DTensors use: a new tensor, for which `wait_tensor` waits."""
    name, args = function._opname.removesuffix("_"), (*args, *kwargs.values())
    if name in ("wait_tensor", "_wrap_tensor_autograd"):  # torch's wrapper waits when it is used
        work = _under_way.pop(tensor.untyped_storage()._cdata, None)
        if work is not None:
            work.wait()
        return tensor
    group: Any = dist.distributed_c10d._resolve_process_group(args[-1])
    options = SimpleNamespace(asyncOp=True, reduceOp=dist.ReduceOp.SUM)
    if name in ("all_reduce", "reduce_scatter_tensor"):
        options.reduceOp = {"sum": dist.ReduceOp.SUM}.get(args[0], dist.ReduceOp.MAX)
    if name == "all_reduce":
        result = tensor if function._opname.endswith("_") else tensor.clone()
        work = group.allreduce([result], options)
    elif name == "all_gather_into_tensor":
        result = tensor.new_empty((tensor.shape[0] * group.size(), *tensor.shape[1:]))
        work = group.all_gather_single(result, tensor.contiguous(), options)
    elif name == "reduce_scatter_tensor":
        result = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
        work = group.reduce_scatter_single(result, tensor.contiguous(), options)
    elif name == "all_to_all_single":
        result = tensor.new_empty((sum(args[0]), *tensor.shape[1:]))
        work = group.all_to_all_single(result, tensor.contiguous(), args[0], args[1], options)
    elif name == "broadcast":
        result = tensor.clone()
        work = group.broadcast([result], options)
    else:
        raise ValueError(f"a rehearsal has no {function}; it has torch's other functional collectives")
    _under_way[result.untyped_storage()._cdata] = work
    return result


def _fsdp(function: Any, *args: Any, **kwargs: Any) -> Any:
    """One of FSDP2's operations. The schema of the first does not say what it writes, so its body runs in the open."""
    if function._opname == "all_gather_copy_in":
        return _fsdp_collectives.all_gather_copy_in_cuda(*args, **kwargs)
    return getattr(_fsdp_collectives, function._opname)(*args, **kwargs)


_under_way: dict[int, Work] = {}
"""By the storage of its result."""
COLLECTIVES: dict[str, Callable[..., Any]] = {"_c10d_functional": _functional, "fsdp": _fsdp}
"""Operations that move data between ranks, or serve those that do, by their namespace."""


def _make_group(options: Any, backend_options: Any) -> Group:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return Group(_worlds[-1], options.group_id, ranks, options.group_rank)


@contextmanager
def one_rank(world: World) -> Iterator[World]:
    """Let this process be one rank of a cluster. Afterwards it has the process groups that it had."""
    if REHEARSED.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(REHEARSED, _make_group, extended_api=True, devices=["cpu", "cuda"])
    place = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.rank % world.places.local,
        "LOCAL_WORLD_SIZE": world.places.local,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }
    _worlds.append(world)
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()}),
        mock.patch.object(Traffic, "observer", staticmethod(world.machine.count)),
        mock.patch.object(
            RankGroup, "gather", RankGroup.gather if world.machine.cost_of is None else _all_answer_alike
        ),
        mock.patch.object(device_mesh, "new_group", partial(_new_own_group, world.rank)),
        _other_groups(),
    ):
        dist.init_process_group(REHEARSED, store=dist.HashStore(), rank=world.rank, world_size=world.size)
        try:
            yield world
        finally:
            _worlds.pop()


def _all_answer_alike(group: RankGroup, value: Any) -> list[Any]:
    """What `RankGroup.gather` returns. It is free of cost; among many ranks its messages would take long."""
    return [value] * group.size


def _new_own_group(rank: int, ranks: Sequence[int], **keys: Any) -> Any:
    """Make a group of a mesh as torch does, but none of other ranks, which are many in a large mesh."""
    return dist.new_group(ranks, **keys) if rank in ranks else dist.GroupMember.NON_GROUP_MEMBER


def no_groups() -> Any:
    """The tables of a process without groups, under the names of torch.distributed's own `_World`."""
    return SimpleNamespace(
        default_pg=None, pg_map={}, pg_names={}, pg_group_ranks={}, pg_backend_config={}, group_count=0,
        tags_to_pg={}, pg_to_tag={}, pg_coalesce_state={}, comms=[], pg_config_info=[], pg_default_device={},
    )  # fmt: skip


@contextmanager
def _other_groups() -> Iterator[None]:
    """Put the process's own groups aside, and bring them back."""
    others = no_groups()
    others.group_count = _FIRST_NAME
    with ExitStack() as stack:
        stack.callback(lambda: distributed_c10d._update_default_pg(dist.group.WORLD))
        stack.enter_context(mock.patch.object(distributed_c10d, "_world", others))
        stack.enter_context(mock.patch.dict(cluster._made_on, clear=True))
        unregister = torch._C._distributed_c10d._unregister_process_group
        stack.callback(lambda: [unregister(name) for name in others.pg_names.values()])
        yield
