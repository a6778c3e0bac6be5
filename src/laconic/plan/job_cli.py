"""`laconic plan JOB.toml --cluster C.toml`: what a job will take under every strategy, and which to take."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from laconic.config import ConfigError, load, to_dict, to_toml
from laconic.plan.candidates import CANDIDATES, RUN_ALONE, candidate_named
from laconic.plan.choice import Choice, Contender, choose
from laconic.plan.cluster_file import load_cluster
from laconic.plan.estimates import Estimate
from laconic.plan.pictures import SUFFIXES, draw_timelines
from laconic.plan.prediction import Predictor
from laconic.plan.units import format_number, format_quantity
from laconic.store import files

_DESCRIPTION = """\
Predict the seconds, the bytes and the memory of a step of a training job on a cluster, under laconic's strategies and
its peers', and recommend one. Nothing is run: the model is traced on tensors without data. This needs no GPU."""

_EPILOG = """\
examples:
  laconic plan job.toml --cluster cluster.toml
  laconic plan job.toml --cluster cluster.toml --out best.toml   # then: torchrun ... -m laconic.train best.toml
  laconic plan job.toml --cluster cluster.toml --allow 4bit,local-steps
  laconic plan job.toml --cluster cluster.toml --timeline step.svg --strategy fsdp2

docs/plan.md explains the cluster file; `laconic doctor --out` writes it."""

_WIDTH = 110


def add_job(commands: Any) -> None:
    """Add the command to the subcommands of `laconic plan`."""
    parser: argparse.ArgumentParser = commands.add_parser("job", help="a job's seconds, bytes and memory (the default)")
    parser.set_defaults(run=run_job)
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.prog = "laconic plan"
    parser.add_argument("job", metavar="JOB.toml", help="a job of laconic train")
    parser.add_argument("--cluster", required=True, metavar="C.toml", help="the cluster file")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the type of the devices; default: the job's")
    parser.add_argument(
        "--strategies", type=_names, metavar="NAME,...", help=f"the strategies; default: all of {', '.join(CANDIDATES)}"
    )
    parser.add_argument(
        "--allow", type=_names, default=[], metavar="NAME,...",
        help="inexact strategies that may be recommended, besides those that the job asks for",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="BEST.toml", help="write the recommended job")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help=f"draw a step; FILE ends in {', '.join(SUFFIXES)}"
    )
    parser.add_argument("--strategy", metavar="NAME", help="the strategy to draw; default: the recommended one")


def run_job(options: argparse.Namespace) -> None:
    """Predict, and print the ranking.

    Raises:
        ConfigError: the job, the cluster file or an option makes no sense.
        JobError: the model cannot be built.
        TraceError: the model cannot be traced.
    """
    for path, option in ((options.out, "--out"), (options.timeline, "--timeline")):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: the folder does not exist; make {path.parent} first")
    if options.timeline is not None and options.timeline.suffix not in SUFFIXES:
        raise ConfigError(f"--timeline {options.timeline} names no kind of picture; end it in {', '.join(SUFFIXES)}")
    drawn = None if options.strategy is None else candidate_named(options.strategy)
    for name in options.allow:
        candidate_named(name)
    predictor = Predictor(load(options.job), load_cluster(options.cluster), device_type=options.device)
    choice = choose(predictor, allow=options.allow, names=options.strategies)
    if options.json:
        print(json.dumps(choice_as_dict(choice), indent=1))
    else:
        print_choice(choice, Console(highlight=False), explains_all=options.strategies is not None)
    if options.timeline is not None:
        best = None if choice.recommended is None else CANDIDATES[choice.recommended.strategy]
        chosen = drawn or best
        if chosen is None:
            raise ConfigError("--timeline: nothing fits, so nothing is recommended; name a --strategy to draw")
        found = (entry.estimate.job for entry in choice.entries if entry.estimate.strategy == chosen.name)
        estimate = predictor.estimate(chosen, job=next(found, None), keeps_spans=True)
        if not isinstance(estimate, Estimate):
            raise ConfigError(f"--strategy {chosen.name} cannot run this job: {estimate.reason}")
        draw_timelines([estimate], options.timeline)
    if options.out is not None:
        if choice.job is None:
            raise ConfigError(f"--out {options.out} is not written: {choice.remedy or 'nothing is recommended'}")
        files.write_text(options.out, to_toml(choice.job))
        print(f"laconic plan: wrote {options.out}", file=sys.stderr)


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def print_choice(choice: Choice, console: Console, *, explains_all: bool = False) -> None:
    """Print the ranking for people: with `explains_all`, also why each other strategy cannot run the job."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("strategy", no_wrap=True)
    for name in ("s/step", "tokens/s", "wire/token", "device", "host/node", "spare"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in choice.entries:
        table.add_row(*_cells(entry))
    console.width = max(console.width, _WIDTH)
    console.print(table)
    for entry in choice.entries:
        console.print(f"{entry.estimate.label}: {entry.reason}", soft_wrap=True)
    for refusal in choice.refusals if explains_all else ():
        console.print(f"{refusal.label}: not possible: {refusal.reason}", soft_wrap=True)
    if choice.refusals and not explains_all:
        labels = "; ".join(refusal.label for refusal in choice.refusals)
        names = ",".join(refusal.strategy for refusal in choice.refusals)
        console.print(f"not possible: {labels}. Why: add --strategies {names}", soft_wrap=True)
    if RUN_ALONE and not explains_all:
        labels = "; ".join(each.label for each in RUN_ALONE)
        console.print(f"run, not planned: {labels}", soft_wrap=True)
    notes = dict.fromkeys(note for entry in choice.entries for note in entry.estimate.notes)
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    if choice.recommended is not None:
        console.print(f"\ntake {choice.recommended.label}", soft_wrap=True)
    for title, line in (
        ("", choice.rival), ("", choice.remedy), ("in a job: ", choice.in_toml), ("in a script: ", choice.in_code),
    ):  # fmt: skip
        if line:
            console.print(f"{title}{line}", markup=False, soft_wrap=True)


def _cells(entry: Contender) -> Sequence[str]:
    estimate = entry.estimate
    spare = min(estimate.spare_device_bytes, estimate.spare_host_bytes)
    return (
        "*" if entry.is_recommended else "",
        estimate.label,
        format_number(estimate.seconds),
        format_number(estimate.tokens_per_s),
        format_quantity(estimate.wire_bytes_per_token, "B"),
        format_quantity(estimate.peak_bytes, "B"),
        format_quantity(estimate.host_bytes * estimate.ranks_per_node, "B"),
        f"-{format_quantity(-spare, 'B')}" if spare < 0 else format_quantity(spare, "B"),
    )


def choice_as_dict(choice: Choice) -> dict[str, Any]:
    """The ranking as plain JSON values. Bytes and seconds are of one step; memory is of one rank."""
    return {
        "recommended": None if choice.recommended is None else choice.recommended.strategy,
        "job": None if choice.job is None else to_dict(choice.job),
        "rival": choice.rival,
        "remedy": choice.remedy,
        "strategies": [{**estimate_as_dict(entry.estimate), "reason": entry.reason} for entry in choice.entries],
        "refused": [vars(refusal) for refusal in choice.refusals],
    }


def estimate_as_dict(estimate: Estimate) -> dict[str, Any]:
    """A prediction as plain JSON values."""
    plain = (
        "strategy", "label", "fits", "inexact", "seconds", "tokens", "seconds_per_token", "tokens_per_s", "wire_bytes",
        "wire_bytes_per_token", "interface_bytes", "local_bytes", "peak_bytes", "peak", "resting", "host_bytes",
        "spare_device_bytes", "spare_host_bytes", "notes",
    )  # fmt: skip
    return {
        **{key: getattr(estimate, key) for key in plain},
        "rank_bytes": {f"{level}/{purpose}": size for (level, purpose), size in estimate.sent_bytes.items()},
        "waits_s": {lane.value: seconds for lane, seconds in estimate.waits_s.items()},
        "bound_by": estimate.bound_by.value,
    }
