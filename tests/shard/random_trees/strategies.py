"""Draws cases with hypothesis. Each draw begins with the simplest value, towards which hypothesis shrinks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hypothesis import strategies as st

from tests.shard.random_trees.case import (
    MODES,
    NEED_INPUT_GRADIENT,
    Axes,
    Case,
    Forward,
    Micro,
    Node,
    Precision,
    Step,
    Unit,
)
from tests.shard.random_trees.modules import CONTAINERS, OWN_LEAVES

T = TypeVar("T")

_LEAVES = ("linear", "mlp", "norm", "embedding", "conv", "identity", *OWN_LEAVES)
_NODES = (*CONTAINERS, "sequential")
_RETURNS = ("tensor", "tuple", "list", "dict", "nested", "dataclass", "namedtuple", "input")
_MAX_DEPTH = 3
_MAX_NODES = 9
AXES: dict[int, tuple[Axes, ...]] = {
    1: ((1, 1), (1,)),
    2: ((2, 1), (1, 2), (2,), (2, 1, 1)),
    3: ((3, 1), (1, 3), (3,), (3, 1, 1)),
    4: ((2, 2), (4, 1), (1, 4), (2, 2, 1), (2, 1, 2)),
}
"""The meshes of each number of ranks."""
_PRECISIONS = (
    Precision("float64"),
    Precision("float32"),
    Precision("bfloat16"),
    Precision("bfloat16", "float32"),
    Precision("float64", "float32", "float32"),
    Precision("bfloat16", "float32", "float64"),
    Precision(None, "float64"),
    Precision("float32", "float64", "float64"),
)


def _seldom(draw: Callable[[Any], Any], value: Any, otherwise: T, one_in: int = 4) -> Any:
    """Draw from `value`, a strategy, once in `one_in` times, else give `otherwise`."""
    return draw(value) if draw(st.integers(1, one_in)) == one_in else otherwise


class _Trees:
    """Draws the modules of one case."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.budget = _MAX_NODES
        self.dtype = draw(st.sampled_from(("float64", "float64", "float64", "float32", "bfloat16")))
        self.mixes = draw(st.integers(0, 3)) == 3
        self.precision = _seldom(draw, st.sampled_from(_PRECISIONS), None)

    def node(self, depth: int = 0, *, is_plain: bool = False) -> Node:
        """Draw a module. In a Sequential it `is_plain`: nobody casts between its children."""
        draw = self.draw
        self.budget -= 1
        is_leaf = depth == _MAX_DEPTH or self.budget <= 0 or (depth > 0 and draw(st.integers(0, 2)) == 0)
        kinds = _LEAVES if is_leaf else _NODES
        if is_plain:
            kinds = tuple(kind for kind in kinds if kind not in ("embedding", "conv"))
        kind = draw(st.sampled_from(kinds))
        children: list[Node] = []
        if not is_leaf:
            most = 1 if kind in ("twice", "alias", "inplace") else 3
            fewest = 2 if kind in ("gate", "spare", "branches") else 1
            inner_plain = is_plain or kind == "sequential"
            children = [self.node(depth + 1, is_plain=inner_plain) for _ in range(draw(st.integers(fewest, most)))]
        if kind == "sequential":
            children = [replace(child, style="plain", returns="tensor") for child in children]
        return Node(
            kind=kind,
            children=tuple(children),
            unit=self.unit(depth, is_plain=is_plain),
            dtype=self.dtype if is_plain or not self.mixes else draw(st.sampled_from(("float64", "float32"))),
            bias=draw(st.booleans()),
            size=draw(st.sampled_from((3, 1, 2, 5, 11))),
            frozen=_seldom(draw, st.sampled_from((-1, 1, 2, 5)), 0, 5),
            style=_seldom(draw, st.sampled_from(("checkpoint", "reentrant", "no_grad", "detach")), "plain", 6),
            takes=draw(st.sampled_from(("args", "kwargs", "dict", "tuple", "dataclass"))),
            returns=_seldom(draw, st.sampled_from(_RETURNS), "tensor", 2),
        )

    def unit(self, depth: int, *, is_plain: bool) -> Unit | None:
        """Draw whether a module is a unit; the root mostly is one."""
        draw = self.draw
        chances = (True, True, True, True, True, True, True, False) if depth == 0 else (False, True)
        if not draw(st.sampled_from(chances)):
            return None
        cache = draw(st.sampled_from(("none", "host", "device", "rank", "auto")))
        return Unit(
            cache=cache,
            gradients="node" if cache == "auto" else draw(st.sampled_from(("node", "rank"))),
            budget=draw(st.sampled_from((0, 300, 1000, 10**6))) if cache == "auto" else 0,
            reshard_after_forward=draw(st.sampled_from((None, False) if cache == "rank" else (None, True, False))),
            granularity=_seldom(draw, st.sampled_from(("rows", "elements", "whole")), None),
            checks=_seldom(draw, st.integers(0, 3), None, 2),
            offloads=_seldom(draw, st.just(True), False),
            precision=None if is_plain or self.precision is None or not draw(st.booleans()) else self.precision,
        )


class _Steps:
    """Draws the steps of one case."""

    def __init__(self, draw: Callable[[Any], Any], *, is_reentrant: bool) -> None:
        self.draw, self.is_reentrant = draw, is_reentrant
        self.modes = [mode for mode in MODES if not (is_reentrant and mode in NEED_INPUT_GRADIENT)]

    def step(self) -> Step:
        draw = self.draw
        syncs_all = draw(st.integers(0, 3)) < 3
        num_micros = draw(st.integers(1, 2)) if syncs_all else draw(st.integers(2, 3))
        micros = [self.micro(accumulates=not syncs_all) for _ in range(num_micros)]
        return Step(
            before=_seldom(draw, st.sampled_from(("no_grad", "inference_mode", "eval", "abandoned")), ""),
            micros=tuple(micros),
            syncs_all=syncs_all,
            clips=_seldom(draw, st.just(True), False),
            steps=draw(st.integers(0, 3)) < 3,
            zero=draw(st.sampled_from(("none", "none", "zeros", "keep"))),
            edits=_seldom(draw, st.sampled_from(("noticed", "unnoticed")), ""),
            toggles=_seldom(draw, st.integers(0, 30), None),
            moves=_seldom(draw, st.integers(0, 7), None),
        )

    def micro(self, *, accumulates: bool) -> Micro:
        """Draw a micro-batch. One that accumulates has a backward like the others, so the last one sends all."""
        draw = self.draw
        modes: Sequence[str] = self.modes
        if accumulates:
            modes = [mode for mode in modes if not mode.endswith("_only")]
        mode = draw(st.sampled_from(modes))
        forwards = [self.forward(mode, accumulates=accumulates) for _ in range(draw(st.integers(1, 3)))]
        return Micro(mode=mode, forwards=tuple(forwards), same_input=_seldom(draw, st.just(True), False))

    def forward(self, mode: str, *, accumulates: bool) -> Forward:
        draw = self.draw
        needs_grad = mode in NEED_INPUT_GRADIENT or (accumulates and self.is_reentrant)
        return Forward(
            rows=draw(st.sampled_from((2, 0, 1, 3))),
            needs_grad=draw(st.booleans()) or needs_grad,
            turn=0 if accumulates else draw(st.integers(0, 2)),
            takes=draw(st.sampled_from(("args", "kwargs", "dict", "dataclass"))),
            outputs=-1 if accumulates else _seldom(draw, st.integers(1, 3), -1),
        )


@st.composite
def cases(draw: Callable[[Any], Any], world: int) -> Case:
    """Draw a case for `world` ranks."""
    trees = _Trees(draw)
    root = trees.node()
    steps = _Steps(draw, is_reentrant=any(node.style == "reentrant" for node in root.walk()))
    axes = draw(st.sampled_from(AXES[world]))
    return Case(
        world=world,
        root=root,
        steps=tuple(steps.step() for _ in range(draw(st.integers(1, 3)))),
        axes=axes,
        shares=_seldom(draw, st.tuples(*[st.integers(1, 5)] * math.prod((axes or (world,))[-2:])), None),
        width=draw(st.sampled_from((3, 5, 6, 7))),
        seed=draw(st.integers(0, 1000)),
        optimizer=draw(
            st.sampled_from(("sgd", "momentum foreach", "sgd fused", "adamw", "adamw foreach", "adamw fused"))
        ),
        ties=_seldom(draw, st.just(True), False),
        ignored=_seldom(draw, st.integers(0, 30), None, 8),
    )
