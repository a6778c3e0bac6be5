"""The class that `fully_shard` gives a module: FSDP2's methods on modules."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from laconic.comm.traffic import Traffic
from laconic.shard.extension import overrides
from laconic.shard.ledger import Ledger
from laconic.shard.policies import Placement
from laconic.shard.unit import Unit, units_below


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module of class `cls` after `fully_shard`. Python forgets it with `cls`."""
    bases = ShardedModule, cls
    made = next((each for each in cls.__subclasses__() if each.__bases__ == bases), None)
    if made is not None:
        return made
    own = {name: method for name, method in overrides.items() if hasattr(cls, name)}
    # The module's name too: transformers knows its own models by it, and initialises custom ones differently.
    return type(f"Sharded{cls.__name__}", bases, {"__module__": cls.__module__, **own})


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module of class `cls` had before `fully_shard`; `cls` itself if that is not sharded."""
    return cls.__mro__[cls.__mro__.index(FSDPModule) + 1] if issubclass(cls, ShardedModule) else cls


@dataclass(frozen=True)
class UnshardHandle:
    """The handle of a gather that `unshard(async_op=True)` began."""

    wait: Callable[[], None]
    """Finish the gather and show the gathered parameters in the module."""


class ShardedModule(FSDPModule, nn.Module):
    """A module after `fully_shard`, with FSDP2's methods. Setters with `recurse` also set all sharded modules below.

    It is an instance of torch's `FSDPModule`. A method of `FSDPModule` that is not here raises NotImplementedError.
    """

    _laconic_unit: Unit

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module: a container builds a new one of its own class for a slice, such as `model[:2]`."""
        plain: Any = plain_class(cls)
        module = plain.__new__(plain)
        module.__init__(*args, **kwargs)  # Python does not, as the new module is not an instance of `cls`
        return module

    @property
    def traffic(self) -> Traffic:
        """The byte counters of this rank in this module's mesh."""
        return self._laconic_unit.cluster.traffic

    def memory(self) -> Ledger:
        """Return the bytes that the engine holds for this root module on this rank."""
        if self._laconic_unit.has_root:
            return replace(self._laconic_unit.root.ledger)
        ledger = Ledger()  # it has not run yet
        ledger.hold(sum(bucket.shard.nbytes for unit in self._units() for bucket in unit.buckets))
        return ledger

    def reset_peak_memory(self) -> None:
        """Set `device_peak_bytes` of `memory()` to the bytes that are held now."""
        if self._laconic_unit.has_root:
            self._laconic_unit.root.ledger.reset_peak()

    def _units(self, recurse: bool = True) -> Sequence[Unit]:
        own = self._laconic_unit
        if not recurse:
            return [own]
        return own.root.units if own.is_root else units_below(self)  # a walk over all modules takes time each step

    def _set(self, recurse: bool, **settings: bool) -> None:
        for unit in self._units(recurse):
            vars(unit).update(settings)

    def _get_fsdp_state(self) -> Any:
        """The object whose `_pre_forward` and `_post_forward` torch's `register_fsdp_forward_method` calls."""
        return self._laconic_unit

    # -- gathering -----------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:  # type: ignore[override]
        """Gather this module's parameters. Collective over the mesh's node and local axes.

        With `async_op` it returns at once, with a handle whose `wait()` finishes the gather.
        """
        if async_op:
            self._laconic_unit.gather.begin()
            return UnshardHandle(self._laconic_unit.unshard)
        self._laconic_unit.unshard()
        return None

    def reshard(self) -> None:
        """Free this module's gathered parameters and show the sharded ones.

        Raises:
            RuntimeError: a gathered parameter was edited in place; the edit would be lost.
        """
        self._laconic_unit.reshard()
        self._laconic_unit.delay_edits()

    def invalidate(self, *, recurse: bool = True) -> None:
        """Say that parameters have changed without notice, so that their cached and gathered copies are stale.

        Changes of parameters and of `to_local()` are noticed by themselves. Those through `.data`, a raw pointer or
        another process are not; `laconic.Checks(unnoticed_edits=True)` finds them. Call it on every rank alike.
        """
        for unit in self._units(recurse):
            for bucket in unit.buckets:
                bucket.stored.note_change()

    def forget_copies(self) -> None:
        """Let this module's weights cross between nodes exactly next time, also with `wire="4bit"`.

        With `wire="lossless"` all nodes have the exact weights anyway.

        A state dict, a checkpoint, a load and any edit do this by themselves. See `laconic.Wire`.

        Raises:
            ValueError: a lossless message was damaged on its way; load the last checkpoint.
        """
        self._laconic_unit.settle_copies()

    def placements(self) -> dict[str, Placement]:
        """Return where each unit below this root rests now, by the unit's name. Collective before the first forward.

        Under `cache="auto"` that is at first nowhere, and from the second step on what was chosen.
        """
        return {unit.name: unit.placement for unit in self._laconic_unit.root.units}

    @property
    def is_placed(self) -> bool:
        """True unless `cache="auto"` has yet to choose where units of this root rest."""
        return self._laconic_unit.root.chooser is None

    def set_placements(self, placements: Mapping[str, Placement]) -> None:
        """Let units rest elsewhere from now on, whatever their `cache` says, such as where another run has chosen.

        Collective before the first forward. Call it on the root between steps, on every rank alike.

        Args:
            placements: by the names that `placements()` returns; other units stay where they are.

        Raises:
            ValueError: a name is not that of a unit, or weights that cross as differences would rest nowhere.
        """
        self._laconic_unit.root.set_placements(placements)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are freed after forward. False saves the gather in backward and costs their memory.

        Raises:
            ValueError: the argument is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        self._set(recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are freed after backward. With False they are gathered again only when they change."""
        self._set(recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this module's parameters.

        False is for modules such as an embedding, whose backward does not need them.
        """
        self._laconic_unit.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to gather when this forward begins. Default: those that came next in the last forward.

        Raises:
            ValueError: a module is not sharded by laconic.
        """
        self._laconic_unit.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to gather when this backward begins. Default: those that came before this one in forward.

        Raises:
            ValueError: a module is not sharded by laconic.
        """
        self._laconic_unit.backward_prefetch = _units_of(modules)

    # -- reducing ------------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the next backward sends gradients across the nodes. For gradient accumulation.

        Set it to False for all micro-batches of an optimizer step but the last. Backward then sums gradients inside the
        node only, and a rank keeps one node shard of sums, in the reduce dtype, until a backward with sync sends them.
        """
        self._set(recurse, requires_gradient_sync=requires_gradient_sync)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without the wire in backwards inside the `with` block, as under DDP's `no_sync`.

        The next backward outside sends the sums: see `set_requires_gradient_sync`. After the block the settings of all
        units below are as before, also after an exception, and blocks may be nested.
        """
        units = self._units()
        before = [unit.requires_gradient_sync for unit in units]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, requires_sync in zip(units, before, strict=True):
                unit.requires_gradient_sync = requires_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether the next backward sums gradients over the islands, the replicas of HSDP.

        With False, each rank keeps the sums of its island until a backward sums them over the islands.
        """
        self._set(recurse, requires_all_reduce=requires_all_reduce)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether trained parameters that no rank has used in a backward get gradients of zeros.

        With False, the default as in FSDP2, they get none, and optimizers pass over them. A parameter that some rank
        has used gets the sum of all ranks either way.
        """
        self._set(recurse, fills_unused=reduce_scatter_unused_params)

    def set_reduce_once_per_backward(self, reduce_once: bool, *, recurse: bool = True) -> None:
        """Set whether a backward through several forwards reduces gradients once, at the last, or once per forward.

        Once per forward is the default, as in FSDP2: it takes the memory of one forward. Once per backward sends each
        gradient once, but keeps the weights and the unreduced gradients of the whole model until then.
        """
        self._set(recurse, reduce_once_per_backward=reduce_once)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward of this root is the last one of its step.

        With False, its last reduction may still be under way when it returns, and `.grad` is complete only after a
        backward that is the last.
        """
        self._laconic_unit.root.is_last_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of this module's summed gradients; modules below keep theirs.

        The default is the number of ranks whose gradients are summed: those of the mesh, or of this island if
        `LocalSteps` trains islands on their own.

        Raises:
            ValueError: `factor` is not positive or not finite.
        """
        if not factor > 0 or math.isinf(factor):
            raise ValueError(f"the gradient divide factor must be a positive number, got {factor}")
        for bucket in self._laconic_unit.buckets:
            bucket.divide_by = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """See `set_gradient_divide_factor`, the present name of FSDP2's older method."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Set a function that gets each reduced shard of this module, divided and in the reduce dtype, and may edit it.

        Raises:
            NotImplementedError: `stream` is given; the function runs on laconic's own stream for reductions.
        """
        if stream is not None:
            raise NotImplementedError("set_all_reduce_hook(stream=): laconic runs the hook on its own stream")
        for bucket in self._laconic_unit.buckets:
            bucket.reduced_hook = hook

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Set an event that the next forward of this root waits for before it gathers. The forward discards it."""
        self._laconic_unit.root.post_optim_event = event

    def reset_iter_state(self) -> None:
        """Recover after an exception in forward or backward. Gradients of the failed iteration are lost.

        Raises:
            RuntimeError: this module is not the root.
        """
        unit = self._laconic_unit
        if unit.has_root and not unit.is_root:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        unit.root.order.end_forward()
        unit.root.abandon_iteration()

    # -- settings that laconic fixes -----------------------------------------------------------------------------------

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Change nothing: laconic always sums and divides afterwards."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Accept the number, but keep one reduction in flight, as by default.

        Raises:
            TypeError: the number is no integer.
            ValueError: the number is not positive.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        if max_input_buffers > 1:
            warnings.warn("laconic keeps one reduction in flight, whatever max_input_buffers says", stacklevel=2)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Accept True: laconic's reductions always have process groups of their own.

        Raises:
            NotImplementedError: `enable` is False.
        """
        if not enable:
            raise NotImplementedError(
                "set_separate_reduce_scatter_group(False): laconic's reductions always have process groups of their own"
            )

    # -- nn.Module -----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `nn.Module.zero_grad`. Also zeroes the sharded parameters of units that are gathered now."""
        super().zero_grad(set_to_none)
        for parameter in (sharded for unit in self._units() for bucket in unit.buckets for sharded in bucket.sharded):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def _get_name(self) -> str:
        """The plain class's name: transformers' Trainer chooses the loss with smoothed labels by it."""
        return plain_class(type(self)).__name__

    def __repr__(self) -> str:
        return f"Sharded{super().__repr__()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise AssertionError(  # FSDP2's type
            f"{type(self).__name__} cannot be deep-copied, as its units and process groups exist once; copy the model "
            "before fully_shard, or keep copies of the parameters (copy.deepcopy(param) works)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, so torch.save cannot save it either, since each rank holds only "
            "a part. Save it with laconic.checkpoint.save_checkpoint, its weights alone with laconic.save_safetensors, "
            "or its whole state dict with torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True))"
        )

    @property
    def _fsdp_use_orig_params(self) -> bool:
        """What torch.compile asks of modules that FSDP manages: True, as of FSDP2's."""
        return True

    @_fsdp_use_orig_params.setter
    def _fsdp_use_orig_params(self, value: bool) -> None:
        """Refuse torch's older FSDP, which sets this on all modules that it is about to wrap."""
        raise TypeError(
            "FullyShardedDataParallel cannot wrap a model that laconic.fully_shard has sharded; use the sharded model "
            "as it is"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # FSDP2's own _apply is skipped: it would convert the parameters one by one.
        self._laconic_unit.apply(fn, functools.partial(super(FSDPModule, self)._apply, fn, recurse))
        return self


def reshard_all(model: nn.Module) -> None:
    """Show sharded parameters in place of gathered ones, in all units below `model`."""
    for unit in units_below(model):
        unit.reshard()


def _units_of(modules: Sequence[FSDPModule]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, ShardedModule):
            raise ValueError(f"expected modules of laconic.fully_shard, got {type(module).__name__}")
    return [module._laconic_unit for module in modules]  # type: ignore[attr-defined]


_REFUSED = {
    "set_custom_all_gather": "laconic gathers along two levels, with transfers and buffers of its own",
    "set_custom_reduce_scatter": "laconic reduces along two levels, with transfers and buffers of its own",
    "set_allocate_memory_from_process_group_for_comm": "laconic's collectives read and write its own buckets",
    "set_symm_mem_for_comm": "laconic's collectives read and write its own buckets",
}
"""FSDP2's methods that laconic does not have, with the reason."""


def _refuse(name: str, reason: str) -> None:
    def refuse(self: ShardedModule, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not supported: {reason}")

    refuse.__doc__ = f"Raise NotImplementedError: {reason}."
    setattr(ShardedModule, name, refuse)


for _name in vars(FSDPModule):
    if not _name.startswith("_") and _name not in vars(ShardedModule):
        _refuse(_name, _REFUSED.get(_name, "this method of FSDP2 is not known to laconic"))
