"""`laconic compare CONFIG.toml`: one job under several strategies, side by side in the lab."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from laconic.compare.case import STRATEGIES, Case, ComparisonError, Job, config_of
from laconic.compare.machine import describe_machine, in_words
from laconic.compare.plot import save_plot
from laconic.compare.progress import make_reporter
from laconic.compare.result import Result
from laconic.compare.runner import Comparison
from laconic.compare.table import LEGEND, LEGEND_NO_WIRE, render
from laconic.config.job import Config, JobError, load
from laconic.lab import LabUnavailable, format_rate, parse_rate

_DEMO_CONFIG = Path(__file__).with_name("demo.toml")

_DESCRIPTION = """\
Run the training job of CONFIG.toml under PyTorch's own strategies and under laconic's, on emulated nodes at one or
several rates, and put side by side what each took: seconds and wire bytes per step, memory, loss. Same weights, rows
and optimizer everywhere. Ends with a table, compare.json and compare.png in the output folder."""

_EPILOG = f"""\
strategies: {", ".join(f"{name} ({label})" for name, (label, _) in STRATEGIES.items())}

examples:
  laconic compare --demo
  laconic compare examples/pretrain.toml --rates 200mbit,1gbit,none --steps 8
  laconic compare examples/lora.toml --strategies fsdp2,host,device --rates 50mbit --lora

The first two steps of a run are not timed: the second has its memory watched. Without root the lab needs a kernel with
user namespaces, or --no-wire."""


def main(argv: list[str]) -> int:
    """Run the command; the exit code is 1 if a run failed and 2 for a mistake in the arguments."""
    options = _parse(argv)
    console = Console()
    try:
        base = load(options.config)
        cases = make_cases(base, options)
        with _leaving_in_order(), _comparison(base, options, len(cases), console) as comparison:
            results = [comparison.run(case) for case in cases]
    except (JobError, LabUnavailable, ValueError) as error:
        print(f"laconic compare: {error}", file=sys.stderr)
        return 2
    except ComparisonError as error:
        print(f"laconic compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("laconic compare: interrupted; everything in the lab has ended", file=sys.stderr)
        return 128 + signal.SIGINT
    _tell(results, cases, options, console)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="laconic compare", description=_DESCRIPTION, epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="as for laconic train")
    parser.add_argument(
        "--demo", action="store_true",
        help="a small job that comes with laconic: full training, then LoRA, at 200 Mbit/s, in a few minutes",
    )  # fmt: skip
    parser.add_argument(
        "--strategies", type=_names, metavar="A,B,...",
        help="which to run, in this order (default: all; with --demo: fsdp2,host)",
    )  # fmt: skip
    parser.add_argument(
        "--rates", type=_rates, default=[200e6], metavar="A,B,...",
        help="of every node's link in each direction, as in 200mbit,1gbit,none (default 200mbit)",
    )  # fmt: skip
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="emulated nodes (default 2)")
    parser.add_argument("--local", type=int, default=2, metavar="L", help="ranks on each node (default 2)")
    parser.add_argument(
        "--steps", type=int, metavar="S", help="optimizer steps of each run (default 8; with --demo 20)"
    )
    parser.add_argument("--lora", action="store_true", help="after full training run LoRA too, as [lora] describes it")
    parser.add_argument("--save", action="store_true", help="end each run under laconic with a checkpoint")
    parser.add_argument("--no-wire", action="store_true", help="run on loopback: logical nodes, no rate, no wire bytes")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="of each run (default 1800)")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), metavar="DIR", help="default runs/compare")
    options = parser.parse_args(argv)
    if options.demo == (options.config is not None):
        parser.error("give a CONFIG.toml, or --demo, which brings its own")
    if options.demo:
        options.config, options.lora, options.save = _DEMO_CONFIG, True, True
    options.strategies = options.strategies or (["fsdp2", "host"] if options.demo else list(STRATEGIES))
    options.steps = options.steps or (20 if options.demo else 8)
    if options.no_wire:
        options.rates = [None]
    options.command = shlex.join(["laconic", "compare", *argv])
    return options


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown or not names:
        what = f"{unknown[0]!r} is not a strategy" if unknown else "no strategy is named"
        raise argparse.ArgumentTypeError(f"{what}; there are {', '.join(STRATEGIES)}")
    return list(dict.fromkeys(names))


def _rates(text: str) -> list[float | None]:
    try:
        return list(dict.fromkeys(parse_rate(rate) for rate in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def make_cases(base: Config, options: argparse.Namespace) -> list[Case]:
    """Every run of the command, in order, after making sure that each strategy can run the job."""
    jobs: list[Job] = ["lora"] if base.lora.enabled else ["full", "lora"] if options.lora else ["full"]
    cases = [
        Case(
            strategy=strategy,
            job=job,
            rate_bits_per_s=rate,
            steps=options.steps,
            save=options.save and STRATEGIES[strategy][1]["strategy"] == "laconic",
        )
        for job in jobs
        for rate in options.rates
        for strategy in options.strategies
    ]
    for case in cases:
        config_of(base, case, options.out)
    return cases


def _comparison(base: Config, options: argparse.Namespace, num_runs: int, console: Console) -> Comparison:
    return Comparison(
        base, options.out, nodes=options.nodes, local=options.local, wire=not options.no_wire,
        timeout_s=options.timeout, reporter=make_reporter(num_runs=num_runs, console=console),
    )  # fmt: skip


@contextmanager
def _leaving_in_order() -> Iterator[None]:
    """Turn the signals that end a process into exceptions, so that the lab is left in order."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _tell(results: Sequence[Result], cases: Sequence[Case], options: argparse.Namespace, console: Console) -> None:
    def say(text: str = "") -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    machine = describe_machine()
    say()
    say(render(results))
    say()
    say(LEGEND_NO_WIRE if options.no_wire else LEGEND)
    say(f"{options.nodes} nodes x {options.local} ranks, {_size(results)}; {in_words(machine)}")
    say()
    report = options.out / "compare.json"
    report.write_text(json.dumps(_report(results, options, machine), indent=1) + "\n", encoding="utf-8")
    say(f"figures:         {report}")
    picture = options.out / "compare.png"
    try:
        save_plot(results, picture, title=f"{options.nodes} nodes x {options.local} ranks, {_size(results)}")
        say(f"picture:         {picture}")
    except ModuleNotFoundError as error:
        say(f"no picture, for want of {error.name}: pip install 'laconic[bench]'")
    for case, result in zip(cases, results, strict=True):
        if case.save:
            step = max((Path(result.output) / "checkpoints").glob("step-*"))
            say(f"checkpoint:      {_short(step)}  ({case.label})")
    if load(options.config).log.tensorboard:
        say(f"TensorBoard log: {options.out / 'runs'}  (tensorboard --logdir {options.out / 'runs'})")


def _size(results: Sequence[Result]) -> str:
    by_job = {result.job: result for result in results}
    parts = [f"{max(result.num_parameters for result in results) / 1e6:.1f} M parameters"]
    if "lora" in by_job:
        lora = by_job["lora"]
        parts.append(f"{lora.num_trainable / lora.num_parameters:.2%} trainable with LoRA")
    return ", ".join(parts)


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _report(
    results: Sequence[Result], options: argparse.Namespace, machine: dict[str, str | int | float]
) -> dict[str, Any]:
    return {
        "command": options.command,
        "machine": machine,
        "nodes": options.nodes,
        "local": options.local,
        "rates": [format_rate(rate) for rate in options.rates],
        "results": [result.to_dict() for result in results],
    }
