"""`laconic plan`: what a job takes, and the padding of layouts."""

import argparse
import atexit
import dataclasses
import gc
import json
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from laconic.errors import JobError, say_mistake
from laconic.extras import how_to_install
from laconic.layout.granularity import rows
from laconic.plan.job_cli import add_job
from laconic.plan.known import models
from laconic.plan.padding import LayoutRow, UnitShapes, layout_rows, plan_of, shapes_of
from laconic.plan.pictures import SUFFIXES, draw_layout
from laconic.plan.remedies import Advice, advise
from laconic.plan.tracing import TraceError
from laconic.rehearse import without_collector

_LAYOUT = """\
The memory that whole blocks cost: the padding of a model's units at several numbers of ranks and rows per block. Two
columns show rules that keep single rows whole: PyTorch FSDP2's (each tensor's first dimension in equal parts) and
Megatron-FSDP's (a shard is a multiple of the least common multiple of all rows). Where a plan pads more than 3 % (5 %
beyond 1,024 ranks), the cheapest remedies follow, with the calls that give them and the bytes that they cost a rank.
This needs no GPU, no other rank."""

_LAYOUT_EPILOG = f"""\
models: {textwrap.fill(", ".join(models()) + ", a transformers config.json, or a folder with a config.json", 112)}

examples:
  laconic plan layout --model gpt-oss-120b --ranks 64,96,1024
  laconic plan layout --model ./my-model --ranks 8,12 --rows 1,32 --explain
  laconic plan layout --model llama-3-70b --ranks 8 --rows 16 --draw layer.svg"""


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code: 2 for a mistake in the arguments, else 0."""
    options = _parse(argv)
    atexit.register(gc.freeze)  # the last collection would take a second, for what ends with the process
    try:
        with without_collector():
            options.run(options)
    except (ValueError, JobError, TraceError, OSError) as error:
        mistake = str(error)
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        option = "--draw" if options.command == "layout" else "--timeline"
        option, extra = (option, "bench") if missing == "matplotlib" else ("--model", "train")
        mistake = f"{option} needs {missing}; {how_to_install(extra)}"
    else:
        return 0
    say_mistake("laconic plan" if options.command == "job" else f"laconic plan {options.command}", mistake)
    return 2


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="laconic plan", description="Compute numbers of a run before it starts.")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    add_job(commands)
    layout = commands.add_parser("layout", help="the padding of a model's layouts at a list of group sizes")
    layout.set_defaults(run=_layout)
    layout.description, layout.epilog = _LAYOUT, _LAYOUT_EPILOG
    layout.formatter_class = argparse.RawDescriptionHelpFormatter
    layout.add_argument("--model", required=True, help="a known name, a config.json, or a folder with a config.json")
    layout.add_argument(
        "--ranks", type=_counts, default=[8, 64, 128], metavar="N,...", help="numbers of ranks that share a unit"
    )
    layout.add_argument("--rows", type=_counts, default=[1, 16, 32, 128], metavar="K,...", help="rows per block")
    layout.add_argument(
        "--itemsize", type=int, choices=(1, 2, 4), default=2, help="bytes of the smallest dtype sent (default: 2)"
    )
    layout.add_argument("--explain", action="store_true", help="name the tensors that force each bucket's size")
    layout.add_argument("--json", action="store_true", help="print JSON, with explanations")
    layout.add_argument(
        "--draw", type=_picture, metavar="FILE", help="draw the layout for the first number of ranks and of rows"
    )
    is_job = argv[:1] and not argv[0].startswith("-") and argv[0] not in commands.choices
    return parser.parse_args(["job", *argv] if is_job else argv)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _picture(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is in a folder that does not exist; make {path.parent} first")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; give the name of a file")
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} names no kind of picture; end it in {', '.join(SUFFIXES)}")
    return path


def _layout(options: argparse.Namespace) -> None:
    model = shapes_of(options.model)
    units = model.units()
    table = list(layout_rows(units, options.ranks, options.rows, itemsize=options.itemsize))
    advice = [advise(model, row.num_ranks, row.num_rows, itemsize=options.itemsize) for row in table]
    if options.json:
        print(json.dumps([_as_dict(row, found) for row, found in zip(table, advice, strict=True)], indent=1))
    else:
        _print_layout(options.model, units, table, explains=options.explain)
        _print_advice([found for found in advice if found is not None])
    if options.draw:
        repeated = [unit for unit in units if unit.count > 1] or units[:1]  # layers, not the rest of the model
        largest = max(repeated, key=lambda unit: unit.numel)
        num_ranks, num_rows = options.ranks[0], options.rows[0]
        plan = plan_of(largest, num_ranks, rows(num_rows), itemsize=options.itemsize)
        title = f"{options.model}: {largest.name} on {num_ranks} ranks, blocks of {_count_rows(num_rows)}"
        draw_layout(plan, title).savefig(options.draw)


def _count_rows(count: int) -> str:
    return f"{count} row{'s' * (count > 1)}"


def _print_layout(model: str, units: Sequence[UnitShapes], rows: Sequence[LayoutRow], *, explains: bool) -> None:
    console = Console(highlight=False)
    total = sum(unit.count * unit.numel for unit in units)
    names = ", ".join(f"{unit.count} x {unit.name}" if unit.count > 1 else unit.name for unit in units)
    console.print(f"{model}: padding of {total:,} elements in {names}")
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("ranks", *dict.fromkeys(_count_rows(row.num_rows) for row in rows), "FSDP2", "LCM"):
        table.add_column(name, justify="right")
    for num_ranks, group in groupby(rows, key=lambda row: row.num_ranks):
        line = list(group)
        cells = [f"{row.padding:.2%}" + (f" ({row.num_buckets})" if row.num_buckets > 1 else "") for row in line]
        table.add_row(str(num_ranks), *cells, f"{line[0].fsdp2:.2%}", f"{line[0].lcm:.2%}")
    console.print(table)
    if any(row.num_buckets > 1 for row in rows):
        console.print("(n): the largest number of buckets of a unit; a bucket is a collective.")
    for row in rows if explains else []:
        console.print(f"\n{row.num_ranks} ranks, {_count_rows(row.num_rows)}")
        for unit, reason in row.explanations:
            console.print(f"  {unit}: {reason}")


def _print_advice(advice: Sequence[Advice]) -> None:
    if not advice:
        return
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(
        "\nRemedies, the cheapest first, and the bytes of a rank beyond those of an even cut without padding:"
    )
    for found in advice:
        console.print(str(found))


def _as_dict(row: LayoutRow, advice: Advice | None) -> dict[str, object]:
    buckets = [
        {"unit": unit, **dataclasses.asdict(reason), "padding": reason.padding, "text": str(reason)}
        for unit, reason in row.explanations
    ]
    remedies = [
        {**dataclasses.asdict(each), "calls": each.calls, "text": str(each)}
        for each in (advice.remedies if advice else ())
    ]
    plain = {key: value for key, value in vars(row).items() if key != "explanations"}
    return {**plain, "buckets": buckets, "remedies": remedies}
