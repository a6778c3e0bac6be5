"""The program of PyTorch's FSDP2 and HSDP: what one rank gathers, computes, reduces and keeps in a step.

[Note: FSDP2's order of work]
The order of work and the lifetime of every buffer are those of torch 2.13's `torch/distributed/fsdp/_fully_shard`
(design: Zhao and others, "PyTorch FSDP", arXiv 2304.11277; per-parameter sharding: pytorch/pytorch#114299). Methods
here are named after those of `FSDPParamGroup`.

- Each parameter is cut in dim 0 and padded there to a multiple of the ranks, so padding travels, too.
- A gather of a unit copies the shards into a buffer, fills the buffer, and copies it out into whole parameters. Frozen
  and trained parameters share it; parameters of several dtypes travel as bytes.
- On NCCL the host runs ahead of the device. So in forward the gather of unit i + 2 may start when unit i has been
  copied out, and the buffer of unit i stays until unit i + 1 is copied out. In backward the gather of the unit before
  starts when a unit has been copied out. Reductions have a stream of their own. The next reduction waits for the last
  one, whose input stays until then.
- On CPU there are no streams. With the collectives of [Note: The strongest baseline] in strategies/ring.py, each unit
  begins the gather of the next one, and a reduction ends before backward goes on. With Gloo's own collectives gathers
  are waited for as well, and a reduce-scatter is the all-reduce of a copy of its input.
- Gloo receives an all-gather in a flat buffer of its own, which lives as long as the transfer, and copies it out.
- Gradients stay where autograd puts them until the unit's backward ends. Without a sync they stay there for the rest of
  the step, in the reduce dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Literal

from laconic.plan.buckets import Shape
from laconic.plan.machine import Job, Machine
from laconic.plan.model_trace import ModelTrace, ParameterSpec
from laconic.plan.optimizer_cost import adamw_cost
from laconic.plan.phase import Phase
from laconic.plan.program import StepWork, Update, WrittenProgram
from laconic.plan.rings import Ring

Sharded = Literal["flat", "hpz", "hsdp"]
"""Over all ranks; over all ranks, and inside the node between forward and backward; or inside the node."""


class _State(Enum):
    SHARDED = auto()
    POST_FORWARD = auto()
    UNSHARDED = auto()


@dataclass(frozen=True, kw_only=True)
class Fsdp2Options:
    """How a job calls FSDP2's `fully_shard`."""

    sharded: Sharded = "flat"
    reshards: bool = True
    """`reshard_after_forward`, if it is no integer."""
    is_gloo: bool = False
    """True for Gloo's own collectives on CPU."""
    syncs_always: bool = False
    """True if every micro-batch reduces its gradients, which frees the whole ones and crosses the wire each time."""


class _Group:
    """A unit's `FSDPParamGroup`: its sizes, and its state in the course of the program."""

    def __init__(self, name: str, parameters: Sequence[ParameterSpec], size: int, reduce_itemsize: int | None) -> None:
        self.name = name
        trained = [each for each in parameters if each.is_trained]
        if len({each.dtype for each in trained}) > 1:
            dtypes = ", ".join(sorted({str(each.dtype) for each in trained}))
            raise ValueError(f"FSDP2 wants one dtype for the trained parameters of a unit, and {name} has {dtypes}")
        padded = [padded_numel(each.shape, size) for each in parameters]
        self.shard_bytes = sum(n // size * each.dtype.itemsize for n, each in zip(padded, parameters, strict=True))
        """The shard at rest."""
        self.full_bytes = sum(n * each.compute_dtype.itemsize for n, each in zip(padded, parameters, strict=True))
        """The buffer of a gather, and the whole parameters."""
        self.cast_bytes = sum(
            n * each.compute_dtype.itemsize
            for n, each in zip(padded, parameters, strict=True)
            if each.compute_dtype != each.dtype
        )
        """The part of `full_bytes` that is cast before it is gathered."""
        compute_itemsize = trained[0].compute_dtype.itemsize if trained else 4
        itemsize = reduce_itemsize or compute_itemsize
        self.reduce_bytes = sum(padded_numel(each.shape, size) for each in trained) * itemsize
        """The input of the reduce-scatter."""
        self.gradient_bytes = float(sum(each.numel for each in trained) * compute_itemsize)
        """The gradients as autograd leaves them."""
        self.accumulates_cast = itemsize != compute_itemsize
        self.accumulated_bytes = self.gradient_bytes / compute_itemsize * itemsize
        self.largest_cast_bytes = float(max((each.numel for each in trained), default=0) * compute_itemsize)
        rest_itemsize = trained[0].dtype.itemsize if trained else itemsize
        self.shard_gradient_bytes = self.reduce_bytes / size / itemsize * rest_itemsize
        self.casts_sum = rest_itemsize != itemsize
        self.trained_numel = sum(-(-each.shape[0] // size) * each.numel // each.shape[0] for each in trained)
        """The trained elements of the first rank, which has the most."""
        self.trained_itemsize = rest_itemsize
        self.num_trained = len(trained)
        self.state = _State.SHARDED
        self.gather: Job | None = None
        self.is_gathering = False
        self.landing_bytes = 0.0
        """Gloo's own buffer."""
        self.fresh_bytes = 0.0
        """Gradients of this micro-batch."""
        self.grad_bytes = 0.0
        """Gradients of whole parameters, in the dtype of autograd or, once accumulated, of reductions."""
        self.has_accumulated = False
        self.sum_bytes = 0.0
        """The reduced gradients, `.grad` of the sharded parameters."""


def padded_numel(shape: Sequence[int], size: int) -> int:
    """The elements of a tensor whose dim 0 is padded to a multiple of `size`.

    Raises:
        ValueError: the tensor has no dim, so that FSDP2 refuses it.
    """
    if not shape:
        raise ValueError("FSDP2 does not shard a scalar parameter; make it a tensor of shape (1,)")
    rows = -(-shape[0] // size) * size
    for extent in shape[1:]:
        rows *= extent
    return rows


class Fsdp2(WrittenProgram):
    """FSDP2 on a machine: [Note: FSDP2's order of work]."""

    def __init__(self, machine: Machine, work: StepWork, shape: Shape, options: Fsdp2Options) -> None:
        """Shard the units of `work.trace`.

        Raises:
            ValueError: FSDP2 refuses the parameters.
        """
        self._machine, self._work, self._options = machine, work, options
        self._trace: ModelTrace = work.trace
        self._is_cpu = machine.device_type == "cpu"
        self._is_gloo = options.is_gloo
        self._shards = Ring(shape=shape, among="node" if options.sharded == "hsdp" else "all")
        self._node = Ring(shape=shape, among="node")
        self._replicas = Ring(shape=shape, among="place") if options.sharded == "hsdp" and shape.nodes > 1 else None
        reduce_dtype = work.sharding.precision.reduce_dtype
        self.groups = [
            _Group(unit.name, unit.parameters, self._shards.size, reduce_dtype.itemsize if reduce_dtype else None)
            for unit in self._trace.units
        ]
        self._is_hpz = options.sharded == "hpz" and shape.local < shape.ranks
        self._following = self._forward_order()
        self._ahead: dict[int, Job | None] = {}
        """Gathers that the device has begun before the host's bookkeeping reaches them."""
        self._deferred_bytes = 0.0
        """The buffer of the gather before, in forward."""
        self._reduction: Job | None = None
        self._reduction_bytes = 0.0
        """The input of the last reduction."""
        self._pending: list[Job | None] = []
        self._kept_sums_bytes = 0.0
        for group in self.groups:
            machine.hold("parameters", group.shard_bytes)
        self._update = self._make_update()

    def _make_update(self) -> Update:
        trained = [group for group in self.groups if group.num_trained]
        if not trained:
            raise ValueError("the model has no parameter that trains")
        itemsize = trained[0].trained_itemsize
        numel = sum(group.trained_numel for group in trained)
        cost = adamw_cost(self._work.optimizer, numel, itemsize)
        return Update(self._machine, cost, gradient_bytes=numel * itemsize)

    def _forward_order(self) -> list[int]:
        """The units in the order in which their forwards begin: the root, whose embedding comes first, and layers."""
        return list(dict.fromkeys(segment.unit for segment in self._trace.forward))

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """See `Program.step`."""
        for index in range(self._work.micro_batches):
            self._run(syncs=self._options.syncs_always or index == self._work.micro_batches - 1)
        self._update.run(self._shards.all_reduce("norm", "control", 4).sent)
        for group in self.groups:
            self._machine.hold("gradients", -group.sum_bytes)
            group.sum_bytes = 0.0

    def _run(self, *, syncs: bool) -> None:
        """One micro-batch."""
        forward, backward = self._trace.forward, self._trace.backward
        ends = {segment.unit: index for index, segment in enumerate(forward)}
        post_forward = sorted(ends, key=lambda unit: ends[unit])
        self._begin_ahead(0)
        for index, segment in enumerate(forward):
            group = self.groups[segment.unit]
            if group.state is not _State.UNSHARDED:
                self._pre_forward(segment.unit)
            self._settle()
            self._machine.compute(group.name, segment.phase)
            if ends[segment.unit] == index:
                self._post_forward(group)
        self._free_deferred()
        last = {segment.unit: index for index, segment in enumerate(backward)}
        late = self._late(backward[-1].unit if backward else 0)
        begun: set[int] = set()
        for index, segment in enumerate(backward):
            group = self.groups[segment.unit]
            if segment.unit not in begun:
                begun.add(segment.unit)
                self._pre_backward(segment.unit, post_forward)
            self._settle()
            self._compute_backward(group, segment.phase)
            if last[segment.unit] == index and segment.unit not in late:
                self._post_backward(group, syncs=syncs)
        self._finish_backward([unit for unit in self._root_first() if unit in late or unit not in last], syncs=syncs)

    def _late(self, last_unit: int) -> set[int]:
        """The units whose inputs need no gradient, so that the final callback ends them: root, perhaps a layer."""
        return {len(self.groups) - 1, last_unit}

    def _root_first(self) -> list[int]:
        return [len(self.groups) - 1, *range(len(self.groups) - 1)]

    def _settle(self) -> None:
        """Free Gloo's own buffers of transfers that have ended."""
        for group in self.groups:
            if group.landing_bytes and (group.gather is None or group.gather.end_s <= self._machine.now_s):
                self._free_landing(group)

    def _free_landing(self, group: _Group) -> None:
        self._machine.hold("transfers", -group.landing_bytes)
        group.landing_bytes = 0.0

    # -- gather --------------------------------------------------------------------------------------------------------

    def _begin_ahead(self, place: int) -> None:
        """On NCCL: begin the gathers of the first two units, which wait for nothing but the optimizer."""
        if not self._is_cpu:
            for unit in self._following[place : place + 2]:
                self._send_gather(unit)

    def _send_gather(self, unit: int) -> None:
        group = self.groups[unit]
        if unit not in self._ahead and group.state is not _State.UNSHARDED and not group.is_gathering:
            self._ahead[unit] = self._send(group)

    def _send(self, group: _Group) -> Job | None:
        ring = self._node if group.state is _State.POST_FORWARD else self._shards
        return self._machine.send(ring.gather(f"gather {group.name}", "weights", group.full_bytes))

    def _unshard(self, unit: int) -> None:
        """Begin a gather."""
        group, machine = self.groups[unit], self._machine
        if group.state is _State.UNSHARDED or group.is_gathering:
            return
        ring = self._node if group.state is _State.POST_FORWARD else self._shards
        group.is_gathering = True
        if ring.size == 1:
            return
        cast_bytes = group.cast_bytes / ring.size if group.state is _State.SHARDED else 0.0
        with machine.holding("transfers", cast_bytes):
            machine.hold("transfers", group.full_bytes)
            if self._is_cpu:
                if cast_bytes:
                    machine.touch(f"cast {group.name}", 3 * cast_bytes)
                machine.touch(f"copy in {group.name}", 2 * group.full_bytes / ring.size)
        group.gather = self._ahead.pop(unit) if unit in self._ahead else self._send(group)
        if self._is_cpu:
            group.landing_bytes = group.full_bytes
            machine.hold("transfers", group.landing_bytes)
        if self._is_gloo:
            machine.wait(group.gather, f"gather {group.name}")
            self._free_landing(group)

    def _wait_for_unshard(self, unit: int, *, is_forward: bool) -> None:
        """Wait for a gather, and copy out."""
        group, machine = self.groups[unit], self._machine
        if not group.is_gathering:
            return
        group.is_gathering = False
        if is_forward:
            self._free_deferred()
        machine.wait(group.gather, f"gather {group.name}")
        self._free_landing(group)
        is_from_node = group.state is _State.POST_FORWARD
        ring = self._node if is_from_node else self._shards
        machine.hold("parameters", group.full_bytes)
        machine.touch(f"copy out {group.name}", 2 * group.full_bytes)
        if is_from_node:
            machine.hold("cache", -group.full_bytes / self._node.size)
        if ring.size > 1:
            if is_forward and (not self._is_cpu or self._is_gloo):
                self._deferred_bytes = group.full_bytes
            else:
                machine.hold("transfers", -group.full_bytes)
        group.gather, group.state = None, _State.UNSHARDED

    def _drop_gather(self, group: _Group) -> None:
        """Wait for a gather that ran ahead of a backward that never came: all before it is frozen."""
        if group.is_gathering:
            self._machine.wait(group.gather, f"gather {group.name}")
            self._free_landing(group)
            ring = self._node if group.state is _State.POST_FORWARD else self._shards
            self._machine.hold("transfers", -group.full_bytes if ring.size > 1 else 0.0)
            group.gather, group.is_gathering = None, False

    def _free_deferred(self) -> None:
        self._machine.hold("transfers", -self._deferred_bytes)
        self._deferred_bytes = 0.0

    def _pre_forward(self, unit: int) -> None:
        self._unshard(unit)
        self._wait_for_unshard(unit, is_forward=True)
        place = self._following.index(unit)
        if not self._is_cpu:
            for ahead in self._following[place + 1 : place + 3]:
                self._send_gather(ahead)
        elif not self._is_gloo:
            for ahead in self._following[place + 1 : place + 2]:
                self._unshard(ahead)

    def _post_forward(self, group: _Group) -> None:
        if self._is_hpz:
            kept_bytes = group.full_bytes / self._node.size
            self._machine.touch(f"keep {group.name}", 2 * kept_bytes)
            self._machine.hold("cache", kept_bytes)
            self._machine.hold("parameters", -group.full_bytes)
            group.state = _State.POST_FORWARD
        elif self._options.reshards:
            self._reshard(group)

    def _reshard(self, group: _Group) -> None:
        if group.state is _State.UNSHARDED:
            self._machine.hold("parameters", -group.full_bytes)
        elif group.state is _State.POST_FORWARD:
            self._machine.hold("cache", -group.full_bytes / self._node.size)
        group.state = _State.SHARDED

    def _pre_backward(self, unit: int, post_forward: Sequence[int]) -> None:
        self._unshard(unit)
        self._wait_for_unshard(unit, is_forward=False)
        place = post_forward.index(unit)
        if place:
            self._unshard(post_forward[place - 1])

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _compute_backward(self, group: _Group, phase: Phase) -> None:
        """Run a phase of backward. Gradients stay beside activations, unless they are added to older ones."""
        if group.grad_bytes and not group.has_accumulated:
            self._machine.compute(group.name, phase)
            return
        self._machine.compute(group.name, replace(phase, peak_bytes=phase.peak_with_gradients_bytes))
        self._machine.hold("gradients", phase.gradient_bytes)
        group.fresh_bytes += phase.gradient_bytes

    def _post_backward(self, group: _Group, *, syncs: bool) -> None:
        """Free the whole parameters, and reduce the gradients."""
        machine = self._machine
        if group.has_accumulated and group.fresh_bytes:
            machine.touch(f"add {group.name}", 2 * group.grad_bytes + group.fresh_bytes)
            machine.hold("gradients", -group.fresh_bytes)
        else:
            group.grad_bytes += group.fresh_bytes
        group.fresh_bytes = 0.0
        self._reshard(group)
        if not syncs:
            self._keep(group)
        elif group.grad_bytes:
            self._reduce(group)

    def _keep(self, group: _Group) -> None:
        """Keep whole gradients until the step's last micro-batch, in the dtype of reductions."""
        if group.accumulates_cast and group.grad_bytes and not group.has_accumulated:
            machine = self._machine
            with machine.holding("gradients", group.largest_cast_bytes):  # a parameter has both forms for a moment
                machine.touch(f"cast {group.name}", group.grad_bytes + group.accumulated_bytes)
            machine.hold("gradients", group.accumulated_bytes - group.grad_bytes)
            group.grad_bytes = group.accumulated_bytes
            group.has_accumulated = True

    def _reduce(self, group: _Group) -> None:
        machine, size = self._machine, self._shards.size
        self._end_last_reduction()
        machine.hold("transfers", group.reduce_bytes)
        machine.touch(f"copy in {group.name}", group.grad_bytes + group.reduce_bytes)
        machine.hold("gradients", -group.grad_bytes)
        group.grad_bytes, group.has_accumulated = 0.0, False
        sum_bytes = group.reduce_bytes / size
        machine.hold("gradients", sum_bytes)
        self._reduction_bytes = group.reduce_bytes
        job = self._reduce_scatter(group)
        if self._replicas:
            job = machine.send(self._replicas.all_reduce(f"reduce {group.name}", "gradients", sum_bytes), job) or job
        if self._is_cpu:
            machine.wait(job, f"reduce {group.name}")
            machine.touch(f"divide {group.name}", 2 * sum_bytes)
        self._pending.append(job)
        if group.casts_sum:
            machine.hold("gradients", group.shard_gradient_bytes)
            if self._replicas:
                self._kept_sums_bytes += sum_bytes  # FSDP2 keeps an all-reduce's own buffer to the end of backward
            else:
                machine.hold("gradients", -sum_bytes)
        if group.sum_bytes:  # an earlier micro-batch's sum is there: this one is added to it
            machine.touch(f"add {group.name}", 3 * group.shard_gradient_bytes)
            machine.hold("gradients", -group.shard_gradient_bytes)
        group.sum_bytes = group.shard_gradient_bytes

    def _reduce_scatter(self, group: _Group) -> Job | None:
        """Reduce over the ranks that share the shards."""
        machine, ring = self._machine, self._shards
        name, nbytes = f"reduce {group.name}" + (" inside" if self._replicas else ""), group.reduce_bytes
        if ring.size == 1:
            machine.touch(f"copy {group.name}", 2 * nbytes)
            return None
        if self._is_gloo:
            with machine.holding("transfers", nbytes):
                machine.touch(f"copy {group.name}", 2 * nbytes)
                machine.wait(machine.send(ring.all_reduce(name, "gradients", nbytes)), name)
                machine.touch(f"sum {group.name}", 3 * nbytes * (ring.size - 1) / ring.size)
            return None
        job = machine.send(ring.reduce_scatter(name, "gradients", nbytes))
        if self._is_cpu:
            machine.wait(job, name)
            machine.touch(f"sum {group.name}", 3 * nbytes * (ring.size - 1) / ring.size)
        self._reduction = job
        return job

    def _end_last_reduction(self) -> None:
        """Wait for the last reduction, and free its input."""
        self._machine.wait(self._reduction, "reduce")
        self._machine.hold("transfers", -self._reduction_bytes)
        self._reduction, self._reduction_bytes = None, 0.0

    def _finish_backward(self, units: Sequence[int], *, syncs: bool) -> None:
        """The root's final callback: end the backward of `units`, and wait for every reduction."""
        for unit in units:
            self._post_backward(self.groups[unit], syncs=syncs)
        for group in self.groups:
            self._drop_gather(group)
        for job in self._pending:
            self._machine.wait(job, "reduce")
        self._pending.clear()
        self._end_last_reduction()
        self._machine.hold("gradients", -self._kept_sums_bytes)
        self._kept_sums_bytes = 0.0
