"""Which tensors of a model partial updates slice, and where: across the width of every MLP and attention layer.

[Note: What a slice is]
A hidden unit of an MLP is a row of the matrices that make it, with its entry of their biases, and a column of the one
that uses it; slice i of S has the i-th S-th of the units. In attention the units are heads, and with grouped queries
the groups of heads that share keys and values. If S does not divide the groups but does divide the heads, queries and
outputs are sliced and keys and values are shared: every slice trains them. Shared too is all that has no such units:
embeddings, norms, routers, the output layer, and the biases of whatever adds to the residual stream. (Partial Parameter
Updates, arXiv 2509.22418, slices across the width; which tensors, and the rule for groups, are ours.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from laconic.ragged.parts import Piece, SlicedParameter

Kind = Literal["mlp", "attention"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run [start, stop) of one dim, of `units` equal parts that stay whole."""

    start: int
    stop: int
    units: int
    may_be_shared: bool = False
    """Every slice trains all of it if its units cannot be dealt out evenly; without, that is an error."""

    def is_shared(self, slices: int) -> bool:
        """True if it is not sliced."""
        return self.may_be_shared and self.units % slices != 0

    def part(self, slice: int, slices: int) -> tuple[int, int]:
        """Slice `slice` of it, [start, stop)."""
        length = (self.stop - self.start) // slices
        return self.start + slice * length, self.start + (slice + 1) * length


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one tensor of a module is sliced."""

    parameter: str
    """Its name in the module."""
    dim: int
    segments: tuple[Segment, ...]
    """Of `dim`, in order, without gaps: a fused matrix has one for each matrix in it."""
    is_factor: bool = True
    """Inputs are multiplied with it; a bias, which is added, is not one."""

    def shared(self, slices: int) -> tuple[tuple[int, int], ...]:
        """The ranges of `dim` that every slice trains."""
        return tuple((segment.start, segment.stop) for segment in self.segments if segment.is_shared(slices))

    def ranges(self, slice: int, slices: int) -> tuple[tuple[int, int], ...]:
        """The ranges of `dim` that slice `slice` alone trains; over all slices they tile what is not shared."""
        return tuple(segment.part(slice, slices) for segment in self.segments if not segment.is_shared(slices))

    def applied(self, shape: tuple[int, ...], slices: int) -> SlicedParameter:
        """The parameter of this shape, cut so. All slices have parts of equal shape."""
        ranges = [*(self.ranges(index, slices) for index in range(slices)), self.shared(slices)]
        pieces = []
        for part, runs in enumerate(ranges):
            offset = 0
            for start, stop in runs:
                pieces.append(Piece(start=start, length=stop - start, part=part, offset=offset))
                offset += stop - start
        return SlicedParameter(
            name=self.parameter,
            shape=shape,
            dim=self.dim,
            slices=slices,
            pieces=tuple(sorted(pieces, key=lambda piece: piece.start)),
            is_factor=self.is_factor,
        )

    def check(self, name: str, slices: int) -> None:
        """Refuse a number of slices that units cannot be dealt out to; `name` is the tensor's in the model."""
        for segment in self.segments:
            if segment.units % slices and not segment.may_be_shared:
                kind = "rows or columns" if segment.units == segment.stop - segment.start else "heads or other units"
                raise ValueError(
                    f"slices={slices} does not divide the {segment.units} {kind} of {name}; use a divisor of "
                    f"{segment.units}, or leave such layers out with include="
                )


@dataclass(frozen=True, kw_only=True)
class LayerPattern:
    """A kind of layer, recognised by its parts."""

    kind: Kind
    find: Callable[[nn.Module], Sequence[Cut]]
    """The cuts of a module; none if it is no such layer."""


def sliced_layer(
    module_class: type[nn.Module],
    *,
    kind: Kind,
    rows: Sequence[str],
    columns: Sequence[str],
    units: Callable[[nn.Module], int] | None = None,
) -> LayerPattern:
    """Declare how to slice modules of a class of one's own.

    Args:
        module_class: the class; all its instances are sliced.
        kind: what `include=` knows it as.
        rows: children, linear layers, that make the units: their outputs are cut, and their biases.
        columns: children, linear layers, that use the units: their inputs are cut.
        units: how many parts, heads say, must stay whole, of a module. Default: every output is one.
    """

    def find(module: nn.Module) -> list[Cut]:
        if not isinstance(module, module_class):
            return []
        for child in (*rows, *columns):
            if not is_linear(module.get_submodule(child)):
                raise ValueError(
                    f"{child} of {type(module).__name__} is a {type(module.get_submodule(child)).__name__}; rows and "
                    "columns name linear layers. Give a LayerPattern that returns Cuts for other tensors"
                )
        count = units(module) if units is not None else None
        made = [
            cut for child in rows for cut in outputs(module, child, [_segment(0, _width_out(module, child), count)])
        ]
        used = [inputs(module, child, count or _width_in(module, child)) for child in columns]
        return [*made, *used]

    return LayerPattern(kind=kind, find=find)


# -- linear layers -----------------------------------------------------------------------------------------------------


def is_linear(module: object) -> bool:
    """nn.Linear, or the Conv1D of GPT-2, which stores its weight transposed."""
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def outputs(module: nn.Module, child: str, segments: Sequence[Segment]) -> list[Cut]:
    """Cut what a linear layer puts out: its weight and its bias."""
    linear = module.get_submodule(child)
    cuts = [Cut(parameter=f"{child}.weight", dim=int(_is_conv1d(linear)), segments=tuple(segments))]
    if getattr(linear, "bias", None) is not None:
        cuts.append(Cut(parameter=f"{child}.bias", dim=0, segments=tuple(segments), is_factor=False))
    return cuts


def inputs(module: nn.Module, child: str, units: int) -> Cut:
    """Cut what a linear layer takes in: its weight alone, for the bias belongs to all units."""
    dim = int(not _is_conv1d(module.get_submodule(child)))
    return Cut(parameter=f"{child}.weight", dim=dim, segments=(_segment(0, _width_in(module, child), units),))


def _is_conv1d(module: object) -> bool:
    return any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)  # transformers is not imported for it


def _weight(module: nn.Module, child: str) -> Tensor:
    weight = module.get_submodule(child).weight
    assert isinstance(weight, Tensor)
    return weight


def _width_out(module: nn.Module, child: str) -> int:
    return _weight(module, child).shape[int(_is_conv1d(module.get_submodule(child)))]


def _width_in(module: nn.Module, child: str) -> int:
    return _weight(module, child).shape[int(not _is_conv1d(module.get_submodule(child)))]


def _segment(start: int, width: int, units: int | None = None, *, may_be_shared: bool = False) -> Segment:
    return Segment(start=start, stop=start + width, units=units or width, may_be_shared=may_be_shared)


def _linears(module: nn.Module, *names: str) -> bool:
    return all(is_linear(module._modules.get(name)) for name in names)


# -- MLPs --------------------------------------------------------------------------------------------------------------

_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),  # Llama, Mistral, Qwen, the experts of mixtures
    (("up_proj",), "down_proj"),  # without a gate: Nemotron
    (("c_fc",), "c_proj"),  # GPT-2
    (("fc1",), "fc2"),  # OPT, Phi
    (("dense_h_to_4h",), "dense_4h_to_h"),  # GPT-NeoX
    (("w1", "w3"), "w2"),  # experts, one by one
)
"""Children that make hidden units, and the child that uses them."""


def _mlp(module: nn.Module) -> list[Cut]:
    for made, used in _MLPS:
        if _linears(module, *made, used):
            rows = [cut for child in made for cut in outputs(module, child, [_segment(0, _width_out(module, child))])]
            return [*rows, inputs(module, used, _width_in(module, used))]
    return []


def _fused_mlp(module: nn.Module) -> list[Cut]:
    """Phi-3: gates and ups in one matrix."""
    if not _linears(module, "gate_up_proj", "down_proj"):
        return []
    width = _width_in(module, "down_proj")
    segments = [_segment(0, width), _segment(width, width)]
    return [*outputs(module, "gate_up_proj", segments), inputs(module, "down_proj", width)]


def _experts(module: nn.Module) -> list[Cut]:
    """The experts of a mixture as transformers 5 has them: (experts, out, in) or, transposed, (experts, in, out)."""
    down = module._parameters.get("down_proj")
    name = next((name for name in ("gate_up_proj", "up_proj") if module._parameters.get(name) is not None), None)
    if down is None or name is None or down.ndim != 3:
        return []
    up = module._parameters[name]
    assert up is not None
    ups = 2 if name == "gate_up_proj" else 1
    if up.shape[1:] == (ups * down.shape[2], down.shape[1]):
        up_dim, down_dim = 1, 2
    elif up.shape[1:] == (down.shape[2], ups * down.shape[1]):
        up_dim, down_dim = 2, 1
    else:
        return []
    width = down.shape[down_dim]
    if getattr(module, "is_concatenated", True):
        segments = tuple(_segment(index * width, width) for index in range(ups))
    else:  # gate and up of a unit lie side by side
        segments = (_segment(0, ups * width, width),)
    cuts = [Cut(parameter=name, dim=up_dim, segments=segments)]
    if module._parameters.get(f"{name}_bias") is not None:
        cuts.append(Cut(parameter=f"{name}_bias", dim=1, segments=segments, is_factor=False))
    return [*cuts, Cut(parameter="down_proj", dim=down_dim, segments=(_segment(0, width),))]


# -- attention ---------------------------------------------------------------------------------------------------------


def _separate_attention(module: nn.Module) -> list[Cut]:
    """Llama, Mistral, Qwen, GPT-OSS, OPT: a matrix each; what is head-major stays whole by heads."""
    output = next((name for name in ("o_proj", "out_proj", "dense") if _linears(module, name)), None)
    if output is None or not _linears(module, "q_proj", "k_proj", "v_proj"):
        return []
    heads = _heads(module, _width_in(module, output))
    groups = _heads(module, _width_out(module, "k_proj"))
    cuts = outputs(module, "q_proj", [_segment(0, _width_out(module, "q_proj"), heads)])
    for child in ("k_proj", "v_proj"):
        cuts += outputs(module, child, [_segment(0, _width_out(module, child), groups, may_be_shared=True)])
    return [*cuts, inputs(module, output, heads)]


def _fused_attention(module: nn.Module) -> list[Cut]:
    """GPT-2 and Phi-3: queries, keys and values below each other in one matrix."""
    for fused, output in (("c_attn", "c_proj"), ("qkv_proj", "o_proj")):
        if not _linears(module, fused, output) or _linears(module, "q_attn"):  # q_attn: across to an encoder
            continue
        if fused == "c_attn" and not _is_conv1d(module._modules["c_attn"]):  # GPT-BigCode has another order
            continue
        queries = _width_in(module, output)
        keys = (_width_out(module, fused) - queries) // 2
        heads, groups = _heads(module, queries), _heads(module, keys)
        segments = [
            _segment(0, queries, heads),
            _segment(queries, keys, groups, may_be_shared=True),
            _segment(queries + keys, keys, groups, may_be_shared=True),
        ]
        return [*outputs(module, fused, segments), inputs(module, output, heads)]
    return []


def _interleaved_attention(module: nn.Module) -> list[Cut]:
    """GPT-NeoX: a head's query, key and value rows lie together."""
    if not _linears(module, "query_key_value", "dense"):
        return []
    width, queries = _width_out(module, "query_key_value"), _width_in(module, "dense")
    if width != 3 * queries:
        return []
    heads = _heads(module, queries)
    return [*outputs(module, "query_key_value", [_segment(0, width, heads)]), inputs(module, "dense", heads)]


def _heads(module: nn.Module, width: int) -> int:
    size = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    if not isinstance(size, int) or width % size:
        raise ValueError(
            f"cannot tell the heads of {type(module).__name__}: it has {width} features and head_dim={size}; set "
            "module.head_dim, or declare the module in patterns= with sliced_layer"
        )
    return width // size


PATTERNS = (
    LayerPattern(kind="attention", find=_separate_attention),
    LayerPattern(kind="attention", find=_fused_attention),
    LayerPattern(kind="attention", find=_interleaved_attention),
    LayerPattern(kind="mlp", find=_mlp),
    LayerPattern(kind="mlp", find=_fused_mlp),
    LayerPattern(kind="mlp", find=_experts),
)
"""What is known of transformers' models; the first that finds something in a module is taken."""
