"""Point-to-point messages between devices, matched by their order.

[Note: Order instead of tags]
NCCL has no tags, and Gloo's send is done only once the receiver has asked. So a receiver knows from the senders'
programs what will come from each of them and in which order, and asks in that order, ahead of need. On NCCL messages up
(to a higher number) and down have a process group each, so that a receive that was posted early does not hold up a
send. Batons have another, since they may be passed at any time. Nothing is promised beyond the batch that everybody is
certain to run: messages of a batch are expected when the device begins that batch, and a sender waits for its buffers
only once their receiver must have taken them, in a batch it has begun itself.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from laconic.comm.traffic import Purpose, Traffic
from laconic.cyclic.parcel import HEADER_BYTES, Form
from laconic.cyclic.schedule.messages import Message

Key = tuple[str, int, int, int]
NUMBER_BYTES = 8
"""Of a message that is one fp64 number."""

_PURPOSES: dict[str, Purpose] = {
    "gradient": "gradients",
    "total": "gradients",
    "weights": "weights",
    "rear weights": "weights",
    "activation": "activations",
    "activation gradient": "activations",
    "square": "control",
    "norm": "control",
}


class PeerLost(RuntimeError):
    """A message will not come: the other device has ended."""


@dataclass
class _Posted:
    work: dist.Work
    buffer: Tensor


@dataclass
class _Sent:
    message: Message
    works: list[dist.Work]
    buffers: list[Tensor]


@dataclass
class _Shapes:
    shapes: Hashable
    are_new: bool


class Links:
    """One device's messages.

    Args:
        mesh: one axis; None if there is one device, and all messages are to itself.
        num_bytes: of a message of weights or gradients; a function of the stage.
        device: where buffers are made.
    """

    def __init__(self, mesh: DeviceMesh | None, device: torch.device, num_bytes: Callable[[int], int]) -> None:
        self.traffic = Traffic()
        self.waited_s = 0.0
        """Seconds that taking has stood still since the caller set it to zero."""
        self._device, self._num_bytes = device, num_bytes
        self._here: dict[Key, Any] = {}
        self._posted: dict[Key, _Posted] = {}
        self._expected: dict[int, deque[Message]] = defaultdict(deque)
        self._sent: deque[_Sent] = deque()
        self._forms: dict[tuple[Hashable, int], Form] = {}
        self._shapes: dict[int, _Shapes] = {}
        self._seen: set[Hashable] = set()
        self.mesh_rank = 0
        self._own: list[dist.ProcessGroup] = []
        if mesh is not None:
            ranks = mesh.mesh.flatten().tolist()
            part = len(ranks) < dist.get_world_size()
            # A receive that NCCL waits for holds up what comes after it on the same pair; Gloo's does not.
            count = 3 if dist.get_backend(mesh.get_group()) == "nccl" else 2
            self._own = [dist.new_group(ranks, use_local_synchronization=part) for _ in range(count)]
            self._control = self._own[0]
            self._groups = {True: self._own[1], False: self._own[-1]}
            self.mesh_rank = mesh.get_local_rank()
        self._batons: deque[tuple[dist.Work, Tensor]] = deque()

    # -- what will come ------------------------------------------------------------------------------------------------

    def expect(self, messages: Iterable[Message]) -> None:
        """These will come, in this order from each source."""
        for message in messages:
            self._expected[message.source].append(message)

    def shapes_of(self, batch: int, shapes: Hashable) -> None:
        """Tell what the batch's shapes are, the same on all devices: parcels' forms are remembered by them."""
        self._shapes[batch] = _Shapes(shapes, shapes not in self._seen)
        self._shapes.pop(batch - 3, None)
        self._seen.add(shapes)

    def post(self, step: int) -> None:
        """Make room for, and ask for, all that is due before this time step."""
        for queue in self._expected.values():
            while any(message.due < step for message in queue) and self._is_form_known(queue[0]):
                self._post_next(queue)

    def _post_next(self, queue: deque[Message]) -> None:
        message = queue.popleft()
        if self._has_header(message):
            header = self._receive(message, torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self._device))
            self._wait(header.work, message)
            self._remember(message, Form.from_header(header.buffer))
        if _PURPOSES[message.kind] == "activations":
            num_bytes = self._form(message).layout.num_bytes
        elif _PURPOSES[message.kind] == "control":
            num_bytes = NUMBER_BYTES
        else:
            num_bytes = self._num_bytes(message.stage)
        self._posted[message.key] = self._receive(
            message, torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        )

    def _receive(self, message: Message, buffer: Tensor) -> _Posted:
        with self._losing(message):
            work = dist.irecv(buffer, group=self._groups[message.target > message.source], group_src=message.source)
        assert work is not None
        return _Posted(work, buffer)

    # -- parcels -------------------------------------------------------------------------------------------------------

    def _has_header(self, message: Message) -> bool:
        """In the first batch of its shapes. By batch, so that sender and receiver are of one mind."""
        return message.kind == "activation" and self._shapes[message.index].are_new

    def _is_form_known(self, message: Message) -> bool:
        if message.kind == "activation gradient":
            return (self._shapes[message.index].shapes, message.stage - 1) in self._forms
        return not self._has_header(message)

    def _form(self, message: Message) -> Form:
        """Of a parcel: the output of stage `message.stage`, or the gradient of that of the stage before."""
        shapes = self._shapes[message.index].shapes
        if message.kind == "activation gradient":
            return self._forms[shapes, message.stage - 1].gradients()
        return self._forms[shapes, message.stage]

    def _remember(self, message: Message, form: Form) -> None:
        self._forms[self._shapes[message.index].shapes, message.stage] = form

    # -- take and send -------------------------------------------------------------------------------------------------

    def peek(self, message: Message | Key) -> Any:
        """What has arrived under this key, waiting for it; it stays."""
        key = message.key if isinstance(message, Message) else message
        if key in self._here:
            return self._here[key]
        if key not in self._posted:
            queue = next(queue for queue in self._expected.values() if any(m.key == key for m in queue))
            while key not in self._posted:
                self._post_next(queue)
        posted = self._posted.pop(key)
        self._wait(posted.work, message)
        content: Any = posted.buffer
        self.traffic.count("node", _PURPOSES[key[0]], sent_bytes=0, received_bytes=posted.buffer.numel())
        if isinstance(message, Message) and _PURPOSES[key[0]] == "activations":
            content = self._form(message).unpack(posted.buffer)
        self._here[key] = content
        return content

    def take(self, message: Message | Key) -> Any:
        """What has arrived, waiting for it; a buffer, or a list of tensors for what stages hand each other."""
        content = self.peek(message)
        del self._here[message.key if isinstance(message, Message) else message]
        return content

    def put(self, key: Key, content: Any) -> None:
        """As if it had arrived."""
        self._here[key] = content

    def send(self, message: Message, content: Any) -> int:
        """Let a buffer, or a list of tensors, go. Returns its bytes, 0 if it stays here. It must not change later."""
        if message.target == message.source:
            self.put(message.key, content)
            return 0
        buffers = [content]
        if _PURPOSES[message.kind] == "activations":
            form = Form.of(content)
            if message.kind == "activation":
                self._remember(message, form)
            header = [form.header(self._device)] if self._has_header(message) else []
            buffers = [*header, form.layout.pack(content, self._device)]
        group = self._groups[message.target > message.source]
        with self._losing(message):
            works = [dist.isend(buffer, group=group, group_dst=message.target) for buffer in buffers]
        self._sent.append(_Sent(message, [work for work in works if work is not None], buffers))
        num_bytes = sum(buffer.numel() for buffer in buffers)
        self.traffic.count("node", _PURPOSES[message.kind], sent_bytes=num_bytes, received_bytes=0)
        return num_bytes

    def release(self, step: int, batch: int) -> None:
        """Let go of buffers whose receivers must have them by now, the device being at this time step and batch."""
        waiting: deque[_Sent] = deque()
        for sent in self._sent:
            if sent.message.due < step and sent.message.due_in <= batch:
                for work in sent.works:
                    self._wait(work, sent.message)
            else:
                waiting.append(sent)
        self._sent = waiting

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        while self._sent:
            sent = self._sent.popleft()
            for work in sent.works:
                self._wait(work, sent.message)
        for work, _ in self._batons:
            work.wait()
        self._batons.clear()
        assert not self._posted, list(self._posted)
        assert not any(self._expected.values()), self._expected

    def close(self) -> None:
        """End the connections. Nothing must be under way."""
        for group in self._own:
            dist.destroy_process_group(group)
        self._own.clear()

    # -- batons --------------------------------------------------------------------------------------------------------

    def ask_baton(self) -> Callable[[], int]:
        """Ask the device before for its word; the result waits for it."""
        word = torch.zeros(1, dtype=torch.int64, device=self._device)
        with self._losing(self.mesh_rank - 1):
            work = dist.irecv(word, group=self._control, group_src=self.mesh_rank - 1)
        assert work is not None

        def wait() -> int:
            self._wait(work, self.mesh_rank - 1)
            self.traffic.count("node", "control", sent_bytes=0, received_bytes=word.nbytes)
            return int(word)

        return wait

    def pass_baton(self, word: int) -> None:
        """Tell the device after that it may begin."""
        while len(self._batons) > 1:
            self._wait(self._batons.popleft()[0], self.mesh_rank + 1)
        told = torch.tensor([word], device=self._device)
        with self._losing(self.mesh_rank + 1):
            work = dist.isend(told, group=self._control, group_dst=self.mesh_rank + 1)
        assert work is not None
        self.traffic.count("node", "control", sent_bytes=told.nbytes, received_bytes=0)
        self._batons.append((work, told))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """From one device to all; not part of a training step."""
        with self._losing(source):
            dist.broadcast(tensor, group=self._control, group_src=source)

    # -- failures ------------------------------------------------------------------------------------------------------

    def _wait(self, work: dist.Work, of: Message | Key | int) -> None:
        start = time.perf_counter()
        with self._losing(of), self.traffic.waiting("node"):
            work.wait()
        self.waited_s += time.perf_counter() - start

    @contextmanager
    def _losing(self, of: Message | Key | int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # that is what connections raise
            if isinstance(of, Message):
                what = f"the {of.kind} of stage {of.stage} between devices {of.source} and {of.target}"
            else:
                what = f"a message of device {of}" if isinstance(of, int) else f"the {of[0]} of stage {of[1]}"
            raise PeerLost(f"{what} cannot be exchanged: a worker has ended ({error})") from error
