"""Slices tile every sliced tensor, and consist of the right heads and units."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from laconic.config import SyncConfig
from laconic.partial.patterns import SLICED_BY_DEFAULT, Cut, DimRun, LayerPattern, sliced_layer
from laconic.partial.updates import partial_updates
from laconic.ragged.parts import slice_of_parameters, sliced_parameters
from tests.reference.partial import mask_by_hand
from tests.support.partial_models import BOTH, MLPS, MODELS, Mlp, MlpNet, active_mask, build


@pytest.mark.parametrize("kind", [kind for kind in MODELS if not kind.endswith("_mm")])
@pytest.mark.parametrize("num_slices", [2, 8])
def test_slices_tile_every_sliced_tensor_and_share_all_others(kind: str, num_slices: int) -> None:
    """All islands have the same parameters, and each trains its slice and what is shared."""
    plain = build(kind)
    options: dict[str, Any] = {"num_slices": num_slices, "include": BOTH}
    models = [partial_updates(copy.deepcopy(plain), slice_index=i, **options) for i in range(num_slices)]
    masks = [active_mask(model) for model in models]
    sliced, of = sliced_parameters(models[0]), slice_of_parameters(models[0])
    assert sliced
    for name, parameter in plain.named_parameters():
        held = sum(mask[name].int() for mask in masks)
        assert held.shape == parameter.shape
        has_shared = name not in sliced or len(sliced[name].part_names) > num_slices
        counts = [1] * (name in sliced) + [num_slices] * has_shared
        assert held.unique().tolist() == counts, name
    shapes = [[(name, p.shape) for name, p in model.named_parameters()] for model in models]
    assert all(other == shapes[0] for other in shapes)
    for index, model in enumerate(models):
        assert slice_of_parameters(model) == of
        assert all(p.requires_grad == (of[name] in (None, index)) for name, p in model.named_parameters())


def test_every_matrix_of_mlps_and_attention_is_sliced_and_nothing_else() -> None:
    for kind, count in (("llama", 7), ("llama-mha-biases", 7 + 5), ("phi3", 4), ("gpt2", 6), ("gpt-neox", 6)):
        names = sliced_parameters(partial_updates(build(kind), slice_index=0, num_slices=4, include=BOTH))
        assert len(names) == 2 * count, kind  # two layers
        assert not any(word in name for name in names for word in ("norm", "embed", "head", "ln_", "wte")), kind
    names = sliced_parameters(partial_updates(build("gpt-oss-eager"), slice_index=0, num_slices=4, include=BOTH))
    assert {name.split(".", 3)[3] for name in names} == {
        *(f"self_attn.{letter}_proj.{kind}" for letter in "qkv" for kind in ("weight", "bias")),
        "self_attn.o_proj.weight",
        *(f"mlp.experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj")),
    }
    named: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, ".mlp."), ({"include": ["mlp"]}, ".mlp."), ({"include": ["attention"]}, ".self_attn."),
    )  # fmt: skip
    for options, word in named:
        chosen = sliced_parameters(partial_updates(build("llama"), slice_index=0, num_slices=2, **options))
        assert chosen
        assert all(word in name for name in chosen), options
    assert SyncConfig().slice_include == SLICED_BY_DEFAULT, "a job slices what a call slices"


GPT2, GPT_OSS = "transformer.h.0", "model.layers.0.mlp.experts"
THIRDS = [third * 32 + i for third in range(3) for i in range(24, 32)]
HALVES = [*range(12, 24), *range(48 + 12, 48 + 24)]
MASKS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "qwen3": (1, 4, {  # 8 heads of 6 in 4 groups, which stay with their keys
        "model.layers.0.self_attn.q_proj.weight": ((48, 32), 0, range(12, 24)),
        "model.layers.0.self_attn.k_proj.weight": ((24, 32), 0, range(6, 12)),
        "model.layers.0.self_attn.v_proj.weight": ((24, 32), 0, range(6, 12)),
        "model.layers.0.self_attn.o_proj.weight": ((32, 48), 1, range(12, 24)),
        "model.layers.0.self_attn.q_norm.weight": None,
    }),
    "llama": (5, 8, {  # keys are shared where there are fewer groups than slices
        "model.layers.1.self_attn.k_proj.weight": None,
        "model.layers.1.self_attn.q_proj.weight": ((32, 32), 0, range(20, 24)),
    }),
    "phi3": (5, 8, {"model.layers.1.self_attn.qkv_proj.weight": ((64, 32), 0, [*range(20, 24), *range(32, 64)])}),
    "gpt2": (3, 4, {  # fused matrices are cut in each of the matrices that they hold
        f"{GPT2}.attn.c_attn.weight": ((32, 96), 1, THIRDS),
        f"{GPT2}.attn.c_attn.bias": ((96,), 0, THIRDS),
        f"{GPT2}.mlp.c_proj.weight": ((128, 32), 0, range(96, 128)),
        f"{GPT2}.mlp.c_proj.bias": None,
    }),
    "mixtral-eager": (1, 4, {
        f"{GPT_OSS}.gate_up_proj": ((4, 96, 32), 1, HALVES),
        f"{GPT_OSS}.down_proj": ((4, 32, 48), 2, range(12, 24)),
        "model.layers.0.mlp.gate.weight": None,
    }),
    "gpt-oss-eager": (1, 4, {  # side by side
        f"{GPT_OSS}.gate_up_proj": ((4, 32, 96), 2, range(24, 48)),
        f"{GPT_OSS}.gate_up_proj_bias": ((4, 96), 1, range(24, 48)),
    }),
}  # fmt: skip
"""Slice, number of slices, and what trains: the shape, a dim and places along it; None is all."""


@pytest.mark.parametrize("kind", MASKS)
def test_slices_have_the_right_heads_and_units(kind: str) -> None:
    slice_index, num_slices, wanted = MASKS[kind]
    masks = active_mask(partial_updates(build(kind), slice_index=slice_index, num_slices=num_slices, include=BOTH))
    for name, own in wanted.items():
        mask = masks[name]
        expected = torch.ones_like(mask) if own is None else mask_by_hand(own[0], own[1], list(own[2]))
        assert torch.equal(mask, expected), name


def test_experts_that_are_modules_are_sliced_one_by_one() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2, self.w3 = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 8)

    experts = nn.ModuleList(Expert() for _ in range(3))
    mask = active_mask(partial_updates(experts, slice_index=1, num_slices=2, include=["mlp"]))
    for expert in range(3):
        for name in ("w1", "w3"):
            assert torch.equal(mask[f"{expert}.{name}.weight"], mask_by_hand((8, 6), 0, [4, 5, 6, 7]))
            assert torch.equal(mask[f"{expert}.{name}.bias"], mask_by_hand((8,), 0, [4, 5, 6, 7]))
        assert torch.equal(mask[f"{expert}.w2.weight"], mask_by_hand((6, 8), 1, [4, 5, 6, 7]))
        assert mask[f"{expert}.w2.bias"].all()


def test_users_declare_their_own_modules() -> None:
    class Mixer(nn.Module):
        heads = 3

        def __init__(self) -> None:
            super().__init__()
            self.make, self.use = nn.Linear(5, 12), nn.Linear(12, 5)

    by_heads = sliced_layer(Mixer, kind="attention", rows=["make"], columns=["use"], units=lambda module: module.heads)
    options: dict[str, Any] = {"slice_index": 1, "include": ["attention"], "patterns": [by_heads]}
    mask = active_mask(partial_updates(Mixer(), num_slices=3, **options))
    assert torch.equal(mask["make.weight"], mask_by_hand((12, 5), 0, [4, 5, 6, 7]))
    with pytest.raises(ValueError, match=r"num_slices=2 does not divide the 3 heads or other units of make\.weight"):
        partial_updates(Mixer(), num_slices=2, **options)

    table = pattern_of("weight", 6, nn.Embedding, dim=1)
    model = partial_updates(nn.Embedding(4, 6), slice_index=2, num_slices=3, include=["mlp"], patterns=[table])
    assert torch.equal(active_mask(model)["weight"], mask_by_hand((4, 6), 1, [4, 5]))


def tied() -> nn.Module:
    model = nn.ModuleList([Mlp(), Mlp()])
    model[1].up.weight = model[0].up.weight
    return model


def pattern_of(parameter: str, stop: int, kind: type[nn.Module], dim: int = 0) -> LayerPattern:
    """Cut a parameter along a dim, in pairs along dim 1."""
    cut = Cut(parameter=parameter, dim=dim, segments=(DimRun(start=0, stop=stop, units=stop // (dim + 1)),))
    return LayerPattern(kind="mlp", find=lambda module: [cut] if isinstance(module, kind) else [])


LLAMA, HALF = partial(build, "llama"), {"slice_index": 0, "num_slices": 2}
OWN: dict[str, Any] = {**HALF, "include": ["mlp"], "patterns": MLPS}
TWICE = [sliced_layer(nn.ModuleList, kind="mlp", rows=["0.up"], columns=["0.down"]), *MLPS]
CONVOLUTION = partial(nn.Conv1d, 2, 4, 3, bias=False)
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (LLAMA, {**HALF, "num_slices": 5, "include": BOTH}, r"num_slices=5 does not divide the 8 heads .*q_proj"),
    (LLAMA, {**OWN, "num_slices": 9}, r"does not divide the 48 rows or columns of .*gate_proj"),
    (LLAMA, {**HALF, "slice_index": 2}, "slice_index 0 to num_slices - 1"),
    (LLAMA, {**HALF, "num_slices": 0}, "num_slices must be positive"),
    (LLAMA, {**HALF, "include": ["router"]}, "'router'"),
    (LLAMA, {**HALF, "include": []}, "include is empty"),
    (MlpNet, {**HALF, "include": BOTH}, "no attention and no mlp layer of MlpNet is known"),
    (lambda: partial_updates(LLAMA(), **HALF), HALF, "sliced already"),  # type: ignore[arg-type]
    (tied, OWN, r"0\.up\.weight and 1\.up\.weight are tied"),
    (lambda: nn.ModuleList([Mlp()]), {**OWN, "patterns": TWICE}, r"two patterns slice 0\.up\.weight"),
    (CONVOLUTION, {**OWN, "patterns": [pattern_of("weight", 4, nn.Module)]}, r"\(4, 2, 3\) is cut along dim 0"),
    (Mlp, {**OWN, "patterns": [pattern_of("up.bias", 6, Mlp)]}, "do not cover dim 0"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), REFUSED)
def test_what_cannot_be_sliced_is_refused_by_name_before_anything_changes(
    make: Callable[[], Any], arguments: dict[str, Any], message: str
) -> None:
    model = make()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=message):
        partial_updates(model, **arguments)
    assert [name for name, _ in model.named_parameters()] == names


@given(
    widths=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.booleans()), min_size=1, max_size=4),
    num_slices=st.integers(1, 4),
)
def test_parts_and_whole_are_each_other(widths: list[tuple[int, int, bool]], num_slices: int) -> None:
    """`widths` has (units per slice, width of a unit, is shared) for every segment."""
    segments, start = [], 0
    for units, width, is_shared in widths:
        count = num_slices * units + (1 if is_shared else 0)
        segments.append(DimRun(start=start, stop=start + count * width, units=count, may_be_shared=is_shared))
        start = segments[-1].stop
    cut = Cut(parameter="weight", dim=1, segments=tuple(segments))
    sliced = cut.apply((2, start, 3), num_slices)
    covered = [index for piece in sliced.pieces for index in range(piece.start, piece.start + piece.length)]
    assert covered == list(range(start))
    if cut.is_shared(num_slices):
        return
    whole = torch.randn(2, start, 3)
    parts = sliced.split(whole)
    assert len(parts) == len(sliced.part_names)
    assert len({part.shape for part in parts[:num_slices]}) == 1
    assert sum(part.numel() for part in parts) == whole.numel()
    assert torch.equal(sliced.join(parts), whole)
