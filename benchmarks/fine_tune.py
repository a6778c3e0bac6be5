"""LoRA fine-tuning on conversations on two boxes, as docs/fine-tune.md tells it: the job of examples/chat.toml.

    python -m benchmarks.fine_tune            some minutes on 2 cores, recorded in RESULTS.md; draws docs/fine-tune.png
    python -m benchmarks.fine_tune --quick    a few steps, printed only

Two emulated nodes of one rank each, joined by a wire of 100 Mbit/s, train the job with a larger model than the
example's: under laconic, FSDP2 with a true ring, and DDP, and under laconic on an unshaped wire.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from laconic.compare.case import STRATEGIES, Case
from laconic.compare.result import Result
from laconic.compare.runner import Comparison
from laconic.compare.table import render
from laconic.config import load
from laconic.lab import LabUnavailable
from tests.support.measure import Benchmark, BenchmarkError, Options
from tests.support.record import Record, Row, ratio_row

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "fine-tune.png"
RATE_BITS_PER_S = 1e8
_SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6}
_LABELS = {
    ("host", RATE_BITS_PER_S): ("laconic, 100 Mbit/s", "#d95f02", "-"),
    ("host", None): ("laconic, unshaped wire", "#d95f02", ":"),
    ("ddp", RATE_BITS_PER_S): ("DDP, 100 Mbit/s", "#a3c1da", "-"),
    ("fsdp2", RATE_BITS_PER_S): ("FSDP2, 100 Mbit/s", "#4d4d4d", "-"),
}


@dataclass
class Bench:
    """The open lab, and the runs."""

    comparison: Comparison
    steps: int

    @cached_property
    def results(self) -> list[Result]:
        """Every run of the picture."""
        cases = [
            Case(strategy=name, job="lora", rate_bits_per_s=rate, steps=self.steps, measure_memory=False)
            for name, rate in _LABELS
        ]
        return [self.comparison.run(case) for case in cases]

    def result(self, strategy: str, rate: float | None) -> Result:
        """The run of a strategy at a rate."""
        return next(each for each in self.results if (each.strategy, each.rate_bits_per_s) == (strategy, rate))


def draw(bench: Bench, path: Path) -> None:
    """Draw the loss of every run against the seconds since its first step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained", dpi=150)
    axes = figure.subplots()
    for result in bench.results:
        label, color, style = _LABELS[result.strategy, result.rate_bits_per_s]
        passed = [sum(result.step_times_s[:index]) for index in range(len(result.step_times_s) + 1)]
        axes.plot(passed, result.losses[-len(passed) :], style, color=color, label=label)
    axes.set_xlabel("seconds since the first step", fontsize=9)
    axes.set_ylabel("loss", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _save(record: Record, bench: Bench) -> None:
    draw(bench, PICTURE)
    record.save(
        more=["The job of examples/chat.toml with a Llama of 256 x 6 layers.", render(bench.results)],
        results=[result.to_dict() for result in bench.results],
    )


@contextlib.contextmanager
def _prepare(options: Options) -> Iterator[Bench]:
    job = load(ROOT / "examples" / "chat.toml")
    assert isinstance(job.model.config, dict)
    sizes = {} if options.quick else _SIZES
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, config={**job.model.config, **sizes}))
    data = dataclasses.replace(job.data, path=str(ROOT / str(job.data.path)))
    try:
        with Comparison(dataclasses.replace(job, data=data), options.out, nodes=2, local=1) as comparison:
            yield Bench(comparison=comparison, steps=4 if options.quick else job.train.steps)
    except LabUnavailable as error:
        raise BenchmarkError(str(error)) from error


BENCHMARK = Benchmark(
    measures=("laconic.codec", "laconic.hf", "laconic.layers", "laconic.shard"),
    name="fine_tune",
    prepare=_prepare,
    save=_save,
)


@BENCHMARK.row("unshaped")
def against_unshaped(bench: Bench) -> Row:
    """Compare laconic's step on the slow wire with its step on an unshaped one."""
    slow, free = bench.result("host", RATE_BITS_PER_S), bench.result("host", None)
    return ratio_row(
        claim="LoRA on conversations, 2 nodes x 1 rank at 100 Mbit/s, seconds a step against an unshaped wire",
        ratio=slow.step_s / free.step_s,
        limit=1.15,
        note=f"{slow.step_s:.3f} s against {free.step_s:.3f} s, medians of {slow.steps} steps. {_others(bench)}",
    )


@BENCHMARK.row("losses")
def losses(bench: Bench) -> Row:
    """Compare the losses of all runs."""
    first = bench.results[0]
    worst = max(
        abs(one - other) / abs(other)
        for result in bench.results
        for one, other in zip(result.losses, first.losses, strict=True)
    )
    return Row(
        claim="LoRA on conversations, losses of laconic, FSDP2 and DDP",
        required="equal within 1e-4 relative, fp32",
        measured=f"within {worst:.1e}",
        is_met=worst <= 1e-4,
        note=f"the loss falls from {first.losses[0]:.3f} to {first.loss:.3f} in {first.steps} steps.",
    )


def _others(bench: Bench) -> str:
    found = []
    for name in ("fsdp2", "ddp"):
        result = bench.result(name, RATE_BITS_PER_S)
        found.append(f"{STRATEGIES[name].label} {result.step_s:.3f} s, {(result.wire_bytes or 0) / 1e6:.3g} MB a step")
    own = bench.result("host", RATE_BITS_PER_S)
    return f"At 100 Mbit/s: {'; '.join(found)}; laconic {(own.wire_bytes or 0) / 1e6:.3g} MB a step."


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
