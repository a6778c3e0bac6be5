"""LoRA fine-tuning on conversations on two boxes, as docs/fine-tune.md tells it: the job of examples/chat.toml.

    python -m benchmarks.fine_tune            some minutes on 2 cores, recorded; draws docs/fine-tune.png
    python -m benchmarks.fine_tune --quick    a few steps, printed only

Two emulated nodes of one rank each, joined by a wire of 100 Mbit/s, train the job with a larger model than the
example's: under laconic, FSDP2 with a true ring, and DDP, and under laconic on an unshaped wire.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from laconic.compare.case import STRATEGIES, Case
from laconic.compare.result import Result
from laconic.compare.runner import Comparison
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


Runs = dict[tuple[str, float | None], Result]
"""Every run of the picture, by strategy and rate."""


@dataclass
class Bench:
    """The open lab, and the runs."""

    comparison: Comparison
    steps: int

    @cached_property
    def runs(self) -> Runs:
        """All runs, made when a row first needs them."""
        return {
            (name, rate): self.comparison.run(
                Case(strategy=name, job="lora", rate_bits_per_s=rate, steps=self.steps, measure_memory=False)
            )
            for name, rate in _LABELS
        }


def draw(runs: Runs, path: Path) -> None:
    """Draw the loss of every run against the seconds since its first step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained", dpi=150)
    axes = figure.subplots()
    for key, run in runs.items():
        label, color, style = _LABELS[key]
        passed = [sum(run.step_times_s[:index]) for index in range(len(run.step_times_s) + 1)]
        axes.plot(passed, run.losses[-len(passed) :], style, color=color, label=label)
    axes.set_xlabel("seconds since the first step", fontsize=9)
    axes.set_ylabel("loss", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _save(record: Record, bench: Bench) -> None:
    draw(bench.runs, PICTURE)
    record.save(results=[run.to_dict() for run in bench.runs.values()])


@contextlib.contextmanager
def _prepare(options: Options) -> Iterator[Bench]:
    job = load(ROOT / "examples" / "chat.toml")
    assert isinstance(job.model.config, dict)
    sizes = {} if options.quick else _SIZES
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, config={**job.model.config, **sizes}))
    rows, chats = options.out / "rows", ROOT / "examples" / "data" / "chat.jsonl"
    subprocess.run([sys.executable, str(ROOT / "examples" / "chat_rows.py"), str(chats), str(rows)], check=True)
    data = dataclasses.replace(job.data, path=str(rows))
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
    slow, free = bench.runs["host", RATE_BITS_PER_S], bench.runs["host", None]
    others = "; ".join(
        f"{STRATEGIES[name].label} {run.step_s:.3f} s, {(run.wire_bytes or 0) / 1e6:.3g} MB a step"
        for (name, rate), run in bench.runs.items()
        if rate is not None
    )
    return ratio_row(
        claim="LoRA on conversations, 2 nodes x 1 rank at 100 Mbit/s, seconds a step against an unshaped wire",
        ratio=slow.step_s / free.step_s,
        note=f"{slow.step_s:.3f} s against {free.step_s:.3f} s, medians of {slow.steps} steps. At 100 Mbit/s: "
        f"{others}.",
    )


@BENCHMARK.row("losses")
def losses(bench: Bench) -> Row:
    """Compare the losses of all runs."""
    first, *others = (run.losses for run in bench.runs.values())
    worst = max(abs(a - b) / abs(b) for each in others for a, b in zip(each, first, strict=True))
    return Row(
        claim="LoRA on conversations, losses of laconic, FSDP2 and DDP",
        measured=f"within {worst:.1e}",
        note=f"the loss falls from {first[0]:.3f} to {first[-1]:.3f} in {len(first)} steps.",
    )


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
