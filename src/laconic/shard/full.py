"""The gathered weights of a bucket, and the parameters that modules use in forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import count, repeat
from operator import add, attrgetter, is_
from typing import NamedTuple

import torch
from torch import Tensor, nn

from laconic import _compat
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.buffer import Buffer
from laconic.shard.form import Form
from laconic.shard.linear import GradientSink, set_sink, write_gradient_in_place
from laconic.shard.stored import StoredWeights

_version_of, _requires_grad, _next = attrgetter("_version"), attrgetter("requires_grad"), partial(add, 1)
_NUM_LOOKS = 2
"""After so many uses a bucket on a CPU is compared with its shard: an edit by `.data` leaves no other trace. For an
accelerator the host would have to wait; see `Checks`."""
_TINY_NUMEL = 1 << 16
"""A gradient of so many elements is copied sooner than a function in Python has written it in place."""


class ParameterPlaces:
    """The modules that show the parameters of a bucket."""

    def __init__(self, each: Sequence[Sequence[tuple[nn.Module, str]]], names: Sequence[str]) -> None:
        """Take every (module, attribute) that shows each parameter, and the parameters' names."""
        self.each, self._names = each, names
        self.all = [(index, *place) for index, places in enumerate(each) for place in places]
        """Every (index of the parameter, module, attribute)."""

    def show(self, parameters: Sequence[nn.Parameter | None], *, instead_of: Sequence[nn.Parameter] = ()) -> None:
        """Show `parameters` in the modules; None hides one from `nn.Module._apply`, which must not see it.

        Raises:
            RuntimeError: a module has another parameter than the one of `instead_of`.
        """
        for index, module, name in self.all if instead_of else ():  # at each gather and release, so without calls
            shown = module._parameters.get(name)
            if shown is not instead_of[index]:
                if shown is not None:
                    refuse_transform(shown, self._names[index])
                raise RuntimeError(
                    f"parameter {self._names[index]} is no longer the one fully_shard made: it was replaced. Copy into "
                    "it instead (param.copy_(value) under torch.no_grad()), or call load_state_dict of the sharded "
                    "module"
                )
        for index, module, name in self.all:
            module._parameters[name] = parameters[index]


def refuse_transform(parameter: Tensor, name: str) -> None:
    """Refuse what a torch.func transform has put in the place of a sharded parameter.

    Raises:
        RuntimeError: a transform has wrapped `parameter`.
    """
    if _compat.is_of_transform(parameter):
        raise RuntimeError(
            f"torch.func cannot differentiate by {name}, a sharded parameter: its gradient is a sum over the ranks. "
            "Call backward() on the loss, or transform by the module's inputs"
        )


class _Attributes:
    """The attributes of one parameter in both forms: a user meets either, and puts his own on it."""

    def __init__(self, sharded: nn.Parameter, gathered: nn.Parameter) -> None:
        self.sharded, self.gathered = vars(sharded), vars(gathered)
        self._own = {*RaggedTensor.__annotations__, "_is_param", *self.gathered}  # of the engine
        self.share()

    def share(self) -> None:
        """Copy those that one form lacks."""
        for given, other in ((self.sharded, self.gathered), (self.gathered, self.sharded)):
            other.update({name: given[name] for name in given.keys() - other.keys() - self._own})
        self.number = len(self.sharded) + len(self.gathered)


class _Memory(NamedTuple):
    """The memory of a full buffer, as it is seen."""

    tensor: Tensor
    """The tensor of which the parameters are views, (L * N * C,)."""
    alias: Tensor
    """The tensor that the engine writes to, with a version of its own."""
    node_shard: Tensor
    """The part of `alias` that is this rank's node shard, (N * C,)."""
    storage: torch.UntypedStorage
    own: Buffer | None
    """What the ledger counts; None if it is the shard's own memory, as on a mesh of one rank."""


class FullBuffer:
    """The gathered weights of one bucket, (L * N * C,), and the gathered parameters that are views of them.

    [Note: Views that outlive their memory]
    Modules and autograd keep views of a bucket while its memory is freed. So `free` empties the storage in place,
    `allocate` fills it again, and the views never change. Autograd also remembers the version of every tensor that it
    saves, and a refill with the same values must not look like an edit. So the engine writes through an alias with its
    own version counter. Each gathered parameter has a counter of its own, too, as a parameter that is alone in its
    memory would: it counts only a user's edits, and only those of this parameter. While there is no memory, it has
    another number, at which autograd raises an error: [Note: Losses past the outputs] in hooks.py.
    """

    def __init__(self, stored: StoredWeights, form: Form, places: ParameterPlaces) -> None:
        """Gather what is stored."""
        self._stored, self._form, self._places = stored, form, places
        self.memory: _Memory | None = None
        """None before the first gather, and after `drop`."""
        self.parameters: list[nn.Parameter] = []
        """The gathered parameters, in the order of the sharded ones; empty before the first gather."""
        self._views: tuple[nn.Parameter, ...] = ()
        """The gathered parameters whose memory is this buffer's."""
        self._versions: list[int] = []
        self.trained: list[bool] = []
        """Of each gathered parameter when it was shown: its version, and whether it trained."""
        self._saved_versions: tuple[int, ...] = ()
        """Those of `_views`, while there is no memory."""
        self._shown_version = -1
        """That of the shard when the parameters were shown, in the first uses."""
        self._looks_left = _NUM_LOOKS
        self._attributes: list[_Attributes] = []
        self._sink: GradientSink | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of memory of its own that it has now."""
        own = None if self.memory is None else self.memory.own
        return own.nbytes if own is not None and own.is_held else 0

    def allocate(self) -> Tensor:
        """Allocate its memory in the dtype of the wire, unless it is allocated already. Returns the engine's alias."""
        memory = self.memory or self._make()
        own = memory.own
        if own is not None and not own.is_held:
            own.fill()
            _compat.set_versions(self._views, self._saved_versions)
        return memory.alias

    def _make(self) -> _Memory:
        stored, form = self._stored, self._form
        # An inference tensor has no versions and could not be trained with later.
        with torch.inference_mode(False), torch.enable_grad():
            device = stored.cluster.device if stored.is_offloaded else stored.shard.device
            is_whole = stored.cluster.size == 1 and stored.shard.device == device
            own = None
            if is_whole and form.compute_dtype == stored.shard.dtype and not form.converts:
                tensor = stored.shard.data
            else:
                tensor = torch.empty(form.geometry.whole_numel, dtype=form.dtype, device=device)
                own = Buffer(tensor, stored.ledger)
            alias = tensor.data
            node_shard = alias[form.geometry.node_in_whole]
            self.memory = _Memory(tensor, alias, node_shard, tensor.untyped_storage(), own)
            self.parameters = [] if form.converts else list(map(self._parameter, count(), self.views()))
            self._views = tuple(
                [each for each, spec in zip(self.parameters, stored.specs, strict=False) if spec.dtensor is None]
            )
        return self.memory

    def decode(self) -> None:
        """Make the gathered parameters out of a buffer that is complete, if they convert: [Note: Conversion]."""
        if self._form.converts:
            decoded = self._form.decode(self.allocate(), self.views)
            if not self.parameters:
                self.parameters = list(map(self._watched, count(), decoded))

    def node_shard(self) -> Tensor:
        """This rank's node shard within the buffer, which is allocated: (N * C,), a view."""
        self.allocate()
        assert self.memory is not None, "it was allocated"
        return self.memory.node_shard

    def free(self) -> None:
        """Free the memory, and what was decoded from it. Views stay."""
        own = None if self.memory is None else self.memory.own
        if own is not None and own.is_held:
            own.empty()
            self._saved_versions = tuple(map(_version_of, self._views))
            _compat.set_versions(self._views, tuple(map(_next, self._saved_versions)))
            if self._form.converts:
                self._form.free()

    def drop(self) -> None:
        """Free the memory for good: the next gather makes another buffer, with other gathered parameters."""
        self.free()
        self.memory = None
        self._versions, self._attributes = [], []
        self._form.forget()

    def views(self) -> list[Tensor]:
        """The elements of each parameter, in its shape."""
        assert self.memory is not None, "it was made"
        return [
            spec.assemble(self.memory.tensor[spec.slot.offset : spec.slot.offset + spec.slot.numel])
            for spec in self._stored.specs
        ]

    def _parameter(self, index: int, view: Tensor) -> nn.Parameter:
        if not view.is_floating_point():  # such as a quantised table: it can never train
            return nn.Parameter(view.data, requires_grad=False)
        parameter = nn.Parameter(view.data)
        spec = self._stored.specs[index]
        if self._sink is not None and spec.dtensor is None and spec.slot.numel > _TINY_NUMEL:
            set_sink(parameter, self._sink, index)
        return self._watched(index, parameter)

    def _watched(self, index: int, parameter: nn.Parameter) -> nn.Parameter:
        """Send the gradients of a gathered parameter to the sink, if its sharded one trains."""
        if self._sink is not None:
            parameter.register_post_accumulate_grad_hook(partial(_collect, weakref.ref(self._sink), index))
        sharded = self._stored.parameters[index]
        parameter.requires_grad_(sharded.requires_grad)
        # the user's hooks run on sums, also if they meet the gathered parameter
        parameter.register_post_accumulate_grad_hook = sharded.register_post_accumulate_grad_hook  # type: ignore[method-assign]
        self._attributes.append(_Attributes(sharded, parameter))
        return parameter

    def set_sink(self, sink: GradientSink) -> None:
        """Send the gradients of the gathered parameters to `sink`."""
        self._sink = sink
        for index, module, name in self._places.all:
            if name == "weight" and self._stored.specs[index].slot.numel > _TINY_NUMEL:
                write_gradient_in_place(module)

    def show(self) -> None:
        """Show the gathered parameters in the modules.

        Raises:
            RuntimeError: a module's sharded parameter was replaced; the replacement would be lost now.
        """
        self.reconcile()
        self._places.show(self.parameters, instead_of=self._stored.parameters)
        self._versions = list(map(_version_of, self.parameters))
        if self._looks_left:
            self._shown_version = self._stored.version

    def reconcile(self) -> None:
        """Let both forms of the parameters train or not, and have the attributes, as a user has set on either.

        Users meet either, as the unit is gathered or not: the one that has changed since the last call is right.
        """
        for each in self._attributes:  # at each gather and release, so without calls
            if each.number != len(each.sharded) + len(each.gathered):
                each.share()
        trained = list(map(_requires_grad, self.parameters))
        if trained == self.trained == list(map(_requires_grad, self._stored.parameters)):  # most often
            return
        for index, (sharded, gathered) in enumerate(zip(self._stored.parameters, self.parameters, strict=True)):
            if self.trained and gathered.requires_grad != self.trained[index]:
                sharded.requires_grad_(gathered.requires_grad)
            else:
                gathered.requires_grad_(sharded.requires_grad)
        self.trained = list(map(_requires_grad, self.parameters))

    def hide(self) -> None:
        """Show the sharded parameters in the modules again.

        Raises:
            RuntimeError: a gathered parameter was edited in place, or replaced; the edit would be lost.
        """
        self.reconcile()
        self._places.show(self._stored.parameters, instead_of=self.parameters)
        now, before = list(map(_version_of, self.parameters)), self._versions
        assert self.memory is not None, "it was shown"
        if not all(map(is_, map(Tensor.untyped_storage, self._views), repeat(self.memory.storage))):
            self._refuse_other_memory(self.memory.storage)
        looks = self._looks_left > 0 and self._looks()
        if not before or (now == before and not looks):
            return
        self._versions = now
        slots = self._stored.layout.slots
        changed = [index for index in range(len(now)) if looks or now[index] != before[index]]
        edited = ", ".join(slots[index].name for index in changed if self._is_edited(index))
        if edited:
            raise RuntimeError(
                f"the gathered parameter {edited} was edited in place, which does not change the sharded parameter "
                "that trains. Call reshard() of the sharded module, and edit its parameter under torch.no_grad()"
            )

    def _looks(self) -> bool:
        """True if all parameters are to be compared with the shard: a few times, if it is what was gathered."""
        self._looks_left -= 1
        stored, is_on_host = self._stored, self._stored.cluster.device.type == "cpu"
        is_there = is_on_host and not stored.shard.is_meta and not _compat.is_fake(stored.shard)
        return is_there and self._form.has_own_bits and self._shown_version == stored.version

    def _refuse_other_memory(self, storage: torch.UntypedStorage) -> None:
        """Refuse gathered parameters that have got other memory (`parameter.data = values`), and take it from them."""
        moved = [
            index
            for index, (each, spec) in enumerate(zip(self.parameters, self._stored.specs, strict=True))
            if spec.dtensor is None and each.untyped_storage() is not storage
        ]
        views = self.views()
        for index in moved:
            self.parameters[index].data = views[index].data
        names = ", ".join(self._stored.layout.slots[index].name for index in moved)
        raise RuntimeError(
            f"the .data of the gathered parameter {names} was replaced, which does not change the sharded parameter "
            "that trains. Call reshard() of the sharded module, and edit its parameter under torch.no_grad()"
        )

    def _is_edited(self, index: int) -> bool:
        """True if a parameter with a new version has other elements, of this rank's own, than were gathered.

        A new version alone says little: torch's parametrizations, which peft registers in forward, call `set_` with the
        same memory. Where weights cross in few bits, there is nothing to compare with.
        """
        stored, full = self._stored, self.allocate()
        if not self._form.has_own_bits:
            return True
        own = stored.part(self._form.shards_of(full)[stored.cluster.shard_index], index)
        gathered = stored.part(stored.shard, index).to(full.device, full.dtype)
        return not torch.equal(own.view(torch.uint8), gathered.view(torch.uint8))  # a NaN is equal to itself


def _collect(sink: weakref.ref[GradientSink], index: int, parameter: nn.Parameter) -> None:
    """Collect a gradient. A strong reference to `sink`, held by the hook, would be a cycle that Python never frees."""
    if parameter.grad is None:  # it was written in place
        return
    target = sink()
    assert target is not None, "a gradient came for a model that is gone"
    target.collect(index, parameter)
