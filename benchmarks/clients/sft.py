"""The row about the speed of LoRA fine-tuning by SFTTrainer on a slow wire, in the lab."""

from __future__ import annotations

import dataclasses
import json
import statistics

from benchmarks.clients.bench import BENCHMARK, TIMEOUT_S, Bench
from laconic.compare.runner import explain_failure
from laconic.lab import Lab, format_rate
from tests.support.record import Row

RATE_BITS_PER_S = 100e6
"""The rate of the lab's links."""
LIMIT = 1.15
"""The largest ratio of laconic's step on this wire to its step on an unshaped wire."""
_NODES, _LOCAL = 2, 2


@BENCHMARK.row("sft-lab")
def sft_lab(bench: Bench) -> Row:
    pairs = [(_run(bench, "laconic", RATE_BITS_PER_S), _run(bench, "laconic", None)) for _ in range(bench.pairs)]
    ratios = sorted(shaped["step_s"] / unshaped["step_s"] for shaped, unshaped in pairs)
    ratio = statistics.median(ratios)
    peers = {name: (_run(bench, name, RATE_BITS_PER_S), _run(bench, name, None)) for name in ("fsdp2", "ddp")}
    step_s = statistics.median(shaped["step_s"] for shaped, _ in pairs)
    fsdp2, fsdp2_unshaped = peers["fsdp2"]
    each = "; ".join(
        f"{name} {shaped['step_s']:.3f} s and {shaped['sent_bytes'] / 1e6:.3f} MB, unshaped "
        f"{unshaped['step_s']:.3f} s, loss {shaped['loss']:.4f}"
        for name, (shaped, unshaped) in {**peers, "laconic, last pair,": pairs[-1]}.items()
    )
    return Row(
        claim=(
            f"LoRA by SFTTrainer on {_NODES} x {_LOCAL} at {format_rate(RATE_BITS_PER_S)}, seconds a step against the "
            "same on an unshaped wire; FSDP2 through accelerate beside it"
        ),
        required=f"<= {LIMIT:.2f}x",
        measured=(
            f"{ratio:.3f}x; FSDP2 {fsdp2['step_s'] / fsdp2_unshaped['step_s']:.1f}x; "
            f"laconic takes 1/{fsdp2['step_s'] / step_s:.0f} of FSDP2's step"
        ),
        is_met=ratio <= LIMIT,
        note=(
            f"{bench.llama}, fp32, adapters of rank 8 on q_proj and v_proj, 0.5 % of the weights. The median of "
            f"{bench.pairs} pairs of runs of {bench.lab_steps} steps, from {ratios[0]:.3f}x to {ratios[-1]:.3f}x; "
            f"{each}; bytes that a node sends in a step. FSDP2 has a true ring and gathers ahead. accelerate 1.15 "
            "trains by DDP on CPU, whatever FSDP settings it gets; the benchmark turns its FSDP2 on, as on a GPU."
        ),
        tried=(
            "1.198x by medians of 3 alternating runs of each strategy (0.748, 0.747 and 0.623 s against 0.665, 0.624 "
            "and 0.610 s), in which the machine's drift between the runs counts as the wire's."
        ),
    )


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
