"""A sharded module's life: gathered for its forward and its backward, by hooks on the module.

[Note: Phases]
A unit rests, or is in its forward, or in its backward: `UnitPhase`. Its gathered weights have a state of their own,
`GatherState`. A forward that backward recomputes leaves the unit in its backward. A root has a `Backward` besides, from
the first gradient anywhere below it to autograd's last callback.

[Note: When a unit is done with backward]
A unit may free its weights and reduce its gradients when every operation of its forward has run backward. That is when
gradients arrive at its inputs: autograd runs the youngest ready node first, so the identity that the unit puts on its
inputs at the start of forward comes after all nodes of that forward. This moment depends on the graph alone, not on
which parameters got gradients, so all ranks issue the reductions in one order. A unit whose inputs need no gradient has
no such moment. A callback at the end of backward finishes it, and all others left, in reverse order of the module tree.

If the unit runs forward several times before one backward, each forward's backward begins at its outputs and ends at
its inputs: autograd runs all nodes of a later forward first. So at most one forward's gradients wait for reduction at a
time, as in FSDP2. `set_reduce_once_per_backward` sums them in the bucket instead.

With `create_graph=True` the graph of the gradients needs the weights as well, so they stay gathered until the next
backward without it.

A frozen unit whose weights stay whole, such as the base under a LoRA, has nothing to do in backward: it awaits nothing,
and its forward costs two hooks less on each tensor. The root, which always awaits, shows the sharded parameters.

[Note: Pipelines]
A stage of torch's pipelines runs the forward and the backward of each micro-batch without a sync, several forwards
before a backward. A schedule that splits backward asks autograd for the gradients of inputs first and for those of
weights later, and adds these to `.grad` of the gathered parameters, in their dtype. At the end of the step the stage
asks for the reductions: there is no backward then, and the root sums what waits, and what it finds in those `.grad`s.
A split backward looks for the parameters that the forward has used, so these must stay gathered from the forward on.
The stage of `laconic.pipeline` gathers before a split backward, and asks after each: without a sync that adds what is
in those `.grad`s to what waits.

[Note: Several modules in one unit]
The modules of `fully_shard([a, b])` are gathered and freed together. One pass begins when the first of them is called,
and ends when each has returned, when one is called again, or with the root's forward. The inputs of the module that
begins a pass end its backward.

[Note: Recomputed forwards]
Activation checkpointing runs a unit's forward again inside backward. The non-reentrant kind does so after gradients
have reached the unit's outputs: the weights are gathered already, and the recomputed graph is thrown away, so it gets
no hooks. The reentrant kind runs the first forward without a graph. Then the unit has no hooks yet, and treats the
recomputed forward as the real one. Either way the weights stay until the backward that follows has used them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.comm.journal import UnitProgress
from laconic.layout.granularity import Blocks, check_matched
from laconic.ragged.tensor import admit_edits
from laconic.shard import extension
from laconic.shard.bucket import Bucket
from laconic.shard.buffers import Buffers, Owner
from laconic.shard.cache import NodeShard, Slab, choose_device_shards
from laconic.shard.choosing import Chooser, PlacingRoot
from laconic.shard.crossing import Copies
from laconic.shard.gather import AT_REST, HostReads, UnitGather
from laconic.shard.grad import WaitingGradient
from laconic.shard.hooks import AwaitedHooks, SavedWeights, map_tensors
from laconic.shard.itinerary import Order
from laconic.shard.lanes import Lanes
from laconic.shard.ledger import Held, Ledger
from laconic.shard.placement import UnitUse
from laconic.shard.policies import Cache, Checks, Placement, Prefetch, ShardPolicy
from laconic.shard.reduce import BucketGradients, Reduction, ReductionQueue


class UnitPhase(Enum):
    """What a unit is doing: [Note: Phases]."""

    REST = auto()
    FORWARD = auto()
    """From the call of its first module until all have returned: [Note: Several modules in one unit]."""
    BACKWARD = auto()
    """From the first gradient at its outputs until it is done: [Note: When a unit is done with backward]."""
    PAUSE = auto()
    """Between the backwards of two of its forwards, whose gradients are reduced together."""


_IN_BACKWARD = (UnitPhase.BACKWARD, UnitPhase.PAUSE)
_LEFT_ALONE = "_laconic_left_alone"
"""The attribute of parameters that a call of `fully_shard` was told to leave alone."""


def is_left_alone(parameter: Tensor) -> bool:
    """True if some call of `fully_shard` was told to leave a parameter alone."""
    return hasattr(parameter, _LEFT_ALONE)


class Origin:
    """The parameters that one call of `fully_shard` was told to leave alone."""

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        self._ignored = [ref(parameter) for parameter in ignored]
        for parameter in ignored:
            setattr(parameter, _LEFT_ALONE, True)

    def ignored(self) -> list[int]:
        """The identities of the parameters that the call was told to leave alone."""
        return [id(parameter) for reference in self._ignored if (parameter := reference()) is not None]


@dataclass(eq=False, repr=False, kw_only=True)
class Unit:
    """The engine's side of one sharded module. What it shares with the units of its tree is in their `Root`."""

    modules: Sequence[nn.Module]
    """One module, or several that are gathered together: [Note: Several modules in one unit]."""
    buckets: list[Bucket]
    blocks: Blocks
    cluster: Cluster
    cache: Cache
    precision: MixedPrecisionPolicy
    origin: Origin
    reshard_after_forward: bool | None
    checks: Checks | None
    prefetch: Prefetch
    broadcast_buffers: bool
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    reduce_once_per_backward: bool = False
    fills_unused: bool = False
    """True if trained parameters that no rank has used get gradients of zeros: `set_reduce_scatter_unused_params`."""
    forward_prefetch: list[Unit] | None = None
    backward_prefetch: list[Unit] | None = None

    def __post_init__(self) -> None:
        self.progress = UnitProgress(", ".join(type(module).__name__ for module in self.modules))
        self.gradients: list[BucketGradients] = []
        keeps_copies = any(bucket.wire.sends_differences for bucket in self.buckets)
        self.placement = self.cache.placement(keeps_copies=keeps_copies)
        """Where the weights and the sums of gradients rest now."""
        self.begin_counting()
        self.phase = UnitPhase.REST
        """What the unit is doing: [Note: Phases]."""
        self.is_root = False
        """True for the outermost unit, once it leads."""
        self._lanes: Lanes | None = None
        self._entered: set[nn.Module] = set()  # the modules called in the present pass
        self._was_recomputed = False
        self.has_ended = False
        """True once a forward's backward has ended, in the present backward."""
        self._awaits_backward = True
        """False if backward has nothing to do for the present forward: [Note: When a unit is done with backward]."""
        self.keeps_for_a_step = False
        """True if node shards stay until a backward or a step ends: the root knows."""
        self.awaited = AwaitedHooks(self._reach_outputs, self._reach_inputs)
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
            module.register_state_dict_pre_hook(lambda *_: self._prepare_state_dict())
            module.register_load_state_dict_pre_hook(lambda *_: self.reshard())
            module.register_load_state_dict_post_hook(lambda *_: extension.observer_class().loaded(self.buckets))
        self._saved = SavedWeights(self.modules, self._reach_weights)

    @property
    def name(self) -> str:
        """The names of the modules in the root; before the root leads, their classes."""
        return self.progress.name

    def _become(self, phase: UnitPhase) -> None:
        """Leave the forward, if one runs, for another phase."""
        self.phase = phase
        self._entered.clear()

    # -- the root ------------------------------------------------------------------------------------------------------

    def join(self, root: Root) -> None:
        """Run under `root` from now on.

        Raises:
            RuntimeError: the unit has run before, outside this root.
        """
        if self.has_root:
            if self.root.order.has_run:
                raise RuntimeError(
                    f"{self.name} ran before {root.top.name or 'the root module'}, which contains it; run the "
                    "outermost sharded module first, and call fully_shard on all modules before the first forward"
                )
            self.reshard()
            for bucket in self.buckets:
                bucket.close_account()
        self.root, self.is_root = root, root.top is self
        for bucket in self.buckets:
            bucket.keep()
            bucket.open_account(root.ledger)
        # A unit may have another mesh than its root: [Note: Two parallelisms, two meshes] in ragged/dtensor.py.
        self.gather = UnitGather(self.buckets, root.lanes, root.copies_of, root.observer, self.prefetch)
        self.gradients = [
            BucketGradients(bucket, root.lanes, self._begin_gradients, root.observer) for bucket in self.buckets
        ]

    def leave(self) -> None:
        """Run under no root: a mistake was found before the first forward, and the next one makes another root."""
        for bucket in self.buckets:
            bucket.close_account()
        del self.root, self.gather
        self.is_root, self.gradients = False, []

    # names of FSDP2's state: torch's share_comm_ctx reads and sets two; at the end of a step a stage of its pipelines
    # looks for the groups of all states, of which there are none here, and calls back: [Note: Pipelines]

    _fsdp_param_groups = all_states = ()

    @property
    def _state_ctx(self) -> Unit:
        return self

    def _root_post_backward_final_callback(self) -> None:
        self.root.reduce_waiting()

    @property
    def _comm_ctx(self) -> Lanes:
        """The lanes that this unit uses if it is the outermost one."""
        if self._lanes is None:
            self._lanes = Lanes(self.cluster.device)
        return self._lanes

    @_comm_ctx.setter
    def _comm_ctx(self, lanes: Lanes) -> None:
        if self.has_root and lanes is not self.root.lanes:
            raise RuntimeError("call share_comm_ctx before the first forward of its modules")
        self._lanes = lanes

    @property
    def has_root(self) -> bool:
        """True once the unit runs under a root."""
        return "root" in vars(self)

    @cached_property
    def root(self) -> Root:
        """The root of this unit. A unit without one leads its own units from now on; see `Root`."""
        return Root(self)

    @cached_property
    def gather(self) -> UnitGather:
        """The gather of the unit's buckets, which its root makes."""
        Root(self)
        gather: UnitGather = vars(self)["gather"]
        return gather

    @property
    def ledger(self) -> Ledger | None:
        """The ledger of the root; None before anything has run."""
        return self.root.ledger if self.has_root else None

    # -- gathered or not -----------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the parameters and show them in the module."""
        self.gather.show()

    def reshard(self) -> None:
        """Show the sharded parameters in the module and free the gathered ones."""
        if self.has_root:
            self.gather.release()

    def check_placement(self, placement: Placement) -> None:
        """Refuse a placement that the unit cannot have.

        Raises:
            ValueError: weights that cross as differences would rest nowhere.
        """
        policy = Cache(where=placement.weights)
        for bucket in self.buckets:
            ShardPolicy(cache=policy, wire=bucket.wire)

    @property
    def is_around(self) -> bool:
        """True if other units run while its weights are gathered."""
        return any(unit is not self for module in self.modules for unit in units_below(module))

    def begin_counting(self) -> None:
        """Count uses of the unit from now on."""
        self._num_gathers = self._num_early_sums = 0

    def use(self) -> UnitUse:
        """The use of the unit since `begin_counting`."""
        return UnitUse(
            buckets=self.gather.uses(),
            num_gathers=self._num_gathers,
            num_early_sums=self._num_early_sums,
            keeps_copies=any(bucket.wire.sends_differences for bucket in self.buckets),
            is_around=self.is_around,
        )

    def delay_edits(self) -> None:
        """Let the next edit of weights in host memory wait until they have been read."""
        if self.has_root:
            self.root.host_reads.delay_edits()

    def settle_copies(self) -> None:
        """Let nodes have the optimizer's own weights from the next gather on, and forget what gradients have lost.

        See [Note: Exact crossings] in shard/crossing.py.
        """
        if self.has_root:
            self.gather.settle_copies()
        for gradients in self.gradients:
            gradients.forget_lost()

    def _prepare_state_dict(self) -> None:
        """Show the sharded parameters. A run that resumes from them begins with exact weights, so this one does too."""
        self.reshard()
        self.settle_copies()

    def apply(self, function: Callable[[Tensor], Tensor], super_apply: Callable[[], None]) -> None:
        """Run `nn.Module._apply`, but convert the shard, of which the parameters are views.

        Raises:
            ValueError: `function` changes the dtype of gradients whose sums wait elsewhere, or see `StoredWeights`.
        """
        for bucket in self.buckets:
            changes = function(bucket.shard.new_empty(0)).dtype != bucket.dtype
            if changes and any(isinstance(parameter.grad, WaitingGradient) for parameter in bucket.sharded):
                raise ValueError(
                    f"cannot change the dtype of {self.name}, as sums of its gradients wait for a step that syncs: "
                    "call .to(dtype) after the optimizer's step and zero_grad()"
                )
        self.reshard()
        admit_edits()
        for bucket in self.buckets:
            bucket.places.show([None] * len(bucket.sharded))
        try:
            super_apply()
        finally:
            for bucket in self.buckets:
                bucket.places.show(bucket.sharded)
        for bucket in self.buckets:
            bucket.convert(function)

    # -- forward -------------------------------------------------------------------------------------------------------

    @_compat.outside_compilation
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.precision.cast_forward_inputs and self.precision.param_dtype is not None:
            args, kwargs = _cast((args, kwargs), self.precision.param_dtype)
        if _compat.in_backward() and self._is_recomputed:
            self._was_recomputed = True
            self.unshard()
            return args, kwargs
        begins_pass = not self._entered or module in self._entered
        _compat.outside_transforms(self._enter_forward, module, begins_pass)
        if torch.is_grad_enabled():
            if begins_pass and self._awaits_backward:
                args, kwargs = self.awaited.watch_inputs(args, kwargs)
            if self._saved.looks and not _compat.in_backward():
                self._saved.enter(module, lambda: [each for bucket in self.buckets for each in bucket.full.parameters])
        return args, kwargs

    def _enter_forward(self, module: nn.Module, begins_pass: bool) -> None:
        if begins_pass:
            self._begin_pass()
        self.phase = UnitPhase.FORWARD
        self._entered.add(module)
        if not begins_pass:
            self.gather.show()
            return
        self.gather.show_begun()
        stays = self.gather.stays and self.gather.stays_whole
        self._awaits_backward = self.is_root or not stays or self.root.observer.inspects
        for bucket in self.buckets:  # at each forward, so without calls
            self._awaits_backward |= True in bucket.full.trained

    def _begin_pass(self) -> None:
        """Begin the forward of the unit: [Note: Several modules in one unit]."""
        self.progress.note("in forward")
        root = self.root
        if self.is_root:
            self._refuse_several_roots()
            root.begin_forward()
        self._entered.clear()
        self._num_gathers += torch.is_grad_enabled() and root.probe is None
        for bucket in self.buckets:
            if bucket.stored.is_dropped and not bucket.stored.is_frozen:
                bucket.stored.restore()
        self.gather.stays = self._stays_for_backward
        ahead = self.forward_prefetch
        root.order.enter_forward(self.gather, None if ahead is None else [unit.gather for unit in ahead])

    def _refuse_several_roots(self) -> None:
        if len(self.modules) > 1:
            raise RuntimeError(
                f"the root of sharded modules must be one module, got {self.name} in one call of fully_shard; call "
                "fully_shard on the module that contains them as well, and run that one"
            )

    @_compat.outside_compilation
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._saved.looks:
            self._saved.leave(module)
        if self.precision.output_dtype is not None:
            output = _cast(output, self.precision.output_dtype)
        if _compat.in_backward() and self._is_recomputed:
            return output
        if self._awaits_backward and torch.is_grad_enabled():
            output = self.awaited.watch_outputs(output, name=self.progress.name, trains=self._trains)
        if len(self._entered) == len(self.modules):
            self.end_pass()
        if self.is_root:
            self.root.end_forward()
        return output

    def _trains(self) -> bool:
        return any(not bucket.stored.is_frozen for bucket in self.buckets)

    def end_pass(self) -> None:
        """Free the weights after the forward of the unit, unless they stay for backward."""
        self._become(UnitPhase.REST)
        if not _compat.in_backward() and not (self.gather.stays and torch.is_grad_enabled()):
            self.gather.release()
        returns = self.unshard_in_backward and len(self.awaited.outputs) > 0
        self.root.order.leave_forward(self.gather, returns=returns)
        self.progress.note("after forward")

    @property
    def _stays_for_backward(self) -> bool:
        is_default = self.reshard_after_forward is None and (self.is_root or self.placement.weights == "rank")
        return self.reshard_after_forward is False or is_default

    @property
    def _is_recomputed(self) -> bool:
        """True of a forward inside of backward whose graph will be thrown away: [Note: Recomputed forwards]."""
        return self.phase is UnitPhase.BACKWARD or len(self.awaited.outputs) > 0

    # -- backward ------------------------------------------------------------------------------------------------------

    def _reach_outputs(self) -> None:
        """Gather the weights: backward reaches the outputs of one of this unit's forwards."""
        _compat.outside_transforms(self._enter_backward, self.unshard_in_backward)

    def _reach_weights(self) -> bool:
        """Gather the weights if the unit rests: backward reaches one of its forwards past the outputs."""
        if self.gather.is_complete:
            return False
        self._enter_backward(True)
        self.unshard()  # also if the unit is in its backward already
        return True

    def _enter_backward(self, gathers: bool) -> None:
        backward = self.root.backward or self.root.begin_backward()
        if self.phase is UnitPhase.BACKWARD:
            return
        self._become(UnitPhase.BACKWARD)
        self.progress.note("in backward")
        if gathers:
            self._num_gathers += not self.gather.stays and self.root.probe is None
            ahead = self.backward_prefetch
            self.root.order.enter_backward(self.gather, None if ahead is None else [unit.gather for unit in ahead])
            self.gather.show_begun()
        if not backward.adds_to_grad:
            backward.adds_to_grad = any(each.adds_to_grad() for each in self.gradients)

    def _reach_inputs(self) -> None:
        """End the backward of one of this unit's forwards: [Note: When a unit is done with backward]."""
        if not self.reduce_once_per_backward or not self.awaited.inputs:
            self._end_backward()
        elif self.awaited.outputs:
            self._become(UnitPhase.PAUSE if self.phase in _IN_BACKWARD else UnitPhase.REST)

    @property
    def _frees_after_backward(self) -> bool:
        """True if the weights may go: a graph of gradients still needs them."""
        return self.reshard_after_backward and not self.root.creates_graph

    def _begin_gradients(self) -> bool:
        """Make ready for the first gradient of a bucket, which is about to take memory.

        Returns whether it may be that of the gradients that wait whole: not if a probe gets those of this backward.
        """
        if self.root.backward is None:
            self.root.begin_backward()
        if self._was_recomputed:  # the last sums have run beside that, so to wait for them takes no time
            self.root.reductions.free_buckets()
        return self.root.probe is None

    def _end_backward(self) -> None:
        """Free the weights and begin to reduce the gradients."""
        self._was_recomputed, self.has_ended = False, True
        if self._frees_after_backward:
            self.gather.release()
        backward = self.root.backward
        reduces = (self.phase in _IN_BACKWARD or self.fills_unused) and backward is not None and backward.adds_to_grad
        self._become(UnitPhase.REST)
        self._num_early_sums += self.root.probe is None and not self.requires_gradient_sync
        # All trained buckets, with or without gradients here: [Note: Gradients that do not come].
        for gradients in self.gradients:
            if gradients.full is not None or (reduces and not gradients.bucket.stored.is_frozen):
                if self.fills_unused and self.root.probe is None:
                    gradients.fill_unused()
                if self.root.probe is not None:
                    gradients.show_unreduced(self.root.probe)
                elif self.placement.gradients == "rank" and not self.requires_gradient_sync:
                    gradients.keep_whole()  # [Note: Gradients that wait whole]
                else:
                    self._reduce(gradients, gradients.take_full())
        self.progress.note("after backward")

    def _reduce(self, gradients: BucketGradients, full: Held | None) -> None:
        across_nodes = self.requires_gradient_sync
        if full is not None or across_nodes:
            self.root.observer.reducing(self, across_nodes=across_nodes)
        across_islands = self._crosses_islands(gradients)
        reduction = Reduction(gradients, full, across_nodes=across_nodes, across_islands=across_islands)
        self.root.reductions.add(reduction)

    def _crosses_islands(self, gradients: BucketGradients) -> bool:
        """True if sums go over replicas now. Those of a small bucket are all the sums it has."""
        return self.requires_all_reduce or gradients.bucket.cluster.cut is not None

    @property
    def has_left(self) -> bool:
        """True if something is left to do at the end of a backward: most units are done then."""
        if self.phase is not UnitPhase.REST or self.awaited.inputs or self.fills_unused:
            return True
        for gradients in self.gradients:
            if gradients.full is not None or gradients.waiting:
                return True
        return self.keeps_for_a_step

    def finish_backward(self) -> None:
        """Reduce the gradients that are left and, in a micro-batch that syncs, partial sums of earlier ones."""
        is_left_out = self.fills_unused and not self.has_ended
        if is_left_out or self.phase in _IN_BACKWARD or any(gradients.full is not None for gradients in self.gradients):
            self._end_backward()
        self.awaited.inputs.clear()  # of a retained graph; its next backward begins at the outputs
        syncs = self.requires_gradient_sync and self.root.probe is None
        for gradients in self.gradients if syncs else ():
            self.root.reductions.settle(gradients)
            has_partial_sums = gradients.has_partial_sums(across_islands=self._crosses_islands(gradients))
            if has_partial_sums and not self.root.reductions.is_crossing_nodes(gradients):
                self._reduce(gradients, gradients.take_full() if gradients.waits_whole else None)
        if self._frees_after_backward:
            self.free_node_shards(ends_step=syncs)

    def free_node_shards(self, *, ends_step: bool) -> None:
        """Free the node shards whose time is over, and those that the optimizer is about to make stale."""
        for bucket in self.buckets:
            kept, is_base = bucket.node_shard, bucket.wire.sends_differences  # of the next difference
            is_over = kept.until == "backward"
            if kept.is_kept and (is_over or (ends_step and not is_base and not bucket.stored.is_frozen)):
                self.reshard()  # a gather that has begun may still write into it
                kept.free()
            if is_over:
                kept.version = None  # what rests on the host, too

    def leave_backward(self) -> None:
        """Free the weights at the end of a backward of the root."""
        if self._frees_after_backward:
            self.gather.release()

    def abandon(self) -> None:
        """Drop the gradients of a forward or backward that raised, and free the weights."""
        self._become(UnitPhase.REST)
        self._was_recomputed = self.has_ended = False
        self.awaited.clear()
        for gradients in self.gradients:
            gradients.discard()
        self.reshard()
        if self.has_root:
            self.gather.forget_copies()
        self.settle_copies()


class Root(PlacingRoot):
    """The outermost unit and all below it: what they share, and where their forwards and backwards begin and end."""

    def __init__(self, top: Unit) -> None:
        """Lead all units below `top`, also those that were unsharded by hand before. Collective over the mesh.

        Raises:
            RuntimeError: a unit below has run before, outside its root.
            ValueError: a granularity pattern matches no parameter of any unit.
            Exception: the observer has found a mistake.
        """
        self.top, self.cluster = top, top.cluster
        self.units = list(dict.fromkeys(unit for module in top.modules for unit in units_below(module)))
        """Outermost first."""
        check_matched(unit.blocks for unit in self.units)
        self.lanes, self.ledger = top._comm_ctx, Ledger()
        self.order = Order()
        self.reductions = ReductionQueue()
        self.observer = extension.observer_class()(self)
        self.backward: Backward | None = None
        """The backward that runs below this root."""
        self.creates_graph = False
        """True if the last backward ran with `create_graph=True`, so that another one may need the same weights."""
        self.is_last_backward = True
        """False if the next backward need not wait for its last reduction."""
        self.post_optim_event: Any = None
        """An event for which the next forward waits before it gathers."""
        self.probe: Callable[[Bucket, Tensor], None] | None = None
        """Takes the gradients of each bucket, (L * N * C,), in place of their reduction: see guard/audit.py."""
        self._copies: dict[Cluster, Copies] = {}
        names = {child: name for module in top.modules for name, child in module.named_modules()}
        for unit in self.units:
            own_names = ", ".join(filter(None, (names.get(child) for child in unit.modules))) or unit.name
            for bucket in unit.buckets:
                bucket.unit_name, bucket.full.is_around = own_names, unit.is_around
            unit.join(self)
            unit.progress.name = own_names
        is_offloaded = any(bucket.stored.is_offloaded for bucket in self.buckets)
        self.host_reads = HostReads(self.lanes.gather_node, is_offloaded=is_offloaded)
        is_pinned = all(unit.cache.pin_memory for unit in self.units)
        self._slab = Slab(self.cluster, self.ledger, is_pinned=is_pinned)
        try:
            self.observer.leading()
        except BaseException:
            for unit in self.units:
                unit.leave()
            raise
        with torch.inference_mode(False):  # training could not fill a slab of inference tensors
            self._place_caches()
        self._to_place = [unit for unit in self.units if unit.cache.where == "auto"]
        self.chooser = Chooser(self, [unit.cache for unit in self._to_place]) if self._to_place else None
        """Chooses where units rest, once; None if their caches say."""
        owners = [Owner(unit.modules, unit.cluster, unit.broadcast_buffers) for unit in self.units]
        self._buffers = Buffers(owners, self._diverges)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of all units."""
        return [bucket for unit in self.units for bucket in unit.buckets]

    @property
    def gradients(self) -> list[BucketGradients]:
        """The gradients of all units."""
        return [gradients for unit in self.units for gradients in unit.gradients]

    def copies_of(self, cluster: Cluster) -> Copies:
        """The copies of the weights that the nodes of `cluster` have: [Note: Exact crossings] in crossing.py."""
        return self._copies.setdefault(cluster, Copies(cluster, self.observer))

    def _diverges(self, cluster: Cluster) -> bool:
        return any(bucket.replicas_diverge for bucket in self.buckets if bucket.cluster is cluster)

    def set_placements(self, placements: Mapping[str, Placement]) -> None:
        """See `ShardedModule.set_placements`."""
        units = {unit.name: unit for unit in self.units}
        for name, placement in placements.items():
            if name not in units:
                raise ValueError(f"{name!r} is no unit of this root; its units are {', '.join(map(repr, units))}")
            units[name].check_placement(placement)
        if self.chooser is not None:
            self.chooser.settle()
        self.place({units[name]: placement for name, placement in placements.items()})

    def place(self, placements: Mapping[Unit, Placement]) -> None:
        """Let units rest elsewhere from now on. No forward or backward runs."""
        with torch.inference_mode(False):  # training could not fill a slab of inference tensors
            for unit in self.units:
                unit.gather.rest_nowhere()
            self._slab.free()
            for unit, placement in placements.items():
                unit.placement = placement
            self._place_caches()

    @property
    def version(self) -> int:
        """A number that every change of weights increases."""
        return sum(bucket.stored.version for bucket in self.buckets)

    def watch_passing(self) -> None:
        """See `PlacingRoot.watch_passing`."""
        self.ledger.watch_passing(partial(_full_bytes, ref(self)))

    def uses_to_place(self) -> list[UnitUse]:
        """See `PlacingRoot.uses_to_place`."""
        return [unit.use() for unit in self._to_place]

    def place_chosen(self, placements: Sequence[Placement]) -> None:
        """See `PlacingRoot.place_chosen`."""
        self.place(dict(zip(self._to_place, placements, strict=True)))

    def allocate_chosen(self) -> int:
        """See `PlacingRoot.allocate_chosen`."""
        shards = [bucket.node_shard for unit in self._to_place for bucket in unit.buckets]
        return sum(shard.allocate() for shard in shards)

    def _place_caches(self) -> None:
        """Let weights stay where the units' placements say; those of one node as node shards do not."""
        hosted: list[list[NodeShard]] = []
        for unit in self.units:
            if unit.placement.weights != "none":
                for bucket in unit.buckets:
                    bucket.find_hooks()
            if unit.placement.weights == "rank":
                for bucket in unit.buckets:
                    bucket.node_shard.stay_whole()
            elif unit.placement.weights != "none":
                kept = [bucket.node_shard for bucket in unit.buckets if bucket.cluster.num_nodes > 1]
                for each in kept:
                    each.until = unit.cache.until
                    each.stay_on_device()
                if unit.placement.weights == "host":
                    hosted.append(kept)
        budget_bytes = max((unit.cache.device_budget_bytes for unit in self.units), default=0)
        on_device = choose_device_shards([sum(shard.most_bytes for shard in each) for each in hosted], budget_bytes)
        self._slab.fill([shard for index, each in enumerate(hosted) if index not in on_device for shard in each])
        self.order.choose_anew()
        for unit in self.units:
            kept = [bucket.node_shard for bucket in unit.buckets]
            unit.keeps_for_a_step = any(each.where == "device" or each.until == "backward" for each in kept)
            unit.gather.settle_place()

    def begin_forward(self) -> None:
        """Begin a forward. A forward that backward recomputes belongs to the present step."""
        if self.backward is not None and not _compat.in_backward():
            self.abandon_iteration()
        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None
        if self.chooser is not None and torch.is_grad_enabled() and not _compat.in_backward():
            self.chooser.begin_forward()
        self.observer.begin_forward()
        keeps = any([unit.awaited.outputs for unit in self.units])  # noqa: C419  a generator takes a call for each
        self.order.begin_forward(keeps=keeps)
        self._buffers.begin_forward(syncs=self.top.requires_gradient_sync, compare=self.observer.sharing)

    def end_forward(self) -> None:
        """End a forward, and the step if no backward follows."""
        for unit in self.units:
            if unit.phase is UnitPhase.FORWARD:  # some of its modules did not run
                unit.end_pass()
        self.order.end_forward()
        for unit in self.units:
            if unit.gather.stays:
                unit.gather.store()
        self._buffers.end_forward()
        self.host_reads.delay_edits()
        if not torch.is_grad_enabled() and not _compat.in_backward():  # no backward will free what was gathered
            for unit in self.units:
                unit.reshard()
                unit.free_node_shards(ends_step=False)
            self.observer.all_issued()
            self.observer.settled(ends_step=True, is_last=True)

    def begin_backward(self) -> Backward:
        """Begin a backward at its first gradient: of an output or, if none gets one, of a parameter."""
        if self.backward is None:
            self.creates_graph = torch.is_grad_enabled()
            self.backward = Backward(adds_to_grad=any(each.adds_to_grad() for each in self.gradients))
            for unit in self.units:
                unit.has_ended = False
                for gradients in unit.gradients:
                    if gradients.shown.shown:
                        self.reductions.drop(gradients, gradients.take_waiting())
            _compat.after_this_backward(self._finish_backward)
        return self.backward

    def _finish_backward(self) -> None:
        """Finish the backward of all units, in an order that is the same on all ranks."""
        _compat.outside_transforms(self._finish_units)

    def _finish_units(self) -> None:
        for unit in reversed(self.units):
            if unit.has_left:
                unit.finish_backward()
        self.observer.all_issued()
        self.host_reads.delay_edits()
        if self.is_last_backward:
            self.reductions.finish(self.host_reads)
        self.reductions.wait_for_ended()
        for unit in self.units:
            for gradients in unit.gradients:
                if gradients.waiting or (not self.is_last_backward and self.reductions.has(gradients)):
                    gradients.show_waiting()
            if unit.gather.state not in AT_REST:
                unit.leave_backward()
        self._end_backward()
        syncs = self.probe is None and any(unit.requires_gradient_sync for unit in self.units)
        if self.chooser is not None and syncs:
            self.chooser.end_step()
        self.observer.settled(ends_step=syncs, is_last=self.is_last_backward)

    def reduce_waiting(self) -> None:
        """Reduce what earlier backwards have left, or add it up without a sync; none runs now: [Note: Pipelines]."""
        self.backward = Backward(adds_to_grad=True)
        for gradients in self.gradients:
            if gradients.shown.shown:
                self.reductions.drop(gradients, gradients.take_waiting())
            gradients.collect_left()
        self._finish_units()

    def _end_backward(self) -> None:
        self.order.end_backward()
        self.backward = None

    def abandon_iteration(self) -> None:
        """Drop the incomplete gradients of a forward or backward that raised."""
        self.reductions.abandon()
        self.host_reads.delay_edits()
        self.observer.abandoned()
        for unit in self.units:
            unit.abandon()
        self._end_backward()


def _full_bytes(reference: ref[Root]) -> dict[bool, int]:
    """The bytes of a root's full buffers, of units around others (True) and of the others.

    Gradients that wait hold the ledger. If the ledger held the root, that would be a cycle that Python never frees.
    """
    found, root = {False: 0, True: 0}, reference()
    for bucket in [] if root is None else root.buckets:
        found[bucket.full.is_around] += bucket.full.nbytes
    return found


@dataclass(kw_only=True)
class Backward:
    """A backward that runs below a root."""

    adds_to_grad: bool
    """True if it adds to `.grad` of some parameter: [Note: Gradients that do not come] in shard/reduce.py."""


def units_below(module: nn.Module) -> list[Unit]:
    """Return the units of `module` and of all modules below, outermost first, each once."""
    return list(dict.fromkeys(unit for child in module.modules() if (unit := unit_of(child)) is not None))


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of a module that was given to `fully_shard`; None for other modules."""
    return getattr(module, "_laconic_unit", None)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)
