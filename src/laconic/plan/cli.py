"""`laconic plan`: what a run will take, computed before it runs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from laconic.layout.granularity import rows
from laconic.plan import timesteps
from laconic.plan.draw import draw
from laconic.plan.padding import LayoutRow, layout_rows, plan_of
from laconic.plan.shapes import KNOWN, UnitShapes, units_of

_DESCRIPTION = """\
How much memory whole blocks cost: the padding of a model's units when each is shared by so many ranks and no run of so
many rows is cut, beside PyTorch FSDP2's rule (each tensor's first dimension in equal parts) and Megatron-FSDP's (shards
are multiples of all rows' least common multiple), which keep single rows whole. Needs no GPU and no other rank."""

_EPILOG = f"""\
models: {", ".join(KNOWN)} (one typical layer each), a transformers config.json, or a folder that has one

examples:
  laconic plan layout --model gpt-oss-120b --ranks 64,96,1024
  laconic plan layout --model ./my-model --ranks 8,12 --rows 1,32 --explain
  laconic plan layout --model llama-3-70b --ranks 8 --rows 16 --draw layer.svg"""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code is 2 for a mistake in the arguments."""
    options = _parse(argv)
    return int(options.run(options))


def _layout(options: argparse.Namespace) -> int:
    try:
        units = units_of(options.model)
    except ValueError as error:
        print(f"laconic plan: {error}", file=sys.stderr)
        return 2
    found = list(layout_rows(units, options.ranks, options.rows, itemsize=options.itemsize))
    if options.json:
        print(json.dumps([_as_dict(row) for row in found], indent=1))
    else:
        _show(options.model, units, found, explained=options.explain)
    if options.draw:
        largest = max(units, key=lambda unit: unit.numel * (unit.count > 1 or len(units) == 1))
        num_ranks, num_rows = options.ranks[0], options.rows[0]
        plan = plan_of(largest, num_ranks, rows(num_rows), itemsize=options.itemsize)
        title = f"{options.model}: {largest.name} on {num_ranks} ranks, blocks of {num_rows} row{'s' * (num_rows > 1)}"
        Path(options.draw).write_text(draw(plan, title), encoding="utf-8")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="laconic plan", description="What a run will take, before it runs.")
    commands = parser.add_subparsers(required=True, metavar="command")
    layout = commands.add_parser(
        "layout",
        help="the padding of a model's layouts at a list of group sizes",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    layout.add_argument("--model", required=True, help="a known name, a config.json or a folder with one")
    layout.add_argument("--ranks", type=_counts, default=[8, 64, 128], metavar="N,...", help="that share a unit")
    layout.add_argument("--rows", type=_counts, default=[1, 16, 32, 128], metavar="K,...", help="per block")
    layout.add_argument(
        "--itemsize", type=int, choices=(1, 2, 4), default=2, help="bytes of the smallest dtype sent (default: 2)"
    )
    layout.add_argument("--explain", action="store_true", help="say which tensors force each bucket's size")
    layout.add_argument("--json", action="store_true", help="print JSON, with explanations")
    layout.add_argument("--draw", metavar="FILE.svg", help="draw the first number of ranks and rows: what each holds")
    layout.set_defaults(run=_layout)
    timesteps.add_parser(commands)
    return parser.parse_args(argv)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers such as 8,64,100")
    return counts


def _show(model: str, units: Sequence[UnitShapes], found: Sequence[LayoutRow], *, explained: bool) -> None:
    console = Console()
    total = sum(unit.count * unit.numel for unit in units)
    named = ", ".join(f"{unit.count} x {unit.name}" if unit.count > 1 else unit.name for unit in units)
    row_counts = list(dict.fromkeys(row.num_rows for row in found))
    console.print(f"{model}: padding of {total:,} elements in {named}", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("ranks", justify="right")
    for count in row_counts:
        table.add_column(f"{count} row{'s' * (count > 1)}", justify="right")
    table.add_column("FSDP2", justify="right")
    table.add_column("LCM", justify="right")
    for start in range(0, len(found), len(row_counts)):
        group = found[start : start + len(row_counts)]
        cells = [f"{row.padding:.2%}" + (f" ({row.num_buckets})" if row.num_buckets > 1 else "") for row in group]
        table.add_row(str(group[0].num_ranks), *cells, f"{group[0].fsdp2:.2%}", f"{group[0].lcm:.2%}")
    console.print(table)
    if any(row.num_buckets > 1 for row in found):
        console.print("(n): the largest number of buckets of a unit; a bucket is a collective.", highlight=False)
    if explained:
        for row in found:
            console.print(f"\n{row.num_ranks} ranks, {row.num_rows} row{'s' * (row.num_rows > 1)}", highlight=False)
            for unit, reason in row.explanations:
                console.print(f"  {unit}: {reason}", highlight=False)


def _as_dict(row: LayoutRow) -> dict[str, object]:
    return {
        **{key: value for key, value in dataclasses.asdict(row).items() if key != "explanations"},
        "buckets": [
            {"unit": unit, **dataclasses.asdict(reason), "padding": reason.padding, "text": str(reason)}
            for unit, reason in row.explanations
        ],
    }
