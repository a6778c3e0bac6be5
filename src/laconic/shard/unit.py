"""A sharded module's life: gathered for its forward and its backward, by hooks on the module.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.comm.progress import UnitProgress
from laconic.layout.granularity import Blocks, check_matched
from laconic.shard.bucket import Bucket
from laconic.shard.buffers import Buffers
from laconic.shard.context import Context
from laconic.shard.description import compare, describe, parts_of
from laconic.shard.gather import UnitGather
from laconic.shard.hooks import OutputGradients, watch_inputs
from laconic.shard.inspection import UnitChecks
from laconic.shard.lanes import Lanes
from laconic.shard.ledger import Ledger
from laconic.shard.policies import Cache, Checks
from laconic.shard.reduce import BucketGradients, Reduction
from laconic.shard.replaced import take_loaded_values, take_values_and_warn
from laconic.shard.traps import Origin, TrapSearch
from laconic.shard.trees import leaves_of, map_tensors, tensors_in


@dataclass(eq=False, repr=False, kw_only=True)
class Unit:
    """The engine's side of one sharded module. The outermost unit is the root and leads all units below it."""

    modules: Sequence[nn.Module]
    """One module, or several that are gathered together: [Note: Several modules in one unit]."""
    buckets: list[Bucket]
    blocks: Blocks
    cluster: Cluster
    cache: Cache
    precision: MixedPrecisionPolicy
    origin: Origin
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    checks: Checks | None = None
    broadcast_buffers: bool = False
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    reduce_once_per_backward: bool = False
    forward_prefetch: list[Unit] | None = None
    backward_prefetch: list[Unit] | None = None
    is_in_backward: bool = False
    """True from the first gradient at its outputs until the unit is done with backward."""
    gradients: list[BucketGradients] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.progress = UnitProgress(", ".join(type(module).__name__ for module in self.modules))
        self._root = self
        self._units: list[Unit] = []  # of the root: all units of its tree, outermost first
        self._context: Context | None = None
        self._traps: TrapSearch | None = None  # of the root
        self._buffers: Buffers | None = None  # likewise
        self._lanes: Lanes | None = None
        self._gather: UnitGather | None = None
        self._is_shown = False
        self._entered: set[nn.Module] = set()  # the modules called in the present pass
        # Hooks that backward has yet to run. They die with their graph, also if the forward is never run backward.
        self._awaited_outputs: WeakSet[OutputGradients] = WeakSet()
        self._awaited_inputs: WeakSet[Any] = WeakSet()
        for module in self.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward)
            module.register_state_dict_pre_hook(lambda *_: self._prepare_state_dict())
            module.register_load_state_dict_pre_hook(lambda *_: self.reshard())
            module.register_load_state_dict_post_hook(lambda *_: take_loaded_values(self.buckets))

    @property
    def name(self) -> str:
        """The names of the modules in the root; before the root leads, their classes."""
        return self.progress.name

    # -- the units of one root -----------------------------------------------------------------------------------------

    def lead(self) -> Context:
        """Become the root of all units below, also of units that were unsharded by hand before, and share a context.

        Raises:
            RuntimeError: a unit below has run before, outside its root.
            ValueError: a granularity pattern matches no parameter of any unit, or ranks began with different weights.
            RanksDifferError: a setting differs between ranks: [Note: One description of everything] in description.py.
        """
        self._units = list(dict.fromkeys(unit for module in self.modules for unit in units_below(module)))
        check_matched(unit.blocks for unit in self._units)
        context = Context(self.cluster, self._comm_ctx)
        names = {child: name for module in self.modules for name, child in module.named_modules()}
        for unit in self._units:
            if unit._context is not None:
                if unit._context.has_run:
                    raise RuntimeError(
                        f"{unit.name} ran before {self.name or 'the root module'}, which contains it; run the "
                        "outermost sharded module first, and call fully_shard on all modules before the first forward"
                    )
                unit._leave()
            unit._join(self, context)
        for unit in self._units:
            unit.progress.name = ", ".join(filter(None, (names.get(child) for child in unit.modules))) or unit.name
            for bucket in unit.buckets:
                bucket.unit_name = unit.name
        compare(
            self.cluster.all_flag_group, f"the first forward of {type(self.modules[0]).__name__}",
            describe(self._units), island=self.cluster.island_rank, parts=parts_of(self._units),
        )  # fmt: skip
        with torch.inference_mode(False):  # training could not fill a slab of inference tensors
            context.place_caches([(unit.cache, unit.buckets) for unit in self._units])
        self._buffers = Buffers(self._units)
        origins = [unit.origin for unit in self._units]
        self._traps = TrapSearch(self.modules, origins, [bucket for unit in self._units for bucket in unit.buckets])
        return context

    def _join(self, root: Unit, context: Context) -> None:
        self._root, self._context = root, context
        # A unit may have another mesh than its root: [Note: Two parallelisms, two meshes] in ragged/dtensor.py.
        checks = UnitChecks(self.checks, self.buckets, context.inspection)
        self._gather = UnitGather(self.buckets, context.lanes, context.copies_of, checks, context.program)
        self.gradients = [
            BucketGradients(bucket, context.lanes, context.ledger, self._begin_root_backward, checks)
            for bucket in self.buckets
        ]
        for bucket in self.buckets:
            take_values_and_warn(bucket)
            bucket.open_account(context.ledger)

    def _leave(self) -> None:
        self.reshard()
        for bucket in self.buckets:
            bucket.close_account()

    # torch's share_comm_ctx reads and sets these two names of FSDP2's state

    _fsdp_param_groups = ()

    @property
    def _comm_ctx(self) -> Lanes:
        """The lanes that this unit uses as a root."""
        if self._lanes is None:
            self._lanes = Lanes(self.cluster.device)
        return self._lanes

    @_comm_ctx.setter
    def _comm_ctx(self, lanes: Lanes) -> None:
        if self._context is not None and lanes is not self._context.lanes:
            raise RuntimeError("call share_comm_ctx before the first forward of its modules")
        self._lanes = lanes

    @property
    def context(self) -> Context:
        """The state that the units of one root share. A unit without a root leads its own units from now on."""
        return self._context or self.lead()

    @property
    def gather(self) -> UnitGather:
        """The gather of the unit's buckets."""
        if self._gather is None:
            self.lead()
        assert self._gather is not None
        return self._gather

    @property
    def ledger(self) -> Ledger | None:
        """The ledger of the root; None before anything has run."""
        return None if self._context is None else self._context.ledger

    @property
    def is_root(self) -> bool:
        """True for the outermost unit."""
        return self._context is not None and self._root is self

    @property
    def _all_gradients(self) -> list[BucketGradients]:
        """The gradients of all units of this root."""
        return [gradients for unit in self._root._units for gradients in unit.gradients]

    def _finish_backward(self) -> None:
        """Finish the backward of all units of this root, in an order that is the same on all ranks."""
        for unit in reversed(self._units):
            unit._finish_own_backward()
        self._compare_programs()
        if self.context.is_last_backward:
            self.context.reductions.finish()
        for gradients in self._all_gradients:
            if gradients.has_partial_sums(across_islands=True) or self.context.reductions.has(gradients):
                gradients.show_waiting()
        for unit in self._units:
            if unit._frees_after_backward:
                unit.reshard()
        self.context.end_backward()
        self._settle_programs()
        if self.context.probe is None and any(unit.requires_gradient_sync for unit in self._units):
            self.context.inspection.end_step()
        if self.context.is_last_backward:
            self.context.inspection.conclude()

    def _compare_programs(self) -> None:
        """Begin to compare what ranks have issued: [Note: One program on all ranks] in program.py."""
        diverges = any(bucket.replicas_diverge for unit in self._units for bucket in unit.buckets)
        self.context.program.start_comparison(diverges=diverges)

    def _settle_programs(self) -> None:
        """Finish the comparison now if transfers let the host wait anyway."""
        if not self.gather.is_stream_ordered:
            self.context.program.settle()

    def abandon_iteration(self) -> None:
        """Drop the incomplete gradients of a forward or backward that raised, in all units of this root."""
        self.context.reductions.abandon()
        self.context.inspection.forget()
        self.context.program.forget()
        for unit in self._units:
            unit.is_in_backward = False
            unit._entered.clear()
            unit._awaited_outputs.clear()
            unit._awaited_inputs.clear()
            for gradients in unit.gradients:
                gradients.discard()
            unit.reshard()
            unit.forget_copies()
        self.context.end_backward()

    # -- gathered or not -----------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the parameters and show them in the module."""
        self.gather.finish()
        for bucket in self.buckets:
            if self._is_shown:
                bucket.follow_requires_grad()
            else:
                bucket.show_gathered()
        self._is_shown = True

    def reshard(self) -> None:
        """Show the sharded parameters in the module and free the gathered ones."""
        if self._gather is None:
            return
        try:
            if self._is_shown:
                self._is_shown = False
                for bucket in self.buckets:
                    bucket.show_sharded()
        finally:
            self._gather.release()

    def forget_copies(self) -> None:
        """Let the weights cross exactly next time: [Note: Exact crossings] in shard/difference.py."""
        if self._gather is not None:
            self._gather.forget_copies()
        for gradients in self.gradients:
            gradients.forget_lost()

    def _prepare_state_dict(self) -> None:
        """Show the sharded parameters. A run that resumes from them begins with exact weights, so this one does too."""
        self.reshard()
        self.forget_copies()

    def apply(self, function: Callable[[Tensor], Tensor], super_apply: Callable[[], None]) -> None:
        """Run `nn.Module._apply`, but convert the shard in place of the parameters that are views of it."""
        self.reshard()
        for bucket in self.buckets:
            bucket.show([None] * len(bucket.sharded))
        try:
            super_apply()
        finally:
            for bucket in self.buckets:
                bucket.show(bucket.sharded)
        for bucket in self.buckets:
            bucket.convert(function)

    # -- forward -------------------------------------------------------------------------------------------------------

    @_compat.outside_compilation
    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.precision.cast_forward_inputs and self.precision.param_dtype is not None:
            args, kwargs = _cast((args, kwargs), self.precision.param_dtype)
        if self._is_recomputed():
            self.unshard()
            return args, kwargs
        begins_pass = not self._entered or module in self._entered
        with _compat.outside_transforms():
            if begins_pass:
                self._begin_pass()
            self._entered.add(module)
            self.unshard()
        if begins_pass and torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(args, kwargs)
        return args, kwargs

    def _begin_pass(self) -> None:
        """Begin the forward of the unit: [Note: Several modules in one unit]."""
        self.progress.enter_forward()
        context = self.context
        if self.is_root:
            self._refuse_several_roots()
            if self._traps is not None:
                self._traps.look_again()
            if context.is_in_backward and not _compat.in_backward():
                self.abandon_iteration()
            context.begin_forward(keep_order=any(unit._awaited_outputs for unit in self._units))
            if self._buffers is not None:
                self._buffers.begin_forward(syncs=self.requires_gradient_sync)
        self._entered.clear()
        for bucket in self.buckets:
            if bucket.is_shard_dropped and not bucket.is_frozen:
                bucket.restore_shard()
        context.enter_forward(self.gather, _gathers(self.forward_prefetch))

    def _refuse_several_roots(self) -> None:
        if len(self.modules) > 1:
            raise RuntimeError(
                f"the root of sharded modules must be one module, got {self.name} in one call of fully_shard; call "
                "fully_shard on the module that contains them as well, and run that one"
            )

    @_compat.outside_compilation
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.precision.output_dtype is not None:
            output = _cast(output, self.precision.output_dtype)
        if self._is_recomputed():
            return output
        if torch.is_grad_enabled():
            output = self._watch_outputs(output)
        if len(self._entered) == len(self.modules):
            self._end_pass()
        if self.is_root:
            self._end_root_forward()
        return output

    def _end_pass(self) -> None:
        """Free the weights after the forward of the unit, unless they stay for backward."""
        self._entered.clear()
        keeps = self.reshard_after_forward is False or (self.reshard_after_forward is None and self.is_root)
        if not _compat.in_backward() and not (keeps and torch.is_grad_enabled()):
            self.reshard()
        else:
            self.gather.let_host_edit()
        self.context.leave_forward(self.gather)
        self.progress.leave_forward()

    def _end_root_forward(self) -> None:
        for unit in self._units:
            if unit._entered:  # some of its modules did not run
                unit._end_pass()
        self.context.end_forward()
        if self._buffers is not None:
            self._buffers.end_forward()
        if not torch.is_grad_enabled() and not _compat.in_backward():  # no backward will free what was gathered
            for unit in self._units:
                unit.reshard()
            self._compare_programs()
            self._settle_programs()
            self.context.inspection.end_step()
            self.context.inspection.conclude()

    def _is_recomputed(self) -> bool:
        """True in a forward whose graph will be thrown away: [Note: Recomputed forwards]."""
        return _compat.in_backward() and (self.is_in_backward or len(self._awaited_outputs) > 0)

    def _watch_inputs(self, args: Any, kwargs: Any) -> Any:
        watched = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not watched:
            return args, kwargs
        identities = dict(zip(map(id, watched), watch_inputs(self, watched), strict=True))
        return map_tensors(lambda tensor: identities.get(id(tensor), tensor), (args, kwargs))

    def _watch_outputs(self, output: Any) -> Any:
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        hook = OutputGradients(self)
        if tensors:
            self._awaited_outputs.add(hook)
            for tensor in tensors:
                tensor.register_hook(hook)
        if _compat.in_transform():  # there, an output may need an outer graph's gradient without saying so
            return map_tensors(lambda tensor: tensor if tensor.requires_grad else hook.follow(tensor), output)
        if not tensors and (self._awaited_inputs or any(not bucket.is_frozen for bucket in self.buckets)):
            self._refuse_hidden_tensors(output)
        return output

    def _refuse_hidden_tensors(self, output: Any) -> None:
        """Refuse outputs that may hide tensors: without a hook on them, backward would find the weights freed."""
        for leaf in leaves_of(output):
            if not isinstance(leaf, Tensor | str | bytes | int | float | complex | bool | None):
                raise ValueError(
                    f"{self.name} returns a {type(leaf).__name__}, in which its tensors cannot be found, and nothing "
                    "else that needs a gradient; return tensors, or lists, tuples, dicts or dataclasses of them, or "
                    "register the type with torch.utils._pytree.register_pytree_node"
                )

    # -- backward ------------------------------------------------------------------------------------------------------

    def await_inputs(self, node: Any) -> None:
        """Expect `node`, on the inputs of a forward, to report the end of that forward's backward."""
        self._awaited_inputs.add(node)

    def begin_backward(self, hook: OutputGradients) -> None:
        """Gather the weights: backward reaches the outputs of one of this unit's forwards."""
        self._awaited_outputs.discard(hook)
        self._begin_root_backward()
        if not self.is_in_backward:
            self.is_in_backward = True
            self.progress.enter_backward()
            if self.unshard_in_backward:
                self.context.enter_backward(self.gather, _gathers(self.backward_prefetch))
                self.unshard()
            if not self.context.adds_to_grad:
                self.context.adds_to_grad = any(each.adds_to_grad() for each in self.gradients)
            for gradients in self.gradients:
                gradients.is_due = self.context.adds_to_grad and not gradients.bucket.is_frozen

    def _begin_root_backward(self) -> None:
        """Begin a backward under this root at its first gradient: of an output or, if none gets one, of a parameter."""
        if not self.context.is_in_backward:
            adds_to_grad = any(each.adds_to_grad() for unit in self._root._units for each in unit.gradients)
            self.context.begin_backward(creates_graph=torch.is_grad_enabled(), adds_to_grad=adds_to_grad)
            for gradients in self._all_gradients:
                self.context.reductions.drop(gradients, gradients.take_waiting())
            _compat.after_this_backward(self._root._finish_backward)

    def reach_inputs(self, node: Any) -> None:
        """End the backward of one of this unit's forwards: [Note: When a unit is done with backward]."""
        self._awaited_inputs.discard(node)
        if not self.reduce_once_per_backward or not self._awaited_inputs:
            self._end_backward()
        elif self._awaited_outputs:
            self.is_in_backward = False  # the backward of another forward follows and begins at its outputs

    @property
    def _frees_after_backward(self) -> bool:
        """True if the weights may go: a graph of gradients still needs them."""
        return self.reshard_after_backward and not self.context.creates_graph

    def _end_backward(self) -> None:
        """Free the weights and begin to reduce the gradients."""
        if self._frees_after_backward:
            self.reshard()
        self.is_in_backward = False
        # All buckets that are due, with or without gradients here: [Note: Gradients that do not come].
        for gradients in self.gradients:
            if gradients.is_due or gradients.has_gradients:
                if self.context.probe is not None:
                    self._show_unreduced(gradients, self.context.probe)
                else:
                    self._reduce(gradients, gradients.take_full())
        self.progress.leave_backward()

    def _show_unreduced(self, gradients: BucketGradients, probe: Callable[[Bucket, Tensor], None]) -> None:
        full = gradients.take_unreduced()
        probe(gradients.bucket, full)
        gradients.ledger.hold(-full.nbytes)

    def _reduce(self, gradients: BucketGradients, full: Tensor | None) -> None:
        across_nodes = self.requires_gradient_sync
        if full is not None or across_nodes:
            self.context.program.note(f"the reduction of {self.name}{'' if across_nodes else ' inside the node'}")
        reduction = Reduction(gradients, full, across_nodes=across_nodes, across_islands=self.requires_all_reduce)
        self.context.reductions.add(reduction)

    def _finish_own_backward(self) -> None:
        """Reduce the gradients that are left and, in a micro-batch that syncs, partial sums of earlier ones."""
        if self.is_in_backward or any(gradients.has_gradients for gradients in self.gradients):
            self._end_backward()
        self._awaited_inputs.clear()  # of a retained graph; its next backward begins at the outputs
        if not self.requires_gradient_sync or self.context.probe is not None:
            return
        for gradients in self.gradients:
            has_partial_sums = gradients.has_partial_sums(across_islands=self.requires_all_reduce)
            if has_partial_sums and not self.context.reductions.is_crossing_nodes(gradients):
                self._reduce(gradients, None)
            cached = gradients.bucket.cached
            is_base = gradients.bucket.wire.sends_differences  # of the next difference
            if cached is not None and not gradients.bucket.is_frozen and not is_base and self._frees_after_backward:
                self.reshard()  # a gather that has begun may still write into the cache
                cached.free()  # the optimizer is about to make it stale


def units_below(module: nn.Module) -> list[Unit]:
    """Return the units of `module` and of all modules below, outermost first, each once."""
    return list(dict.fromkeys(unit for child in module.modules() if (unit := unit_of(child)) is not None))


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of a module that was given to `fully_shard`; None for other modules."""
    return getattr(module, "_laconic_unit", None)


def _gathers(units: list[Unit] | None) -> list[UnitGather] | None:
    return None if units is None else [unit.gather for unit in units]


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)
