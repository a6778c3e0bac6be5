"""A stage of torch's pipelines whose messages are counted, and cross in eight bits by choice.

[Note: Activations on the wire]
A boundary is what one stage hands to the next: tensors whose shapes and dtypes are known before the first message.
Forward sends them, in the dtype that they have. Backward sends the gradients of those that need one. So T tokens of h
values in two bytes take 2 T h bytes a step in each direction. Inside a rank, where a V turns, nothing is sent.

With wire="8bit" a tensor that needs a gradient crosses as whole numbers of a step, one step to a block of 128 values,
and its gradient as well. All else (masks, positions, rotary angles, 64-bit numbers) crosses as it is. A receiver
computes with what it decodes; the sender's own graph has the exact values, so the gradient that comes back is that of
the decoded ones, passed straight through. No feedback could make up for what is lost: the next micro-batch has other
tokens.

[Note: Room for messages]
torch makes room for the messages of all micro-batches of a step, and keeps it: 4 T h bytes at an inner boundary. Here a
message has memory from the moment that it is asked for. What forward has taken goes with its graph, when backward has
passed; what backward has taken goes at once. So there is room for the micro-batches that are alive.

[Note: Outputs leave with their loss]
torch's schedule makes the loss of what the last stage returns, and keeps both until backward has passed. Only the loss
has use for the output: of a language model that is the logits, as large as all else that a layer keeps. So here the
stage makes the loss, and the schedule gets it as the output.

[Note: Weights of a split backward]
A schedule that splits backward asks autograd for the gradients of a stage's inputs, and later for those of its weights,
in the gathered parameters' `.grad`. torch leaves them there until the step ends, in the dtype of gathered weights: sums
in bfloat16. Here each micro-batch's gradients go to the bucket at once, as those of an ordinary backward that does not
sync, so sums are in the reduce dtype. And the search for the parameters that the forward has used finds gathered ones,
because the weights are gathered before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.tensor import DTensor

from laconic import _compat
from laconic.codec import CODECS, Codec
from laconic.comm.launch import node_of_rank
from laconic.comm.traffic import Level, Traffic
from laconic.shard.sharded_module import ShardedModule
from laconic.shard.unit import unit_of

_CODEC: Codec = CODECS["int8"]
"""The codec of wire="8bit"."""
_CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def as_tuple(values: Any) -> tuple[Any, ...]:
    """One value or several, as a tuple."""
    return tuple(values) if isinstance(values, tuple | list) else (values,)


@dataclass(frozen=True)
class TensorForm:
    """The shape and dtype of a tensor that crosses a boundary, and whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorForm:
        """The form of a tensor."""
        return TensorForm(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def like(self, device: torch.device | str) -> Tensor:
        """A contiguous tensor of this form, of zeros: an index of an embedding may be zero."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device).requires_grad_(self.requires_grad)

    def nbytes(self, wire: str) -> int:
        """The bytes of the message with such a tensor."""
        numel = torch.Size(self.shape).numel()
        return _CODEC.payload_bytes(numel) if is_coded(self, wire) else numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}".removeprefix("torch.")


@dataclass(frozen=True)
class Boundary:
    """What a stage hands to the next one, for one micro-batch."""

    tensors: tuple[TensorForm, ...]

    @staticmethod
    def of(outputs: Any) -> Boundary:
        """The boundary behind a stage with these outputs.

        Raises:
            ValueError: a stage hands on something that is no tensor.
        """
        values = as_tuple(outputs)
        for value in values:
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                raise ValueError(
                    f"a stage hands on a {type(value).__name__}, but only plain tensors cross to the next; return a "
                    "tensor or a tuple of tensors, of a DTensor its to_local()"
                )
        return Boundary(tuple(TensorForm.of(value) for value in values))

    def plain(self) -> list[list[Any]]:
        """The boundary as plain values, which ranks may exchange."""
        return [[list(each.shape), str(each.dtype).removeprefix("torch."), each.requires_grad] for each in self.tensors]

    @staticmethod
    def from_plain(values: list[list[Any]]) -> Boundary:
        """The boundary that `plain` has described."""
        return Boundary(tuple(TensorForm(tuple(shape), getattr(torch, dtype), needs) for shape, dtype, needs in values))

    def gradients(self) -> Boundary:
        """What comes back."""
        return Boundary(tuple(each for each in self.tensors if each.requires_grad))

    def nbytes(self, wire: str) -> int:
        """The bytes of its message."""
        return sum(each.nbytes(wire) for each in self.tensors)


def is_coded(form: TensorForm, wire: str) -> bool:
    """Whether a tensor crosses in few bits: [Note: Activations on the wire]."""
    return wire == "8bit" and form.requires_grad and form.dtype in _CODED_DTYPES


def encode_tensor(tensor: Tensor, form: TensorForm, wire: str) -> Tensor:
    """The message with a tensor of this form: the tensor itself, contiguous, or its codes."""
    tensor = tensor.detach()
    if not is_coded(form, wire):
        return tensor.contiguous()
    message = room_for(form, wire, tensor.device)
    _CODEC.encode_into(message, tensor.reshape(-1), check=False)
    return message


def room_for(form: TensorForm, wire: str, device: torch.device) -> Tensor:
    """Memory for the message with a tensor of this form."""
    if not is_coded(form, wire):
        return torch.empty(form.shape, dtype=form.dtype, device=device)
    return torch.empty(form.nbytes(wire), dtype=torch.uint8, device=device)


def decode_tensor(message: Tensor, form: TensorForm, wire: str) -> Tensor:
    """The tensor of a message, without a graph."""
    if not is_coded(form, wire):
        return message
    tensor = torch.empty(form.shape, dtype=form.dtype, device=message.device)
    _CODEC.decode_into(tensor.view(-1), message)
    return tensor


def count_message(traffic: Traffic, op: dist.P2POp) -> None:
    """Count what an operation sends to another rank, or receives from it, as activations."""
    level: Level = "local" if node_of_rank(op.peer) == node_of_rank(dist.get_rank()) else "node"
    sent_bytes = op.tensor.nbytes if op.op is dist.isend else 0
    traffic.count(level, "activations", sent_bytes=sent_bytes, received_bytes=op.tensor.nbytes - sent_bytes)


class WireStage(PipelineStage):
    """A stage of torch's pipelines: [Note: Activations on the wire], [Note: Weights of a split backward].

    It works in all of torch's schedules. Both boundaries are known from the beginning, so torch runs no forward to
    infer them, and sends no pickled metadata.
    """

    def __init__(
        self,
        module: nn.Module,
        stage_index: int,
        entries: Sequence[Boundary],
        *,
        group: dist.ProcessGroup,
        gradients: dist.ProcessGroup | None = None,
        device: torch.device,
        wire: str = "exact",
        traffic: Traffic | None = None,
    ) -> None:
        """Make the stage of a module.

        Args:
            module: the stage, sharded by `laconic.fully_shard` or not.
            stage_index: its number.
            entries: what each stage takes, for one micro-batch; what comes after the first is what crosses.
            group: the ranks of the pipeline.
            gradients: a group of the same ranks, for gradients of activations. Default: `group`.
            device: this rank's device.
            wire: "exact" or "8bit".
            traffic: counts the bytes, as "activations". Default: that of the sharded module, or a new one.
        """
        self._entry, self._exit = (*entries, Boundary(()))[stage_index : stage_index + 2]
        if traffic is None:
            traffic = module.traffic if isinstance(module, ShardedModule) else Traffic()
        self.traffic = traffic
        self._wire, self._gradients = wire, gradients or group
        self._landings: dict[tuple[str, int], list[tuple[Tensor, Tensor, TensorForm]]] = {}
        """Codes that have been asked for, and the tensors in which torch looks for what they stand for."""
        self.syncs = True
        """False if another step's gradients are to be added before they are reduced."""
        self.loss_of: Callable[[Any, int], Tensor] | None = None
        """The loss of an output of a micro-batch, which the last stage makes: [Note: Outputs leave with their loss]."""
        _compat.refuse_constants_between_stages([form for each in entries[1:] for form in each.tensors])
        outputs = self._exit.tensors or (TensorForm((1,), torch.float32, True),)  # nobody asks for those of the last
        super().__init__(
            module,
            stage_index,
            len(entries),
            device,
            input_args=tuple(form.like("meta") for form in self._entry.tensors),
            output_args=tuple(form.like("meta") for form in outputs),
            group=group,
        )

    # -- messages ------------------------------------------------------------------------------------------------------

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See `PipelineStage`. Raises ValueError if an output is not as the boundary says."""
        if not self.is_last:
            self._refuse_other_outputs(fwd_chunk_id)
        return self._sending(super().get_fwd_send_ops(fwd_chunk_id), self._exit)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See `PipelineStage`."""
        return self._sending(self._backward(super().get_bwd_send_ops(bwd_chunk_id)), self._entry.gradients())

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See `PipelineStage`."""
        if not self.is_first:
            self._make_room(self.args_recv_info[fwd_chunk_id], self._entry, trains=self.has_backward)
        return self._receiving(super().get_fwd_recv_ops(fwd_chunk_id), self._entry, ("forward", fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See `PipelineStage`."""
        if self.has_backward and not self.is_last:
            self._make_room(self.grad_recv_info[bwd_chunk_id], self._exit)
        ops = self._backward(super().get_bwd_recv_ops(bwd_chunk_id))
        return self._receiving(ops, self._exit.gradients(), ("backward", bwd_chunk_id))

    def _backward(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops:
            op.group = self._gradients
        return ops

    def _sending(self, ops: list[dist.P2POp], boundary: Boundary) -> list[dist.P2POp]:
        for op, form in zip(ops, boundary.tensors if ops else (), strict=True):
            op.tensor = encode_tensor(op.tensor, form, self._wire)
            count_message(self.traffic, op)
        return ops

    def _receiving(self, ops: list[dist.P2POp], boundary: Boundary, key: tuple[str, int]) -> list[dist.P2POp]:
        for op, form in zip(ops, boundary.tensors if ops else (), strict=True):
            if is_coded(form, self._wire):
                landing, op.tensor = op.tensor, room_for(form, self._wire, op.tensor.device)
                self._landings.setdefault(key, []).append((op.tensor, landing, form))
            count_message(self.traffic, op)
        return ops

    def _make_room(self, infos: Sequence[Any], boundary: Boundary, *, trains: bool = False) -> None:
        """Let torch receive tensors into new memory: [Note: Room for messages]."""
        for info, form in zip(infos, boundary.tensors, strict=True):
            if info.buffer is not None:  # None: no gradient comes
                room = torch.empty(form.shape, dtype=form.dtype, device=self.device)
                info.buffer = room.requires_grad_(trains and form.requires_grad)

    def _free_room(self, infos: Sequence[Any]) -> None:
        """Let go of what torch has received."""
        for info in infos:
            if getattr(info, "buffer", None) is not None:  # not of the batch
                info.buffer = torch.empty(0, device=self.device)

    @torch.no_grad()
    def _land(self, direction: str, chunk: int) -> None:
        """Decode what has come to where torch looks for it."""
        for message, landing, form in self._landings.pop((direction, chunk), ()):
            landing.copy_(decode_tensor(message, form, self._wire))

    def _refuse_other_outputs(self, chunk: int) -> None:
        outputs, _ = self.fwd_cache[chunk]
        forms = [TensorForm(tuple(each.shape), each.dtype, False) for each in outputs]
        wanted = [TensorForm(each.shape, each.dtype, False) for each in self._exit.tensors]
        if forms != wanted:
            raise ValueError(
                f"stage {self.stage_index} hands on {', '.join(map(str, forms))}, and its boundary has "
                f"{', '.join(map(str, wanted))}; a stage's outputs must have the same shapes for each micro-batch"
            )

    # -- forward and backward ------------------------------------------------------------------------------------------

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See `PipelineStage`. With `loss_of` the last stage returns the loss in place of its output."""
        self._land("forward", fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._free_room(self.args_recv_info[fwd_chunk_id])
        if self.loss_of is None:
            return output
        self.fwd_cache[fwd_chunk_id] = (), self.fwd_cache[fwd_chunk_id][1]
        return self.loss_of(output, fwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """See `PipelineStage`."""
        self._land("backward", bwd_chunk_id)
        if not full_backward:
            self._gather()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and not self.is_first:
            loss.detach_()  # torch keeps all losses of a step, whose graphs would keep the stage's inputs
        if self.has_backward:
            self._free_room(self.grad_recv_info[bwd_chunk_id])

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """See `PipelineStage`. Weights rest after each backward as the stage's cache says.

        torch would keep them whole from the first backward of a step to its end. With `cache="rank"` they stay so.
        """
        if backward_type != "full" or not isinstance(self.submod, ShardedModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self.submod.set_is_last_backward(False)
        self.submod.set_requires_gradient_sync(False)
        return stage_backward(*(bwd_kwargs[name] for name in ("stage_output", "output_grads", "input_values"))), None

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """See `PipelineStage`, which writes zeros where the next stage has no gradient."""
        if any(each is None for each in next_stage_bwd_outputs):
            self._make_room(self.grad_recv_info[mb_index], self._exit)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """See `PipelineStage`."""
        self._gather()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        if isinstance(self.submod, ShardedModule) and not self.is_first:  # the first one's is an ordinary backward
            unit = unit_of(self.submod)
            assert unit is not None
            unit.root.reduce_waiting()

    def _gather(self) -> None:
        for module in self.submod.modules():
            if isinstance(module, ShardedModule):
                module.unshard()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """See `PipelineStage`; all stages know their shapes, and a rehearsal has nobody to vote on that."""
        _compat.expect_given_shapes(self)
        handed_on = super()._prepare_forward_infra(*args, **kwargs)
        for infos in self.args_recv_info.values():
            self._free_room(infos)
        return handed_on

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """See `PipelineStage`."""
        handed_on = super()._prepare_backward_infra(*args, **kwargs)
        for infos in self.grad_recv_info.values():
            self._free_room(infos)
        return handed_on

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """See `PipelineStage`. Gradients wait if another step adds to them."""
        if self.syncs:
            super().perform_reduce_grad(grad_scale_factor)

    def _validate_fwd_outputs(self, outputs: Sequence[Tensor]) -> None:
        """Compare nothing, as torch 2.11 would: the shapes and strides of the last stage's outputs may be any."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Leave gradients alone, which torch clears here: they may be an earlier step's, as nothing was inferred."""
