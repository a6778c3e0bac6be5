"""The table of combinations. docs/composition.md and the test of every cell come from this table.

A cell is a strategy, an optimizer and a set of features. It works unless two of its parts are refused together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from laconic import registry
from laconic.shard.policies import Wire
from tests.composition import columns

CACHES = tuple(
    name
    for name, each in registry.strategies().items()
    if each.is_own and each.in_compare and not each.has_islands and each.pipeline is None
)
"""laconic's registered strategies that sync in every step and hold all layers: each is a row, with its keys of
`fully_shard`."""
ISLANDS = ("replicas", "4bit replicas", "local steps", "partial updates")
_WIRES = {name: Wire.of(registry.named(name).shard.get("wire")) for name in CACHES}
CODED = (
    *(name for name, wire in _WIRES.items() if not (wire.keeps_weights and wire.keeps_gradients)),
    "4bit replicas",
    "cyclic, 8bit",
)
"""The strategies whose crossings lose something."""
LOSSLESS = tuple(name for name, wire in _WIRES.items() if wire.weights == "lossless")
"""The strategies that refuse weights of 32 bits: all their cells have mixed precision."""
THIN = tuple(name for name, wire in _WIRES.items() if wire != Wire())
"""The strategies of `CACHES` with coded crossings."""
CYCLIC = ("cyclic", "cyclic, 8bit", "cyclic, sharded", "local steps around cyclic")
STRATEGIES = (*CACHES, *ISLANDS, *CYCLIC)
WELL_TESTED = ("host", "cyclic")
"""The strategies that are tested with every optimizer and feature at once, and with every two features."""
OPTIMIZERS = ("AdamW", "AdamW8bit", "Muon", "Shampoo")
OUTER = ("tensor parallel", "expert parallel")
"""The features that cut parameters over another mesh axis."""
FEATURES = (
    "LoRA",
    *OUTER,
    "context parallel",
    "checkpointing",
    "mixed precision",
    *columns.MORE,
    "pipeline",
    "compile",
)


def keys_of(name: str) -> dict[str, Any]:
    """The arguments of `fully_shard` that a row of `CACHES` has beside the others."""
    return {key: value for key, value in registry.named(name).shard.items() if key != "strategy"}


def _call(name: str) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in keys_of(name).items())
    return f"`fully_shard({arguments})`".replace("'", '"')


MEANING = {
    **{name: _call(name) for name in CACHES},
    "replicas": "islands that sum their gradients in every step: HSDP",
    "4bit replicas": 'the same with `Wire(gradients="int4")`',
    "local steps": "`LocalSteps` around sharded islands",
    "partial updates": "`partial_updates` in islands of `LocalSteps`",
    "cyclic": "`CyclicDataParallel`",
    "cyclic, 8bit": '`CyclicDataParallel(wire="8bit")`, each worker on a node of its own',
    "cyclic, sharded": '`CyclicDataParallel(states="sharded")`',
    "local steps around cyclic": "`LocalSteps` around islands that are cyclic runs; it drains an island before a sync",
    "AdamW": "`torch.optim.AdamW`; other element-wise optimizers of torch behave alike",
    "AdamW8bit": "`laconic.optim.AdamW8bit`, with its granularity; tensor parallelism cuts between its blocks",
    "Muon": "`laconic.optim.Muon`",
    "Shampoo": "`laconic.optim.Shampoo`",
    "LoRA": "peft's adapters in every linear layer of the blocks",
    "tensor parallel": "`parallelize_module` over another mesh axis, before `fully_shard`; cyclic: in each worker",
    "expert parallel": "experts as DTensors over another mesh axis, before `fully_shard`; cyclic: in each worker",
    "context parallel": "sequences cut over ranks, which are among the ranks of `fully_shard`'s mesh",
    "checkpointing": "`torch.utils.checkpoint` around every block",
    "mixed precision": "`MixedPrecisionPolicy` with bf16 computation; cyclic: `torch.autocast` in stages",
    **columns.MEANING,
    "pipeline": "two stages of `torch.distributed.pipelining`, each a sharded module over two ranks",
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
    def has_adapters(self) -> bool:
        return bool(self.features & {"LoRA", "QLoRA"})

    @property
    def parts(self) -> set[str]:
        return {self.strategy, self.optimizer, *self.features}


def cell_of(strategy: str, optimizer: str = "AdamW", *features: str) -> Cell:
    """The cell of a strategy, with the feature that it needs."""
    needed = ("mixed precision",) if strategy in LOSSLESS else ()
    return Cell(strategy, optimizer, frozenset((*features, *needed)))


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Two parts that are refused together, each one of several, with ValueError before the first step."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    message: str
    """A part of the error's text."""
    remedy: str
    """The part of the error's text that says what to do."""
    beside: tuple[str, ...] = ()
    """Parts of which one must be there too; none must by default."""
    unless: tuple[str, ...] = ()
    """Parts beside which the two are taken."""


REFUSALS = (
    Refusal(
        first=("partial updates",),
        second=("LoRA", "QLoRA"),
        message="the model has LoRA adapters: only they train, and they are too small to slice",
        remedy="Leave partial_updates out",
    ),
    Refusal(
        first=("partial updates",),
        second=("tensor parallel",),
        message="is a DTensor, in parts already; partial updates slice whole tensors only",
        remedy="Leave out partial_updates, or the parallelism that has cut the tensor",
    ),
    Refusal(
        first=("local steps around cyclic",),
        second=OUTER,
        message="LocalSteps and a cyclic run whose layers tensor or expert parallelism has cut",
        remedy="leave that parallelism out, or LocalSteps",
    ),
    Refusal(
        first=CYCLIC,
        second=OUTER,
        beside=("AdamW8bit", "Muon", "Shampoo"),
        message="is a DTensor of shape",
        remedy="takes parameters of laconic.fully_shard, or plain ones",
    ),
    Refusal(
        first=CYCLIC,
        second=("context parallel",),
        message="the cyclic schedule needs a mesh of one axis",
        remedy="leave context parallelism out: nothing would sum gradients over the other axes",
    ),
    Refusal(
        first=("partial updates",),
        second=("scaled",),
        message="is a ScaledWeight, which is gathered in another form, and its slices would be plain",
        remedy="leave it out of convert_to_scaled_training (module_filter_fn) or of partial_updates (include)",
    ),
    Refusal(
        first=CYCLIC,
        second=("scaled",),
        message="is a ScaledWeight, which holds its elements in another tensor, and workers of the cyclic schedule put "
        "new versions into the parameter itself",
        remedy="leave the layer out of convert_to_scaled_training, or train with fully_shard",
        unless=("LoRA", "QLoRA"),  # such weights are frozen then
    ),
    Refusal(
        first=("tensor parallel",),
        second=("scaled",),
        message="a weight that trains in few bits is cut by laconic.fully_shard alone",
        remedy="Leave the layer out of convert_to_scaled_training with module_filter_fn, or out of parallelize_module",
    ),
    Refusal(
        first=("tensor parallel",),
        second=("QLoRA",),
        message="this layer has a frozen weight in nf4 and takes no other",
        remedy="leave it out of quantize_, or out of the plan of parallelize_module",
    ),
)


def is_empty(parts: set[str]) -> bool:
    """True if these parts are no cell.

    Adapters come once. The cyclic schedule calls no `fully_shard`, and has stages of its own. A pipeline beside another
    parallelism, or in the versions of one publisher, needs more than four ranks.
    """
    never = [
        ({*CYCLIC}, {*columns.OF_KEYWORDS, "pipeline"}),
        ({"LoRA"}, {"QLoRA"}),
        ({"pipeline"}, {*OUTER, "context parallel", columns.PUBLISHED}),
    ]
    return any(parts & first and parts & second for first, second in never)


def refusals_of(parts: set[str]) -> list[int]:
    """The indices of the refusals that these parts of a cell meet."""
    return [
        number
        for number, each in enumerate(REFUSALS)
        if all(parts.intersection(some) for some in (each.first, each.second, each.beside or parts))
        and not parts.intersection(each.unless)
    ]


def cells() -> list[Cell]:
    """The cells to test: each pair of parts, many triples, and all features at once."""
    fast = [name for name in FEATURES if name != "compile"]
    together = [name for name in fast if name not in (*columns.MORE, "pipeline")]
    found: dict[Cell, None] = {}

    def add(strategy: str, optimizer: str = "AdamW", *features: str) -> None:
        cell = cell_of(strategy, optimizer, *features)
        if not is_empty(cell.parts):
            found[cell] = None

    for strategy in STRATEGIES:
        for optimizer in OPTIMIZERS:
            add(strategy, optimizer)
        for name in FEATURES:
            add(strategy, "AdamW", name)
        # two islands have two ranks each, so sequences are not cut there beside parameters
        at_once = [name for name in together if strategy not in ISLANDS or name != "context parallel"]
        # in the sums of the ranks of another axis, bf16 is more than the tolerance
        left_out = (OUTER, ("mixed precision",)) if strategy in (*CYCLIC, "partial updates") else ((),)
        for some in left_out:
            add(strategy, "AdamW", *(n for n in at_once if n not in some and not refusals_of({strategy, n})))
    for strategy, optimizer, name in product(WELL_TESTED, OPTIMIZERS, fast):
        add(strategy, optimizer, name)
    for strategy, pair in product(WELL_TESTED, combinations(fast, 2)):
        add(strategy, "AdamW", *pair)
    for optimizer in OPTIMIZERS:
        # Other parallelisms sum in another order than one process. In bf16 that is much, and these rules enlarge it.
        has_matrices = optimizer in ("Muon", "Shampoo")
        left_out = ((*OUTER, "context parallel"), ("mixed precision",)) if has_matrices else ((),)
        for some in left_out:
            chosen = [name for name in together if name not in some and not refusals_of({optimizer, name})]
            add("host", optimizer, *chosen)
        add("host", optimizer, "compile")
    for name in fast:
        add("host", "AdamW", "compile", name)
    return list(found)


def sample() -> list[Cell]:
    """Every strategy, one of each kind with all features that fit and with every optimizer, and all that is refused."""
    tried = cells()
    kinds = ("host", THIN[0], "local steps", "cyclic")
    working = [cell for cell in tried if works(cell) and "compile" not in cell.features]
    largest = [max((c for c in working if c.strategy == name), key=lambda cell: len(cell.features)) for name in kinds]
    by_optimizer = [cell_of(*pair) for pair in product(("host", "local steps", "cyclic"), OPTIMIZERS)]
    alone = [cell_of(name) for name in STRATEGIES if name not in kinds]
    more = [cell_of("host", "AdamW", name) for name in (*columns.MORE, "pipeline")]
    return list(dict.fromkeys([*largest, *by_optimizer, *alone, *more, *(cell for cell in tried if not works(cell))]))


def cells_of(strategy: str, *, in_sample: bool) -> list[Cell]:
    """Those of a strategy that do not compile: those of the sample, or all others."""
    chosen = set(sample())
    fast = [cell for cell in cells() if cell.strategy == strategy and "compile" not in cell.features]
    return [cell for cell in fast if (cell in chosen) == in_sample]


def works(cell: Cell) -> bool:
    return not refusals_of(cell.parts)
