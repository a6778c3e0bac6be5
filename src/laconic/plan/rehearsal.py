"""A step of the trainer, rehearsed on phantom layers: the real engine, optimizer and stepper as one rank of a cluster.

[Note: Rehearsed steps]
The trainer's own `Simultaneous` shards the model and takes two steps in a rehearsal (laconic.rehearse); the second is
read. The first fills caches, makes the optimizer's states and learns the order of units. Layers are phantoms, and
tensors have no values: [Note: Phantom layers], [Note: Data without values] in rehearse/operations.py. The clock comes
later: a machine plays the tape at any cluster's rates.

All ranks are alike but for the payloads of coded crossings, which depend on a rank's place in its node. So where bytes
are coded, the tape has the mean over the places. Messages of many nodes are alike, too: a few of them are coded and
decoded, and each stands for as many.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial, partialmethod
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from laconic import _compat, registry
from laconic.codec import Codec
from laconic.codec.payload import FewBits, Part, Piece, few_bits_of, parts_of_islands, shards_of_nodes
from laconic.comm.cluster import Cluster
from laconic.comm.launch import RankInfo
from laconic.comm.moves import NOTHING, Pending
from laconic.config import Config, SyncConfig
from laconic.data.batches import Batch
from laconic.hf.layers import layers_to_shard
from laconic.islands import outer_optimizer
from laconic.islands.all_reduce import IslandGroup
from laconic.islands.local_steps import LocalSteps
from laconic.islands.policies import Membership
from laconic.layout.bucket import BucketLayout
from laconic.optim.owners import Matrix
from laconic.plan.equal_layers import list_of_equal, only
from laconic.plan.machine import Kind
from laconic.plan.model_trace import ModelTrace, batch_of, build_untrained
from laconic.plan.op_cost import Costs, tensors_of
from laconic.plan.phantom import Phantom, hidden_tensor
from laconic.plan.phantom_stages import StageForms, stages_of
from laconic.ragged.spec import RaggedSpec
from laconic.rehearse import Machine, Tape, rehearsal
from laconic.rehearse.rings import Places
from laconic.shard import crossing
from laconic.shard.placement import Passing, UnitUse
from laconic.shard.policies import Placement
from laconic.shard.unit import units_below
from laconic.strategies import ddp_hooks, parallelize, zero1
from laconic.strategies.ring import pass_around
from laconic.strategies.stepper import Setup
from laconic.strategies.under import strategy_of

STEPS = 2
END = "end"
"""The mark after the last step."""
_MOST_CODED = 4
"""The messages of a crossing that are coded, and the pieces of a message; each stands for as many as are left out."""
_MOST_PARTS = 64
"""The parts whose sizes are looked at. More differ in nothing but where tensors happen to end."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The tape of one rank's steps, and what a reader must know besides."""

    tape: Tape
    kinds: Mapping[int, Kind]
    """What the memories are that outlive the engine's work: by their numbers."""
    outer_states: Set[int] = frozenset()
    """The memories of what islands keep between syncs. They are the host's, on a CPU too, as `OuterFragment` says."""
    buckets: Sequence[tuple[str, BucketLayout]] = ()
    """The name of each bucket's unit, and its layout."""
    uses: Mapping[str, UnitUse] = field(default_factory=dict)
    """The use of each unit in the last step, by its name."""
    passing: Passing = field(default_factory=Passing)
    """The bytes that whole weights add to the fullest moment of the last step."""
    matrices: Sequence[Matrix] = ()
    """The matrices that owners update, in the order of the optimizer's parameters: optim/owners.py."""
    fragments: Sequence[Sequence[RaggedSpec]] = ()
    """What islands sync, fragment by fragment; none without islands."""


@dataclass
class Rehearsals:
    """The rehearsals of one job's model: each strategy and number of ranks runs once, whatever the cluster's rates."""

    build: Callable[[Config], nn.Module] = build_untrained
    """Builds a job's model on the meta device."""
    _models: dict[str, tuple[nn.Module, nn.ModuleList | None]] = field(default_factory=dict)
    """The model of each job, and the list of its layers if they are equal."""
    done: dict[Any, Rehearsal] = field(default_factory=dict)
    """By what tells rehearsals of this model apart."""
    _forms: dict[Any, StageForms] = field(default_factory=dict)
    """How a model is cut into blocks, by the model, the shape of its micro-batches and the dtype of hidden states."""

    def of(
        self,
        job: Config,
        trace: ModelTrace,
        places: Places,
        *,
        kept: Sequence[int] | None = None,
        placements: Mapping[str, Placement] | None = None,
    ) -> Rehearsal:
        """The rehearsal of `job` on this many ranks.

        Args:
            job: its keys.
            trace: of the model.
            places: of the ranks.
            kept: the layers that stay in the model. Default: all.
            placements: where units rest. Default: as the job's cache says.

        Raises:
            JobError, ValueError: the trainer refuses the job.
        """
        key = (repr(job), trace.device_type, places, tuple(kept or ()), repr(placements))
        if key not in self.done:
            self.done[key] = _rehearse(job, trace, self._model(job, kept), kept, places, placements)
        return self.done[key]

    def of_stages(
        self, job: Config, trace: ModelTrace, places: Places, num_places: int, *, rows: int
    ) -> list[Rehearsal]:
        """The rehearsals of a job with a pipeline, of one rank for each place in it.

        Micro-batches have so many rows, as those of the trace.

        Raises:
            JobError, ValueError: the trainer refuses the job.
        """
        precision = job.shard.policy.precision.param_dtype
        shape = rows, job.data.sequence_length
        of_model = (repr((job.model, job.lora, job.data.tokenizer)), shape, precision)
        if of_model not in self._forms:
            dtype = None if precision is None else getattr(torch, precision)
            self._forms[of_model] = StageForms.of(self.model(job), *shape, dtype)
        found = []
        for place in range(num_places):
            key = (repr(job), trace.device_type, places, place)
            if key not in self.done:
                rank = place * (places.ranks // num_places)
                model, forms = self._model(job, None), self._forms[of_model]
                self.done[key] = _rehearse(job, trace, model, None, places, None, rank=rank, forms=forms)
            found.append(self.done[key])
        return found

    def model(self, job: Config) -> nn.Module:
        """The job's model, on the meta device. Nobody may change it."""
        return self._template(job)[0]

    def equal_layers(self, job: Config) -> int:
        """The number of the model's layers, if all are equal; else 0."""
        _, container = self._template(job)
        return 0 if container is None else len(container)

    def _template(self, job: Config) -> tuple[nn.Module, nn.ModuleList | None]:
        key = repr((job.model, job.lora, job.data.tokenizer))
        if key not in self._models:
            model = self.build(job)
            self._models[key] = model, list_of_equal(model, layers_to_shard(model))
        return self._models[key]

    def _model(self, job: Config, kept: Sequence[int] | None) -> nn.Module:
        """A copy of the model with the layers `kept`."""
        template, container = self._template(job)
        if kept is None or container is None:
            return copy.deepcopy(template)
        with only(container, kept):
            return copy.deepcopy(template)


def _rehearse(
    job: Config,
    trace: ModelTrace,
    model: nn.Module,
    kept: Sequence[int] | None,
    places: Places,
    placements: Mapping[str, Placement] | None,
    *,
    rank: int = 0,
    forms: StageForms | None = None,
) -> Rehearsal:
    train = replace(job.train, compile=False)  # phantoms compute nothing
    job, layers = replace(job, train=train, sync=_rarely_synced(job.sync)), layers_to_shard(model)
    kinds: dict[int | None, Kind] = {}
    batch, costs = Batch(**batch_of(job.data, job.train.micro_batch_size)), Costs()
    strategy = strategy_of(job.shard, job.sync, job.schedule, job.pipeline)
    if strategy.parallelize:
        registry.load(strategy.parallelize)  # the machine has the threads of modules that are there
    with (
        rehearsal(**asdict(places), rank=rank, device_type=trace.device_type, cost_of=costs) as machine,
        _trainer_on(machine, costs, batch, job.sync.slices),
        nullcontext() if forms is None else forms.on(machine),
        machine.recording() as tape,
    ):
        costs.machine = machine
        make = registry.load(strategy.stepper)
        stepper = make(model, Setup.of(job, RankInfo.from_environment(), machine.device))
        if placements is not None:
            stepper.module.set_placements(placements)
        if forms is None:
            units = units_below(model)
            phantom = Phantom(machine, costs, trace, model, dict(zip(kept or range(len(layers)), layers, strict=True)))
        else:
            units = [unit for stage in stepper._part.stages for unit in units_below(stage)]
            phantom = stages_of(stepper, forms, machine, costs, trace, layers)

        def begin_update(*_: Any) -> None:
            machine.mark("update")
            kinds.update(_kinds_of_gradients(machine, model))

        stepper.optimizer.register_step_pre_hook(begin_update)

        def take_step() -> None:
            stepper.begin()
            stepper.step([batch] * (job.train.accumulation * len(stepper.workers)), is_last=False)
            phantom.end()

        for number in range(STEPS):
            machine.mark(("step", number))
            for unit in units:
                unit.begin_counting()
            if number and units:  # the first step has found the root
                units[0].root.watch_passing()
            take_step()
        machine.mark(END)
        outer_states = set() if stepper.local is None else _sync_all(machine, stepper.local, take_step)
        for tensor in (*model.parameters(), *model.buffers()):
            kinds[_number_of(machine, tensor)] = "parameters"
        for state in getattr(stepper.optimizer, "optim", stepper.optimizer).state.values():
            kinds.update({_number_of(machine, each): "optimizer" for each in tensors_of(state)})
        owned = getattr(stepper.optimizer, "matrices", {}).values()
        fragments = stepper.local.fragments if stepper.local is not None else ()
        return Rehearsal(
            tape=tape,
            kinds={number: kind for number, kind in kinds.items() if number is not None},
            outer_states=outer_states,
            buckets=[(unit.name, bucket.layout) for unit in units for bucket in unit.buckets],
            uses={unit.name: unit.use() for unit in units},
            passing=units[0].root.ledger.passing if units else Passing(),
            matrices=[matrix for matrices in owned for matrix in matrices],
            fragments=[[each.spec for each in fragment.parameters.values()] for fragment in fragments],
        )


def _sync_all(machine: Machine, local: LocalSteps, take_step: Callable[[], None]) -> set[int]:
    """Let each fragment sync twice. The steps of the second time are marked. Returns the memories of outer states."""
    schedule, found = local.schedule, set[int]()

    def note() -> None:
        found.update(machine.memory(tensor).id for tensor in local.kept_tensors())

    note()
    while local.rounds < schedule.fragments:
        local.advance()
    for number in range(schedule.fragments):
        while (local.steps + 1) % schedule.interval:
            local.advance()
        note()  # a sync makes new ones of what a codec has lost
        machine.mark(("sync", number))
        for _ in range(1 + schedule.overlap):
            take_step()
        machine.mark(("synced", number))
    note()
    return found


def _rarely_synced(sync: SyncConfig) -> SyncConfig:
    """The section of a job whose plain steps come before the first sync.

    An exchange has one step to hide behind, or none. Its islands are there from the begin to the end.
    """
    if not sync.is_local:
        return sync
    policy = sync.policy
    fragments, overlap = policy.schedule.fragments, min(1, policy.schedule.overlap)
    schedule = replace(policy.schedule, every=fragments * (STEPS + 2), overlap=overlap)
    policy = replace(policy, schedule=schedule, membership=Membership(islands=policy.membership.islands))
    return replace(sync, policy=policy)


def _number_of(machine: Machine, tensor: Tensor) -> int | None:
    """The number of a tensor's memory; None if nobody has recorded it."""
    local = getattr(tensor, "_local_tensor", tensor)
    return machine.memory(local).id if machine.knows(local) else None


def _kinds_of_gradients(machine: Machine, model: nn.Module) -> dict[int | None, Kind]:
    return {_number_of(machine, p.grad): "gradients" for p in model.parameters() if p.grad is not None}


# -- what the trainer finds --------------------------------------------------------------------------------------------


@contextmanager
def _trainer_on(machine: Machine, costs: Costs, batch: Batch, slices: int) -> Iterator[None]:
    """Let the trainer find weights without values, messages that stand for others, and islands for all slices.

    The batch is on the device.
    """
    for tensor in batch.arguments().values():
        machine.take(tensor, is_device=machine.device.type != "cpu")

    def materialize(model: nn.Module, config: Any, device: torch.device) -> int:
        model.to_empty(device=device)
        return 0

    def holders(cluster: Cluster, values: Sequence[int]) -> list[int]:
        return [cluster.num_islands // slices] * len(values)  # of parts; other islands train other slices

    partition = vars(ZeroRedundancyOptimizer)["_partition_parameters"]

    def fullest_first(optimizer: Any, *given: Any) -> list[list[dict[str, Any]]]:
        parts = partition(optimizer, *given)  # of ranks, which all wait for the fullest
        numels = [sum(parameter.numel() for group in part for parameter in group["params"]) for part in parts]
        place = numels.index(max(numels))
        parts[0], parts[place] = parts[place], parts[0]
        return parts

    def pass_alike(parts: Sequence[Tensor], group: Any) -> None:
        whole = hidden_tensor(sum(part.numel() for part in parts), dtype=parts[0].dtype)
        pass_around(whole.tensor_split(len(parts)), group)  # what a rank sends is the mean over ranks

    def powersgd(*given: Any, **keys: Any) -> Any:
        state = power_sgd(*given, **keys)
        state.iter = state.start_powerSGD_iter  # its first steps, which are exact, are not read
        return state

    power_sgd = ddp_hooks.PowerSGDState
    with ExitStack() as stack:
        for target, name, value in (
            (zero1, "pass_around", pass_alike),
            (ddp_hooks, "PowerSGDState", powersgd),
            (ZeroRedundancyOptimizer, "_partition_parameters", fullest_first),
            (parallelize, "materialize", materialize),
            (outer_optimizer, "sum_over_islands", holders),
            (crossing, "few_bits_of", partial(_AlikeParts, machine, costs)),
            (FewBits, "of_rows", partial(_AlikeRows.among, costs)),
            (IslandGroup, "start_all_to_all", partialmethod(_send_alike, machine)),
            (IslandGroup, "gather", lambda islands, *values: [list(values)] * islands.size),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def _alike(count: int) -> dict[int, int]:
    """The places of a few of `count` ranks, the first among them, and for how many each stands; it for itself."""
    stride = max(1, -(-(count - 1) // _MOST_CODED))
    return {0: 1, **{place: min(stride, count - place) for place in range(1, count, stride)}}


def _send_alike(islands: IslandGroup, machine: Machine, landings: Tensor, messages: Tensor) -> Pending:
    """`IslandGroup.start_all_to_all`, in which a few messages stand for all."""
    group, works = islands._group, []
    if group is not None and messages.shape[-1]:
        others = {place: count for place, count in _alike(islands.size).items() if place}
        works += [_compat.irecv(landings[place], group, place) for place in others]
        for place, count in others.items():
            machine.alike = count
            works.append(_compat.isend(messages[place], group, place))
        machine.alike = 1
        for work in works:
            work.wait()
    return NOTHING


class _AlikeRows(FewBits):
    """Equal parts of islands, some of which stand for all."""

    _costs: Costs

    @classmethod
    def among(cls, costs: Costs, codec: Codec, num_rows: int, numel: int) -> FewBits:
        """See `FewBits.of_rows`."""
        piece = Piece(slice(0, numel), slice(0, codec.payload_bytes(numel)), codec)
        rows = cls([[piece]] * num_rows, [numel] * num_rows)
        rows._costs = costs
        return rows

    def places(self, num_ranks: int) -> Iterator[int]:
        """See `PartCoding.places`."""
        for place, count in _alike(num_ranks).items():
            with self._costs.times(count):
                yield place


class _AlikeParts(FewBits):
    """A coding some of whose parts, and of their pieces, stand for all: [Note: Rehearsed steps].

    This rank's part is the first, and stands for itself.
    """

    def __init__(
        self, machine: Machine, costs: Costs, layout: BucketLayout, parts: Sequence[Part], codec: Codec, **keys: Any
    ) -> None:
        self._machine, self._costs = machine, costs
        places = list(_alike(len(parts)))
        coded = few_bits_of(layout, [parts[place] for place in places], codec, **keys)
        every = list(coded._pieces.values())
        few = [pieces[:_MOST_CODED] for pieces in every]
        super().__init__(few, [part.numel for part in parts])
        self._pieces = dict(zip(places, few, strict=True))
        self._shares = {
            place: _numel(whole) / max(1, _numel(some)) for place, some, whole in zip(places, few, every, strict=True)
        }
        self.nbytes = coded.nbytes
        stride = -(-len(parts) // _MOST_PARTS)
        sizes = [few_bits_of(layout, each[::stride], codec, **keys).nbytes for each in _elsewhere(layout, parts)]
        self._factor = sum(sizes) / len(sizes) / max(1, self.nbytes)
        """The mean of a message's bytes over the places in a node, in multiples of this rank's."""

    def places(self, num_ranks: int) -> Iterator[int]:
        """See `PartCoding.places`."""
        for place, count in _alike(num_ranks).items():
            with self._costs.times(count):
                yield place

    def encode(self, index: int, part: Tensor, message: Tensor, **keys: Any) -> None:
        """See `FewBits.encode`."""
        self._machine.factor = self._factor  # a transfer follows
        with self._costs.times(self._shares[index]):
            super().encode(index, part, message, **keys)

    def decode(self, index: int, message: Tensor) -> Iterator[Any]:
        """See `FewBits.decode`."""
        with self._costs.times(self._shares[index]):
            yield from super().decode(index, message)

    def decode_into(self, index: int, message: Tensor, part: Tensor, *, adds: bool = False) -> None:
        """See `FewBits.decode_into`."""
        with self._costs.times(self._shares[index]):
            super().decode_into(index, message, part, adds=adds)


def _numel(pieces: Sequence[Piece]) -> int:
    return sum(piece.values.stop - piece.values.start for piece in pieces)


def _elsewhere(layout: BucketLayout, parts: Sequence[Part]) -> list[Sequence[Part]]:
    """The parts of other ranks in the place of `parts`, of at most 64 of them."""
    if parts[0].numel == layout.size(parts[0].shard) and len(parts) > 1 and parts[1].shard != parts[0].shard:
        places = layout.num_shards // len(parts)
        stride = -(-places // max(1, _MOST_PARTS // len(parts[:_MOST_PARTS])))
        return [shards_of_nodes(layout, range(i * len(parts), (i + 1) * len(parts))) for i in range(0, places, stride)]
    stride = -(-layout.num_shards // _MOST_PARTS)
    return [parts_of_islands(layout, shard, len(parts)) for shard in range(0, layout.num_shards, stride)]
