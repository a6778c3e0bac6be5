"""A sharded module: its life through forward and backward, hooked onto the module it shards.

[Note: When a unit is done with backward]
A unit may free its weights, and reduce its gradients, when every operation of its forward has run backward. That is
when gradients arrive at its inputs: autograd runs ready nodes youngest first, so the identity put on the inputs at the
beginning of forward comes after all nodes made in it. The moment depends on the graph alone, not on which parameters
got gradients, so all ranks issue the reductions in one order. A unit whose inputs need no gradient has no such moment;
it is finished, with everything else that is left, by a callback at the end of backward, in the reverse order of the
module tree.

[Note: Recomputed forwards]
Activation checkpointing runs a unit's forward again inside backward. The non-reentrant kind does so after gradients
have reached the unit's outputs, so the weights are there already, and the recomputed graph is thrown away: it gets no
hooks. The reentrant kind ran the first forward without a graph, so nothing is known of the unit yet and the recomputed
forward is treated as the real one. Either way the weights stay until the backward that follows is done with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from laconic import _compat
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import Communicator
from laconic.layout.granularity import check_matched
from laconic.shard.bucket import Bucket
from laconic.shard.cache import Cache, RestingSlice, choose_device_slices, free_slab, make_slab
from laconic.shard.gather import UnitGather
from laconic.shard.lanes import Lanes
from laconic.shard.ledger import Ledger
from laconic.shard.reduce import BucketGradients, Reduction, ReductionQueue

PREFETCH = 2
"""How many units ahead gathers across nodes begin; the second only if its slice lands where it rests."""


class UnitState(Enum):
    """Where a unit stands in its step."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    """From the gradients' arrival at its outputs until it is done with backward."""


class Unit:
    """The engine's side of one sharded module."""

    def __init__(
        self,
        module: nn.Module,
        name: str,
        buckets: list[Bucket],
        *,
        cluster: Cluster,
        cache: Cache,
        precision: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.module, self.name, self.buckets = module, name, buckets
        self.cluster, self.cache, self.precision = cluster, cache, precision
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.state = UnitState.IDLE
        self.context: Context | None = None
        self.gradients: list[BucketGradients] = []
        self._gather: UnitGather | None = None
        self._is_shown = False
        # What backward will still reach, by things that die with their graph: a forward nobody runs backward leaves no
        # trace.
        self._awaited_outputs: WeakSet[_OutputGradients] = WeakSet()
        self._awaited_inputs: WeakSet[Any] = WeakSet()
        module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._post_forward)
        module.register_state_dict_pre_hook(lambda *_: self.reshard())

    def join(self, context: Context) -> None:
        """Become part of a root's context: now that all units are known, transfers can be set up."""
        self.context = context
        node, local = Communicator(self.cluster, "node"), Communicator(self.cluster, "local")
        self._gather = UnitGather(self.buckets, node, local, context.lanes)
        self.gradients = [
            BucketGradients(bucket, node, local, context.lanes, context.ledger) for bucket in self.buckets
        ]
        for bucket in self.buckets:
            bucket.account(context.ledger)

    def leave(self) -> None:
        """End the membership of a context in which nothing has run, for that of a root further out."""
        self.reshard()
        for bucket in self.buckets:
            bucket.close_account()

    @property
    def gather(self) -> UnitGather:
        """The gather of the unit's buckets; the unit must have joined a context."""
        if self._gather is None:
            Context(self)
        assert self._gather is not None
        return self._gather

    @property
    def is_root(self) -> bool:
        """True for the outermost unit."""
        return self.context is not None and self.context.root is self

    # -- gathered or not -----------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the parameters and show them to the module."""
        self.gather.finish()
        if not self._is_shown:
            for bucket in self.buckets:
                bucket.show_gathered()
            self._is_shown = True

    def reshard(self) -> None:
        """Show the sharded parameters to the module and give the gathered ones' memory back."""
        if self._gather is None:
            return
        try:
            if self._is_shown:
                self._is_shown = False
                for bucket in self.buckets:
                    bucket.show_sharded()
        finally:
            self._gather.release()

    def apply(self, function: Callable[[Tensor], Tensor], super_apply: Callable[[], None]) -> None:
        """Do `nn.Module._apply`: the shard is converted instead of the parameters that are views of it."""
        self.reshard()
        for bucket in self.buckets:
            bucket.hide()
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
        if self.context is None:
            Context(self)
        assert self.context is not None
        self.state = UnitState.FORWARD
        for bucket in self.buckets:
            if bucket.is_shard_dropped and not bucket.is_frozen:
                bucket.restore_shard()
        self.context.entering_forward(self)
        if torch.is_grad_enabled():
            args, kwargs = self._watch_inputs(args, kwargs)
        return args, kwargs

    @_compat.outside_compilation
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.precision.output_dtype is not None:
            output = _cast(output, self.precision.output_dtype)
        if self._is_recomputed():
            return output
        assert self.context is not None
        self.state = UnitState.IDLE
        if torch.is_grad_enabled():
            self._watch_outputs(output)
        keeps = self.reshard_after_forward is False or (self.reshard_after_forward is None and self.is_root)
        if not _compat.in_backward() and not (keeps and torch.is_grad_enabled()):
            self.reshard()
        self.context.left_forward(self)
        return output

    def _is_recomputed(self) -> bool:
        """[Note: Recomputed forwards]: True in a forward whose graph will be thrown away."""
        return _compat.in_backward() and (self.state is UnitState.BACKWARD or len(self._awaited_outputs) > 0)

    def _watch_inputs(self, args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        watched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not watched:
            return args, kwargs
        for index, tensor in zip(watched, _InputGradients.apply(self, *(leaves[i] for i in watched)), strict=True):
            leaves[index] = tensor
        return tree_unflatten(leaves, tree)

    def _watch_outputs(self, output: Any) -> None:
        tensors = [leaf for leaf in _tensors(output) if leaf.requires_grad]
        if tensors:
            hook = _OutputGradients(self)
            self._awaited_outputs.add(hook)
            for tensor in tensors:
                tensor.register_hook(hook)
        elif self._awaited_inputs or any(not bucket.is_frozen for bucket in self.buckets):
            self._refuse_hidden(output)

    def _refuse_hidden(self, output: Any) -> None:
        """A unit must see the tensors it returns, or backward would find its weights gone."""
        for leaf in tree_flatten(output)[0]:
            if not isinstance(leaf, Tensor | str | bytes | int | float | complex | bool | None):
                raise ValueError(
                    f"{self.name} returns a {type(leaf).__name__}, in which its tensors cannot be found, and nothing "
                    "else that needs a gradient; return tensors, or lists, tuples, dicts or dataclasses of them, or "
                    "register the type with torch.utils._pytree.register_pytree_node"
                )

    def await_inputs(self, node: Any) -> None:
        """Expect `node`, on the inputs of a forward, to report that its backward is over."""
        self._awaited_inputs.add(node)

    # -- backward ------------------------------------------------------------------------------------------------------

    def outputs_have_gradients(self, hook: _OutputGradients) -> None:
        """Backward begins with one of this unit's forwards: have the weights."""
        assert self.context is not None
        self._awaited_outputs.discard(hook)
        self.context.entering_backward(self)
        self.state = UnitState.BACKWARD

    def inputs_have_gradients(self, node: Any) -> None:
        """Backward is over with one of this unit's forwards: [Note: When a unit is done with backward]."""
        self._awaited_inputs.discard(node)
        if not self._awaited_inputs:
            self.end_backward()
        elif self._awaited_outputs:
            self.state = UnitState.IDLE  # another forward's backward follows, and announces itself

    def end_backward(self) -> None:
        """Free the weights, send the gradients on their way."""
        assert self.context is not None
        if self.reshard_after_backward:
            self.reshard()
        self.state = UnitState.IDLE
        # All its trainable buckets, whether or not gradients came on this rank: others may have some ([Note: Gradients
        # that do not come] in shard/reduce.py).
        for gradients in self.gradients:
            if not gradients.bucket.is_frozen:
                reduction = Reduction(gradients, gradients.take_full(), across_nodes=self.requires_gradient_sync)
                self.context.reductions.add(reduction)

    def abandon_backward(self) -> None:
        """Forget a backward that raised: its gradients are incomplete."""
        self.state = UnitState.IDLE
        self._awaited_outputs.clear()
        self._awaited_inputs.clear()
        for gradients in self.gradients:
            gradients.discard()
        self.reshard()

    def settle(self) -> None:
        """The end of a backward: nothing of this one is awaited any more, and no sum stays behind when syncing."""
        assert self.context is not None
        if self.state is UnitState.BACKWARD or any(gradients.are_waiting for gradients in self.gradients):
            self.end_backward()
        if not self.requires_gradient_sync:
            return
        for gradients in self.gradients:
            if gradients.partial is not None and not self.context.reductions.has(gradients):
                self.context.reductions.add(Reduction(gradients, None, across_nodes=True))
            resting = gradients.bucket.resting
            if resting is not None and not gradients.bucket.is_frozen and self.reshard_after_backward:
                self.reshard()  # a gather under way may still be writing into the slice
                resting.drop()  # the optimizer is about to make it stale


class Context:
    """What the units under one root share: order of execution, queues, lanes, the account and the host slab."""

    def __init__(self, root: Unit) -> None:
        """Take over all units below `root`, also those that were unsharded by hand before.

        Raises:
            RuntimeError: one of them has run on its own before, outside its root.
            ValueError: a granularity pattern matches no parameter of any of them.
        """
        self.root = root
        self.units = units_below(root.module)
        check_matched(blocks for unit in self.units if (blocks := getattr(unit.module, "_laconic_blocks", None)))
        device = root.cluster.device
        self.ledger = Ledger()
        self.lanes = Lanes(device)
        self.reductions = ReductionQueue()
        self._forward: list[Unit] = []  # the last complete forward, for prefetching the next unit
        self._entered: list[Unit] = []  # this forward so far
        self._left: list[Unit] = []  # finished forwards of this step, which backward visits in reverse
        self._in_backward = False
        for unit in self.units:
            if unit.context is not None:
                if unit.context.has_run:
                    raise RuntimeError(
                        f"{unit.name} ran before {root.name or 'the root module'}, which contains it; run the "
                        "outermost sharded module first, and call fully_shard on all modules before the first forward"
                    )
                unit.leave()
            unit.join(self)
        names = {module: name for name, module in root.module.named_modules()}
        for unit in self.units:
            unit.name = names[unit.module] or unit.name
        self._place_slices(device)

    def _place_slices(self, device: torch.device) -> None:
        """Give every bucket whose unit caches a place for its slice."""
        slab_users: list[RestingSlice] = []
        budget = max((unit.cache.device_budget_bytes for unit in self.units), default=0)
        cached = [unit for unit in self.units if unit.cache.where != "none" and unit.cluster.num_nodes > 1]
        for unit in cached:  # on one node nothing crosses a wire, and the slice is the shard
            for bucket in unit.buckets:
                bucket.resting = RestingSlice(bucket.slice_numel, bucket.compute_dtype, device, self.ledger, self.lanes)
        hosted = [unit for unit in cached if unit.cache.where == "host"]
        sizes = [sum(_resting(bucket).nbytes for bucket in unit.buckets) for unit in hosted]
        on_device = choose_device_slices(sizes, budget)
        for index, unit in enumerate(hosted):
            if index not in on_device:
                slab_users += [_resting(bucket) for bucket in unit.buckets]
        if slab_users:
            nbytes = sum(resting.nbytes for resting in slab_users)
            slab = make_slab(nbytes, device, num_local=self.root.cluster.num_local)
            self.ledger.host_bytes = slab.nbytes
            if device.type == "cuda":
                weakref.finalize(self, free_slab, slab).atexit = False  # keeps the slab until then
            for resting, part in zip(slab_users, slab.split([resting.nbytes for resting in slab_users]), strict=True):
                resting.rest_in(part)

    @property
    def has_run(self) -> bool:
        """True once the root has begun a forward."""
        return bool(self._forward or self._entered)

    # -- the order of execution ----------------------------------------------------------------------------------------

    def entering_forward(self, unit: Unit) -> None:
        """Have `unit`'s weights, and start on the next one's."""
        if unit is self.root and not _compat.in_backward():
            if self._in_backward:
                self._abandon_backward()
            self._entered = []
            if torch.is_grad_enabled():
                self._left = []
        unit.gather.begin()
        following: list[Unit] = []
        if self.root.state is UnitState.FORWARD:  # outside the root's forward no order is recorded
            self._entered.append(unit)
            position = len(self._entered)
            if self._forward[position - 1 : position] == [unit]:
                following = _worth_beginning(self._forward[position : position + PREFETCH])
        if unit.forward_prefetch is not None:
            following = unit.forward_prefetch
        self._gather_with_prefetch(unit, following)

    def left_forward(self, unit: Unit) -> None:
        """Record the order; without a graph nothing may stay behind a forward."""
        if torch.is_grad_enabled():
            self._left.append(unit)
        if unit is self.root:
            self._forward, self._entered = self._entered, []
            if not torch.is_grad_enabled() and not _compat.in_backward():
                for other in self.units:
                    other.reshard()

    def entering_backward(self, unit: Unit) -> None:
        """Have `unit`'s weights, and start on those of the one before it."""
        if not self._in_backward:
            self._in_backward = True
            _compat.after_this_backward(self._settle)
        if unit.state is UnitState.BACKWARD:
            return
        unit.gather.begin()
        if unit.backward_prefetch is not None:
            following = unit.backward_prefetch
        else:
            position = next((i for i in reversed(range(len(self._left))) if self._left[i] is unit), 0)
            following = _worth_beginning(self._left[max(0, position - PREFETCH) : position][::-1])
            del self._left[position:]
        self._gather_with_prefetch(unit, following)

    def _gather_with_prefetch(self, unit: Unit, following: Iterable[Unit]) -> None:
        # The next unit's gather across nodes goes out when this one's has come in, and this unit's gather inside the
        # node runs beside it. A second one keeps the wire busy in between, where it costs no memory.
        unit.gather.start_local()
        for other in following:
            other.gather.begin()
        unit.unshard()

    def _abandon_backward(self) -> None:
        self.reductions.abandon()
        for unit in self.units:
            unit.abandon_backward()
        self._in_backward = False

    def _settle(self) -> None:
        """The end of backward: finish what is left, in an order that is the same on all ranks."""
        for unit in reversed(self.units):
            unit.settle()
        self.reductions.finish()
        for unit in self.units:
            if unit.reshard_after_backward:
                unit.reshard()
        self._left = []
        self._in_backward = False


def _worth_beginning(following: list[Unit]) -> list[Unit]:
    return [unit for distance, unit in enumerate(following) if distance == 0 or unit.gather.begins_for_free]


def units_below(module: nn.Module) -> list[Unit]:
    """The units of `module` and all modules below, outermost first, each once (wrappers may show a module twice)."""
    return list(dict.fromkeys(unit for child in module.modules() if (unit := unit_of(child)) is not None))


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `module` was made, if it was given to fully_shard."""
    return getattr(module, "_laconic_unit", None)


class _OutputGradients:
    """A hook on the outputs of one forward: the first gradient to arrive tells the unit. Lives as long as the graph."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, gradient: Tensor) -> None:
        self._unit.outputs_have_gradients(self)


class _InputGradients(torch.autograd.Function):
    """The identity; its backward tells the unit that gradients have reached its inputs."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        unit.await_inputs(ctx)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.unit.inputs_have_gradients(ctx)
        return (None, *gradients)


def _resting(bucket: Bucket) -> RestingSlice:
    assert bucket.resting is not None
    return bucket.resting


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree
    )


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
