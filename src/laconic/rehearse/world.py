"""One process as one rank of a cluster whose other ranks have this rank's data, on the machine of machine.py.

[Note: Collectives of the machine]
A collective with `async_op=False` runs on the stream that is current, as NCCL's does. With `async_op=True` it runs on
a stream of its group, after everything on the current stream, and keeps its tensors alive; `wait` lets the current
stream wait for it. Tensors of the host go through a thread of Gloo: then the host waits.

[Note: Messages of the machine]
Messages between this rank and another one have a stream of their own on NCCL. On Gloo each message is a timeline: it is
read or written at any time until somebody has waited for it. What arrives is made up: the letter that the program has
of this size; the number 4 where a message is one integer; else bytes that are small numbers in fp32, others each time.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.comm.cluster import init_mesh
from laconic.rehearse.machine import Event, Machine, Stream
from laconic.rehearse.tape import Site


class _Work:
    """A collective under way."""

    def __init__(self, machine: Machine, stream: Stream, tensors: Sequence[Tensor], *, is_device: bool) -> None:
        self._machine, self._tensors, self._is_device = machine, list(tensors), is_device
        self._event = Event(machine, stream.timeline, None)

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream, or the host for tensors in host memory, wait."""
        self.finish(self._machine.site("wait" if self._is_device else "wait on the host"))
        return True

    def finish(self, site: Site | None) -> None:
        """Wait, at a call in the library that can be taken out, or as a part of the collective."""
        machine = self._machine
        machine.wait(machine.current.timeline if self._is_device else machine.thread, self._event.number, site)
        self._tensors.clear()


class World:
    """The collectives of the cluster: [Note: Collectives of the machine]."""

    def __init__(self, machine: Machine, letters: Sequence[Tensor] = ()) -> None:
        self._machine, self._letters = machine, {len(letter): letter for letter in letters}
        self._streams: dict[Any, Stream] = {}
        self._contents = itertools.cycle((0x3C, 0xBB, 0x3D))

    def _run(self, group: Any, async_op: bool, tensors: Sequence[Tensor], body: Callable[[int], None]) -> _Work | None:
        machine = self._machine
        is_device = machine.is_on_device(tensors[0])
        size = dist.get_world_size(group)
        if not async_op and is_device:
            body(size)
            return None
        name = getattr(group, "group_name", "world")
        if (name, is_device) not in self._streams:
            self._streams[name, is_device] = Stream(machine, f"{'NCCL' if is_device else 'Gloo'} {name}")
        work = self._start(self._streams[name, is_device], tensors, lambda: body(size))
        if async_op:
            return work
        work.finish(None)
        return None

    def _start(self, stream: Stream, tensors: Sequence[Tensor], body: Callable[[], Any]) -> _Work:
        """Begin a transfer on a stream, or on a thread of Gloo for tensors of the host."""
        machine = self._machine
        is_device = machine.is_on_device(tensors[0])
        issuer = machine.current.timeline if is_device else machine.thread
        machine.wait(stream.timeline, machine.record(issuer, None), None)
        with ExitStack() as place:
            if not is_device:
                place.enter_context(machine.running_thread(stream.timeline))
            place.enter_context(machine.stream(stream))
            body()
        return _Work(machine, stream, tensors, is_device=is_device)

    def all_gather(self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> Any:
        """Every rank has sent what this one sends."""

        def body(size: int) -> None:
            for part in output.view(size, -1):
                if not _is_same(part, input):
                    part.copy_(input.view(-1))

        return self._run(group, async_op, (output, input), body)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        """The sum of equal inputs."""

        def body(size: int) -> None:
            torch.mul(input.view(size, -1)[0].view_as(output), size, out=output)

        return self._run(group, async_op, (output, input), body)

    def all_to_all(
        self, output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None,
        group: Any = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Each rank has sent what this rank sends to it or, to fill another size, this rank's input over and over."""

        def body(size: int) -> None:
            if output_split_sizes is None:
                output.copy_(input.view_as(output))
                return
            parts = output.split(output_split_sizes)
            source = input.reshape(-1)
            for part in parts:
                flat = part.view(-1)
                for begin in range(0, len(flat) if len(source) else 0, max(len(source), 1)):
                    run = flat[begin : begin + len(source)]
                    run.copy_(source[: len(run)])
                if not len(source):
                    flat.zero_()

        return self._run(group, async_op, (output, input), body)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        """The sum or the largest of equal tensors."""

        def body(size: int) -> None:
            tensor.mul_(size if op == dist.ReduceOp.SUM else 1)

        return self._run(group, async_op, (tensor,), body)

    def broadcast(
        self, tensor: Tensor, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None
    ) -> Any:
        """The tensor of rank 0."""
        return self.all_reduce(tensor, dist.ReduceOp.MAX, group, async_op)

    def all_gather_list(self, outputs: list[Tensor], input: Tensor, group: Any = None, async_op: bool = False) -> Any:
        """Every rank has sent what this one sends."""

        def body(size: int) -> None:
            for output in outputs:
                output.copy_(input)

        return self._run(group, async_op, (*outputs, input), body)

    def isend(self, tensor: Tensor, dst: Any = None, group: Any = None, group_dst: Any = None, tag: int = 0) -> _Work:
        """Another rank reads the tensor: [Note: Messages of the machine]."""
        body = partial(self._machine.note_read, tensor, "isend")
        return self._start(self._link(tensor, group, group_dst), (tensor,), body)

    def irecv(self, tensor: Tensor, src: Any = None, group: Any = None, group_src: Any = None, tag: int = 0) -> _Work:
        """Another rank writes the tensor: [Note: Messages of the machine]."""

        def body() -> None:
            if tensor.dtype == torch.int64:
                tensor.fill_(4)
            elif len(tensor) in self._letters:
                tensor.copy_(self._letters[len(tensor)])
            else:
                tensor.view(torch.uint8).fill_(next(self._contents))

        return self._start(self._link(tensor, group, group_src), (tensor,), body)

    def _link(self, tensor: Tensor, group: Any, peer: int) -> Stream:
        if not self._machine.is_on_device(tensor):
            return Stream(self._machine, f"Gloo, a message of {peer}")
        key = getattr(group, "group_name", "world"), peer
        if key not in self._streams:
            self._streams[key] = Stream(self._machine, f"NCCL {key[0]}, messages of {peer}")
        return self._streams[key]

    def all_gather_object(self, values: list[Any], value: Any, group: Any = None) -> None:
        """Every rank has this rank's object."""
        values[:] = [value] * dist.get_world_size(group)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """True if two tensors begin at the same place."""
    begins = [(each.untyped_storage()._cdata, each.storage_offset()) for each in (tensor, other)]
    return begins[0] == begins[1]


@contextmanager
def one_rank(
    machine: Machine,
    *,
    nodes: int,
    local: int,
    islands: int = 1,
    rank: int = 0,
    backend: str = "nccl",
    letters: Sequence[Tensor] = (),
) -> Iterator[Any]:
    """Yield the mesh of a cluster of which this process is one rank, and whose groups say that they are of `backend`.

    `letters` are messages that other ranks send: [Note: Messages of the machine]. The process group is replaced.
    Afterwards there is none.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=islands * nodes * local)
    world = World(machine, letters)

    def backend_of(group: Any = None) -> str:
        return "fake" if group in (None, dist.group.WORLD) else backend  # laconic watches no peers in a world of "fake"

    with ExitStack() as patches:
        for target, name, value in (
            (_compat, "_all_gather_flat", world.all_gather),
            (_compat, "_reduce_scatter_flat", world.reduce_scatter),
            (_compat, "isend", lambda tensor, group, rank: world.isend(tensor, group=group, group_dst=rank)),
            (_compat, "irecv", lambda tensor, group, rank: world.irecv(tensor, group=group, group_src=rank)),
            (_compat, "all_gather", world.all_gather_list),
            (_compat, "backend_of", lambda group, device_type: backend),
            (dist, "get_backend", backend_of),
            (dist, "all_gather_into_tensor", world.all_gather),
            (dist, "all_gather", world.all_gather_list),
            (dist, "isend", world.isend),
            (dist, "irecv", world.irecv),
            (dist, "all_to_all_single", world.all_to_all),
            (dist, "all_reduce", world.all_reduce),
            (dist, "broadcast", world.broadcast),
            (dist, "all_gather_object", world.all_gather_object),
            (dist, "broadcast_object_list", lambda *args, **kwargs: None),
            (dist, "barrier", lambda *args, **kwargs: None),
        ):
            patches.enter_context(mock.patch.object(target, name, value))
        try:
            yield init_mesh("cuda", nodes=nodes, local=local, islands=islands)
        finally:
            dist.destroy_process_group()
