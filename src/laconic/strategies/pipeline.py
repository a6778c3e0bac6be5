"""The stepper of jobs with [pipeline]: groups of nodes hold different layers, and each group shards its own.

[Note: One batch, with stages or without]
A pipeline of P groups takes P ranks, one of each group, and the rows of all of them: for each rank
train.micro_batch_size x train.accumulation, as if it were alone. So a job has one global batch with stages and without,
and one loss. The pipeline cuts these rows into pipeline.micro_batches, which run one behind the other. The other ranks
of a group are other pipelines, with rows of their own. Their gradients are summed as [shard] says.

[Note: What a rank of a pipeline builds]
Each rank has the whole model on the meta device, where it costs nothing, and cuts it there as all others do. Only the
layers of its own stages get memory. The rest stays on meta, for the names: optimizer groups, checkpoints and refusals
are those of the whole model, [Note: A model held in part] in checkpoint/state.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

import laconic
from laconic import registry
from laconic.checkpoint import state
from laconic.comm.cluster import make_mesh
from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Snapshot
from laconic.comm.watch import waiting_for
from laconic.config import JobError, PipelineConfig, TrainConfig
from laconic.data.batches import Batch
from laconic.hf.causal_lm import StageBlocks, blocks_for_stages
from laconic.hf.layers import base_model, layers_to_shard
from laconic.models.build import HeldPart, materialize
from laconic.pipeline.cutting import PipelineCut, cut_pipeline
from laconic.pipeline.policies import PipelinePolicy
from laconic.pipeline.runtime import Pipeline
from laconic.pipeline.stages import ModelBlock, parameters_of, restoring_random_states
from laconic.pipeline.wire import Boundary, TensorForm, count_message
from laconic.policy import PolicyError
from laconic.shard.ledger import Ledger
from laconic.shard.policies import Placement
from laconic.strategies.optimizers import groups_of
from laconic.strategies.parallelize import compile_layers, mixed_precision, shard_policy
from laconic.strategies.ring import use_rings
from laconic.strategies.simultaneous import Simultaneous
from laconic.strategies.stepper import Save, Setup, loss_of_logits
from laconic.strategies.under import strategy_of

# -- the pipeline of a launch ------------------------------------------------------------------------------------------


def num_places(pipeline: PipelineConfig, ranks: RankInfo) -> int:
    """The groups of nodes that hold different layers; 1 without a pipeline.

    Raises:
        JobError: they do not divide the nodes, or there is one node.
    """
    if not pipeline.is_on:
        return 1
    nodes = ranks.num_nodes
    if nodes <= 1:
        raise JobError(
            f"pipeline.stages = {pipeline.stages!r} and one node: stages are on different nodes; start more nodes, or "
            "leave [pipeline] out"
        )
    places = nodes if pipeline.stages == "nodes" else int(pipeline.stages or 1)
    if nodes % places:
        fitting = ", ".join(str(each) for each in range(2, nodes + 1) if nodes % each == 0)
        raise JobError(
            f"pipeline.stages = {places} does not divide the {nodes} nodes of this launch; set it to one of {fitting}, "
            "or start a multiple of nodes"
        )
    return places


def pipeline_policy(pipeline: PipelineConfig, train: TrainConfig, ranks: RankInfo) -> PipelinePolicy:
    """The policy of a launch with a pipeline: [Note: One batch, with stages or without].

    Raises:
        JobError: the rows or the schedule do not allow the micro-batches, the cut is of another number of stages, or
            layers are compiled whose backward is split.
    """
    places = num_places(pipeline, ranks)
    rows = train.micro_batch_size * train.accumulation * places
    count = pipeline.micro_batches or train.accumulation * places
    if rows % count:
        raise JobError(
            f"pipeline.micro_batches = {count} does not divide the {rows} rows that a pipeline of {places} ranks takes "
            f"in a step: train.micro_batch_size = {train.micro_batch_size} x train.accumulation = {train.accumulation} "
            "for each of its ranks; change one of them"
        )
    stages_per_rank = None
    if pipeline.cut != "cost":
        stages_per_rank, rest = divmod(len(pipeline.cut), places)
        if rest:
            raise JobError(
                f"pipeline.cut = {list(pipeline.cut)} has {len(pipeline.cut)} stages, which do not divide over "
                f"{places} groups of nodes; give a multiple of {places}, or 'cost'"
            )
    try:
        policy = PipelinePolicy(
            micro_batches=count, stages_per_rank=stages_per_rank, **pipeline.pick("schedule", "wire")
        )
        policy.check_ranks(places)
    except ValueError as error:
        text = error.told("pipeline.", " = ") if isinstance(error, PolicyError) else str(error)
        more = "train.accumulation, or pipeline.micro_batches"
        raise JobError(f"[pipeline] on {places} groups of nodes: {text} ({more} sets them)") from None
    if train.compile and policy.splits_backward:
        raise JobError(
            f"train.compile = true and pipeline.schedule = {pipeline.schedule!r}, which splits backward in two: "
            "that of a compiled layer runs whole; use 'Interleaved1F1B', or leave train.compile out"
        )
    return policy


def cut_model(model: nn.Module, setup: Setup, policy: PipelinePolicy, places: int) -> tuple[StageBlocks, PipelineCut]:
    """Cut a model on the meta device, alike on all ranks. Collective.

    Raises:
        ValueError: the model cannot be cut, or not so.
    """
    rows = setup.train.micro_batch_size * setup.train.accumulation * places // policy.micro_batches
    blocks = blocks_for_stages(model, rows, setup.data.sequence_length)
    found, cut = blocks.blocks, setup.pipeline.cut
    num_stages = policy.num_stages(places)
    if cut == "cost":
        if len(found) < num_stages:
            raise JobError(
                f"{num_stages} stages ({policy.num_stages_per_rank} on each of {places} groups of nodes) need as many "
                f"blocks, and the model has {len(found)}: its embedding, {len(found) - 2} layers and its output layer; "
                "set fewer pipeline.stages, or pipeline.schedule = '1F1B'"
            )
        return blocks, cut_pipeline(found, num_stages, by=token_costs(model, found))
    if sum(cut) != len(found):
        raise JobError(
            f"pipeline.cut = {list(cut)} adds up to {sum(cut)} blocks, and the model has {len(found)}: its embedding, "
            f"{len(found) - 2} layers and its output layer with the norm before it"
        )
    return blocks, cut_pipeline(found, num_stages, borders=[sum(cut[:place]) for place in range(1, len(cut))])


def token_costs(model: nn.Module, blocks: Sequence[ModelBlock]) -> list[float]:
    """The multiplications of each block for one token: the elements of its matrices, of experts those that a token has.

    An embedding is looked up, and costs nothing. Attention itself is left out: all layers have it alike.
    """
    config: Any = base_model(model).config
    experts = next((n for key in _EXPERTS if (n := getattr(config, key, None))), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = chosen / experts if experts and chosen else 1.0
    costs = []
    for block in blocks:
        modules = [module for each in block.modules.values() for module in each.modules()]
        looked_up = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
        is_head = block is blocks[-1]  # which may share the embedding's weight
        counted = [p for p in dict.fromkeys(parameters_of(block)) if is_head or id(p) not in looked_up]
        costs.append(sum(p.numel() * (share if p.ndim > 2 else 1.0) for p in counted if p.ndim > 1))
    return costs


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""The names under which configurations of transformers have the number of experts."""


# -- a stage inside its group of nodes ---------------------------------------------------------------------------------


def shard_on_engine(stage: nn.Module, layers: Sequence[nn.Module], setup: Setup, mesh: DeviceMesh) -> None:
    """Shard a stage, and its layers one by one, by laconic's engine over the mesh (node, local) of its group."""
    policies = shard_policy(setup.shard, setup.optimizer).arguments()
    precision = mixed_precision(setup.shard, setup.model)
    for module in [*layers, stage]:
        laconic.fully_shard(module, mesh=mesh, mp_policy=precision, **policies)


def shard_by_torch(stage: nn.Module, layers: Sequence[nn.Module], setup: Setup, mesh: DeviceMesh) -> None:
    """Shard a stage by FSDP2 over all ranks of its group.

    A careful user lets weights stay from the first micro-batch to the last: each would gather them again.
    """
    ranks = mesh._flatten("shard") if mesh.size(0) > 1 else mesh["local"]
    reshards = setup.shard.policy.reshard_after_forward is True
    for module in [*layers, stage]:
        fully_shard(
            module, mesh=ranks, mp_policy=mixed_precision(setup.shard, setup.model), reshard_after_forward=reshards
        )
    if setup.device.type == "cpu" and ranks.size() > 1:
        use_rings([stage, *layers], is_behind_backward=False)


# -- the stepper -------------------------------------------------------------------------------------------------------


class PipelineStepper(Simultaneous):
    """A `Stepper` of a rank that holds some stages of the model, sharded by laconic."""

    _pipeline: Pipeline
    _part: HeldPart

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self._setup = setup
        super().__init__(model, setup)
        places, ranks = self._pipeline.num_ranks, setup.ranks
        number = ranks.rank % (ranks.world_size // places)  # of this rank's pipeline
        self.workers = self.held_out = range(number * places, (number + 1) * places)

    def _place(self, model: nn.Module, setup: Setup) -> None:
        """Build this rank's stages: [Note: What a rank of a pipeline builds]."""
        ranks, places = setup.ranks, num_places(setup.pipeline, setup.ranks)
        policy = pipeline_policy(setup.pipeline, setup.train, ranks)
        self._loss, self._scale = loss_of_logits(model), 1.0
        self._num_items: Tensor | None = None
        self._vocabulary = base_model(model).config.vocab_size
        ties = HeldPart.ties_of(model)
        blocks, cut = cut_model(model, setup, policy, places)
        self._constants, self._told = blocks.constants, set[torch.Size]()
        whole = make_mesh(
            setup.device.type, (places, ranks.num_nodes // places, ranks.num_local), ("pipeline", "node", "local")
        )
        own = {number: cut.stages[number] for number in policy.stages_of(whole["pipeline"].get_local_rank(), places)}
        _refuse_two_copies(cut, policy, places)
        strategy = strategy_of(setup.shard, setup.sync, setup.schedule, setup.pipeline)
        layers, shard = layers_to_shard(model), registry.load(strategy.parallelize)
        for stage in own.values():
            inside = set(stage.modules())
            shard(stage, [layer for layer in layers if layer in inside], setup, whole["node", "local"])
        self._part = HeldPart(stages=list(own.values()), ties=ties)
        materialize(model, setup.model, setup.device, part=self._part)
        model.is_held_in_part = True  # type: ignore[assignment]
        if setup.train.compile:
            compile_layers(model)
        self._pipeline = self._join(own, cut, whole["pipeline"], policy)
        self._engine = None
        sizes = [len(range(*pair)) for pair in zip(cut.borders, cut.borders[1:], strict=False)]
        self.about = (
            f"a pipeline over {places} groups of nodes: stages of {sizes} blocks by {policy.schedule}, "
            f"{policy.micro_batches} micro-batches, activations {policy.wire}"
        )

    def _join(
        self, own: Mapping[int, nn.Module], cut: PipelineCut, mesh: DeviceMesh, policy: PipelinePolicy
    ) -> Pipeline:
        return Pipeline(own, cut, mesh=mesh, loss_fn=self._part_of_loss, policy=policy, reduction="sum")

    def set_training(self, mode: bool) -> None:
        """See `Stepper.set_training`."""
        for stage in self._part.stages:
            stage.train(mode)

    def begin(self) -> None:
        """See `Stepper.begin`."""
        super().begin()
        for stage in self._sharded():
            stage.reset_peak_memory()

    def _sharded(self) -> list[Any]:
        """The stages, where laconic's engine has sharded them."""
        return list(self._part.stages)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _backward(self, batches: Sequence[Batch], scale: float | None) -> float:
        rows = torch.cat([batch.input_ids for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        micro_batches = self._pipeline.policy.micro_batches
        self._tell_constants(torch.Size((len(rows) // micro_batches, rows.shape[1])))
        self._num_items = batches[0].num_items
        # a mean is over the rows of a micro-batch; a sum is divided by the targets of a part: [Note: Mean over tokens]
        self._scale = (scale or 1.0) / (micro_batches if self._num_items is None else len(batches))
        return float(self._pipeline.step(rows, labels)) / (scale or 1.0)

    def _part_of_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        batch = Batch(input_ids=labels, labels=labels, num_items=self._num_items)
        return self._loss(logits, batch) * self._scale

    def _clip_all(self) -> Tensor:
        return self._pipeline.clip_grad_norm_(self._max_grad_norm)

    def loss(self, batch: Batch) -> Tensor:
        """See `Stepper.loss`."""
        self._tell_constants(batch.input_ids.shape)
        self._num_items, self._scale = batch.num_items, 1.0
        return self._pipeline.evaluate(batch.input_ids, batch.labels, micro_batches=1)

    def outputs(self, batch: Batch) -> Any:
        """See `Stepper.outputs`. The loss follows from any logits, so no model runs."""
        logits = torch.zeros(*batch.input_ids.shape, self._vocabulary, device=batch.input_ids.device)
        return SimpleNamespace(logits=logits, loss=self._loss(logits, batch))

    @torch.no_grad()
    def _tell_constants(self, shape: torch.Size) -> None:
        """Let all stages have what layers take beside hidden states for rows of this shape. Collective.

        See [Note: Constants of a pipeline] in hf/causal_lm.py.
        """
        if shape in self._told:
            return
        pipeline, device = self._pipeline, self._setup.device
        if pipeline.has_first:
            rows = torch.zeros(shape, dtype=torch.int64, device=device)
            with restoring_random_states([rows]):
                pipeline.modules[0](rows)
            state.show_sharded(pipeline.modules[0])
        found = self._constants[shape] if pipeline.has_first else ()
        forms = Boundary.from_plain(pipeline._ranks.broadcast(Boundary.of(found).plain())).tensors
        others = range(1, pipeline.num_ranks) if pipeline.has_first else [0]
        kind = dist.isend if pipeline.has_first else dist.irecv
        values = (
            [value.contiguous() for value in found] if pipeline.has_first else [_room(each, device) for each in forms]
        )
        ops = [
            dist.P2POp(kind, value, group=pipeline.group, group_peer=place)
            for place in others for value in values if value.numel()
        ]  # fmt: skip
        for op in ops:
            count_message(pipeline.traffic, op)
        with waiting_for("what layers take beside hidden states"):
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
        self._constants[shape] = tuple(values)
        self._told.add(shape)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _as_whole(self, *, loads: bool) -> Iterator[None]:
        """In the block, the optimizer lists the parameters of the whole model, and those of other stages are on meta.

        A copy of a tied parameter is loaded on all ranks that hold one, and saved by those that hold the first.
        """
        groups = self.optimizer.param_groups
        own = [group["params"] for group in groups]
        with ExitStack() as stack:
            for stage in self._part.stages:
                state.reshard(stage)
            if not loads:
                stack.enter_context(self._part.without_further_copies())
            for group, whole in zip(groups, groups_of(self.module, self._setup.optimizer), strict=True):
                group["params"] = whole["params"]
            try:
                yield
            finally:
                for group, held in zip(groups, own, strict=True):
                    group["params"] = held

    def save(self, save: Save, extra: dict[str, Any]) -> None:
        """See `Stepper.save`."""
        with self._as_whole(loads=False):
            super().save(save, extra)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """See `Stepper.load`."""
        with self._as_whole(loads=True):
            return super().load(folder)

    # -- figures -------------------------------------------------------------------------------------------------------

    def placements(self) -> Mapping[str, Placement]:
        """See `Stepper.placements`: those of this rank's stages."""
        if self._setup.shard.policy.cache.where != "auto":
            return {}
        placed = [stage for stage in self._sharded() if stage.is_placed]
        return {name: each for stage in placed for name, each in stage.placements().items()}

    def traffic(self, before: Snapshot | None = None) -> Snapshot | None:
        """See `Stepper.traffic`."""
        return self._pipeline.traffic.snapshot()

    def memory(self) -> Ledger | None:
        """See `Stepper.memory`: the sum over this rank's stages, whose peaks may be at different times."""
        ledgers = [stage.memory() for stage in self._sharded()]
        return Ledger(
            device_bytes=sum(each.device_bytes for each in ledgers),
            device_peak_bytes=sum(each.device_peak_bytes for each in ledgers),
            host_bytes=sum(each.host_bytes for each in ledgers),
        )


class _TorchPipeline(Pipeline):
    """A pipeline of torch's own stages, which count nothing."""

    def _make_stage(self, module: nn.Module, number: int, entries: tuple[Boundary, ...]) -> Any:
        return PipelineStage(module, number, self.num_stages, self.device, group=self.group)

    def _make_schedule(self, stages: Sequence[Any]) -> Any:
        return self.policy.make_schedule(stages, self._part_of_loss)


class TorchPipelineStepper(PipelineStepper):
    """The same with torch's own stages and FSDP2 inside them."""

    def _join(
        self, own: Mapping[int, nn.Module], cut: PipelineCut, mesh: DeviceMesh, policy: PipelinePolicy
    ) -> Pipeline:
        return _TorchPipeline(own, cut, mesh=mesh, loss_fn=self._part_of_loss, policy=policy, reduction="sum")

    def _sharded(self) -> list[Any]:
        return []

    def traffic(self, before: Snapshot | None = None) -> Snapshot | None:
        """See `Stepper.traffic`."""
        return None

    def memory(self) -> Ledger | None:
        """See `Stepper.memory`."""
        return None


def _room(form: TensorForm, device: torch.device) -> Tensor:
    return torch.empty(form.shape, dtype=form.dtype, device=device)


def _refuse_two_copies(cut: PipelineCut, policy: PipelinePolicy, places: int) -> None:
    for members in cut.tied:
        holders = [policy.rank_of(stage, places) for stage, _ in members]
        if len(set(holders)) < len(holders):
            raise JobError(
                f"pipeline.schedule = {policy.schedule!r} has the first and the last stage on one rank, which would "
                f"have two copies of {members[0][1]} that share its name in a checkpoint; set tie_word_embeddings = "
                "false in model.config, or another schedule"
            )
