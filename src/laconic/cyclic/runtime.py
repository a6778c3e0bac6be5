"""The cyclic schedule at work: N workers, two time steps apart, that exchange everything point to point.

Source: Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep Neural Networks", arXiv
2403.08837. Reference: tests/reference/cyclic.py, equal to the bit under every rule and placement.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from laconic.comm.failure import first_failure, record_failure, watch_peers
from laconic.comm.traffic import Traffic
from laconic.cyclic.coding import RingWire, check_wire
from laconic.cyclic.links import Baton, ByteLayout, Links, PeerLost
from laconic.cyclic.meter import Report
from laconic.cyclic.optimizers import MakeOptimizer, StageOptimizers
from laconic.cyclic.placement import PlacedStages
from laconic.cyclic.schedule import Rule, Schedule, StageCache, StatePlacement
from laconic.cyclic.snapshot import Snapshots
from laconic.cyclic.stages import local_part, refuse_shared_parameters, trainable
from laconic.cyclic.worker import LossFn, MicroBatch, Worker
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.policies import Wire, WireName


class CyclicDataParallel:
    """Trains N stages with N workers. Each worker runs all stages, two time steps after the previous worker.

    All ranks construct it and call its methods in the same order. Parameters begin with the values of the mesh's first
    rank. One worker saves as many activations as in plain data parallelism; the sum over all workers stays flat.
    A trainable parameter that a batch does not use has a gradient of zero. Buffers (running statistics) stay local.

    Args:
        stages: the model, cut in order into N modules, the same on all ranks. The output of stage k, a tensor or a
            tuple of tensors, is the arguments of stage k + 1. They share no trainable parameter and are on one device.
        loss_fn: `loss_fn(output, targets)`, the mean loss of a micro-batch, a tensor of one element.
        optimizer_fn: makes a new optimizer for a list of parameters; called once per stage.
        mesh: one axis of N ranks (shared stages: N(N+1)/2). With None, or one rank, one device runs all micro-batches.
            Tensor parallelism inside a worker uses another axis: [Note: Workers of several ranks] in stages.py.
        rule: the versions that workers use: "v2", "lag2", "clip", "v1", "dp" (all at once), a `Rule`, or a mask.
        states: "replicated": every worker has all parameters, the owner of a stage has its optimizer state. "sharded":
            only the owner keeps parameters too; they travel on two rings. "shared": N(N+1)/2 devices have a stage each.
        cache: with sharded states, where a worker keeps a stage's weights from its forward to its backward: "none", so
            that they travel again for the backward, or "host", in host memory, P in all at most.
        wire: the bits in which weights and gradients cross between nodes: "exact", "8bit", "4bit", or a `Wire`. With
            sharded states weights can only cross as values; with shared stages none cross.
        stagger: the lead of a worker over the next one, as a share of 1/N of a batch. 1 keeps activations flat, less
            tolerates slow links, 0 lets all workers begin at once.
        max_grad_norm: clip gradients by the global norm over all stages. Only the rules "v1", "clip" and "dp" allow it.

    Raises:
        ValueError: ranks and stages do not fit; a stage has no trainable parameter, or shares one, or has one that is
            cut over the workers, or has an optimizer that needs more than gradients; the rule does not exist, or cannot
            wait for the global norm; the wire does not fit the states.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss_fn: LossFn,
        optimizer_fn: MakeOptimizer,
        mesh: DeviceMesh | None = None,
        *,
        rule: Rule | str | Sequence[Sequence[bool | int]] = "v2",
        states: StatePlacement = "replicated",
        cache: StageCache = "none",
        wire: Wire | WireName = "exact",
        stagger: float = 1.0,
        max_grad_norm: float | None = None,
    ) -> None:
        mesh = None if mesh is not None and mesh.size() == 1 else mesh
        _check_stages(stages)
        self.stages = list(stages)
        self.rule = Rule.of(rule, len(self.stages))
        has_norm, states = max_grad_norm is not None, states if mesh is not None else "single"
        self.schedule = Schedule(self.rule, states, has_norm, cache)
        if mesh is not None:
            _check_mesh(mesh, self.schedule)
            _check_parts(stages, mesh)
        policy = Wire.of(wire)
        check_wire(policy, self.schedule.states)
        if not 0 <= stagger <= 1:
            raise ValueError(f"stagger={stagger}, expected 0 (none) to 1 (an N-th of a batch)")
        by_stage = [list(trainable(stage).values()) for stage in self.stages]
        self.optimizer = StageOptimizers(optimizer_fn, by_stage, self._settle)
        """All stages' optimizers as one. Hyper-parameters that are set before `step` belong to its batch's gradient."""
        device = by_stage[0][0].device
        self._links = Links(mesh, device, lambda message: self._worker.wire.num_bytes(message))
        number = self._links.mesh_rank
        if mesh is not None:
            watch_peers()
            with self._failing_together():
                self._hand_on_values()
        layouts = [ByteLayout(map(local_part, parameters)) for parameters in by_stage]
        ring_wire = RingWire(policy, self.schedule, layouts, device, self._links.nodes)
        self._placement = PlacedStages(self.stages, self.schedule, number, self.optimizer, ring_wire)
        count = len(self.stages) if self.schedule.has_device_per_worker else 1
        share = stagger if self.rule.is_staggered and count > 1 else 0.0
        self._worker = Worker(
            stages=self.stages,
            loss_fn=loss_fn,
            schedule=self.schedule,
            number=number,
            links=self._links,
            placement=self._placement,
            wire=ring_wire,
            baton=Baton(self._links, number % count, count, share),
            max_grad_norm=max_grad_norm,
        )
        self._snapshots = Snapshots(self._worker)

    def _hand_on_values(self) -> None:
        for stage in self.stages:
            for tensor in (*stage.parameters(), *stage.buffers()):
                own = local_part(tensor)
                value = own.contiguous()
                self._links.hand_on(value.view(-1).view(torch.uint8), 0)
                own.copy_(value)

    def step(self, batch: MicroBatch | Sequence[MicroBatch]) -> Tensor | None:
        """Train one batch.

        Args:
            batch: this worker's (inputs, targets). With one device, or shared stages: a list with the (inputs, targets)
                of all N workers, in order. Inputs are a tensor or a tuple of tensors, equally many rows on all workers.

        Returns:
            The loss of this worker's micro-batch, or the mean of all N losses if they are computed here: a scalar. None
            on a device of shared stages that does not run the last stage.

        Raises:
            ValueError: micro-batches differ in size or are not N; a stage or `loss_fn` returns no tensors.
            VersionError: a stage's parameters were changed between its forward and its backward.
            RuntimeError: another worker has ended; the message has its traceback.
        """
        with self._failing_together():
            losses = self._worker.step(self._by_worker(batch))
            return torch.stack(losses).mean() if losses else None

    def drain(self) -> None:
        """Bring every stage to its newest version everywhere, and end the run. Collective.

        Afterwards parameters are equal on all workers (with sharded states: the owners have the newest), and the next
        batch begins a new run. No message is under way, so processes may end.
        """
        with self._failing_together():
            self._worker.drain()

    def _settle(self) -> None:
        """Drain, for a sync of islands, which reads and writes all parameters on every worker. Collective."""
        if self.schedule.states in ("sharded", "shared"):
            raise ValueError(
                f'states="{self.schedule.states}" and LocalSteps: a worker holds only its own stages, but a sync of '
                'islands reads and writes all parameters on every worker; use states="replicated"'
            )
        if any(isinstance(parameter, DTensor) for stage in self.stages for parameter in stage.parameters()):
            raise ValueError(
                "LocalSteps and a cyclic run whose layers tensor or expert parallelism has cut: a sync of islands "
                "reads and writes whole parameters; leave that parallelism out, or LocalSteps"
            )
        self.drain()

    def close(self) -> None:
        """Drain, and destroy this object's process groups. A process need not do so before it ends. Collective."""
        self.drain()
        self._links.close()

    def _by_worker(self, batch: Any) -> dict[int, MicroBatch]:
        """The micro-batches by worker, checked."""
        if self.schedule.has_device_per_worker:
            inputs, targets = batch
            return {self._links.mesh_rank: (inputs, targets)}
        given = len(batch) if isinstance(batch, (list, tuple)) else type(batch).__name__
        if given != len(self.stages):
            raise ValueError(
                f'states="{self.schedule.states}" needs the micro-batches of all {len(self.stages)} workers here, a '
                f"sequence of (inputs, targets), got {given}"
            )
        shapes = [_shapes(micro_batch) for micro_batch in batch]
        if len(set(shapes)) > 1:
            worker = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
            raise ValueError(
                f"worker {worker} has a batch of shapes {shapes[worker]}, but worker 0 one of {shapes[0]}; gradients "
                "are averaged over workers with equal weight, so give all workers batches of equal size"
            )
        self._links.set_shapes(self._worker.batch, shapes[0])
        return dict(enumerate(batch))

    @property
    def num_batches(self) -> int:
        """The number of batches trained, over all runs."""
        return self._worker.num_batches

    @property
    def report(self) -> Report:
        """Measurements of this device: live activations, bytes per time step, waits."""
        return self._worker.report

    @property
    def traffic(self) -> Traffic:
        """Bytes by level ("node", "local") and purpose ("weights", "gradients", "activations", "control")."""
        return self._links.traffic

    def set_hyperparameters(self, **settings: Any) -> None:
        """Set hyper-parameters of all groups, for all later batches: `set_hyperparameters(lr=1e-3)`.

        Raises:
            ValueError: a group does not have one of these hyper-parameters.
        """
        for group in self.optimizer.param_groups:
            if unknown := set(settings) - set(group):
                raise ValueError(
                    f"the optimizer has no hyper-parameter {sorted(unknown)[0]!r}; it has "
                    f"{', '.join(sorted(set(group) - {'params'}))}"
                )
            group.update(settings)

    @contextmanager
    def consistent_parameters(self) -> Iterator[int]:
        """Give all stages the parameters of one version, the same on every rank, for evaluation. Collective.

        Yields that version: the number of batches whose gradients it contains. That is one less than the batches
        trained while a staggered run goes on, and all of them after `drain`. Training is not affected.
        Cost: memory for the whole model on every rank; the model travels once along the workers.
        """
        with self._failing_together():
            version = self._snapshots.advance()
            buffers = [self._copy_of_weights(stage) for stage in range(len(self.stages))]
        with self._placement.showing(buffers):
            yield version

    def _copy_of_weights(self, stage: int) -> Tensor:
        source = self._snapshots.weights_device(stage)
        placement, is_here = self._placement, source == self._links.mesh_rank
        buffer = placement.exact(stage).clone() if is_here else placement.layouts[stage].empty(placement.device)
        if self.schedule.num_devices > 1:
            self._links.hand_on(buffer, source)
        return buffer

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, a flat dict of tensors and plain values. Collective, but nothing is gathered.

        Call it between any two steps; it does not change the run. The state contains one version of all stages, the
        optimizer state of that version, and the gradient that waits to be applied. The parts of all ranks together are
        the whole state: write them with torch.distributed.checkpoint, and read them into `blank_state_dict()`. With
        `Wire(feedback=True)` the run forgets what codecs have lost so far, as a run that goes on from the state must.
        """
        with self._failing_together():
            return self._snapshots.state_dict()

    def blank_state_dict(self) -> dict[str, Any]:
        """The entries that this rank needs from a checkpoint, for torch.distributed.checkpoint to fill."""
        return self._snapshots.blank_state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved, to the same bits. Collective.

        A run with another rule, or with another placement of the same stages, may have saved it. More keys do no harm.
        If weights crossed exactly in the run that saved it, workers begin with exact copies.

        Raises:
            ValueError: an entry is missing, or has another shape.
        """
        self._snapshots.check(state)
        self.drain()
        self._snapshots.load(state)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Record this rank's failure for the other ranks; if a message cannot be exchanged, show the first failure."""
        if self.schedule.num_devices == 1:
            yield
            return
        try:
            yield
        except PeerLost as error:
            raise RuntimeError("\n".join(filter(None, [str(error), first_failure(patience_s=1.0)]))) from error
        except Exception as error:  # whatever it is, the other ranks wait for this one
            record_failure(error)
            raise


def _shapes(micro_batch: MicroBatch) -> tuple[Any, ...]:
    """The shapes and dtypes of inputs and targets, as a key: they determine the shapes of activations."""
    tensors = [t for part in micro_batch for t in (part if isinstance(part, (tuple, list)) else [part])]
    return tuple((tuple(t.shape), str(t.dtype)) if isinstance(t, Tensor) else type(t).__name__ for t in tensors)


def _check_mesh(mesh: DeviceMesh, schedule: Schedule) -> None:
    n = schedule.num_stages
    if mesh.ndim != 1:
        raise ValueError(
            f"the cyclic schedule needs a mesh of one axis, got axes {mesh.mesh_dim_names}; pass mesh[axis], and leave "
            "context parallelism out: nothing would sum gradients over the other axes"
        )
    if mesh.size() != schedule.num_devices:
        raise ValueError(
            f'{n} stages with states="{schedule.states}" need {schedule.num_devices} ranks, but the mesh has '
            f"{mesh.size()}; cut the model into another number of stages, or start {schedule.num_devices} ranks"
        )


def _check_parts(stages: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Refuse parameters whose parts several workers hold: [Note: Workers of several ranks]."""
    others = {*mesh.mesh.flatten().tolist()} - {dist.get_rank()}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            ranks = parameter.device_mesh.mesh.flatten().tolist() if isinstance(parameter, DTensor) else []
            if shared := others.intersection(ranks):
                raise ValueError(
                    f"{name} of stage {number} is a DTensor over ranks {sorted(shared)} too, which are other workers, "
                    "but each worker runs all of a stage; cut layers over another mesh axis than that of the workers, "
                    'as in parallelize_module(stage, mesh["tp"], ...) and mesh=mesh["workers"]'
                )


def _check_stages(stages: Sequence[nn.Module]) -> None:
    if not stages:
        raise ValueError("there are no stages; cut the model into one per worker")
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if isinstance(parameter, RaggedTensor):
                raise ValueError(
                    f"{name} of stage {number} is sharded by fully_shard, which gathers it on all workers at once, but "
                    'workers of the cyclic schedule use it one after the other; leave fully_shard out (states="sharded"'
                    " keeps a stage on one worker), or train with fully_shard in place of the cyclic schedule"
                )
            if (
                parameter.requires_grad
                and hasattr(parameter, "__tensor_flatten__")
                and not isinstance(parameter, DTensor)
            ):
                raise ValueError(
                    f"{name} of stage {number} is a {type(parameter).__name__}, which holds its elements in another "
                    "tensor, and workers of the cyclic schedule put new versions into the parameter itself; leave the "
                    "layer out of convert_to_scaled_training, or train with fully_shard in place of the cyclic schedule"
                )
        if not trainable(stage):
            raise ValueError(
                f"stage {number} has no trainable parameter, so its worker's gradient would be empty; cut the model "
                "elsewhere, or into fewer stages"
            )
    refuse_shared_parameters([trainable(stage) for stage in stages])
    devices = {p.device for stage in stages for p in stage.parameters()}
    if len(devices) > 1:
        raise ValueError(f"stages are on several devices, {', '.join(map(str, devices))}; move them all to one")
