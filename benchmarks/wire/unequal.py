"""Batches by speed beside equal batches, where two of four ranks have half the processor of the others."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import Any

from benchmarks.wire.bench import BENCHMARK, HOME, Bench
from benchmarks.wire.slowed import control_groups
from laconic.compare.case import Case, ComparisonError, config_of
from laconic.compare.runner import explain_failure
from laconic.config import to_toml
from tests.support.record import Row

_SHARES = (0.4, 0.4, 0.2, 0.2)
"""Of one processor, by rank. A machine with two of them can always give 1.2."""
_ROWS, _TOKENS = 6, 128
_WARM_STEPS = 8
"""After step 4 the ranks compare, and after step 8 again, by what their new rows take."""


@BENCHMARK.row("unequal", section="placement")
def unequal(bench: Bench) -> Row:
    """`train.rows = "by-speed"` against equal rows."""
    steps = _WARM_STEPS + (4 if bench.quick else 8)
    runs: dict[str, list[dict[str, Any]]] = {"equal": [], "by-speed": []}
    with control_groups(_SHARES) as groups:
        for repeat in range(1 if bench.quick else 2):
            for rows, summaries in runs.items():
                summaries.append(_trained(bench, rows, steps, groups, repeat))
    step_s = {
        rows: statistics.median(time_s for each in summaries for time_s in each["step_s"][_WARM_STEPS:])
        for rows, summaries in runs.items()
    }
    gain = step_s["equal"] / step_s["by-speed"]
    first, *others = (each["losses"] for summaries in runs.values() for each in summaries)
    worst = max(abs(a / b - 1) for losses in others for a, b in zip(losses, first, strict=True))
    divided = " or ".join(sorted({str(list(each["rows"])) for each in runs["by-speed"]}))
    return Row(
        claim=f"tokens/s, rows by measured speed, two of four ranks at half speed, {HOME}, against equal rows",
        measured=f"{gain:.3f}x; within {worst:.1e}",
        measures=("laconic.data.batches", "laconic.train.balance"),
        note=(
            f"ranks have {', '.join(map(str, _SHARES))} of a processor by quotas of control groups; {4 * _ROWS} rows "
            f"of {_TOKENS} tokens a step, divided into {divided}, where the shares alone would give 8, 8, 4, 4 and "
            f"1.5x; {step_s['equal']:.3f} s a step against {step_s['by-speed']:.3f} s, medians of the steps after "
            f"{_WARM_STEPS} of {len(runs['equal'])} alternating runs each; unshaped wire."
        ),
    )


def _trained(bench: Bench, rows: str, steps: int, groups: list[str], repeat: int) -> dict[str, Any]:
    """The summary of one run."""
    comparison = bench.comparison(replace(HOME, job_file="grid"))
    config = config_of(comparison.base, Case(strategy="host", steps=steps, repeat=repeat), comparison.out)
    output = comparison.out / f"unequal-{rows}-{repeat}"
    config = replace(
        config,
        data=replace(config.data, sequence_length=_TOKENS),
        train=replace(config.train, rows=rows, micro_batch_size=_ROWS, output=str(output)),
        log=replace(config.log, memory_step=0),
    )
    job, given = comparison.out / f"{output.name}.toml", comparison.out / "groups.json"
    job.write_text(to_toml(config), encoding="utf-8")
    given.write_text(json.dumps(groups))
    outcome = comparison.run_ranks(["-m", "benchmarks.wire.slowed", str(job), str(given)], None)
    if outcome.exit_code:
        raise ComparisonError(f"{output.name}: {explain_failure(outcome)}")
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary
