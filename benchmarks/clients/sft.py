"""The row about the speed of LoRA fine-tuning by SFTTrainer on a slow wire, in the lab."""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import Any

from benchmarks.clients.bench import TIMEOUT_S, Bench
from benchmarks.record import Row
from laconic.compare.runner import explain_failure
from laconic.lab import Lab, format_rate

RATE_BITS_PER_S = 100e6
"""The rate of the lab's links."""
LIMIT = 1.15
"""The largest ratio of laconic's step on this wire to its step on an unshaped wire."""
_NODES, _LOCAL = 2, 2


def sft_lab(bench: Bench) -> Row:
    shaped, unshaped = _alternate(bench)
    ratio = shaped["laconic"]["step_s"] / unshaped["laconic"]["step_s"]
    each = "; ".join(
        f"{strategy} {shaped[strategy]['step_s']:.3f} s and {shaped[strategy]['sent_bytes'] / 1e6:.3f} MB, unshaped "
        f"{unshaped[strategy]['step_s']:.3f} s, loss {shaped[strategy]['loss']:.4f}"
        for strategy in shaped
    )
    fsdp2 = shaped["fsdp2"]["step_s"]
    return Row(
        key="sft-lab",
        claim=(
            f"LoRA by SFTTrainer on {_NODES} x {_LOCAL} at {format_rate(RATE_BITS_PER_S)}, seconds a step against the "
            "same on an unshaped wire; FSDP2 through accelerate beside it"
        ),
        required=f"<= {LIMIT:.2f}x",
        measured=(
            f"{ratio:.3f}x; FSDP2 {fsdp2 / unshaped['fsdp2']['step_s']:.1f}x; "
            f"laconic takes 1/{fsdp2 / shaped['laconic']['step_s']:.0f} of FSDP2's step"
        ),
        is_met=ratio <= LIMIT,
        note=(
            f"{bench.llama}, fp32, adapters of rank 8 on q_proj and v_proj, 0.5 % of the weights: {each}; bytes that a "
            f"node sends in a step, medians of {bench.repeats} alternating runs of {bench.lab_steps} steps. FSDP2 has "
            "a true ring and gathers ahead. accelerate 1.15 trains by DDP on CPU, whatever FSDP settings it gets; the "
            "benchmark turns its FSDP2 on, as on a GPU."
        ),
    )


def _alternate(bench: Bench) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Return the medians of the runs on the shaped wire, and of those on the unshaped one, by strategy."""
    strategies, rates = ("fsdp2", "ddp", "laconic"), (RATE_BITS_PER_S, None)
    runs: dict[Any, list[dict[str, float]]] = {}
    for _ in range(bench.repeats):
        for rate in rates:
            for strategy in strategies:
                runs.setdefault((rate, strategy), []).append(_run(bench, strategy, rate))
    medians = {
        key: {figure: statistics.median(run[figure] for run in found) for figure in found[0]}
        for key, found in runs.items()
    }
    shaped, unshaped = ({strategy: medians[rate, strategy] for strategy in strategies} for rate in rates)
    return shaped, unshaped


def _run(bench: Bench, strategy: str, rate_bits_per_s: float | None) -> dict[str, float]:
    job, answer = bench.out / "sft.json", bench.out / "sft-answer.json"
    job.write_text(json.dumps({"llama": dataclasses.asdict(bench.llama), "steps": bench.lab_steps}))
    with Lab(nodes=_NODES, rate_bits_per_s=rate_bits_per_s) as lab:
        command = ["-m", "benchmarks.clients.sft_rank", strategy, str(job), str(answer)]
        outcome = lab.run(command, local=_LOCAL, timeout_s=TIMEOUT_S, show=False)
    if outcome.exit_code:
        raise RuntimeError(f"{strategy} failed: {explain_failure(outcome)}")
    found: dict[str, float] = json.loads(answer.read_text())
    print(f"{strategy}, {format_rate(rate_bits_per_s)}: {found}", flush=True)
    return found
