"""How few bits of gradients leave losses as they are: the curve of bits and losses.

    python -m benchmarks.few_bits.study DIR          the runs, on a GPU; some ten minutes on an H100
    python -m benchmarks.few_bits --out DIR          the row of what DIR has, recorded in RESULTS.md
    python -m benchmarks.few_bits --quick            a few codings of a tiny model, on any device

One process plays four nodes, and trains all seeds at once; crossing.py codes as the engine does.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.few_bits.candidates import FLOOR, plan
from benchmarks.few_bits.study import FILE, QUICK, Setting, study
from laconic.compare.markdown import markdown
from tests.support.measure import Benchmark, BenchmarkError, Options
from tests.support.record import Record, Row, write_section

LIMITS = (0.001, 0.003, 0.005)
"""The excesses of the loss for which the least bits are sought."""
MOST_BITS = (3.5, 1.9)
"""The bits that gradients may take at the first and the last of them: those of 0.75 and 0.55 bytes, less 2.5 bits of
weights that cross without loss."""
_QUICK_ONLY = "exact|1.5 rms rotated"
_SECTION = "codings of gradients"
Run = dict[str, Any]


@dataclass
class Bench:
    """The results of the study."""

    results: dict[str, Any]

    def runs(self, protocol: str) -> dict[str, Run]:
        """Return the runs of a protocol by the name of their coding, in the order of the plan.

        `excess` and `error` are against the mean of the two exact runs of a seed, if the second is there.
        """
        found: dict[str, Run] = self.results["runs"]
        keys = {coding.name: f"{protocol}: {coding.name}" for coding, each in plan() if each == protocol}
        floor = found.get(keys[FLOOR.name])
        return {name: _against(found[key], floor) for name, key in keys.items() if key in found}


def _against(run: Run, floor: Run | None) -> Run:
    if floor is None or floor is run:
        return run
    exact = [(one + two) / 2 for one, two in zip(run["exact"], floor["losses"], strict=True)]
    excess = [loss / reference - 1 for loss, reference in zip(run["losses"], exact, strict=True)]
    return run | {"excess": statistics.mean(excess), "error": statistics.stdev(excess) / len(excess) ** 0.5}


def bits_of_run(run: Run, *, coded: bool) -> float:
    """Return the bits of a value: of fixed width, or with `coded` those of Rice's code where it is shorter."""
    fixed = run.get("nominal_bits", math.inf)
    return float(min(fixed, run.get("rice", fixed)) if coded else fixed)


def least_bits(runs: dict[str, Run], limit: float, *, coded: bool) -> tuple[float, str]:
    """Return the least bits at which the mean excess and its standard error stay within a limit, and the coding."""
    within = [
        (bits_of_run(run, coded=coded), name) for name, run in runs.items() if run["excess"] + run["error"] <= limit
    ]
    return min(within, default=(math.inf, "none"))


def table(bench: Bench) -> str:
    """Return all codings as a table, the most bits first."""
    continued, scratch = bench.runs("continued"), bench.runs("scratch")
    cells = []
    for name, run in sorted({**scratch, **continued}.items(), key=lambda each: -bits_of_run(each[1], coded=True)):
        figures = [f"{run[key]:.2f}" if key in run else "-" for key in ("nominal_bits", "rice", "entropy_by_block")]
        losses = [
            f"{runs[name]['excess']:+.2%} ± {runs[name]['error']:.2%}" if name in runs else "-"
            for runs in (continued, scratch)
        ]
        error = f"{run['error_of_sum']:.2f}" if "error_of_sum" in run else "-"
        cells.append([name, *figures, f"{run['memory_bytes']:.2f}", error, *losses])
    head = ("gradients", "bits", "Rice", "entropy", "B kept", "error", "continued", "from scratch")
    return markdown(head, cells, num_text_columns=1)


_LEGEND = (
    "bits: of a value of a matrix, scales included, in codes of fixed width; Rice: in Rice's code, its parameter by "
    "the block; entropy: of the codes given their block. B kept: bytes a parameter that a node of four keeps for "
    "feedback. error: of the sum over nodes, relative. continued, from scratch: loss against exact gradients (the mean "
    "of two runs), mean ± standard error over seeds."
)


def _save(record: Record, bench: Bench) -> None:
    results = bench.results
    write_section(_SECTION, f"{results['machine']}\n\n{table(bench)}\n\n{_LEGEND}")
    record.save()


def _prepare(options: Options) -> Bench:
    if options.quick:
        return Bench(study(options.out, QUICK, only=_QUICK_ONLY))
    if torch.cuda.is_available():
        return Bench(study(options.out, Setting()))
    file = options.out / FILE
    if not file.exists():
        raise BenchmarkError(
            f"there is no {file}: run python -m benchmarks.few_bits.study DIR on a GPU, and name its DIR"
        )
    return Bench(json.loads(file.read_text()))


BENCHMARK = Benchmark(
    name="few_bits", measures=("laconic.codec",), prepare=_prepare, save=_save, details=lambda bench: table(bench)
)


@BENCHMARK.row("gradient-curve", section="lossless")
def gradient_curve(bench: Bench) -> Row:
    """The least bits of gradients at three distances of the loss."""
    continued, setting = bench.runs("continued"), bench.results["setting"]
    fixed = [least_bits(continued, limit, coded=False) for limit in LIMITS]
    coded = [least_bits(continued, limit, coded=True) for limit in LIMITS]
    floor = continued[FLOOR.name]
    tokens = setting["nodes"] * setting["rows"] * setting["length"]
    named = "; ".join(f"{limit:.1%}: {one[1]} / {two[1]}" for limit, one, two in zip(LIMITS, fixed, coded, strict=True))
    return Row(
        claim="least bits of a gradient at a loss within 0.1 / 0.3 / 0.5 % of exact, fixed width; with Rice's code",
        required=f"<= {MOST_BITS[0]} / - / {MOST_BITS[1]} with Rice's code",
        measured="; ".join(" / ".join(f"{bits:.2f}" for bits, _ in each) for each in (fixed, coded)),
        is_met=coded[0][0] <= MOST_BITS[0] and coded[-1][0] <= MOST_BITS[1],
        note=(
            f"{named}. Mean and standard error of {setting['seeds']} seeds lie within the limit; noise floor "
            f"{floor['excess']:+.3%} ± {floor['error']:.3%}. {bench.results['parameters'] / 1e6:.1f} M parameters, "
            f"AdamW, {setting['steps']} steps of {tokens:,} tokens on {setting['nodes']} nodes, of which the last "
            f"{setting['steps'] - setting['fork']} are coded. Runs from scratch, and all codings: section {_SECTION}. "
            f"Runs on {bench.results['machine']}."
        ),
    )


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
