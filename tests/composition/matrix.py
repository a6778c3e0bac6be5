"""The table of combinations. docs/composition.md and the test of every cell come from this table.

A cell is a strategy, an optimizer and a set of features. It works unless two of its parts are refused together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from laconic import registry

CACHES = tuple(
    name for name, each in registry.strategies().items() if each.is_own and each.in_compare and not each.has_islands
)
"""laconic's registered strategies that sync in every step: each is a row, with its keys of `fully_shard`."""
ISLANDS = ("replicas", "4bit replicas", "local steps", "partial updates")
CODED = (*(name for name in CACHES if "wire" in registry.named(name).shard), "4bit replicas")
CYCLIC = ("cyclic", "cyclic, sharded", "local steps around cyclic")
STRATEGIES = (*CACHES, *ISLANDS, *CYCLIC)
WELL_TESTED = ("host", "cyclic")
"""The strategies that are tested with every optimizer and feature at once, and with every two features."""
OPTIMIZERS = ("AdamW", "AdamW8bit", "Muon", "Shampoo")
FEATURES = ("LoRA", "tensor parallel", "checkpointing", "mixed precision", "compile")


def keys_of(name: str) -> dict[str, Any]:
    """The arguments of `fully_shard` that a row of `CACHES` has beside the others."""
    return {key: value for key, value in registry.named(name).shard.items() if key != "strategy"}


def _call(name: str) -> str:
    arguments = ", ".join(f'{key}="{value}"' for key, value in keys_of(name).items())
    return f"`fully_shard({arguments})`"


MEANING = {
    **{name: _call(name) for name in CACHES},
    "replicas": "islands that sum their gradients in every step: HSDP",
    "4bit replicas": 'the same with `Wire(gradients="int4")`',
    "local steps": "`LocalSteps` around sharded islands",
    "partial updates": "`partial_updates` in islands of `LocalSteps`",
    "cyclic": "`CyclicDataParallel`",
    "cyclic, sharded": '`CyclicDataParallel(states="sharded")`',
    "local steps around cyclic": "`LocalSteps` around islands that are cyclic runs; it drains an island before a sync",
    "AdamW": "`torch.optim.AdamW`; other element-wise optimizers of torch behave alike",
    "AdamW8bit": "`laconic.optim.AdamW8bit`, with its granularity",
    "Muon": "`laconic.optim.Muon`",
    "Shampoo": "`laconic.optim.Shampoo`",
    "LoRA": "peft's adapters in every linear layer of the blocks",
    "tensor parallel": "`parallelize_module` over another mesh axis, before `fully_shard`",
    "checkpointing": "`torch.utils.checkpoint` around every block",
    "mixed precision": "`MixedPrecisionPolicy` with bf16 computation; cyclic: `torch.autocast` in stages",
    "compile": "`block.compile()` for every block, before `fully_shard`",
}


@dataclass(frozen=True)
class Cell:
    """One combination."""

    strategy: str
    optimizer: str
    features: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return " + ".join([self.strategy, self.optimizer, *(name for name in FEATURES if name in self.features)])

    @property
    def parts(self) -> set[str]:
        return {self.strategy, self.optimizer, *self.features}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Two parts that are refused together, each one of several, with ValueError before the first step."""

    first: tuple[str, ...]
    second: str
    message: str
    """A part of the error's text."""
    remedy: str
    """The part of the error's text that says what to do."""


REFUSALS = (
    Refusal(
        first=("AdamW8bit",),
        second="tensor parallel",
        message="is cut over another mesh axis as well",
        remedy="use torch.optim.AdamW for it",
    ),
    Refusal(
        first=("Muon", "Shampoo"),
        second="tensor parallel",
        message="is cut over another mesh axis as well",
        remedy='put it into a group with algorithm="adamw"',
    ),
    Refusal(
        first=("partial updates",),
        second="LoRA",
        message="the model has LoRA adapters: only they train, and they are too small to slice",
        remedy="Leave partial_updates out",
    ),
    Refusal(
        first=("partial updates",),
        second="tensor parallel",
        message="is a DTensor, in parts already; partial updates slice whole tensors only",
        remedy="Leave out partial_updates, or the parallelism that has cut the tensor",
    ),
    Refusal(
        first=CYCLIC,
        second="tensor parallel",
        message="is a DTensor, but workers of the cyclic schedule exchange whole stages",
        remedy="leave tensor parallelism and fully_shard out",
    ),
)


def refusals_of(parts: set[str]) -> list[int]:
    """The indices of the refusals that these parts of a cell meet."""
    return [i for i, each in enumerate(REFUSALS) if each.second in parts and parts.intersection(each.first)]


def cells() -> list[Cell]:
    """The cells to test: each pair of parts, many triples, and all features at once."""
    fast = [name for name in FEATURES if name != "compile"]
    found: dict[Cell, None] = {}

    def add(strategy: str, optimizer: str = "AdamW", *features: str) -> None:
        found[Cell(strategy, optimizer, frozenset(features))] = None

    for strategy in STRATEGIES:
        for optimizer in OPTIMIZERS:
            add(strategy, optimizer)
        for name in FEATURES:
            add(strategy, "AdamW", name)
        add(strategy, "AdamW", *(name for name in fast if not refusals_of({strategy, name})))
    for strategy, optimizer, name in product(WELL_TESTED, OPTIMIZERS, fast):
        add(strategy, optimizer, name)
    for strategy, pair in product(WELL_TESTED, combinations(fast, 2)):
        add(strategy, "AdamW", *pair)
    for optimizer in OPTIMIZERS:
        add("host", optimizer, *(name for name in fast if not refusals_of({optimizer, name})))
        add("host", optimizer, "compile")
    for name in fast:
        add("host", "AdamW", "compile", name)
    return list(found)


def all_cells() -> list[Cell]:
    """The whole product."""
    sets = [frozenset(chosen) for count in range(len(FEATURES) + 1) for chosen in combinations(FEATURES, count)]
    return [Cell(*each) for each in product(STRATEGIES, OPTIMIZERS, sets)]
