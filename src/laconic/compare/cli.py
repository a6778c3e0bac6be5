"""`laconic compare CONFIG.toml`: one job under several strategies, side by side in the lab."""

import argparse
import json
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from laconic import registry
from laconic.compare.case import STRATEGIES, Case, ComparisonError, Job, config_of
from laconic.compare.machine import describe_machine, in_words
from laconic.compare.plot import save_plot
from laconic.compare.progress import ConsoleReporter
from laconic.compare.report import render_report
from laconic.compare.result import Result
from laconic.compare.runner import Comparison
from laconic.compare.table import LEGEND, LEGEND_NO_WIRE, ScreenTable, render, savings_in_words
from laconic.config import Config, ConfigError, load
from laconic.errors import JobError
from laconic.extras import how_to_install
from laconic.lab import format_rate, parse_rate
from laconic.lab.cli import add_cluster_options, leaving_in_order

_DEMO_CONFIG = Path(__file__).with_name("demo.toml")

_DEMO_TWINS = (
    " All this is in fp32 with one micro-batch a step. In bf16 FSDP2, HSDP and laconic host send half as much, four "
    "bits what they send here; with more micro-batches FSDP2 alone sends more."
)
"""The difference that bf16 and more micro-batches make; results/twins.json has the bytes."""
_DEMO_DEVICE_MB = 50.0
"""The device memory of the demo's ranks: room for FSDP2 and laconic, but not for HSDP and DDP."""
_STRATEGIES = "fsdp2,hsdp,ddp,host,4bit"
_DEMO = {"strategies": _STRATEGIES, "steps": 6, "lora": True, "save": True, "device_mb": _DEMO_DEVICE_MB}
_DEMOS = {
    "short": _DEMO,
    "quick": {**_DEMO, "strategies": "fsdp2,hsdp,host,4bit", "steps": 5, "lora": False},
    "full": {**_DEMO, "steps": 10},
}
"""The options of each length of demo that the user has not given."""

_DESCRIPTION = """\
Run the training job of CONFIG.toml under PyTorch's own strategies and under laconic's, on emulated nodes at one or
several rates. Compare seconds per step, wire bytes per step, memory and loss. All runs have the same weights, rows and
optimizer. The output folder gets compare.json, compare.png and report.html, a page for any browser."""

_EPILOG = f"""\
strategies: {", ".join(f"{name} ({each.label})" for name, each in STRATEGIES.items())}

examples:
  laconic compare --demo
  laconic compare examples/pretrain.toml --rates 200mbit,1gbit,none --steps 8
  laconic compare examples/lora.toml --strategies fsdp2,host,device --rates 50mbit --lora

The first two steps of a run are not timed: the first fills caches, and memory is watched in the second. Without root
the lab needs a kernel with user namespaces, or --no-wire."""


def main(argv: list[str]) -> int:
    """Run the command, and return its exit code: 1 if a run failed.

    Raises: SystemExit with code 2 for a mistake in the arguments or the job, otherwise as `leaving_in_order`.
    """
    options = parse(argv)
    console = Console()
    try:
        with leaving_in_order("compare"):
            base = load(options.config)
            cases = make_cases(base, options)
            table = ScreenTable([case.strategy for case in cases], device_limit_bytes=options.device_bytes)
            with Comparison(
                base, options.out, nodes=options.nodes, local=options.local, wire=not options.no_wire,
                timeout_s=options.timeout, reporter=ConsoleReporter(console, table, num_runs=len(cases)),
            ) as comparison:  # fmt: skip
                results = [comparison.run(case) for case in cases]
    except ComparisonError as error:
        print(f"laconic compare: {error}", file=sys.stderr)
        return 1
    words = textwrap.wrap(savings_in_words(results, options.device_bytes) + _DEMO_TWINS * options.demo, 110)
    files = _files(results, cases, options.out, has_log=base.log.tensorboard)
    lines = ["", *words, *_report(results, options), *_left_out(options), *files]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options of the command. Raises: SystemExit with code 2 for a mistake in the arguments."""
    parser = argparse.ArgumentParser(
        prog="laconic compare", description=_DESCRIPTION, epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG.toml", help="the training job, in the format of laconic train"
    )
    parser.add_argument(
        "--demo", action="store_true",
        help="a small job that comes with laconic: full training, then LoRA, at 200 Mbit/s, in two minutes",
    )  # fmt: skip
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--quick", action="store_const", dest="length", const="quick", default="short",
        help="with --demo: full training alone, and fewer steps",
    )  # fmt: skip
    length.add_argument("--full", action="store_const", dest="length", const="full", help="with --demo: more steps")
    parser.add_argument(
        "--strategies", metavar="A,B,...",
        help=f"strategies to run, in this order (default: all that are installed; with --demo: {_STRATEGIES})",
    )  # fmt: skip
    parser.add_argument(
        "--rates", default="200mbit", metavar="A,B,...",
        help="rates of every node's link in each direction, such as 200mbit,1gbit,none (default 200mbit)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, metavar="S", help="optimizer steps of each run (default 8; with --demo 6)")
    parser.add_argument("--lora", action="store_true", help="after full training, train with LoRA too, as [lora] says")
    parser.add_argument("--save", action="store_true", help="end each run under laconic with a checkpoint")
    parser.add_argument(
        "--device-mb", type=float, metavar="MB",
        help="the device memory of a rank: the table says which strategies do not fit (with --demo: "
        f"{_DEMO_DEVICE_MB:g})",
    )  # fmt: skip
    add_cluster_options(parser, timeout_s=1800.0)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/compare"), metavar="DIR", help="output folder (default runs/compare)"
    )
    options = parser.parse_args(argv)
    if options.demo == (options.config is not None):
        parser.error("give a CONFIG.toml, or --demo, which has a job of its own; not both")
    if options.length != "short" and not options.demo:
        parser.error(f"--{options.length} is for --demo; choose --strategies and --steps for a job of your own")
    if options.demo:
        options.config = _DEMO_CONFIG
    for name, value in (_DEMOS[options.length] if options.demo else {"steps": 8}).items():
        if getattr(options, name) is None or getattr(options, name) is False:  # not 0, which is refused
            setattr(options, name, value)
    options.device_bytes = None if options.device_mb is None else options.device_mb * 1e6
    options.rates = "none" if options.no_wire else options.rates
    options.refused = {}
    options.command = shlex.join(["laconic", "compare", *argv])
    return options


def make_cases(base: Config, options: argparse.Namespace) -> list[Case]:
    """Return every run of the command, in order.

    Raises: ConfigError if a strategy cannot run the job, ValueError if a strategy, rate or number of steps is wrong.
    """
    rates = dict.fromkeys(map(parse_rate, options.rates.split(",")))
    strategies = _strategies(options.strategies, has_islands=base.sync.is_local)
    jobs: list[Job] = ["lora"] if base.lora.enabled else ["full", "lora"] if options.lora else ["full"]
    options.refused = _refused(base, strategies, jobs, options) if options.strategies is None else {}
    strategies = [name for name in strategies if name not in options.refused]
    cases = [
        Case(
            strategy=strategy,
            job=job,
            rate_bits_per_s=rate,
            steps=options.steps,
            save=options.save and STRATEGIES[strategy].is_own,
        )
        for job in jobs
        for rate in rates
        for strategy in strategies
    ]
    for case in cases:
        config_of(base, case, options.out)
    return cases


def _strategies(chosen: str | None, *, has_islands: bool) -> Sequence[str]:
    """The names of the strategies to run: those chosen, or all that are installed and can run the job.

    Raises: ConfigError if a chosen strategy is not installed.
    """
    if chosen is None:
        return [
            name for name, each in STRATEGIES.items() if each.is_installed and (has_islands or not each.has_islands)
        ]
    names = list(dict.fromkeys(registry.canonical(name.strip()) for name in chosen.split(",")))
    for name in names:
        if name in STRATEGIES and not STRATEGIES[name].is_installed:
            raise ConfigError(f"--strategies {name} needs the package {_missing(name)}")
    return names


def _refused(
    base: Config, strategies: Sequence[str], jobs: Sequence[Job], options: argparse.Namespace
) -> dict[str, str]:
    """The strategies that cannot run the command's jobs on its ranks, with the reasons."""
    from laconic.comm.launch import RankInfo  # here: both import torch, and a wrong key has its error sooner
    from laconic.strategies.checks import check_job

    num_ranks = options.nodes * options.local
    ranks = RankInfo(rank=0, world_size=num_ranks, local_rank=0, num_local=options.local, num_nodes=options.nodes)
    found = {}
    for name in strategies:
        try:
            for job in jobs:
                case = Case(strategy=name, job=job, rate_bits_per_s=None, steps=options.steps)
                check_job(config_of(base, case, options.out), ranks)
        except JobError as error:
            found[name] = str(error)
    if found and len(found) == len(strategies):
        raise ConfigError(f"no strategy can run this job: {next(iter(found.values()))}")
    return found


def _missing(name: str) -> str:
    package = STRATEGIES[name].package or name
    return f"{package}: {how_to_install(package, of_contestants=True)}"


def _left_out(options: argparse.Namespace) -> list[str]:
    """A line for each package and each reason for which strategies were left out, unless the user chose them."""
    if options.strategies is not None:
        return []
    missing = {each.package: name for name, each in STRATEGIES.items() if not each.is_installed}
    lines = [f"left out:        strategies that need {_missing(name)}" for name in missing.values()]
    return lines + [f"left out:        {name}: {reason}" for name, reason in options.refused.items()]


def _report(results: Sequence[Result], options: argparse.Namespace) -> list[str]:
    """Write the measurements and the picture, and return the lines to print."""
    machine = describe_machine()
    cluster = f"{options.nodes} nodes x {options.local} ranks, {_describe_model(results)}"
    legend = LEGEND_NO_WIRE if options.no_wire else LEGEND
    files = {name: options.out / name for name in ("compare.json", "compare.md", "compare.png", "report.html")}
    report = {
        "command": options.command,
        "machine": machine,
        "nodes": options.nodes,
        "local": options.local,
        "rates": list(dict.fromkeys(format_rate(result.rate_bits_per_s) for result in results)),
        "results": [result.to_dict() for result in results],
    }
    files["compare.json"].write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    files["compare.md"].write_text(render(results) + "\n", encoding="utf-8")
    picture, missing = files["compare.png"], ""
    try:
        save_plot(results, picture, title=cluster)
    except ModuleNotFoundError as error:
        missing = f"no picture, because {error.name} is missing: {how_to_install('bench')}"
    page = render_report(
        results,
        title=f"laconic compare: {cluster}",
        machine=in_words(machine),
        command=options.command,
        legend=legend,
        picture=None if missing else picture,
    )
    files["report.html"].write_text(page, encoding="utf-8")
    lines = ["", legend, f"{cluster}; {in_words(machine)}", ""]
    lines += [f"figures:         {files['compare.json']}", f"table:           {files['compare.md']}  (Markdown)"]
    return [*lines, f"report:          {files['report.html']}", missing or f"picture:         {picture}"]


def _files(results: Sequence[Result], cases: Sequence[Case], out: Path, *, has_log: bool) -> Iterator[str]:
    """The lines that name checkpoints and logs."""
    for case, result in zip(cases, results, strict=True):
        if case.save:
            step = max((Path(result.output) / "checkpoints").glob("step-*"))
            shown = step.relative_to(Path.cwd()) if step.is_relative_to(Path.cwd()) else step
            yield f"checkpoint:      {shown}  ({case.label})"
    if has_log:
        yield f"TensorBoard log: {out / 'runs'}  (tensorboard --logdir {out / 'runs'})"


def _describe_model(results: Sequence[Result]) -> str:
    size = f"{max(result.num_parameters for result in results) / 1e6:.1f} M parameters"
    lora = next((result for result in results if result.job == "lora"), None)
    return f"{size}, {lora.num_trainable / lora.num_parameters:.2%} trainable with LoRA" if lora else size
