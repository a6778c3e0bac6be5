"""The layers that partial updates know, and how to declare others.

[Note: Slices of a layer]
A hidden unit of an MLP is one row of each matrix that computes it, with its entry of their biases, and one column of
the matrix that uses it. With S slices, slice i has the i-th of S equal runs of units. In attention the units are heads.
With grouped queries the units are the groups of heads that share keys and values. If S divides the heads but not the
groups, queries and outputs are sliced, and keys and values are shared: every slice trains them. All tensors without
such units are shared too: embeddings, norms, routers, the output layer, and the biases of layers that add to the
residual stream. Partial Parameter Updates (arXiv 2509.22418) slices across the width. Its reviews name "1/4 of the
MLP", so MLPs are what we slice by default; the choice of tensors in attention and the rule for groups are our own.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

from torch import nn

from laconic.ragged.parts import SlicedParameter, SlicePiece


@dataclass(frozen=True, kw_only=True)
class DimRun:
    """The run [start, stop) of a dim. It consists of `units` units of equal width, and a unit stays in one slice."""

    start: int
    stop: int
    units: int
    may_be_shared: bool = False
    """If the slices cannot have equally many units: True lets every slice train the whole segment; False refuses it."""

    def is_shared(self, num_slices: int) -> bool:
        """True if every slice trains the whole segment."""
        return self.may_be_shared and self.units % num_slices != 0


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one tensor of a module is sliced."""

    parameter: str
    """The tensor's name in the module; dots lead to submodules."""
    dim: int
    """The dim of the tensor that is cut."""
    segments: tuple[DimRun, ...]
    """All of `dim`, in order and without gaps. A tensor that fuses several matrices has a segment for each matrix."""
    is_factor: bool = True
    """True if inputs are multiplied with the tensor; False for a bias, which is added."""

    def is_shared(self, num_slices: int) -> bool:
        """True if every slice trains the whole tensor."""
        return all(segment.is_shared(num_slices) for segment in self.segments)

    def apply(self, shape: tuple[int, ...], num_slices: int) -> SlicedParameter:
        """Describe the parts of a tensor of `shape`. The parts of all slices have the same shape."""
        pieces: list[SlicePiece] = []
        sizes = [0] * (num_slices + 1)  # each part's length so far; the last part is the shared one
        for segment in self.segments:
            parts = [num_slices] if segment.is_shared(num_slices) else range(num_slices)
            length = (segment.stop - segment.start) // len(parts)
            for index, part in enumerate(parts):
                start = segment.start + index * length
                pieces.append(SlicePiece(start=start, length=length, part=part, offset=sizes[part]))
                sizes[part] += length
        return SlicedParameter(
            name=self.parameter,
            shape=shape,
            dim=self.dim,
            num_slices=num_slices,
            pieces=tuple(pieces),
            is_factor=self.is_factor,
        )

    def check(self, name: str, shape: tuple[int, ...], num_slices: int) -> None:
        """Raise ValueError if units, dim or segments of the cut do not fit the tensor `name` of the model."""
        for segment in self.segments:
            if segment.units % num_slices and not segment.may_be_shared:
                kind = "rows or columns" if segment.units == segment.stop - segment.start else "heads or other units"
                raise ValueError(
                    f"num_slices={num_slices} does not divide the {segment.units} {kind} of {name}; set num_slices "
                    f"(sync.slices in a job) to a divisor of {segment.units}, or leave such layers out of include "
                    "(sync.slice_include)"
                )
        if self.is_factor and self.dim < len(shape) - 2:
            raise ValueError(
                f"{name} of shape {shape} is cut along dim {self.dim}; slices go across the width of a layer, which is "
                "one of the last two dims"
            )
        ends = [0, *(segment.stop for segment in self.segments)]
        if [segment.start for segment in self.segments] != ends[:-1] or ends[-1] != shape[self.dim]:
            raise ValueError(
                f"the segments of {name} do not cover dim {self.dim} of {shape} in order: "
                f"{[(segment.start, segment.stop) for segment in self.segments]}"
            )


Kind = Literal["mlp", "attention"]
SLICED_BY_DEFAULT: tuple[Kind, ...] = ("mlp",)
"""The kinds of layers that are sliced unless a user names others. Islands that train different heads do not see each
other's changes of what attention attends to, and what their mean loses grows with the number of slices."""


@dataclass(frozen=True, kw_only=True)
class LayerPattern:
    """One form of a kind of layer, and how to find its cuts."""

    kind: Kind
    find: Callable[[nn.Module], Sequence[Cut]]
    """Returns the cuts of a module; none if the module is another kind of layer."""


def sliced_layer(
    module_class: type[nn.Module],
    *,
    kind: Kind,
    rows: Sequence[str],
    columns: Sequence[str],
    units: Callable[[nn.Module], int] | None = None,
) -> LayerPattern:
    """Declare for `partial_updates(patterns=...)` how all modules of a user's own class are sliced.

    `rows` name the linear children that compute the units: the outputs of their weights and biases are cut. `columns`
    name the linear children that use the units: the inputs of their weights are cut. `units` returns a module's number
    of units; by default every output is a unit. `partial_updates` raises ValueError for a child that is not linear.
    """

    def find(module: nn.Module) -> list[Cut]:
        if not isinstance(module, module_class):
            return []
        for child in (*rows, *columns):
            if not _is_linear(layer := module.get_submodule(child)):
                raise ValueError(
                    f"{child} of {type(module).__name__} is a {type(layer).__name__}; rows and columns name linear "
                    "layers. Give a LayerPattern that returns Cuts for other tensors"
                )
        num_units = units(module) if units is not None else None
        row_layers, column_layers = (
            [_Linear(name, module.get_submodule(name)) for name in own] for own in (rows, columns)
        )
        cuts = [layer.cut_outputs(_Part(layer.num_outputs, num_units or layer.num_outputs)) for layer in row_layers]
        return [*chain(*cuts), *(layer.cut_inputs(num_units or layer.num_inputs) for layer in column_layers)]

    return LayerPattern(kind=kind, find=find)


def find_cuts(
    model: nn.Module, include: Collection[Kind], patterns: Iterable[LayerPattern]
) -> dict[str, tuple[nn.Module, Cut]]:
    """Find all cuts of a model. Returns (module, cut) by the tensor's name in the model; the cut has the short name.

    In each module the first pattern that finds cuts is used; the user's `patterns` go before `PATTERNS`. Raises
    ValueError if two patterns cut one tensor, or if the model has no layer of a kind in `include`.
    """
    found: dict[str, tuple[nn.Module, Cut]] = {}
    patterns = [pattern for pattern in (*patterns, *PATTERNS) if pattern.kind in include]
    missing = set(include)
    for prefix, module in model.named_modules():
        kind, cuts = next(((p.kind, cuts) for p in patterns if (cuts := p.find(module))), (None, ()))
        missing.discard(kind)
        for cut in cuts:
            path, _, name = cut.parameter.rpartition(".")
            full_name = ".".join(filter(None, (prefix, cut.parameter)))
            if full_name in found:
                raise ValueError(f"two patterns slice {full_name}; give one that covers both layers")
            found[full_name] = (module.get_submodule(path), replace(cut, parameter=name))
    if missing:
        raise ValueError(
            f"no {' and no '.join(sorted(missing))} layer of {type(model).__name__} is known; declare its class with "
            "patterns=[sliced_layer(...)], or leave it out of include (sync.slice_include in a job)"
        )
    return found


# -- linear layers -----------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Neighbouring indices of a dim that form units of equal width: see `DimRun`."""

    width: int
    units: int
    may_be_shared: bool = False


def _segments(*parts: _Part) -> tuple[DimRun, ...]:
    """Lay parts out one after the other."""
    ends = accumulate(part.width for part in parts)
    return tuple(
        DimRun(start=stop - part.width, stop=stop, units=part.units, may_be_shared=part.may_be_shared)
        for part, stop in zip(parts, ends, strict=True)
    )


class _Linear:
    """A linear child of a module: nn.Linear, or the Conv1D of GPT-2, which stores its weight transposed."""

    def __init__(self, name: str, layer: Any) -> None:
        self.name, self.bias = name, getattr(layer, "bias", None)
        self.is_conv1d = _is_conv1d(layer)
        self.num_outputs, self.num_inputs = layer.weight.shape[:: -1 if self.is_conv1d else 1]

    def cut_outputs(self, *parts: _Part) -> list[Cut]:
        """Cut the rows of the weight, and the bias."""
        segments = _segments(*parts)
        cuts = [Cut(parameter=f"{self.name}.weight", dim=int(self.is_conv1d), segments=segments)]
        if self.bias is not None:
            cuts.append(Cut(parameter=f"{self.name}.bias", dim=0, segments=segments, is_factor=False))
        return cuts

    def cut_inputs(self, units: int) -> Cut:
        """Cut the columns of the weight; the bias belongs to all units."""
        segments = _segments(_Part(self.num_inputs, units))
        return Cut(parameter=f"{self.name}.weight", dim=int(not self.is_conv1d), segments=segments)


def _linears(module: nn.Module, *names: str) -> list[_Linear]:
    """Return the children of these names if all of them are linear layers; otherwise an empty list."""
    layers = [_Linear(name, layer) for name in names if _is_linear(layer := module._modules.get(name))]
    return layers if len(layers) == len(names) else []


def _is_linear(module: object) -> bool:
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: object) -> bool:
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)  # does not import transformers


# -- MLPs --------------------------------------------------------------------------------------------------------------

_MLPS = (
    ("gate_proj", "up_proj", "down_proj"),  # Llama, Mistral, Qwen, the experts of mixtures
    ("up_proj", "down_proj"),  # without a gate: Nemotron
    ("gate_up_proj", "down_proj"),  # Phi-3: the gate and the up projection in one matrix
    ("c_fc", "c_proj"),  # GPT-2
    ("fc1", "fc2"),  # OPT, Phi
    ("dense_h_to_4h", "dense_4h_to_h"),  # GPT-NeoX
    ("w1", "w3", "w2"),  # a mixture whose experts are modules
)
"""The names of the children that compute hidden units, and of the child that uses the units."""


def _mlp(module: nn.Module) -> list[Cut]:
    for names in _MLPS:
        if layers := _linears(module, *names):
            *rows, down = layers
            part = _Part(down.num_inputs, down.num_inputs)
            cuts = [row.cut_outputs(*[part] * (row.num_outputs // part.width)) for row in rows]
            return [*chain(*cuts), down.cut_inputs(part.units)]
    return []


def _experts(module: nn.Module) -> list[Cut]:
    """Transformers 5 stacks the experts of a mixture: (experts, out, in) or, transposed, (experts, in, out)."""
    down = module._parameters.get("down_proj")
    name = next((name for name in ("gate_up_proj", "up_proj") if module._parameters.get(name) is not None), None)
    if down is None or name is None or down.ndim != 3:
        return []
    up = module._parameters[name]
    assert up is not None
    num_ups = 2 if name == "gate_up_proj" else 1
    for up_dim, down_dim in ((1, 2), (2, 1)):
        width = down.shape[down_dim]
        if (up.shape[up_dim], up.shape[down_dim]) == (num_ups * width, down.shape[up_dim]):
            break
    else:
        return []
    if getattr(module, "is_concatenated", True):
        segments = _segments(*[_Part(width, width)] * num_ups)
    else:  # the rows of a unit's gate and up projection alternate
        segments = _segments(_Part(num_ups * width, width))
    cuts = [Cut(parameter=name, dim=up_dim, segments=segments)]
    if module._parameters.get(f"{name}_bias") is not None:
        cuts.append(Cut(parameter=f"{name}_bias", dim=1, segments=segments, is_factor=False))
    return [*cuts, Cut(parameter="down_proj", dim=down_dim, segments=_segments(_Part(width, width)))]


# -- attention ---------------------------------------------------------------------------------------------------------

_ATTENTIONS = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),  # Llama, Mistral, Qwen, GPT-OSS
    ("q_proj", "k_proj", "v_proj", "out_proj"),  # OPT
    ("q_proj", "k_proj", "v_proj", "dense"),  # Phi
    ("c_attn", "c_proj"),  # GPT-2: one matrix has all queries, then all keys, then all values
    ("qkv_proj", "o_proj"),  # Phi-3: so, too
)
"""The names of the children that compute queries, keys and values, and of the child that uses the heads."""


def _attention(module: nn.Module) -> list[Cut]:
    for names in _ATTENTIONS:
        if not (layers := _linears(module, *names)):
            continue
        *rows, output = layers
        is_fused = len(rows) == 1
        if is_fused and _linears(module, "q_attn"):  # attention to an encoder
            continue
        if names[0] == "c_attn" and not rows[0].is_conv1d:  # GPT-BigCode has another order
            continue
        queries = output.num_inputs
        keys = (sum(row.num_outputs for row in rows) - queries) // 2
        heads = _heads(module, queries)
        key = _Part(keys, _heads(module, keys), may_be_shared=True)
        parts = [_Part(queries, heads), key, key]
        cuts = [row.cut_outputs(*own) for row, own in zip(rows, [parts] if is_fused else zip(parts), strict=True)]
        return [*chain(*cuts), output.cut_inputs(heads)]
    return []


def _interleaved_attention(module: nn.Module) -> list[Cut]:
    """GPT-NeoX: one matrix has the query, key and value rows of a head, then those of the next head."""
    layers = _linears(module, "query_key_value", "dense")
    if not layers or layers[0].num_outputs != 3 * layers[1].num_inputs:
        return []
    heads = _heads(module, layers[1].num_inputs)
    return [*layers[0].cut_outputs(_Part(layers[0].num_outputs, heads)), layers[1].cut_inputs(heads)]


def _heads(module: nn.Module, width: int) -> int:
    """Return the number of heads in `width` features."""
    size = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    if not isinstance(size, int) or width % size:
        raise ValueError(
            f"cannot tell the heads of {type(module).__name__}: it has {width} features and head_dim={size}; set "
            "module.head_dim, or declare the module in patterns= with sliced_layer"
        )
    return width // size


PATTERNS = (
    LayerPattern(kind="attention", find=_attention),
    LayerPattern(kind="attention", find=_interleaved_attention),
    LayerPattern(kind="mlp", find=_mlp),
    LayerPattern(kind="mlp", find=_experts),
)
