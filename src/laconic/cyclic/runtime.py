"""The cyclic schedule at work: N workers, two time steps apart, that tell each other everything point to point.

Source: Fournier and Oyallon, "Cyclic Data Parallelism for Efficient Parallelism of Deep Neural Networks", arXiv
2403.08837. Reference: tests/reference/cyclic.py, equal to the bit under every rule and placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laconic.comm.failure import first_failure, record_failure
from laconic.comm.traffic import Traffic
from laconic.cyclic import snapshot
from laconic.cyclic.flat import Layout
from laconic.cyclic.links import Links, PeerLost
from laconic.cyclic.optimizers import MakeOptimizer, StageOptimizers
from laconic.cyclic.placement import Placement, Replicated, trainable
from laconic.cyclic.report import Report
from laconic.cyclic.scaling import LossScale
from laconic.cyclic.schedule.messages import Run
from laconic.cyclic.schedule.rule import Rule
from laconic.cyclic.schedule.schedule import Schedule, StatePlacement
from laconic.cyclic.sharded import Sharded
from laconic.cyclic.worker import Baton, LossFn, Worker

MicroBatch = tuple[Any, Any]


class CyclicDataParallel:
    """Trains stages with one worker per stage, each with its own micro-batch, staggered by two time steps.

    Args:
        stages: the model, cut in order; N modules, the same on all ranks. Stage k's output, a tensor or a tuple of
            tensors, is stage k + 1's arguments. They must share no parameter, and be of one device.
        loss_fn: `loss_fn(output, targets)`, the mean over a micro-batch.
        optimizer_fn: from a list of parameters to a new optimizer; called once per stage.
        mesh: one axis of N ranks, or of N(N+1)/2 for shared stages. None, or one rank: all N micro-batches on one
            device, interleaved.
        rule: which versions workers use: "v2", "lag2", "clip", "v1", "dp" (all at once), a `Rule`, or a mask.
        states: "replicated": all parameters on every worker, optimizer state with a stage's owner. "sharded":
            parameters too rest with the owner alone, and travel on two rings. "shared": stages are spread over
            N(N+1)/2 devices.
        stagger: how much of 1/N of a batch the worker before must have done before one begins; 1 keeps activations
            flat, less forgives slow links. 0 does not stagger.
        max_grad_norm: clip gradients by the global norm over all stages; only under the rules "v1", "clip" and "dp", by
            which updates can wait for it.
        grad_scaler: scale losses with its settings, and leave out the update of a batch whose gradient overflowed;
            under the same rules, and with a scale that follows two batches late. It is read, not updated: see
            `loss_scale`.

    All ranks make it, and call each of its methods, alike. Parameters begin as on the mesh's first rank.
    Activations per worker are those of plain data parallelism; it is their sum over workers that is flat.
    A trainable parameter without a part in a batch has a gradient of zero there. Buffers (running statistics) stay
    local. A stage's frozen parameters stay where they are.

    Raises:
        ValueError: workers are not as many as stages; a stage without a trainable parameter, or one in two stages; an
            optimizer that needs more than gradients; a rule that does not exist; a global norm under a rule that cannot
            wait for it.
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
        stagger: float = 1.0,
        max_grad_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        _check_stages(stages)
        self.stages = list(stages)
        self.rule = Rule.of(rule, len(self.stages))
        is_scaled = grad_scaler is not None and grad_scaler.is_enabled()
        has_norm = max_grad_norm is not None or is_scaled
        is_alone = mesh is None or mesh.size() == 1
        self.schedule = Schedule(self.rule, "single" if is_alone else states, has_norm=has_norm)
        if not is_alone:
            assert mesh is not None
            _check_mesh(mesh, self.schedule)
        if not 0 <= stagger <= 1:
            raise ValueError(f"stagger={stagger}, expected 0 (none) to 1 (an N-th of a batch)")
        layouts = [Layout(trainable(stage)) for stage in self.stages]
        device = trainable(self.stages[0])[0].device
        self.make_optimizer = optimizer_fn
        self.optimizer = StageOptimizers(optimizer_fn, [trainable(stage) for stage in self.stages])
        """For learning-rate schedulers. A change made before `step` belongs to the gradient of that step's batch."""
        self._links = Links(None if is_alone else mesh, device, lambda stage: layouts[stage].num_bytes)
        number = self._links.mesh_rank
        if not is_alone:
            with self._failing_together():
                self._begin_alike(layouts)
        self._placement = self._place(number)
        baton = None
        if self.schedule.states in ("replicated", "sharded") and len(self.stages) > 1:
            share = stagger if self.rule.is_staggered else 0.0
            baton = Baton(self._links, number, len(self.stages), share, measures=device.type == "cpu")
        scale = LossScale(grad_scaler) if grad_scaler is not None and is_scaled else None
        self._worker = Worker(
            self.stages, loss_fn, self.schedule, number, self._links, self._placement, baton, max_grad_norm, scale
        )
        self._run, self._batch = Run(), 0
        self.num_batches = 0
        """Batches trained, over all runs."""

    def _place(self, number: int) -> Placement:
        stages = range(len(self.stages))
        owned = [stage for stage in stages if self.rule.owner(stage) == number]
        match self.schedule.states:
            case "replicated":
                return Replicated(self.stages, owned, self.optimizer)
            case "sharded":
                return Sharded(self.stages, owned, self.optimizer)
            case _:
                return Placement(self.stages, self.schedule.stages_of(number), self.optimizer)

    def _begin_alike(self, layouts: Sequence[Layout]) -> None:
        for stage, layout in zip(self.stages, layouts, strict=True):
            parameters = trainable(stage)
            buffer = layout.pack((p.detach() for p in parameters), parameters[0].device)
            self._links.broadcast(buffer, 0)
            for parameter, value in zip(parameters, layout.views(buffer), strict=True):
                parameter.data.copy_(value)
            for rest in (*stage.buffers(), *(p.data for p in stage.parameters() if not p.requires_grad)):
                value = rest.contiguous()
                self._links.broadcast(value, 0)
                rest.copy_(value)

    # -- training ------------------------------------------------------------------------------------------------------

    def step(self, batch: MicroBatch | Sequence[MicroBatch]) -> Tensor | None:
        """Train one batch: this worker's (inputs, targets); with one device or shared stages all N workers', in order.

        Inputs are a tensor or a tuple of tensors. Returns the loss of this worker's micro-batch, or the mean of all N
        where all are here; None on a device of shared stages that does not have the last one.
        Raises: ValueError for batches of unequal size; RuntimeError with the traceback of a worker that has ended.
        """
        with self._failing_together():
            data = self._by_worker(batch)
            settings = self._worker.settings
            settings[self._batch] = self.optimizer.settings()
            settings.pop(self._batch - 4, None)
            losses = self._worker.run(self._batch, self._run, data)
            self._batch += 1
            self.num_batches += 1
            self.optimizer.step()
            return torch.stack(list(losses.values())).mean() if losses else None

    def drain(self) -> None:
        """Bring every stage to its newest version everywhere, and end the run: the next batch is a first one.

        Collective. After it parameters are equal on all workers (with sharded states: the owner's), and nothing is
        under way, so that processes may end.
        """
        with self._failing_together():
            self._worker.pass_on(self._batch, self._run)
            self._restart(is_pending=False)

    def close(self) -> None:
        """Drain, and end this object's connections; a process that ends need not."""
        self.drain()
        self._links.close()

    def _restart(self, *, is_pending: bool) -> None:
        self._run, self._batch = Run(is_pending=is_pending), 0
        self._worker.settings.clear()
        self._worker.squares.clear()
        self._placement.begin_run(is_pending=is_pending)

    def _by_worker(self, batch: Any) -> dict[int, MicroBatch]:
        """Micro-batches by worker, checked."""
        if self.schedule.states in ("replicated", "sharded"):
            inputs, targets = batch
            return {self._links.mesh_rank: (inputs, targets)}
        if not isinstance(batch, (list, tuple)) or len(batch) != len(self.stages):
            count = len(batch) if isinstance(batch, (list, tuple)) else type(batch).__name__
            raise ValueError(
                f'states="{self.schedule.states}" wants all {len(self.stages)} workers\' micro-batches here, a '
                f"sequence of (inputs, targets), got {count}"
            )
        shapes = [_shapes(micro_batch) for micro_batch in batch]
        if len(set(shapes)) > 1:
            worker = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
            raise ValueError(
                f"worker {worker} has a batch of shapes {shapes[worker]}, but worker 0 one of {shapes[0]}; gradients "
                "are averaged over workers with equal weight, so give all workers batches of equal size"
            )
        self._links.shapes_of(self._batch, shapes[0])
        return dict(enumerate(batch))

    # -- between steps -------------------------------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """What this device did: live activations, bytes per time step, whether it was on time."""
        return self._worker.report

    @property
    def traffic(self) -> Traffic:
        """Bytes by purpose: "weights", "gradients", "activations", "control"."""
        return self._links.traffic

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with now."""
        return 1.0 if self._worker.loss_scale is None else self._worker.loss_scale.scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizers' groups, stage by stage; the same as `optimizer.param_groups`."""
        return self.optimizer.param_groups

    def set_hyperparameters(self, **settings: Any) -> None:
        """Set them in all groups: `set_hyperparameters(lr=1e-3)`. They belong to the next batches' gradients.

        Raises: ValueError for one that a group does not have.
        """
        for group in self.param_groups:
            if unknown := set(settings) - set(group):
                raise ValueError(
                    f"the optimizer has no hyper-parameter {sorted(unknown)[0]!r}; it has "
                    f"{', '.join(sorted(set(group) - {'params'}))}"
                )
            group.update(settings)

    @contextmanager
    def consistent_parameters(self) -> Iterator[int]:
        """For evaluation: the stages have all parameters of one version, the same on every rank. Collective.

        Yields that version: how many batches' gradients it has. It is one less than batches trained while a staggered
        run goes on; after `drain` it is the newest. Training goes on afterwards as if nothing had been.
        Cost: memory for the whole model on every rank, and one broadcast of it.
        """
        with self._failing_together():
            version = snapshot.settle(self)
            for stage in range(len(self.stages)):
                keeper = snapshot.keeper_of_weights(self, stage)
                is_here = keeper == self._links.mesh_rank
                layout = self._placement.layouts[stage]
                buffer = self._placement.buffers[stage] if is_here else layout.empty(self._placement.device)
                if self.schedule.num_devices > 1:
                    self._links.broadcast(buffer, keeper)
                self._placement.show(stage, buffer.clone())
        try:
            yield version
        finally:
            for stage in range(len(self.stages)):
                self._placement.hide(stage)

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, flat: tensors and plain values. Collective, but nothing is gathered.

        The run goes on unharmed, drained or not: weights of a version that all have, the optimizer state that goes
        with them, and the gradient that waits to be applied. Together, all ranks' parts are a whole; write them with
        torch.distributed.checkpoint, and read them back into `blank_state_dict()`.
        """
        with self._failing_together():
            return snapshot.state_dict(self)

    def blank_state_dict(self) -> dict[str, Any]:
        """What this rank needs of a checkpoint, to be filled by torch.distributed.checkpoint."""
        return snapshot.blank_state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was saved, to the same bits. Collective; more keys than needed may be given.

        Another rule, or another placement on the same number of stages, may have saved it.
        Raises: ValueError naming what is missing, or of another shape.
        """
        snapshot.check(self, state)
        self.drain()
        snapshot.load(self, state)

    # -- failures ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Leave one's traceback where the others find it; show theirs when a message does not come."""
        if self.schedule.num_devices == 1:
            yield
            return
        try:
            yield
        except PeerLost as error:
            first = first_failure()
            raise RuntimeError(f"{error}\n{first}" if first else str(error)) from error
        except Exception as error:
            record_failure(error)
            raise


def _shapes(micro_batch: MicroBatch) -> tuple[Any, ...]:
    """Of inputs and targets; hashable, and what a stage's output depends on."""
    tensors = [t for part in micro_batch for t in (part if isinstance(part, (tuple, list)) else [part])]
    return tuple((tuple(t.shape), str(t.dtype)) if isinstance(t, Tensor) else type(t).__name__ for t in tensors)


def _check_mesh(mesh: DeviceMesh, schedule: Schedule) -> None:
    n = schedule.num_stages
    if mesh.ndim != 1:
        raise ValueError(
            f"the cyclic schedule needs a mesh of one axis, got axes {mesh.mesh_dim_names}; pass mesh[axis]"
        )
    if mesh.size() != schedule.num_devices:
        raise ValueError(
            f'{n} stages with states="{schedule.states}" need {schedule.num_devices} ranks, but the mesh has '
            f"{mesh.size()}; cut the model into another number of stages, or start {schedule.num_devices} ranks"
        )


def _check_stages(stages: Sequence[nn.Module]) -> None:
    if not stages:
        raise ValueError("there are no stages; cut the model into one per worker")
    for number, stage in enumerate(stages):
        if not trainable(stage):
            raise ValueError(
                f"stage {number} has no trainable parameter, so its worker's gradient would be empty; cut the model "
                "elsewhere, or into fewer stages"
            )
    places = Counter(id(p) for stage in stages for p in trainable(stage))
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            if places[id(parameter)] > 1:
                raise ValueError(
                    f"{name} of stage {number} is also in another stage; a weight has one gradient and one version, so "
                    "cut the model such that tied weights are in one stage, or untie them"
                )
    devices = {p.device for stage in stages for p in stage.parameters()}
    if len(devices) > 1:
        raise ValueError(f"stages are on several devices, {', '.join(map(str, devices))}; move them all to one")
