"""The tensors of a model for a reader: as they are published, in few bits, or in another float dtype.

[Note: Kept values]
Readers of patches need the values before. A model in few bits does not have them, nor has one in another dtype. So a
reader keeps the published values of such tensors in host memory, and stages patches against them as if they were the
model's. Their digests tell which version they are. A new reader has none, and begins with whole values. When kept
values have changed, their tensor is encoded anew, whole: by our own codec, by the quantiser that transformers has used
([Note: Requantising] in hf/requantizing.py), or by a cast. So it is what encoding the export of that step gives.

A tensor counts as the encoding of its kept values while it has the digests that the last encoding left. The reader
forgets these before values change. So after an error in the middle, in another model, or where somebody has changed
codes, the next update encodes anew. (Scales that a library keeps as attributes of a parameter, as bitsandbytes does,
are not looked at.)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from laconic.checkpoint import state
from laconic.errors import JobError
from laconic.hf.hub_names import FolderRun
from laconic.hf.requantizing import Requantizer
from laconic.layers.linear import QuantizedLinear, quantized_layers
from laconic.publish.coordinates import CheckpointContents, contents_of, in_folder
from laconic.publish.staging import CAST_DTYPES, StagedTensor, digests_of, memory_of
from laconic.publish.versions import PublishError, VersionManifest


class HeldForm(Protocol):
    """A tensor of a model that is not as it is published."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the values that are encoded; None for that of the version."""

    def parts(self) -> dict[str, Tensor]:
        """The plain tensors that the model has now, such as codes and scales, by name."""

    def problem(self, values: Tensor) -> str:
        """Why some values, of the published dtype, cannot be encoded; empty if they can."""

    def encode(self, values: Tensor) -> None:
        """Encode all values, of the published dtype, on the host, into the model. Raises: whatever a library does."""


class CastTensor:
    """A tensor in another float dtype."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._name, self._tensor = name, tensor
        self.shape, self.dtype = tuple(tensor.shape), None

    def parts(self) -> dict[str, Tensor]:
        """See `HeldForm`."""
        return {self._name: self._tensor.detach()}

    def problem(self, values: Tensor) -> str:
        """See `HeldForm`."""
        return _overflow(values, self._tensor.dtype)

    @torch.no_grad()
    def encode(self, values: Tensor) -> None:
        """See `HeldForm`."""
        self._tensor.copy_(values)


class CodedWeight:
    """The weight of a `QuantizedLinear`."""

    def __init__(self, name: str, layer: QuantizedLinear) -> None:
        self._name, self._layer = name, layer
        self.shape, self.dtype = (layer.out_features, layer.in_features), None

    def parts(self) -> dict[str, Tensor]:
        """See `HeldForm`."""
        return {
            f"{self._name}_codes": self._layer.weight_codes.detach(),
            f"{self._name}_scales": self._layer.weight_scales.detach(),
        }

    def problem(self, values: Tensor) -> str:
        """See `HeldForm`."""
        is_finite = bool(torch.isfinite(values).all())
        return "" if is_finite else f"has NaN or infinity, which {self._layer.weight_format} cannot code"

    @torch.no_grad()
    def encode(self, values: Tensor) -> None:
        """See `HeldForm`."""
        codes, scales = self._layer.encode(values.to(self._layer.weight_codes.device))
        self._layer.weight_codes.copy_(codes)
        self._layer.weight_scales.copy_(scales)


class LibraryTensor:
    """A tensor that a quantiser of transformers has made."""

    def __init__(self, name: str, model: nn.Module, requantizer: Requantizer) -> None:
        self._name, self._model, self._requantizer = name, model, requantizer
        self.shape, self.dtype = requantizer.shapes[name], requantizer.dtype

    def parts(self) -> dict[str, Tensor]:
        """See `HeldForm`."""
        found: dict[str, Tensor] = {}
        for name in self._names():
            found |= _leaves(name, _held(self._model, name))
        return found

    def _names(self) -> list[str]:
        """The names of the model's tensors for it, such as `weight` and `weight_scale_inv`."""
        parent, _, own = self._name.rpartition(".")
        module = self._model.get_submodule(parent)
        further = [key for key in (*module._parameters, *module._buffers) if key != own and key.startswith(own)]
        names = [f"{parent}.{key}" if parent else key for key in further if _held(module, key) is not None]
        return [self._name, *(name for name in names if name not in self._requantizer.shapes)]

    def problem(self, values: Tensor) -> str:
        """See `HeldForm`."""
        return _overflow(values, self.dtype)

    @torch.no_grad()
    def encode(self, values: Tensor) -> None:
        """See `HeldForm`. Tensors stay where they are, unless their class is one that only its library writes."""
        own = _held(self._model, self._name)
        made = self._requantizer.quantize(self._name, values.to(own.device, self.dtype))
        for name, new in made.items():
            if problem := _difference(_held(self._model, name), new):
                raise PublishError(
                    f"{name}: {problem}; load the model by from_pretrained(..., quantization_config=...)"
                )
        for name, new in made.items():
            old = _held(self._model, name)
            if _class(old) == "Tensor" or is_traceable_wrapper_subclass(old):
                for place, value in zip(_leaves(name, old).values(), _leaves(name, new).values(), strict=True):
                    place.copy_(value)
            else:  # as bitsandbytes' parameters, whose scales are attributes
                parent, _, key = name.rpartition(".")
                setattr(self._model.get_submodule(parent), key, new)


@dataclass(frozen=True, kw_only=True)
class EncodedTensor:
    """A tensor that a model holds in another form, and its kept values: [Note: Kept values]."""

    name: str
    """The name in the model."""
    published: tuple[str, ...]
    """The names in the version: several for stacked experts."""
    form: HeldForm
    values: Tensor
    """The kept values, in the published dtype, on the host."""
    is_current: bool
    """Whether the model's tensor is the encoding of the kept values."""

    def check(self, staged: Mapping[str, StagedTensor]) -> None:
        """Raise PublishError if new values cannot be encoded."""
        for name in self.published:
            full = staged[name].full
            if problem := self.form.problem(staged[name].changes[1] if full is None else full):
                raise PublishError(
                    f"{name} {problem}; nothing was applied. Read it into a model of the published dtype"
                )


@dataclass(frozen=True, kw_only=True)
class HeldTensors:
    """The tensors of a model, or the values that are kept for them, by their published names."""

    tensors: dict[str, Tensor]
    encoded: tuple[EncodedTensor, ...]


Marks = dict[str, tuple[object, ...]]


class LeftTensors(NamedTuple):
    """Tensors as an update has left them."""

    tensors: Mapping[str, Tensor]
    """They are held, so that no others come to lie where they are; none if marks are not trusted."""
    marks: Marks
    digests: dict[str, str]

    def digests_now(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """The digests of tensors: those that were left, if marks say that nothing has changed, or else taken."""
        is_known = bool(self.marks) and self.marks == marks_of(tensors)  # inference tensors have no marks
        return self.digests if is_known else digests_of(tensors)


NOTHING_LEFT = LeftTensors({}, {}, {})


class KeptValues:
    """The values that a reader keeps: [Note: Kept values]."""

    def __init__(self, *, cast: bool, trusts_marks: bool) -> None:
        self._cast, self._trusts_marks = cast, trusts_marks
        self._values: dict[str, Tensor] = {}
        self._encodings: dict[str, LeftTensors] = {}
        self._requantizer: tuple[weakref.ref[nn.Module], Requantizer] | None = None

    def hold(self, model: nn.Module | Mapping[str, Tensor], target: VersionManifest) -> HeldTensors:
        """Find the whole tensors of a model under the names of a version.

        Cost: a pass over those in other forms, unless their marks are trusted; at first host memory for their values.

        Raises:
            PublishError: a tensor is sharded, on the meta device, or in a form that nobody can encode.
        """
        dtypes = {each.name: each.torch_dtype for each in target.tensors}
        forms: dict[str, HeldForm] = {}
        if isinstance(model, nn.Module):
            contents, forms, tied = self._contents(model, target, dtypes)
            runs = in_folder(contents, target.names)
            tensors = contents.tensors
        else:
            for name, tensor in model.items():
                _check_plain(name, tensor)
            tensors, tied = _untied(model)
            runs = {name: FolderRun(name, 0, tuple(tensor.shape)) for name, tensor in tensors.items()}
        names: dict[str, list[str]] = {name: [] for name in tensors}
        for name in dtypes:
            if (run := runs.get(tied.get(name, name))) is not None:
                names[run.name].append(name)
        for name, tensor in tensors.items():
            if name in forms:
                continue
            _check_plain(name, tensor)
            wanted = {dtypes[each] for each in names[name]} - {tensor.dtype}
            if self._cast and tensor.dtype in CAST_DTYPES and wanted and wanted <= set(CAST_DTYPES):
                forms[name] = CastTensor(name, tensor)
        self._values = {name: values for name, values in self._values.items() if name in forms}
        self._encodings = {name: last for name, last in self._encodings.items() if name in forms}
        encoded = tuple(self._encoded(name, form, names[name], dtypes) for name, form in forms.items())
        tensors = tensors | {each.name: each.values for each in encoded}
        found = {name: _run(tensors[run.name], run) for name, run in runs.items()}
        found |= {name: found[first] for name, first in tied.items() if first in found}
        return HeldTensors(tensors=found, encoded=encoded)

    def begin(self, encoded: Sequence[EncodedTensor], staged: Mapping[str, StagedTensor]) -> list[EncodedTensor]:
        """Return the tensors to encode when staged values have been applied, and forget how they were encoded."""
        changed = {name for name, each in staged.items() if each.full is not None or len(each.changes[0])}
        stale = [each for each in encoded if not each.is_current or not changed.isdisjoint(each.published)]
        for each in stale:
            self._encodings.pop(each.name, None)
        return stale

    def encode(self, stale: Iterable[EncodedTensor]) -> None:
        """Encode kept values into the model.

        Raises:
            PublishError: a library cannot. The model is of two versions then, and the next update encodes the rest.
        """
        for each in stale:
            try:
                each.form.encode(each.values)
            except Exception as error:  # of any library, in several lines
                reason = " ".join(str(error).split())
                raise PublishError(
                    f"{each.name} cannot be encoded ({reason}); the model has parts of two versions. Update again"
                ) from error
            parts = each.form.parts()
            trusted = parts if self._trusts_marks else {}
            self._encodings[each.name] = LeftTensors(trusted, marks_of(trusted), digests_of(parts))

    def _encoded(
        self, name: str, form: HeldForm, published: Sequence[str], dtypes: Mapping[str, torch.dtype]
    ) -> EncodedTensor:
        parts = form.parts()
        for part, tensor in parts.items():
            _check_plain(part, tensor)
        if self._trusts_marks:
            check_counted(parts.values())
        dtype = next((dtypes[each] for each in published), None)
        if dtype not in CAST_DTYPES or not (form.dtype is None or self._cast):
            dtype = form.dtype or torch.get_default_dtype()  # `check_fit` refuses it, as for any tensor
        values = self._values.get(name)
        if values is None or (tuple(values.shape), values.dtype) != (form.shape, dtype):
            with torch.inference_mode(False):  # its tensors count no changes
                values = self._values[name] = torch.empty(form.shape, dtype=dtype)
        last = self._encodings.get(name, NOTHING_LEFT)
        is_current = last.digests == last.digests_now(parts)
        return EncodedTensor(name=name, published=tuple(published), form=form, values=values, is_current=is_current)

    def _contents(
        self, model: nn.Module, target: VersionManifest, published: Mapping[str, torch.dtype]
    ) -> tuple[CheckpointContents, dict[str, HeldForm], dict[str, str]]:
        """The tensors of a module, those in few bits without memory; the latter's forms; and the names of tied ones."""
        contents = contents_of(model, target.names, leaves_codes=True)
        tied = state.tied_names(model) if target.names != "hub" else {}
        if contents.model is None:  # adapters, which are as they are published
            return contents, {}, tied
        tensors, forms, shown = contents.tensors, dict[str, HeldForm](), contents.model
        layers = {id(layer.weight_codes): layer for layer in quantized_layers(model)}
        for name, parameter in state.named_parameters(model).items():
            if id(parameter) in layers and name not in published:
                weight = name.removesuffix("_codes")
                _check_plain(name, parameter)
                forms[weight] = CodedWeight(weight, layers[id(parameter)])
                tensors = {key: each for key, each in tensors.items() if key not in (name, f"{weight}_scales")}
        inner = getattr(model, "_orig_mod", model)
        if "hf_quantizer" in vars(inner) and not _is_as_published(tensors, published):
            tensors, library, shown = self._of_library(inner, tensors)
            forms |= library
        tensors = tensors | {name: torch.empty(form.shape, device="meta") for name, form in forms.items()}
        return CheckpointContents(tensors=tensors, model=shown), forms, tied

    def _of_library(
        self, model: nn.Module, tensors: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, HeldForm], nn.Module]:
        """The plain tensors of a model that transformers has quantised, the forms of others, and the plain model."""
        if self._requantizer is None or self._requantizer[0]() is not model:
            try:
                self._requantizer = weakref.ref(model), Requantizer(model)
            except JobError as error:
                raise PublishError(str(error)) from error
        requantizer = self._requantizer[1]
        modules = {name.rpartition(".")[0] for name in requantizer.names}
        plain = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in requantizer.names and (name in requantizer.shapes or name.rpartition(".")[0] not in modules)
        }
        forms: dict[str, HeldForm] = {name: LibraryTensor(name, model, requantizer) for name in requantizer.names}
        return plain, forms, requantizer.plain


def _is_as_published(tensors: Mapping[str, Tensor], published: Mapping[str, torch.dtype]) -> bool:
    """Whether a version has the tensors of a quantised model themselves, such as their codes."""
    return all(
        published.get(name) == tensor.dtype and not is_traceable_wrapper_subclass(tensor)
        for name, tensor in tensors.items()
    )


def check_counted(tensors: Iterable[Tensor]) -> None:
    """Raise PublishError unless tensors count their changes."""
    if any(each.is_inference() for each in tensors):
        raise PublishError(
            "the model was made in torch.inference_mode(), which does not count changes; make it outside, or give "
            'verify="each"'
        )


def marks_of(tensors: Mapping[str, Tensor]) -> Marks:
    """Where tensors lie, and how often torch's operations have changed them."""
    return {name: (each.data_ptr(), each.shape, each.stride(), each._version) for name, each in tensors.items()}


def _untied(model: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a dict, tied ones once; and the first name of each tied tensor by its further names."""
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in model.items():
        first.setdefault(memory_of(tensor), name)
    tied = {name: first[memory_of(tensor)] for name, tensor in model.items()}
    tied = {name: other for name, other in tied.items() if name != other}
    return {name: tensor for name, tensor in model.items() if name not in tied}, tied


def _check_plain(name: str, tensor: Any) -> None:
    """Raise PublishError unless a reader can fill this tensor."""
    if isinstance(tensor, DTensor):
        raise PublishError(
            f"{name} is a {type(tensor).__name__}, and a reader fills whole tensors; update a dict of whole tensors "
            "and give it to set_model_state_dict(), or take patches() and keep this rank's part"
        )
    if not isinstance(tensor, Tensor):
        raise PublishError(f"{name} is a {type(tensor).__name__}, and a reader fills tensors; leave it out")
    if is_traceable_wrapper_subclass(tensor):
        raise PublishError(
            f"{name} is a {type(tensor).__name__}, and a reader fills plain tensors; give it the model, if "
            "transformers or laconic.quantize_ has quantised it, or else take patches()"
        )
    if tensor.is_meta:
        raise PublishError(f"{name} is on the meta device; call model.to_empty(device=...) before reading")


def _run(tensor: Tensor, run: FolderRun) -> Tensor:
    """A view of the run of a tensor that a folder has as one."""
    if run.shape == tuple(tensor.shape):
        return tensor
    if not tensor.is_contiguous():
        raise PublishError(f"{run.name} is not contiguous, and the version has it in pieces; make it contiguous")
    return tensor.detach().view(-1)[run.start : run.start + math.prod(run.shape)].view(run.shape)


def _overflow(values: Tensor, dtype: torch.dtype) -> str:
    """Say that finite values become infinite in another dtype; empty if none does."""
    if torch.finfo(dtype).max >= torch.finfo(values.dtype).max:
        return ""
    is_lost = values.isfinite() & ~values.to(dtype).isfinite()
    return f"has values beyond {torch.finfo(dtype).max:g}, the largest of {dtype}" if bool(is_lost.any()) else ""


def _held(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer of a model. Raises: AttributeError."""
    parent, _, key = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(parent), key)
    return found


def _leaves(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors inside a tensor, by name; itself if it is one."""
    if not is_traceable_wrapper_subclass(tensor) or isinstance(tensor, DTensor):
        return {name: tensor.detach()}
    found: dict[str, Tensor] = {}
    for key in tensor.__tensor_flatten__()[0]:
        found |= _leaves(f"{name}.{key}", getattr(tensor, key))
    return found


def _difference(old: Tensor, new: Tensor) -> str:
    """How a tensor that was made anew differs in form from that of the model; empty if it does not."""
    has, makes = (
        " ".join(
            [_class(tensor), *(f"{key}{each.dtype}{list(each.shape)}" for key, each in _leaves("", tensor).items())]
        )
        for tensor in (old, new)
    )
    return "" if has == makes else f"its library makes {makes}, and the model has {has}"


def _class(tensor: Tensor) -> str:
    return "Tensor" if type(tensor) in (Tensor, nn.Parameter) else type(tensor).__name__
