"""The program of PyTorch's DDP: whole parameters on every rank, and gradients that are summed in buckets.

[Note: DDP's buckets]
Source: Li and others, "PyTorch Distributed", arXiv 2006.15704, and torch's `csrc/distributed/c10d/reducer.cpp`. After
the first step DDP orders the buckets as gradients became ready. The first bucket takes tensors until it has 1 MiB, each
following one until it has 25 MiB. A bucket is summed as soon as its last gradient is ready, while backward goes on.
With `gradient_as_bucket_view=True`, which laconic's baseline sets, `.grad` is a view into a bucket. So DDP keeps all
buckets between steps, and a gradient is copied into its bucket at once. Without a sync (all micro-batches but the last)
gradients have memory of their own beside the buckets.

[Note: ZeRO-1's parts]
torch's ZeroRedundancyOptimizer takes the largest parameter that is left, group by group, and gives it to the rank that
has least. All ranks wait for the fullest one, so its part counts. Then parts go along a ring of all ranks, as in an
all-gather: [Note: ZeRO-1 beside DDP] in strategies/zero1.py.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from laconic.config import OptimizerConfig
from laconic.plan.machine import Job, Reading, Simulator
from laconic.plan.model_trace import ModelTrace
from laconic.plan.op_cost import Costs
from laconic.plan.phase import OpWork, Phase
from laconic.plan.program import Program, Shape, StepWork
from laconic.rehearse import rehearsal
from laconic.rehearse.rings import Places, Ring
from laconic.rehearse.tape import Free, Mark, Step
from laconic.strategies.memory import state_nbytes
from laconic.strategies.optimizers import make_optimizer

FIRST_BUCKET_BYTES = 2**20
"""`torch.distributed._DEFAULT_FIRST_BUCKET_BYTES`."""
BUCKET_BYTES = 25 * 2**20
"""The default of `bucket_cap_mb`."""


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    nbytes: float
    last: int
    """The backward phase, as an index among them, in which the last gradient becomes ready."""


class Ddp(Program):
    """DDP on a machine: [Note: DDP's buckets]."""

    def __init__(self, machine: Simulator, work: StepWork, shape: Shape) -> None:
        """Replicate the units of `work.trace`."""
        self._machine, self._work = machine, work
        self._trace: ModelTrace = work.trace
        self._ring = Ring(range(shape.ranks), Places(nodes=shape.nodes, local=shape.local))
        parameters = [each for unit in self._trace.units for each in unit.parameters]
        trained = [each for each in parameters if each.is_trained]
        self._gradient_bytes = float(sum(each.nbytes for each in trained))
        self._buckets = _buckets(self._trace)
        machine.hold("parameters", sum(each.nbytes for each in parameters))
        machine.hold("gradients", self._gradient_bytes)
        self._has_grads, self._own_bytes = False, 0.0
        """Whether micro-batches before have left gradients, and the memory of these beside the buckets."""
        updated = self._updated(work.rehearsals.model(work.job))
        self._optimizer = optimizer_cost(work.job.optimizer, updated, machine.device_type)
        self._has_states = False

    def _updated(self, model: nn.Module) -> nn.Module:
        """The parameters that a rank updates."""
        return model

    def read(self, machine: Simulator) -> Reading:
        """See `Program.read`."""
        for _ in range(2):
            self.step()
        with machine.reading() as reading:
            self.step()
        return reading

    def step(self) -> None:
        """Run one optimizer step."""
        count = self._work.job.train.accumulation
        for index in range(count):
            self._run(syncs=index == count - 1)
        self._update()

    def _run(self, *, syncs: bool) -> None:
        machine = self._machine
        for segment in self._trace.forward:
            machine.compute(self._trace.units[segment.unit].name, segment.phase)
        jobs: list[Job | None] = []
        for index, segment in enumerate(self._trace.backward):
            machine.compute(self._trace.units[segment.unit].name, segment.phase)
            if syncs:
                for place, bucket in enumerate(self._buckets):
                    if bucket.last == index:
                        jobs.append(self._begin(place, bucket))
            machine.touch("gradients", (3 if self._has_grads else 2) * segment.phase.gradient_bytes)
            if not syncs and not self._has_grads:
                self._own_bytes += segment.phase.gradient_bytes
                machine.hold("gradients", segment.phase.gradient_bytes)
        for place, job in enumerate(jobs):
            machine.wait(job, f"reduce bucket {place}")
        if syncs:
            machine.hold("gradients", -self._own_bytes)
            self._own_bytes = 0.0
        self._has_grads = not syncs

    def _update(self) -> None:
        """Clip the gradients by their norm, and step."""
        machine, cost = self._machine, self._optimizer
        machine.touch("norm", self._gradient_bytes)
        machine.touch("clip", 2 * self._gradient_bytes)
        if not self._has_states:
            self._has_states = True
            machine.hold("optimizer", cost.state_bytes)
        with machine.holding("transfers", cost.transient_bytes):
            machine.compute("optimizer", cost.phase)

    def _begin(self, place: int, bucket: _Bucket) -> Job | None:
        self._machine.touch(f"divide bucket {place}", 2 * bucket.nbytes)
        route = self._ring.all_reduce(bucket.nbytes)
        return self._machine.send(route, f"reduce bucket {place}", "gradients")


class DdpZero1(Ddp):
    """DDP whose optimizer's states are cut over the ranks, on a machine: [Note: ZeRO-1's parts]."""

    def step(self) -> None:
        """See `Ddp.step`."""
        super().step()
        route = self._ring.gather(self._gradient_bytes)
        self._machine.wait(self._machine.send(route, "broadcast", "weights"), "broadcast")

    def _updated(self, model: nn.Module) -> nn.Module:
        parts: list[list[nn.Parameter]] = [[] for _ in range(self._ring.size)]
        sizes = [0] * len(parts)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in sorted(trained, key=lambda each: (each.ndim < 2, -each.numel())):  # as the optimizer's groups
            least = sizes.index(min(sizes))
            parts[least].append(parameter)
            sizes[least] += parameter.numel()
        return nn.ParameterList(parts[sizes.index(max(sizes))])


def _buckets(trace: ModelTrace) -> list[_Bucket]:
    """The buckets as `compute_bucket_assignment_by_size` makes them, of gradients in the order in which they come."""
    found: list[_Bucket] = []
    sizes: dict[object, int] = {}
    limits: dict[object, int] = {}
    for index, segment in enumerate(trace.backward):
        parameters = {each.name: each for each in trace.units[segment.unit].parameters}
        for parameter in (parameters[arrival.name] for arrival in segment.phase.arrivals):
            kind = parameter.dtype
            sizes[kind] = sizes.get(kind, 0) + parameter.nbytes
            if sizes[kind] >= limits.get(kind, FIRST_BUCKET_BYTES):
                found.append(_Bucket(nbytes=float(sizes.pop(kind)), last=index))
                limits[kind] = BUCKET_BYTES
    end = len(trace.backward) - 1
    return [*found, *(_Bucket(nbytes=float(size), last=end) for size in sizes.values())]


# -- the optimizer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """An optimizer's step on one rank that holds its parameters whole."""

    state_bytes: float = 0.0
    transient_bytes: float = 0.0
    """The most bytes that the step takes besides."""
    phase: Phase


def optimizer_cost(settings: OptimizerConfig, model: nn.Module, device_type: str) -> OptimizerCost:
    """The cost of a step on the trainable parameters of `model`, which is on the meta device and stays as it is."""
    costs, model = Costs(), copy.deepcopy(model)
    with rehearsal(device_type=device_type, cost_of=costs) as machine, machine.recording() as tape:
        costs.machine = machine
        model.to_empty(device=machine.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        optimizer = make_optimizer(model, settings)
        for step in range(2):  # the first makes the states; the second is read
            machine.mark(step)
            optimizer.step()
        machine.mark("end")
        state_bytes = state_nbytes(optimizer)
        places = [place for place, entry in enumerate(tape.entries) if isinstance(entry, Mark)]
        work: list[OpWork] = []
        held = most = 0
        for entry in tape.entries[places[-2] : places[-1]]:
            if isinstance(entry, Free):
                held -= tape.memories[entry.memory].nbytes
            elif isinstance(entry, Step) and entry.allocates is not None:
                held += tape.memories[entry.allocates].nbytes
            elif isinstance(entry, Step) and isinstance(entry.cost, OpWork):
                work.append(entry.cost)
            most = max(most, held)
    phase = Phase(work=tuple(work), peak_bytes=0, end_bytes=0)
    return OptimizerCost(state_bytes=state_bytes, transient_bytes=most, phase=phase)
