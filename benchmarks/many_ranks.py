"""Published models on up to 16,384 ranks: how much whole blocks pad, and the remedies. Rows of benchmarks.layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from laconic.layout.granularity import rows
from laconic.plan.known import models
from laconic.plan.padding import ModelShapes, shapes_of
from laconic.plan.remedies import Advice, Kind, Remedy, advise, planned_numel
from laconic.plan.units import format_quantity
from tests.support.record import Row, Table

RANKS = (64, 256, 1024, 4096, 10240, 16384)
ROWS = (16, 32, 128)
COLUMNS = ("model", "ranks", *(f"{count} rows" for count in ROWS))
CAPTION = (
    "Padding of published models: as it is -> with blocks of rows and the cheapest remedy for them (nl: n layers a "
    "unit; nr: n replicas), and the bytes that it adds to a rank. With flat blocks every cell is at most {flat}."
)
MEASURES = ("laconic.layout", "laconic.plan.padding", "laconic.plan.remedies")
_ITEMSIZE = 2
_FEW = 1024


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A model on a number of ranks, with blocks of a number of rows."""

    model: str
    num_ranks: int
    num_rows: int
    padding: float
    advice: Advice | None

    def remedy(self, kind: Kind) -> Remedy | None:
        """The cheapest remedy with blocks of this kind; None if there is none."""
        found = self.advice.remedies if self.advice is not None else ()
        return next((each for each in found if each.blocks == kind), None)


@dataclass(frozen=True)
class ManyRanks:
    """All cells. Each is planned once."""

    names: Sequence[str] = field(default_factory=lambda: tuple(models()))
    """The models, by their names in models.toml."""
    built: dict[str, ModelShapes] = field(default_factory=dict)

    @cached_property
    def cells(self) -> list[Cell]:
        """Every model on every number of ranks, with every height of blocks."""
        return [self._cell(*key) for key in itertools.product(self.names, RANKS, ROWS)]

    @property
    def bad(self) -> list[Cell]:
        """The cells that want a remedy."""
        return [cell for cell in self.cells if cell.advice is not None]

    def _cell(self, name: str, num_ranks: int, num_rows: int) -> Cell:
        model = self.model(name)
        padding = padding_of(model, num_ranks, num_rows)
        advice = advise(model, num_ranks, num_rows, itemsize=_ITEMSIZE)
        return Cell(model=name, num_ranks=num_ranks, num_rows=num_rows, padding=padding, advice=advice)

    def model(self, name: str) -> ModelShapes:
        """The shapes of a model."""
        if name not in self.built:
            self.built[name] = shapes_of(name)
        return self.built[name]


def padding_of(model: ModelShapes, num_ranks: int, num_rows: int) -> float:
    """The padding with each layer a unit over all ranks."""
    total = sum(unit.count * planned_numel(unit.shapes, num_ranks, rows(num_rows), _ITEMSIZE) for unit in model.units())
    return total / model.numel - 1


def many_ranks(measured: ManyRanks) -> Row:
    """The remedy that `laconic plan layout` recommends: the cheapest."""
    flat = [cell.advice.remedies[0] for cell in measured.bad if cell.advice is not None and cell.advice.remedies]
    off = max(abs(measured.model(name).numel / 1e9 / models()[name].billions - 1) for name in measured.names)
    return _row(
        measured,
        "the recommended remedy",
        lambda cell: cell.advice.remedies[0] if cell.advice is not None and cell.advice.remedies else None,
        f"{sum(each.blocks == 'flat' for each in flat)} of {len(flat)} are AdamW8bit's flat blocks, in place of tiles "
        f"of as many rows. {{cost}} The models have their published numbers of parameters within {off:.1%}.",
    )


def many_ranks_rows(measured: ManyRanks) -> Row:
    """The cheapest remedy that keeps blocks of rows, for those who need rows for another reason than AdamW8bit."""
    kept = [each for cell in measured.bad if (each := cell.remedy("rows")) is not None]
    several = sum(each.layers_per_unit > 1 for each in kept)
    replicas = sum(each.num_replicas > 1 for each in kept)
    return _row(
        measured,
        "the cheapest remedy that keeps blocks of rows",
        lambda cell: cell.remedy("rows"),
        f"{replicas} have replicas, {several} have several layers in a unit. {{cost}}",
    )


def _row(measured: ManyRanks, name: str, find: Callable[[Cell], Remedy | None], note: str) -> Row:
    found = [(cell, find(cell)) for cell in measured.bad]
    remedies = [(cell, remedy) for cell, remedy in found if remedy is not None]
    groups = [[cell for cell in measured.cells if (cell.num_ranks <= _FEW) == is_few] for is_few in (True, False)]
    after = {id(cell): remedy.padding for cell, remedy in remedies}
    worst = [max(after.get(id(cell), cell.padding) for cell in cells) for cells in groups]
    before = [max(cell.padding for cell in cells) for cells in groups]
    dearest, cost = max(remedies, key=lambda each: each[1].added_bytes)
    costs = sorted(remedy.added_bytes for _, remedy in remedies)
    median, most = (format_quantity(value, "B") for value in (costs[len(costs) // 2], costs[-1]))
    cost_text = (
        f"Bytes that a rank holds more than with an even cut without padding: {median} in the median, at most {most} "
        f"({_of(dearest)}: {cost.words})."
    )
    most_padded = max(measured.cells, key=lambda cell: cell.padding)
    first = f"without one {before[0]:.2%} / {before[1]:.2%} at worst ({_of(most_padded)})"
    return Row(
        measures=MEASURES,
        claim=(
            f"padding of {len(measured.names)} published models with blocks of {', '.join(map(str, ROWS))} rows after "
            f"{name}, on 64 to 1,024 / on up to 16,384 ranks"
        ),
        measured=f"{worst[0]:.2%} / {worst[1]:.2%}",
        note=(f"{first}; {len(measured.bad)} of {len(measured.cells)} cells need one; {note.format(cost=cost_text)}"),
    )


def _of(cell: Cell) -> str:
    return f"{cell.model}, {cell.num_ranks} ranks, {cell.num_rows} rows"


def table(measured: ManyRanks) -> Table:
    """Return a line for each model and number of ranks."""
    flat = [each.padding for cell in measured.bad if (each := cell.remedy("flat")) is not None]
    by_key = {(cell.model, cell.num_ranks, cell.num_rows): cell for cell in measured.cells}
    lines = [
        [name, str(size), *(_text(by_key[name, size, count]) for count in ROWS)]
        for name, size in itertools.product(measured.names, RANKS)
    ]
    return Table(columns=COLUMNS, rows=lines, caption=CAPTION.format(flat=f"{max(flat):.2%}"))


def _text(cell: Cell) -> str:
    remedy = cell.remedy("rows")
    if remedy is None:
        return f"{cell.padding:.2%}"
    layers = f"{remedy.layers_per_unit}l " if remedy.layers_per_unit > 1 else ""
    replicas = f"{remedy.num_replicas}r " if remedy.num_replicas > 1 else ""
    return f"{cell.padding:.2%} -> {remedy.padding:.2%} ({layers}{replicas}+{format_quantity(remedy.added_bytes, 'B')})"
