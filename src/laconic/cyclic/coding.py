"""The bits in which messages of the cyclic schedule cross between nodes.

[Note: Few bits on the ring]
A `Wire` codes weights and gradients that cross between nodes. Activations, norms and batons stay as they are.

  weights    The owner steps the exact weights. It codes a new version once, and each worker sends on what has come. All
             workers, the owner too, compute with what they decode, so a version has the same bits on all of them. A
             difference is taken to the version before, which every worker holds with replicated states. The difference
             contains what codecs have lost of earlier versions, as in [Note: Differences] in shard/crossing.py. With
             sharded states a worker keeps no version, so only values can cross. Shared stages send no weights.
  gradients  A worker decodes the sum that comes, adds its own gradient and codes the sum for the next worker. With
             feedback, it adds what the codec has lost of the stage's sums before. A sum of N gradients is coded N - 1
             times, and once more on its way to the owner. Devices of a shared stage all apply one total. So the last
             worker codes the total once for all of them, and applies what they decode.

Messages inside a node would gain nothing, but the bits of a version must not depend on the way that it took. So weights
and totals of shared stages are coded if any two devices that need them are on different nodes, and other sums of
gradients if their own sender and receiver are.

[Note: Exact versions]
With differences, a version crosses as it is if nothing follows to make up for what codecs lose of it, as the last
version of a run; and every `exact_every` versions, counted over all runs. So after a drain all workers have the exact
weights, which a user may then edit, and the next run begins with them. With values, weights that rest after a drain are
exact, too.
A run that goes on from a snapshot must go on with the workers' copies, which lag behind the exact weights: the snapshot
has both. It does not have what codecs have lost of gradients, N models in all: the run that is saved forgets it, too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.codec import Codec
from laconic.codec.payload import FewBits, pieces_of
from laconic.cyclic.links import NUMBER_BYTES, PURPOSES, ByteLayout
from laconic.cyclic.program import Message
from laconic.cyclic.schedule import Schedule, StatePlacement
from laconic.shard.policies import Wire

_CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_wire(wire: Wire, states: StatePlacement) -> None:
    """Refuse a wire that cannot be followed with states placed so.

    Raises:
        ValueError: something would cross without loss, whose bytes vary; or as differences to copies that nobody keeps;
            or would not cross at all; or frozen weights are to be coded.
    """
    for name in ("weights", "gradients"):
        if getattr(wire, name) == "lossless":
            raise ValueError(
                f"Wire({name}='lossless') is for sharded training: messages of the cyclic schedule all have one "
                f"length; use {name}='exact' or 'int4', or leave the schedule out"
            )
    if states == "sharded" and wire.sends_differences:
        raise ValueError(
            f"Wire(weights={wire.weights!r}) sends differences to the copies that workers keep, but states='sharded' "
            "keeps none; use states='replicated', or Wire(weights='int8', as_values=True, ...), or weights='exact'"
        )
    if states == "shared" and wire.weights != "exact":
        raise ValueError(
            f"Wire(weights={wire.weights!r}) has nothing to act on: with states='shared' every device updates its own "
            "stage, and no weights cross; use weights='exact', as in Wire(gradients='int8')"
        )
    if wire.frozen:
        raise ValueError("Wire(frozen=True) has nothing to act on: workers send what trains only; leave it out")


class StageCoding:
    """The coding of a message with a stage's tensors: matrices in few bits, vectors as they are: [Note: Payloads]."""

    def __init__(self, layout: ByteLayout, codec: Codec, device_type: str, *, rotates: bool) -> None:
        self.layout = layout
        self._parts: list[tuple[torch.dtype, FewBits, slice]] = []
        """The coding of all tensors of each dtype, and its place in the message."""
        self.num_bytes = 0
        for dtype, runs in layout.runs().items():
            pieces = pieces_of(runs, codec, plain=dtype, device_type=device_type, rotates=rotates)
            coding = FewBits([pieces], [layout.num_bytes // dtype.itemsize])
            stop = self.num_bytes + coding.nbytes
            self._parts.append((dtype, coding, slice(self.num_bytes, stop)))
            self.num_bytes = stop

    def encode(self, buffer: Tensor, base: Tensor | None = None) -> Tensor:
        """A message, (num_bytes,), of the tensors in a buffer of the layout; with `base`, of their difference to its.

        Values that are not finite make their block NaN.
        """
        message = torch.empty(self.num_bytes, dtype=torch.uint8, device=buffer.device)
        for dtype, coding, place in self._parts:
            subtracted = None if base is None else base.view(dtype)
            coding.encode(0, buffer.view(dtype), message[place], base=subtracted)
        return message

    def decode(self, message: Tensor, base: Tensor | None = None) -> Tensor:
        """A new buffer with the tensors of a message; with `base`, the sum of its tensors and of the differences."""
        buffer = self.layout.empty(message.device) if base is None else base.clone()
        self.decode_into(message, buffer, adds=base is not None)
        return buffer

    def decode_into(self, message: Tensor, buffer: Tensor, *, adds: bool = False) -> None:
        """Write the tensors of a message into a buffer or, with `adds`, add the difference in the message to it."""
        for dtype, coding, place in self._parts:
            coding.decode_into(0, message[place], buffer.view(dtype), adds=adds)


class RingWire:
    """How the messages of a run cross, and what codecs have lost of this device's gradients.

    `nodes` has the node of each device. A wire that has nothing to act on warns.

    Raises:
        ValueError: a parameter has a dtype that is not coded.
    """

    def __init__(
        self, wire: Wire, schedule: Schedule, layouts: Sequence[ByteLayout], device: torch.device, nodes: Sequence[int]
    ) -> None:
        self.layouts, self._wire, self._schedule, self._nodes = layouts, wire, schedule, nodes
        self.versions_before = 0
        """The version with which the run began, counted over all runs: [Note: Exact versions]."""
        self._lost: dict[int, Tensor] = {}
        """With feedback: what the codec has lost of the sums of each stage, in a buffer of the stage's layout."""
        is_idle = wire.is_exact or len(set(nodes)) < 2
        if is_idle and not wire.is_exact:
            wire.warn_of_one_node("all workers", "torchrun's LOCAL_WORLD_SIZE must say how many ranks a node has")
        self._gradients = [] if is_idle else self._codings(wire.gradient_codec, device.type, wire.rotates_gradients)
        self._weights = [] if is_idle else self._codings(wire.weight_codec, device.type, rotates=False)
        self.has_copies = bool(self._weights) and schedule.states == "replicated"
        """Whether workers keep copies that differ from the owner's exact weights."""
        self.codes_first = bool(self._weights) and not self.has_copies
        """Whether even the version with which a run begins crosses in few bits."""
        self.sends_differences = bool(self._weights) and not wire.as_values
        """Whether each version of the weights is coded as a difference to the version before."""

    def _codings(self, codec: Codec | None, device_type: str, rotates: bool) -> list[StageCoding]:
        if codec is None:
            return []
        for stage, layout in enumerate(self.layouts):
            if unfit := [dtype for dtype in layout.runs() if dtype not in _CODED_DTYPES]:
                raise ValueError(
                    f"stage {stage} has parameters of {unfit[0]}, but codecs take float32, bfloat16 and float16; "
                    "convert the model, or use wire='exact'"
                )
        return [StageCoding(layout, codec, device_type, rotates=rotates) for layout in self.layouts]

    def coding_of(self, message: Message) -> StageCoding | None:
        """The coding of a message; None if it crosses as it is."""
        match message.kind:
            case "weights" | "rear weights":
                return None if message.is_last else self.coding_of_weights(message.stage, message.index)
            case "gradient":
                return self._coding_of_sum(message.stage, (message.source, message.target))
            case "total":
                return self.coding_of_total(message.stage, message.index)
            case _:
                return None

    def coding_of_weights(self, stage: int, version: int) -> StageCoding | None:
        """The coding of a version of a stage; None if the version is exact."""
        is_due = self.sends_differences and (self.versions_before + version) % self._wire.exact_every == 0
        return self._weights[stage] if self._weights and not is_due else None

    def coding_of_total(self, stage: int, batch: int) -> StageCoding | None:
        """The coding of a batch's total on the devices that apply it; None if they have it as it is."""
        if batch < 0:
            return None  # it is from a snapshot
        if self._schedule.states == "shared":
            return self._coding_of_sum(stage, self._schedule.devices_of(stage))
        return self._coding_of_sum(stage, (self._schedule.num_stages - 1, self._schedule.rule.owner(stage)))

    def _coding_of_sum(self, stage: int, devices: Sequence[int]) -> StageCoding | None:
        crosses = bool(self._gradients) and len({self._nodes[device] for device in devices}) > 1
        return self._gradients[stage] if crosses else None

    def num_bytes(self, message: Message) -> int:
        """The size of a message that is not an activation."""
        if PURPOSES[message.kind] == "control":
            return NUMBER_BYTES
        coding = self.coding_of(message)
        return self.layouts[message.stage].num_bytes if coding is None else coding.num_bytes

    def encode_sum(self, message: Message, total: Tensor) -> Tensor:
        """The content of a message with a sum of gradients; `total` is the sum. Overwrites `total` if it is coded."""
        coding = self.coding_of(message)
        if coding is None:
            return total
        if not self._wire.feedback:
            return coding.encode(total)
        views = coding.layout.views
        if (lost := self._lost.get(message.stage)) is not None:
            for own, rest in zip(views(total), views(lost), strict=True):
                own.add_(rest)
        content = coding.encode(total)
        for own, sent in zip(views(total), views(coding.decode(content)), strict=True):
            own.sub_(sent)
        self._lost[message.stage] = total
        return content

    def forget(self) -> None:
        """Drop what codecs have lost of gradients so far."""
        self._lost.clear()
