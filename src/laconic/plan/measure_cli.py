"""`laconic plan measure`: write the cluster file of the machines at hand."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster, init_mesh
from laconic.comm.failure import failing_together
from laconic.comm.launch import ExitWithoutTeardown, RankInfo, ending_with_launcher, pick_device, process_group
from laconic.errors import JobError
from laconic.plan.cluster_file import to_toml
from laconic.plan.measure import Figure, as_spec, device_name, measure
from laconic.plan.units import format_quantity, unit_for
from laconic.store import files

_DESCRIPTION = """\
Measure what the machines at hand can do, in less than two minutes, and write it down as a cluster file: memory, FLOP/s
by dtype, bandwidth of the memories and between host and device, bandwidth and latency inside a node and between nodes.
Start it with torchrun on all nodes, like a training job, and leave the machines alone meanwhile."""

_EPILOG = """\
examples:
  torchrun --nproc-per-node 8 -m laconic.cli plan measure --out cluster.toml
  laconic lab --nodes 2 --local 2 --rate 200mbit -- -m laconic.cli plan measure --out lab.toml
  laconic plan measure                                                      # one rank, on this machine"""

_TIMEOUT_S = 120.0
_UNSTEADY = 0.2
"""The spread above which the command asks for another measurement."""
_WIDTH = 160


def add_measure(commands: Any) -> None:
    """Add the command to the subcommands of `laconic plan`."""
    parser: argparse.ArgumentParser = commands.add_parser("measure", help="write the cluster file of these machines")
    parser.set_defaults(run=run_measure)
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, metavar="FILE", help="the cluster file; default: print it")
    parser.add_argument(
        "--device", default="auto", help='"cpu", "cuda" or another type; default: an accelerator, if any'
    )


def run_measure(options: argparse.Namespace) -> None:
    """Measure, show the figures on stderr, and write the cluster file, all on rank 0. Collective over torchrun's ranks.

    Raises:
        JobError: there is no such device, the file cannot be written, or a figure makes no sense.
    """
    leaving = ExitWithoutTeardown() if "RANK" in os.environ else None
    ranks = RankInfo.from_environment()
    try:
        device = pick_device(options.device, ranks)
    except JobError as error:
        raise JobError(f"--device {options.device}: torch finds no such device here; use cpu or auto") from error
    with ending_with_launcher(), process_group(ranks, device, _TIMEOUT_S) as group, failing_together(ranks.world_size):
        peers = RankGroup(group)
        check_out(options.out, peers)
        figures = measure(Cluster.of(init_mesh(device.type)), peers)
        if ranks.is_main:
            _show(figures)
        text = write_out(options.out, figures, device, peers)
        if ranks.is_main and options.out is None:
            print(text, end="")
    if leaving is not None:
        leaving.code = 0


def check_out(out: Path | None, peers: RankGroup) -> None:
    """Refuse a folder before the measurement, not after it. Collective. Raises: JobError."""
    if out is not None:
        peers.on_rank_0(lambda: _check_writable(out), f"cannot write {out}")


def _check_writable(out: Path) -> None:
    folder = out.absolute().parent
    if out.is_dir():
        raise OSError(f"{out} is a folder; give the name of a file")
    if not os.access(folder, os.W_OK):
        raise OSError(f"the folder {folder} does not exist or is not writable")


def write_out(out: Path | None, figures: Sequence[Figure], device: torch.device, peers: RankGroup) -> str:
    """Return the text of the cluster file, and write it, if there is a path. Collective. Raises: JobError."""
    text = to_toml(as_spec(figures, {"device": device_name(device)}))
    if out is not None:
        peers.on_rank_0(lambda: files.write_text(out, text), f"cannot write {out}")
    return text


def _show(figures: Sequence[Figure]) -> None:
    console = Console(stderr=True, highlight=False)
    console.width = max(console.width, _WIDTH)  # a log has no width
    table = Table("figure", box=box.SIMPLE_HEAD)
    for name in ("median", "lowest", "highest", "spread"):
        table.add_column(name, justify="right")
    table.add_column("how")
    for figure in figures:
        unit = unit_for(figure.key.partition(".")[0])
        cells = [figure.key, format_quantity(figure.median, unit)]
        cells += [format_quantity(value, unit) for value in (min(figure.values), max(figure.values))]
        table.add_row(*(cells if len(figure.values) > 1 else [*cells[:2], "", ""]), _spread(figure), figure.how)
    console.print(table)
    unsteady = [figure.key for figure in figures if figure.spread > _UNSTEADY]
    if unsteady:
        print(
            f"laconic plan measure: {', '.join(unsteady)} varied by more than {_UNSTEADY:.0%}; measure again while "
            "nothing else runs on these machines",
            file=sys.stderr,
        )


def _spread(figure: Figure) -> str:
    return f"{figure.spread:.0%}" if len(figure.values) > 1 else ""
