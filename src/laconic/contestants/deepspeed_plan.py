"""The program of DeepSpeed's ZeRO-3, with hpZ and ZeRO++'s codes.

[Note: DeepSpeed's order of work]
Sources: ZeRO, arXiv 1910.02054, section 5; ZeRO-Infinity, arXiv 2104.07857; ZeRO++, arXiv 2306.10209; and DeepSpeed
0.19's `runtime/zero/stage3.py`. For the gathers see [Note: DeepSpeed's coordinator] in deepspeed_fetch.py. The sizes
follow the model as a careful user sets them, so that no more than the root and two layers are gathered at once.
`stage3_param_persistence_threshold` is 0. Linear layers are DeepSpeed's own, which a model gets that is made inside
`deepspeed.zero.Init`. torch's would keep every weight from forward to backward, for they save a view of it.

- A parameter is cut into as many equal runs of elements as there are ranks, and padded at its end.
- A gradient is copied into a bucket of `reduce_bucket_size` elements as soon as it is ready. A full bucket is copied
  into one message with padding, and reduced: along a ring, or with qgZ by two all-to-alls in four bits, first inside
  the node, then between nodes. ZeRO-3 reduces in every micro-batch.
- A rank keeps its part of the parameters, of their fp32 masters (a copy even if parameters are fp32), of fp32 sums of
  gradients and of two fp32 states; and the bucket. The optimizer works on a copy of the sums.
- hpZ: a parameter that is released keeps a node shard, from which it is gathered until the optimizer's step. A frozen
  parameter keeps it for good.
- qwZ: a gather sends int8 with an fp32 scale for up to 8,000 values. It arrives in int8, is decoded as a whole, and
  copied out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from laconic.comm.traffic import Level
from laconic.contestants.deepspeed_fetch import Coordinator, FetchSizes, Parameter
from laconic.plan.machine import Job, PlanTransfer, Simulator
from laconic.plan.model_trace import ParameterSpec, Segment
from laconic.plan.optimizer_cost import UpdateCost, adamw_cost
from laconic.plan.phase import Phase
from laconic.plan.program import Program, Shape, StepWork, WrittenProgram
from laconic.rehearse.rings import Places, Ring
from laconic.strategies.parallelize import mixed_precision

_QWZ_GROUP = 8000
"""The values that share a scale under qwZ, at most: `CUDAQuantizer.target_group_size`."""
_MOST_REDUCTIONS = 2
"""The reductions in flight before the host waits: `max_param_reduce_events`."""


@dataclass(frozen=True, kw_only=True)
class DeepspeedOptions:
    """DeepSpeed's settings."""

    hpz: bool = False
    """`zero_hpz_partition_size` = the ranks of a node."""
    quantizes: bool = False
    """`zero_quantized_weights` and `zero_quantized_gradients`."""
    reshards: bool = True
    """False: parameters stay gathered from forward to backward, as `stage3_max_reuse_distance` allows."""


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A module's forward or backward: a part of a segment of the trace."""

    unit: str
    parameters: tuple[Parameter, ...]
    phase: Phase
    is_backward: bool


def deepspeed(machine: Simulator, work: StepWork, shape: Shape) -> Program:
    """DeepSpeed under any of its values of shard.strategy: a `Make`."""
    options = DeepspeedOptions(
        hpz=work.job.shard.strategy != "deepspeed",
        quantizes=work.job.shard.strategy == "deepspeed-zero++",
        reshards=work.job.shard.policy.reshard_after_forward is not False,
    )
    return Deepspeed(machine, work, shape, options)


class Deepspeed(WrittenProgram):
    """DeepSpeed's ZeRO-3 on a machine: [Note: DeepSpeed's order of work]."""

    def __init__(self, machine: Simulator, work: StepWork, shape: Shape, options: DeepspeedOptions) -> None:
        """Partition the units of `work.trace`."""
        self._machine, self._work, self._shape, self._options = machine, work, shape, options
        self._is_cpu = machine.device_type == "cpu"
        places = Places(nodes=shape.nodes, local=shape.local)
        self._all, self._node = (Ring(range(size), places) for size in (shape.ranks, shape.local))
        units = [[_parameter(each, shape.ranks) for each in unit.parameters] for unit in work.trace.units]
        layers = [sum(each.numel for each in own) for own in units[:-1]]
        root = sum(each.numel for each in units[-1])
        layer = max(layers, default=root)
        self._bucket_numel = layer
        sizes = FetchSizes(
            prefetch=layer,
            max_live=root + 2 * layer if options.reshards else root + sum(layers),
            max_reuse=0 if options.reshards else root + sum(layers),
        )
        self._steps = _steps(work, units)
        self._coordinator = Coordinator(
            machine, [step.parameters for step in self._steps], sizes, self._send_gather, self._keep
        )
        parameters = [each for own in units for each in own]
        trained = [each for each in parameters if each.is_trained]
        if not trained:
            raise ValueError("the model has no parameter that trains")
        self._parameters = parameters
        self._compute_itemsize = trained[0].itemsize
        reduce_dtype = mixed_precision(work.job.shard, work.job.model).reduce_dtype
        self._reduce_itemsize = reduce_dtype.itemsize if reduce_dtype else self._compute_itemsize
        self._filled: list[Parameter] = []
        self._reductions: list[Job | None] = []
        numel = sum(each.partition_numel for each in trained)
        self._sum_bytes = 4.0 * numel
        machine.hold("parameters", sum(each.partition_numel * each.itemsize for each in parameters))
        machine.hold("optimizer", self._sum_bytes)  # the fp32 masters
        machine.hold("gradients", self._sum_bytes + self._bucket_numel * self._reduce_itemsize)
        cost = replace(adamw_cost(work.optimizer, numel, 4), transient_bytes=self._sum_bytes)
        self._update = UpdateCost(machine, cost, gradient_bytes=self._sum_bytes)

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """See `Program.step`."""
        for _ in range(self._work.micro_batches):
            self._run()
        self._update.run(self._all.all_reduce(4).sent)
        self._machine.touch("copy masters", self._sum_bytes * (1 + self._compute_itemsize / 4))
        for parameter in self._parameters:
            if parameter.is_trained and parameter.has_secondary:
                parameter.has_secondary = False
                self._machine.hold("cache", -self._secondary_bytes(parameter))

    def _run(self) -> None:
        """One micro-batch."""
        self._coordinator.begin()
        for index, step in enumerate(self._steps):
            self._coordinator.fetch()
            self._coordinator.settle()
            self._machine.compute(step.unit, step.phase)
            if step.is_backward:
                for parameter in step.parameters:
                    if parameter.is_trained:
                        self._add(parameter)
            self._coordinator.release(index)
        self._reduce()
        for job in self._reductions:
            self._machine.wait(job, "reduce")
        self._reductions.clear()
        self._coordinator.end()

    # -- gathers -------------------------------------------------------------------------------------------------------

    def _send_gather(self, parameters: Sequence[Parameter]) -> tuple[Job | None, float]:
        is_inside = parameters[0].has_secondary
        ring = self._node if is_inside else self._all
        numel = sum(each.partition_numel for each in parameters) * self._shape.ranks
        nbytes = sum(each.partition_numel * each.itemsize for each in parameters) * self._shape.ranks
        if self._options.quantizes:
            nbytes = numel + 4 * math.ceil(numel / _QWZ_GROUP)
            self._machine.touch("encode", numel / ring.size * (self._compute_itemsize + 1))
        elif self._is_cpu:
            self._machine.touch("copy in", 2 * nbytes / ring.size)
        return self._machine.send(PlanTransfer.along(ring.gather(nbytes), "gather", "weights")), float(nbytes)

    def _keep(self, parameter: Parameter) -> None:
        """Under hpZ, keep a node shard of a parameter that is released."""
        if self._options.hpz and not parameter.has_secondary:
            parameter.has_secondary = True
            nbytes = self._secondary_bytes(parameter)
            self._machine.touch("keep", 2 * nbytes)
            self._machine.hold("cache", nbytes)

    def _secondary_bytes(self, parameter: Parameter) -> float:
        return parameter.partition_numel * self._shape.nodes * parameter.itemsize

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _add(self, parameter: Parameter) -> None:
        """Copy a gradient into the bucket, after the bucket has been reduced if it is full."""
        if self._filled and sum(each.numel for each in self._filled) + parameter.numel > self._bucket_numel:
            self._reduce()
        self._filled.append(parameter)
        if parameter.numel <= self._bucket_numel:
            self._machine.touch("fill bucket", parameter.numel * (self._compute_itemsize + self._reduce_itemsize))
        else:  # the gradient stays where it is
            self._machine.hold("gradients", parameter.nbytes)

    def _reduce(self) -> None:
        """Reduce the bucket, and add this rank's part to its sums."""
        members, self._filled = self._filled, []
        if not members:
            return
        machine, ranks = self._machine, self._shape.ranks
        own_numel = sum(each.partition_numel for each in members)
        nbytes = float(own_numel * ranks * self._reduce_itemsize)
        copies = len(members) > 1 or members[0].numel % ranks
        held_bytes = nbytes if copies else 0.0
        if self._is_cpu:
            held_bytes += nbytes / ranks  # the ring's own landing: strategies/ring.py
        with machine.holding("transfers", held_bytes):
            machine.touch("copy and divide", 4 * nbytes)
            job: Job | None = None
            for transfer in self._reduction(members):
                job = machine.send(transfer, job) or job
            if self._is_cpu:
                machine.wait(job, "reduce")
                machine.touch("sum", 3 * nbytes * (ranks - 1) / ranks)
            else:
                self._reductions.append(job)
                if len(self._reductions) > _MOST_REDUCTIONS:
                    machine.wait(self._reductions.pop(0), "reduce")
            machine.touch("add sums", own_numel * (self._reduce_itemsize + 8))
        for parameter in members:
            if parameter.numel > self._bucket_numel:
                machine.hold("gradients", -parameter.nbytes)

    def _reduction(self, members: Sequence[Parameter]) -> list[PlanTransfer]:
        """The transfers of a bucket, each after the one before."""
        ranks, local, nodes = self._shape.ranks, self._shape.local, self._shape.nodes
        if not (self._options.quantizes and nodes > 1):
            numel = sum(each.partition_numel for each in members) * ranks
            return [PlanTransfer.along(self._all.reduce_scatter(numel * self._reduce_itemsize), "reduce", "gradients")]
        coded = [each for each in members if each.has_two_dims and not each.numel % (2 * ranks)]
        plain = sum(each.partition_numel for each in members if each not in coded) * ranks
        route = self._all.reduce_scatter(plain * self._reduce_itemsize)
        found = [PlanTransfer.along(route, "reduce", "gradients")] if plain else []
        code_bytes = sum(each.numel / 2 + 4 * each.num_scales for each in coded)
        inside: dict[Level, float] = {"local": (local - 1) / local * code_bytes}
        across: dict[Level, float] = {"node": (nodes - 1) / nodes * code_bytes / local}
        for name, sent in (("reduce inside", inside), ("reduce", across)):
            if coded:
                found.append(PlanTransfer(name=name, purpose="gradients", sent=sent))
        return found


def _parameter(spec: ParameterSpec, ranks: int) -> Parameter:
    numel = spec.numel
    return Parameter(
        numel=numel, itemsize=spec.compute_dtype.itemsize, partition_numel=-(-numel // ranks),
        is_trained=spec.is_trained, has_two_dims=len(spec.shape) > 1,
        num_scales=max(*spec.shape[:2], ranks) if len(spec.shape) > 1 else 1,
    )  # fmt: skip


def _steps(work: StepWork, units: Sequence[Sequence[Parameter]]) -> list[_Step]:
    """The modules in the order in which they run. A segment's time is divided by the modules' parameters."""
    trace, root = work.trace, len(units) - 1
    names = [[each.name for each in unit.parameters] for unit in trace.units]
    found: list[_Step] = []
    for is_backward in (False, True):
        seen: dict[int, int] = {}
        for segment in trace.backward if is_backward else trace.forward:
            place = seen.get(segment.unit, 0)
            seen[segment.unit] = place + 1
            modules = _modules(names[segment.unit], units[segment.unit])
            if segment.unit == root:
                modules = _part_of_root(modules, place, is_backward=is_backward)
            found.extend(_divide(trace.units[segment.unit].name, segment, modules))
    return found


def _modules(names: Sequence[str], parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """The parameters of a unit by module, after an empty list for the unit itself."""
    by_module: dict[str, list[Parameter]] = {}
    for name, parameter in zip(names, parameters, strict=True):
        by_module.setdefault(name.rpartition(".")[0], []).append(parameter)
    return [[], *by_module.values()]


def _part_of_root(modules: list[list[Parameter]], place: int, *, is_backward: bool) -> list[list[Parameter]]:
    """The root's modules before the layers (embeddings: all up to the first vector), or those after them."""
    own = modules[1:]
    vectors = [index for index, each in enumerate(own) if not any(one.has_two_dims for one in each)]
    cut = vectors[0] if vectors else min(1, len(own))
    is_before = (place == 0) is not is_backward
    return [[], *(own[:cut] if is_before else own[cut:])]


def _divide(name: str, segment: Segment, modules: list[list[Parameter]]) -> list[_Step]:
    """A segment as the steps of its modules, in the order of forward or in reverse."""
    phase, total = segment.phase, sum(each.numel for own in modules for each in own)
    ordered = [modules[0], *(modules[1:][::-1] if segment.is_backward else modules[1:])]
    found, left = [], phase.end_bytes
    for place, own in enumerate(ordered):
        share = sum(each.numel for each in own) / total if total else 1.0 / len(ordered)
        is_last = place == len(ordered) - 1
        end_bytes = left if is_last else round(phase.end_bytes * share)
        left -= end_bytes
        work = tuple(
            replace(each, flops=each.flops * share, memory_bytes=each.memory_bytes * share) for each in phase.work
        )
        grown = max(0, phase.end_bytes)
        peak_bytes = max(0, phase.peak_bytes - grown) + max(0, end_bytes)
        part = Phase(work=work, peak_bytes=peak_bytes, end_bytes=end_bytes)
        found.append(_Step(unit=name, parameters=tuple(own), phase=part, is_backward=segment.is_backward))
    return found
