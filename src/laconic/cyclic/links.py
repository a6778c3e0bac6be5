"""Point-to-point messages between devices, matched by their order, and the baton that staggers workers.

[Note: Order instead of tags]
NCCL has no tags, and a send of Gloo completes only after the receiver has posted its receive. So a receiver learns from
each sender's program which messages that sender sends, and posts the receives in the same order, before it needs them.
  - On NCCL, messages to higher and to lower device numbers use two process groups, so that a receive that was posted
    early does not block a send. Batons use one more group, since they may be passed at any time.
  - A device expects the messages of a batch when it begins the batch. Only then is it certain that the batch is run.
  - A sender waits for a send only once the receive must have been posted, in a batch that the sender itself has begun.

[Note: Baton]
Messages alone do not keep workers apart: in its first batch a worker that needs nothing from the others would start at
once, and the activations of all workers would be alive together. So worker i begins a batch only when it has received a
baton from worker i - 1. Worker i - 1 passes the baton after a share of its own batch: `stagger` times 1/N of the time
that the batch takes. On CPU the ops are timed. On CUDA the host does not wait for the device, so the time is unknown.
There, and in the first batch, worker i - 1 passes the baton after `stagger` times 2 of its 2N ops. The baton carries
the size of the batch, which must be equal on all workers. Without stagger a worker passes the baton at once, and waits
for the previous worker's baton only after its first N ops.

[Note: Message buffers are not buckets]
The engine's flat buffers (layout/bucket.py, shard/ledger.py) share no code with message buffers. They differ:
  - A bucket has one dtype. A message mixes dtypes (a bf16 hidden state with a bool mask), so it is laid out in bytes.
  - A bucket is cut into equal shards of whole blocks. A message is never cut.
  - A bucket is contiguous per tensor. A message keeps strides, so that channels_last parameters stay channels_last.
  - A bucket is filled again under the same views. A message's buffer never is: [Note: Versions by pointer swap].
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laconic import _compat
from laconic.codec.payload import Run
from laconic.comm.groups import destroy_with, new_group
from laconic.comm.launch import node_of_rank
from laconic.comm.traffic import Level, Purpose, Traffic
from laconic.comm.watch import waiting_for
from laconic.cyclic.program import Key, Message, MessageKind

HEADER_BYTES = 4096  # the size of the message that carries an `ActivationMeta`
_ALIGNMENT_BYTES = 16  # a tensor of any dtype may begin there, and vector loads are aligned


class ByteLayout:
    """The place of every tensor of a list in one buffer of bytes. A gradient has the place of its parameter."""

    def __init__(self, like: Iterable[Tensor]) -> None:
        self._places: list[tuple[slice, torch.dtype, torch.Size, tuple[int, ...]]] = []
        self.num_bytes = 0
        for tensor in like:
            is_dense = tensor.is_contiguous() or (
                tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
            )
            stride = tensor.stride() if is_dense else torch.empty(tensor.shape, device="meta").stride()
            stop = self.num_bytes + tensor.nbytes
            self._places.append((slice(self.num_bytes, stop), tensor.dtype, tensor.shape, stride))
            self.num_bytes = -(-stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def runs(self) -> dict[torch.dtype, list[Run]]:
        """The elements of each tensor in a buffer that is viewed as the tensor's dtype, by dtype; vectors are exact."""
        found: dict[torch.dtype, list[Run]] = {}
        for place, dtype, shape, _ in self._places:
            if place.start < place.stop:
                run = place.start // dtype.itemsize, place.stop // dtype.itemsize, len(shape) < 2
                found.setdefault(dtype, []).append(run)
        return found

    def empty(self, device: torch.device) -> Tensor:
        """A new buffer of zeros, (num_bytes,) of uint8."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer, without a copy."""
        return [buffer[place].view(dtype).as_strided(shape, stride) for place, dtype, shape, stride in self._places]

    def pack(self, tensors: Iterable[Tensor], device: torch.device) -> Tensor:
        """A new buffer with the values of `tensors`, which must have the shapes of the layout's tensors."""
        buffer = self.empty(device)
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor)
        return buffer


@dataclass(frozen=True)
class ActivationMeta:
    """The shapes, dtypes and `requires_grad` flags of the activations that one stage sends to the next.

    The receiver needs them to make room. A header carries them before the first activations of each new batch shape.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    """(shape, dtype, requires_grad) of each activation."""

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> ActivationMeta:
        """The metadata of these activations.

        Raises:
            ValueError: one is a DTensor, of which only this rank's part could cross.
        """
        if any(isinstance(t, DTensor) for t in tensors):
            raise ValueError(
                "a stage hands on a DTensor, but shared stages send plain tensors; let its last layer gather it, as "
                "RowwiseParallel() and use_local_output=True do"
            )
        return ActivationMeta(tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors))

    def gradients(self) -> ActivationMeta:
        """The metadata of the gradients that the receiver returns, one for each activation that requires one."""
        return ActivationMeta(
            tuple((shape, dtype, False) for shape, dtype, requires_grad in self.tensors if requires_grad)
        )

    @property
    def layout(self) -> ByteLayout:
        """The places of the activations in one buffer."""
        return ByteLayout(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, _ in self.tensors)

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The activations in a buffer of this layout, without a copy."""
        flags = (requires_grad for *_, requires_grad in self.tensors)
        return [view.requires_grad_(flag) for view, flag in zip(self.layout.views(buffer), flags, strict=True)]

    def header(self, device: torch.device) -> Tensor:
        """The metadata as a tensor, (HEADER_BYTES,) of uint8. Raises ValueError if they do not fit."""
        text = json.dumps([[shape, str(dtype).removeprefix("torch."), flag] for shape, dtype, flag in self.tensors])
        if len(text) > HEADER_BYTES:
            raise ValueError(
                f"a stage hands on {len(self.tensors)} tensors, whose shapes take {len(text)} bytes to send, expected "
                f"at most {HEADER_BYTES}; hand on fewer tensors, for example one stacked tensor"
            )
        return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES).encode()), dtype=torch.uint8).to(device)

    @staticmethod
    def from_header(header: Tensor) -> ActivationMeta:
        """The metadata that a header carries."""
        entries = json.loads(bytes(header.cpu().tolist()).decode())
        return ActivationMeta(tuple((tuple(shape), getattr(torch, dtype), flag) for shape, dtype, flag in entries))


_KEPT_SHAPES = 3  # messages refer to the shapes of at most this many batches
NUMBER_BYTES = 8
"""The bytes of a message of one number, fp64 or int64."""
PURPOSES: dict[MessageKind, Purpose] = {
    "gradient": "gradients",
    "total": "gradients",
    "weights": "weights",
    "rear weights": "weights",
    "activation": "activations",
    "activation gradient": "activations",
    "square": "control",
    "norm": "control",
    "baton": "control",
}
"""The reason for a message, by its kind."""


class PeerLost(RuntimeError):
    """A message cannot be exchanged, because the process of the other device has ended."""


@dataclass
class _Transfer:
    """A message that is being sent or received. It keeps the buffers alive until the works are done."""

    message: Message
    works: list[dist.Work]
    buffers: list[Tensor]


class Links:
    """The messages of one device, on a `mesh` of one axis. Without a mesh, one device sends all messages to itself.

    `num_bytes` is a function from a message that is not an activation to its size.
    Every method that posts, sends or waits raises PeerLost if the process of the other device has ended.
    """

    def __init__(self, mesh: DeviceMesh | None, device: torch.device, num_bytes: Callable[[Message], int]) -> None:
        self.traffic = Traffic()
        self.waited_s = 0.0  # the time spent waiting since the caller last set this to zero
        self.device, self._num_bytes = device, num_bytes
        self._arrived: dict[Key, tuple[Message | None, Any]] = {}
        self._posted: dict[Key, _Transfer] = {}
        self._expected: dict[tuple[int, bool], deque[Message]] = defaultdict(deque)  # by source; batons for themselves
        self._sent: list[_Transfer] = []
        self._metas: dict[tuple[Hashable, int], ActivationMeta] = {}
        self._shapes: dict[int, tuple[Hashable, bool]] = {}
        self._known_shapes: set[Hashable] = set()
        self.mesh_rank = 0
        groups: list[dist.ProcessGroup] = []
        self.nodes: list[int] = []
        """The node of each device, on a mesh."""
        if mesh is not None:
            ranks = mesh.mesh.flatten().tolist()
            self.nodes = [node_of_rank(rank) for rank in ranks]
            # On NCCL a posted receive blocks later operations with the same peer; on Gloo it does not.
            num_groups = 3 if _compat.backend_of(mesh.get_group(), device.type) == "nccl" else 2
            timeout = _compat.timeout_of(mesh.get_group())
            with waiting_for("the process groups of the cyclic schedule"):
                groups = [new_group(ranks, timeout) for _ in range(num_groups)]
            self._control = groups[0]
            self._groups = {True: groups[1], False: groups[-1]}  # by: target > source; batons use `_control`
            self.mesh_rank = mesh.get_local_rank()
        self._destroy_groups = destroy_with(self, groups)

    def expect(self, messages: Iterable[Message]) -> None:
        """Announce messages that other devices will send. Messages of one sender come in the order of its program."""
        for message in messages:
            self._expected[message.source, message.kind == "baton"].append(message)

    def set_shapes(self, batch: int, shapes: Hashable) -> None:
        """Announce the shapes of a batch, equal on all devices; they determine the shapes of its activations."""
        self._shapes[batch] = shapes, shapes not in self._known_shapes
        self._shapes.pop(batch - _KEPT_SHAPES, None)
        self._known_shapes.add(shapes)

    def post(self, step: int) -> None:
        """Post the receives of all messages that are due before this time step, as far as their sizes are known."""
        for queue in self._expected.values():
            while any(message.due < step for message in queue) and self._is_size_known(queue[0]):
                self._post_next(queue)

    def _post_next(self, queue: deque[Message]) -> None:
        message = queue.popleft()
        if self._has_header(message):
            header = self._receive(message, HEADER_BYTES)
            self._wait(header)
            self._metas[self._meta_key(message)] = ActivationMeta.from_header(header.buffers[0])
        is_activation = PURPOSES[message.kind] == "activations"
        num_bytes = self._meta(message).layout.num_bytes if is_activation else self._num_bytes(message)
        self._posted[message.key] = self._receive(message, num_bytes)

    def _receive(self, message: Message, num_bytes: int) -> _Transfer:
        dtype = torch.int64 if message.kind == "baton" else torch.uint8
        buffer = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=self.device)
        with self._raising_peer_lost(message):
            work = dist.irecv(buffer, group=self._group(message), group_src=message.source)
        assert work is not None
        return _Transfer(message, [work], [buffer])

    def _group(self, message: Message) -> dist.ProcessGroup:
        return self._control if message.kind == "baton" else self._groups[message.target > message.source]

    def _has_header(self, message: Message) -> bool:
        """Whether a header comes before the message: before an activation, in the first batch of its shapes."""
        return message.kind == "activation" and self._shapes[message.index][1]

    def _is_size_known(self, message: Message) -> bool:
        is_activation = PURPOSES[message.kind] == "activations"
        return not self._has_header(message) and (not is_activation or self._meta_key(message) in self._metas)

    def _meta_key(self, message: Message) -> tuple[Hashable, int]:
        """The key of the message's metadata: the shapes of the batch, and the stage whose output sets the shapes."""
        sender = message.stage if message.kind == "activation" else message.stage - 1
        return self._shapes[message.index][0], sender

    def _meta(self, message: Message) -> ActivationMeta:
        meta = self._metas[self._meta_key(message)]
        return meta if message.kind == "activation" else meta.gradients()

    def peek(self, key: Key) -> Any:
        """Wait for a message, keep it, and return its content: a buffer, or the list of tensors of an activation."""
        if key not in self._arrived:
            if key not in self._posted:
                queue = next(queue for queue in self._expected.values() if any(m.key == key for m in queue))
                while key not in self._posted:
                    self._post_next(queue)
            transfer = self._posted.pop(key)
            message, (buffer,) = transfer.message, transfer.buffers
            self._wait(transfer)
            purpose = PURPOSES[message.kind]
            self._count(message.source, purpose, received_bytes=buffer.nbytes)
            self.put(key, self._meta(message).unpack(buffer) if purpose == "activations" else buffer, message)
        return self._arrived[key][1]

    def take(self, key: Key) -> Any:
        """Wait for a message, remove it and return its content."""
        self.peek(key)
        return self._arrived.pop(key)[1]

    def receive(self, key: Key) -> tuple[Message, Any] | None:
        """Wait for a message, remove it and return it with its content; None if no such message comes."""
        expected = (message.key for queue in self._expected.values() for message in queue)
        if key not in self._arrived and key not in self._posted and key not in expected:
            return None
        self.peek(key)
        message, content = self._arrived.pop(key)
        assert message is not None, key
        return message, content

    def put(self, key: Key, content: Any, message: Message | None = None) -> None:
        """Store content as if a message had brought it."""
        self._arrived[key] = message, content

    def send(self, message: Message, content: Any) -> int:
        """Start to send a buffer, or a list of tensors; both must not change later. Returns the bytes that leave."""
        if message.target == message.source:
            self.put(message.key, content, message)
            return 0
        buffers = [content]
        if PURPOSES[message.kind] == "activations":
            meta = ActivationMeta.of(content)
            if message.kind == "activation":
                self._metas[self._meta_key(message)] = meta
            header = [meta.header(self.device)] if self._has_header(message) else []
            buffers = [*header, meta.layout.pack(content, self.device)]
        group = self._group(message)
        with self._raising_peer_lost(message):
            works = [dist.isend(buffer, group=group, group_dst=message.target) for buffer in buffers]
        self._sent.append(_Transfer(message, [work for work in works if work is not None], buffers))
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        self._count(message.target, PURPOSES[message.kind], sent_bytes=num_bytes)
        return num_bytes

    def release(self, step: int, batch: int) -> None:
        """Free the buffers of the messages that were due before this time step, in this batch or an earlier one."""
        waiting: list[_Transfer] = []
        for sent in self._sent:
            if sent.message.due < step and sent.message.due_in <= batch:
                self._wait(sent)
            else:
                waiting.append(sent)
        self._sent = waiting

    def finish(self) -> None:
        """Receive weights that nobody needs any more, and wait until others have received what this device has sent."""
        expected = [message.key for queue in self._expected.values() for message in queue]
        for key in [*self._posted, *expected]:
            assert key[0] in ("weights", "rear weights"), key
            self.take(key)
        for transfer in self._sent:
            self._wait(transfer)
        self._sent.clear()

    def close(self) -> None:
        """Destroy the process groups. No message may be under way."""
        self._destroy_groups()

    def hand_on(self, tensor: Tensor, source: int) -> None:
        """Copy a tensor in place from one device to the next, until all have it. All call it, outside of steps."""
        count = len(self.nodes)
        passed = (self.mesh_rank - source) % count
        with self._raising_peer_lost(f"a message of device {source}"):
            if passed > 0:
                dist.recv(tensor, group=self._control, group_src=(self.mesh_rank - 1) % count)
            if passed < count - 1:
                dist.send(tensor, group=self._control, group_dst=(self.mesh_rank + 1) % count)

    def _level(self, peer: int) -> Level:
        return "local" if self.nodes[peer] == self.nodes[self.mesh_rank] else "node"

    def _count(self, peer: int, purpose: Purpose, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        self.traffic.count(self._level(peer), purpose, sent_bytes=sent_bytes, received_bytes=received_bytes)

    def _wait(self, transfer: _Transfer) -> None:
        message, start = transfer.message, time.perf_counter()
        peer = message.source if message.target == self.mesh_rank else message.target
        with self._raising_peer_lost(message), self.traffic.waiting(self._level(peer)):
            for work in transfer.works:
                work.wait()
        self.waited_s += time.perf_counter() - start

    @contextmanager
    def _raising_peer_lost(self, name: object) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the class that broken connections raise
            raise PeerLost(f"{name} cannot be exchanged: a worker has ended ({error})") from error


class Baton:
    """The baton of worker `number`, one of `count` workers; see [Note: Baton]. One worker alone passes no baton."""

    def __init__(self, links: Links, number: int, count: int, stagger: float) -> None:
        self._links, self._number, self._count, self._stagger = links, number, count, stagger
        self._pass_after = round(2 * stagger)
        self._durations_s: list[float] = []
        self._batch = self._size = 0
        self.is_passed = True  # whether the next worker may run; until then this worker must not wait for it

    def begin(self, batch: int, size: int) -> None:
        """Begin a batch of this many rows."""
        self._batch, self._size, self.is_passed = batch, size, self._number == self._count - 1
        if self._number > 0:
            self._links.expect([self._message(self._number)])
            self._links.post(0)
        self.after_op(0)

    def _message(self, target: int) -> Message:
        """The baton of this batch for a worker, who posts its receive at once; who sends it waits two batches later."""
        return Message("baton", target - 1, target, 0, self._batch, target, due=-1, due_in=self._batch + 2)

    def before_op(self, done: int) -> None:
        """Wait for the baton if the next op of the batch needs it; `done` ops have run.

        Raises:
            ValueError: the previous worker has a batch of another size.
        """
        if self._number > 0 and done == (0 if self._stagger else self._count):
            previous_size = int(self._links.take(self._message(self._number).key))
            if previous_size != self._size:
                raise ValueError(
                    f"worker {self._number} has a batch of {self._size}, but worker {self._number - 1} one of "
                    f"{previous_size}; gradients are averaged over workers with equal weight, so give all workers "
                    "batches of equal size"
                )

    def after_op(self, done: int) -> None:
        """Pass the baton if enough ops of the batch have run; `done` is their number."""
        if not self.is_passed and done >= self._pass_after:
            self.is_passed = True
            size = torch.tensor([self._size], device=self._links.device)
            self._links.send(self._message(self._number + 1), size)

    def end(self, durations_s: Sequence[float]) -> None:
        """End a batch whose ops had these durations; they decide after which op the next batch passes the baton."""
        if not self._stagger:
            return
        previous = self._durations_s or durations_s
        self._durations_s = [(old + new) / 2 for old, new in zip(previous, durations_s, strict=True)]
        self._pass_after = ops_before_baton(self._durations_s, self._stagger, self._count)


def ops_before_baton(durations_s: Sequence[float], stagger: float, count: int) -> int:
    """The ops of a batch after which one of `count` workers passes the baton, if its ops take as long."""
    share_s = stagger * sum(durations_s) / count
    # Count the ops whose middle comes before the share: no other number of ops ends closer to the share.
    middles_s = (end_s - s / 2 for end_s, s in zip(accumulate(durations_s), durations_s, strict=True))
    done = sum(middle_s < share_s for middle_s in middles_s)
    return min(max(done, 1), count + 1)
