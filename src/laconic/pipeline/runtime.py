"""A pipeline: this rank's stages, torch's schedule over them, and what crosses stages besides activations.

[Note: One batch over the stages]
A step of the pipeline has the gradients of one process on the whole batch. The loss of a batch is the mean over its
micro-batches, which are equal, so each micro-batch's loss is divided by their number before its backward. Sums are then
right whatever was in `.grad` before. (torch's `scale_grads` would divide that once more.)

[Note: Agreement of the stages]
Before the first message all ranks of the pipeline tell each other their settings and a digest of the cut, and end with
one error if they differ. Before each step they tell each other that the batch can be cut, and its shapes. For shapes
that are new, each stage runs one forward on zeros, in turn, and all learn the boundary behind it. So receivers know the
length of each message, and a batch of another shape is no surprise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from laconic.comm.agreement import RankGroup
from laconic.comm.groups import destroy_with, is_rehearsed, new_group
from laconic.comm.messages import new_host_group, uses_sends
from laconic.comm.traffic import Traffic
from laconic.comm.watch import waiting_for
from laconic.errors import RanksDifferError
from laconic.pipeline.cutting import PipelineCut
from laconic.pipeline.policies import PipelinePolicy
from laconic.pipeline.schedules import let_weights_rest
from laconic.pipeline.stages import refuse_shared, restoring_state
from laconic.pipeline.ties import Tie
from laconic.pipeline.wire import Boundary, WireStage, as_tuple, count_message, decode_tensor, encode_tensor, room_for
from laconic.shard.sharded_module import ShardedModule, reshard_all
from laconic.shard.unit import units_below

Batch = Tensor | Sequence[Tensor]
_MOST_SHAPES = 4
"""The shapes of batches whose buffers are kept."""


class Pipeline:
    """The stages of this rank and their schedule: `step` trains on a batch, `evaluate` returns its loss.

    Example:
        policy = PipelinePolicy(schedule="1F1B", micro_batches=8)
        cut = cut_pipeline(blocks, policy.num_stages(mesh["pipeline"].size()))
        own = {number: cut.stages[number] for number in policy.stages_of(mesh["pipeline"].get_local_rank(), 2)}
        for stage in own.values():
            laconic.fully_shard(stage, mesh=mesh["node", "local"])
        pipeline = Pipeline(own, cut, mesh=mesh["pipeline"], loss_fn=loss, policy=policy)
        loss = pipeline.step(tokens, targets)
        pipeline.clip_grad_norm_(1.0)
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        cut: PipelineCut,
        *,
        mesh: DeviceMesh,
        loss_fn: Callable[[Any, Tensor], Tensor],
        policy: PipelinePolicy,
        reduction: Literal["mean", "sum"] = "mean",
        entries: Sequence[Boundary] = (),
    ) -> None:
        """Join the pipeline. Collective over `mesh`.

        Args:
            modules: this rank's stages by their numbers, sharded over the other axes of the mesh or not.
            cut: of the whole model, equal on all ranks.
            mesh: one axis, with a rank for each place in the pipeline.
            loss_fn: the loss of a micro-batch from the last stage's outputs and the target.
            policy: the schedule, the micro-batches and the wire.
            reduction: how the losses of micro-batches make that of a batch: "mean" where `loss_fn` is a mean, so that
                it is that of the whole batch; "sum" where it is a sum that the user divides himself.
            entries: what each stage takes for one micro-batch, if that is known. Default: stages run a forward on zeros
                to find out. A rehearsal, whose other stages are not there, needs it.

        Raises:
            ValueError: the schedule cannot have so many micro-batches on so many ranks; these are not the stages of
                this rank; a stage has sharded modules, but is none; or stages share a parameter.
            RanksDifferError: ranks of the pipeline have different settings, or cuts.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction={reduction!r} is not known; use 'mean' or 'sum'")
        self.policy, self.cut, self._loss_fn = policy, cut, loss_fn
        self.modules = dict(sorted(modules.items()))
        """This rank's stages by their numbers, ascending."""
        self.group, self.num_ranks, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self._ranks = RankGroup(_host_group_of(self.group))
        self._ranks.on_all(self._check, "the pipeline cannot start")
        self._agree()
        self._gradients = self.group
        if policy.asks_ahead:
            self._gradients = new_group(dist.get_process_group_ranks(self.group), None)
            destroy_with(self, [self._gradients])
        self._divisor = policy.micro_batches if reduction == "mean" else 1
        self.device = _device_of(mesh)
        self.traffic = next(
            (each.traffic for each in self.modules.values() if isinstance(each, ShardedModule)), Traffic()
        )
        """The counters of this rank; activations have the purpose "activations"."""
        self._entries = {each[0]: each for each in [tuple(entries)] if each}
        """What all stages take, by what the first one takes."""
        self._scheduled_for: dict[Boundary, tuple[list[WireStage], Any]] = {}
        """Stages and their schedule, by what the first stage takes."""
        places = [policy.rank_of(stage, self.num_ranks) for stage in range(self.num_stages)]
        self._ties = [Tie(members, places, self.modules, self.group, self._ranks, self.traffic) for members in cut.tied]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.policy.num_stages(self.num_ranks)

    @property
    def has_first(self) -> bool:
        """True if this rank has the first stage, which takes the batch."""
        return 0 in self.modules

    @property
    def has_last(self) -> bool:
        """True if this rank has the last stage, which takes the target."""
        return self.num_stages - 1 in self.modules

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        yield from dict.fromkeys(each for module in self.modules.values() for each in module.parameters())

    # -- agreement -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        self.policy.check_ranks(self.num_ranks)
        wanted = self.policy.stages_of(self.rank, self.num_ranks)
        if list(self.modules) != wanted:
            raise ValueError(
                f"place {self.rank} of {self.num_ranks} has the stages {wanted} under {self.policy.schedule}, got "
                f"{list(self.modules)}; give it those that policy.stages_of lists"
            )
        if self.cut.num_stages != self.num_stages:
            raise ValueError(
                f"{self.policy.schedule} on {self.num_ranks} ranks has {self.num_stages} stages, but the model is cut "
                f"into {self.cut.num_stages}; cut it into policy.num_stages({self.num_ranks})"
            )
        for number, module in self.modules.items():
            if units_below(module) and not isinstance(module, FSDPModule):
                raise ValueError(
                    f"stage {number} has sharded modules, but is none itself, so torch's schedule would not reduce "
                    "their gradients; call fully_shard on the stage, too, after its blocks"
                )
        refuse_shared(
            {number: module.named_parameters() for number, module in self.modules.items()},
            "parameter, whose gradients would not be added up; let cut_pipeline cut the model, which gives each stage "
            "a copy",
        )

    def _agree(self) -> None:
        """Raise one error on all ranks if their settings or cuts differ: [Note: Agreement of the stages]."""
        policy = self.policy
        own: dict[str, Any] = {
            "number of stages": self.num_stages, "schedule": policy.schedule, "micro-batches": policy.micro_batches,
            "wire": policy.wire, "cut": [list(self.cut.borders), self.cut.digest],
        }  # fmt: skip
        everyone = self._ranks.gather(own)
        numbers = dist.get_process_group_ranks(self.group)
        for rank, other in zip(numbers, everyone, strict=True):
            for key, value in other.items():
                first = everyone[0][key]
                if value != first:
                    here, there = (
                        f"before the blocks {each[0][1:-1]} ({each[1]})" if key == "cut" else repr(each)
                        for each in (value, first)
                    )
                    raise RanksDifferError(
                        f"rank {rank} of the pipeline differs from rank {numbers[0]}: its {key} is {here}, and that of "
                        f"rank {numbers[0]} is {there}; give all ranks one policy, and one cut of one model"
                    )

    def _describe(self, batch: Batch | None, target: Tensor | None, count: int) -> list[list[Any]] | None:
        """The shapes of a micro-batch's inputs, if this rank has the first stage."""
        described = None
        for name, given, stage, is_here in (
            ("the target", target, "last", self.has_last),
            ("the batch", batch, "first", self.has_first),
        ):
            if not is_here:
                continue
            if given is None:
                raise ValueError(f"{name} is missing; give it on the rank that has the {stage} stage")
            tensors = as_tuple(given)
            for tensor in tensors:
                rows = tensor.shape[0] if tensor.ndim else 0
                if not rows or rows % count:
                    raise ValueError(
                        f"{name} has {rows} rows, which do not divide into {count} equal "
                        "micro-batches; give a multiple, or other micro_batches"
                    )
            parts = (tensor.detach()[: tensor.shape[0] // count] for tensor in tensors)
            described = Boundary.of(tuple(parts)).plain() if stage == "first" else None
        return described

    def _shapes(self, batch: Batch | None, target: Tensor | None, count: int) -> tuple[Boundary, ...]:
        """What the stages take, one after the other. Collective: [Note: Agreement of the stages]."""
        described = self._ranks.on_all(
            partial(self._describe, batch, target, count), "the pipeline cannot take the batch"
        )
        told = next((each for each in described if each is not None), None)
        first = (
            next(iter(self._entries)) if told is None else Boundary.from_plain(told)
        )  # a rehearsal has nobody to tell
        if first not in self._entries:
            self._entries[first] = self._find_entries(first)
        return self._entries[first]

    def _scheduled(self, entries: tuple[Boundary, ...]) -> tuple[list[WireStage], Any]:
        """The stages for these shapes and their schedule."""
        if entries[0] not in self._scheduled_for:
            stages = [self._make_stage(module, number, entries) for number, module in self.modules.items()]
            made = stages, self._make_schedule(stages)
            latest = list(self._scheduled_for.items())[1 - _MOST_SHAPES :]  # their buffers take memory
            self._scheduled_for = dict([*latest, (entries[0], made)])
        return self._scheduled_for[entries[0]]

    def _make_stage(self, module: nn.Module, number: int, entries: tuple[Boundary, ...]) -> Any:
        return WireStage(
            module, number, entries, group=self.group, gradients=self._gradients, device=self.device,
            wire=self.policy.wire, traffic=self.traffic,
        )  # fmt: skip

    def _make_schedule(self, stages: Sequence[Any]) -> Any:
        schedule = self.policy.make_schedule(stages, lambda loss, target: loss)  # which the last stage has made
        let_weights_rest(schedule)
        return schedule

    def _find_entries(self, first: Boundary) -> tuple[Boundary, ...]:
        """Run each stage but the last forward on zeros, in turn, and tell all what it hands on. Collective."""
        found = [first]
        for number in range(self.num_stages - 1):
            owner = self.policy.rank_of(number, self.num_ranks)

            def run(number: int = number, owner: int = owner) -> list[list[Any]] | None:
                return self._forward_on_zeros(number, found[-1]).plain() if owner == self.rank else None

            plain = self._ranks.on_all(run, f"stage {number} cannot run")[owner]
            assert plain is not None
            found.append(Boundary.from_plain(plain))
        return tuple(found)

    def _forward_on_zeros(self, number: int, entry: Boundary) -> Boundary:
        module = self.modules[number]
        inputs = [each.like(self.device) for each in entry.tensors]
        with restoring_state([module], inputs), torch.enable_grad():
            found = Boundary.of(module(*inputs))
        reshard_all(module)
        return found

    def _part_of_loss(self, outputs: Any, target: Tensor) -> Tensor:
        return self._loss_fn(outputs, target) / self._divisor

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch | None = None, target: Tensor | None = None, *, is_last: bool = True) -> Tensor:
        """Run all micro-batches of a batch forward and backward, and add their gradients to `.grad`. Collective.

        Args:
            batch: the first stage's inputs, on the rank that has it; others may leave it out.
            target: the last stage's target, on the rank that has it.
            is_last: False if another step's gradients are to be added before the optimizer steps. They are reduced, and
                tied ones summed, at the last.

        Returns the loss of the batch, on every rank.

        Raises:
            ValueError: the batch or the target is missing, or does not divide into micro-batches.
        """
        stages, schedule = self._scheduled(self._shapes(batch, target, self.policy.micro_batches))
        targets = target.chunk(self.policy.micro_batches) if self.has_last and target is not None else ()
        for stage in stages:
            stage.syncs = is_last
            if stage.is_last:
                stage.loss_of = lambda output, number: self._part_of_loss(output, targets[number])
        losses: list[Tensor] = []
        inputs = as_tuple(batch) if self.has_first and batch is not None else ()
        with waiting_for("a step of the pipeline"):
            schedule.step(*inputs, target=target if self.has_last else None, losses=losses, return_outputs=False)
        for stage in stages:
            stage.clear_runtime_states()
        for tie in self._ties if is_last else ():
            tie.sum_gradients()
        return self._tell_loss(losses)

    @torch.no_grad()
    def evaluate(
        self, batch: Batch | None = None, target: Tensor | None = None, *, micro_batches: int | None = None
    ) -> Tensor:
        """Return the loss of a batch, on every rank, without gradients. Collective.

        It changes no module's `training`. `micro_batches` are the parts into which this batch is cut; default: the
        policy's.

        Raises:
            ValueError: see `step`.
        """
        count, losses = micro_batches or self.policy.micro_batches, list[Tensor]()
        entries = self._shapes(batch, target, count)
        inputs = [each.chunk(count) for each in (as_tuple(batch) if self.has_first and batch is not None else ())]
        targets = target.chunk(count) if self.has_last and target is not None else ()
        slots = self.policy.forward_slots(self.rank, self.num_ranks, count)
        before: int | None = None
        output: tuple[Tensor, ...] = ()
        with waiting_for("an evaluation of the pipeline"):
            for slot in range(min(slots), max(slots) + 2):
                stage, part = slots.get(slot, (None, 0))
                values = self._hand_on(before, output, stage, entries)
                if stage is not None:
                    result = self.modules[stage](*(each[part] for each in inputs) if stage == 0 else values)
                    output = as_tuple(result)
                    if stage == self.num_stages - 1:
                        losses.append(self._part_of_loss(result, targets[part]))
                before = stage
        return self._tell_loss(losses)

    def _hand_on(
        self, before: int | None, output: tuple[Tensor, ...], stage: int | None, entries: Sequence[Boundary]
    ) -> tuple[Tensor, ...]:
        """Send what the stage of the slot before has made, receive what that of this slot needs, and return it."""
        wire, sends, receives = self.policy.wire, list[dist.P2POp](), list[dist.P2POp]()
        if before is not None and before + 1 < self.num_stages and before + 1 not in self.modules:
            pairs = zip(output, entries[before + 1].tensors, strict=True)
            sends = [self._op(dist.isend, encode_tensor(each, form, wire), before + 1) for each, form in pairs]
        if stage and stage - 1 not in self.modules:
            forms = entries[stage].tensors
            receives = [self._op(dist.irecv, room_for(form, wire, self.device), stage - 1) for form in forms]
        for work in dist.batch_isend_irecv(sends + receives) if sends or receives else ():
            work.wait()
        if not receives:
            return output  # of the same rank
        return tuple(decode_tensor(op.tensor, form, wire) for op, form in zip(receives, forms, strict=True))

    def _op(self, kind: Callable[..., Any], tensor: Tensor, stage: int) -> dist.P2POp:
        """A message to or from the rank that has a stage, counted."""
        op = dist.P2POp(kind, tensor, group=self.group, group_peer=self.policy.rank_of(stage, self.num_ranks))
        count_message(self.traffic, op)
        return op

    def _tell_loss(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum of the micro-batches' parts, which the rank with the last stage tells all."""
        own = torch.stack([each.detach().float() for each in losses]).sum().item() if losses else None
        told = [each for each in self._ranks.gather(own) if each is not None]
        return torch.tensor(told[0] if told else math.nan, device=self.device)  # in a rehearsal nobody may tell

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages so that their norm is at most `max_norm`. Collective over all ranks.

        A tied parameter counts once. Returns the norm before, on every rank.

        Raises:
            ValueError: `norm_type` is not positive.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type} is no norm; give a positive number, or inf")
        copies = {id(parameter) for tie in self._ties for parameter in tie.further_copies}
        trained = [each for each in self.parameters() if each.grad is not None]
        gradients = [each.grad for each in trained if id(each) not in copies]
        own = nn.utils.get_total_norm(gradients, norm_type) if gradients else torch.tensor(0.0)  # type: ignore[arg-type]
        by_place = self._ranks.gather(float(own.full_tensor() if hasattr(own, "full_tensor") else own))
        norm = torch.linalg.vector_norm(torch.tensor(by_place, dtype=torch.float64), norm_type).float().to(self.device)
        nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
        return norm


def _host_group_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for small messages of hosts, which shall not wait for a device. Collective."""
    if uses_sends(group) or is_rehearsed(group):
        return group
    host_group = new_host_group(group)
    assert host_group is not None
    return host_group


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())
