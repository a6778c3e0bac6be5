"""Rows about the bytes on the wire."""

from __future__ import annotations

import statistics

from benchmarks.local_steps.bench import SMALL_STEP, Bench, wire_bytes
from benchmarks.local_steps.islands import Job
from benchmarks.record import Row
from laconic.codec import codec_named


def bytes_per_token(bench: Bench) -> Row:
    steps = 100
    common = {"shape": bench.shape, "warmup_steps": 5, **SMALL_STEP}
    jobs = [
        Job(name="ddp", kind="ddp", steps=12, **common),
        Job(name="local", steps=2 * steps, every=steps, codec="e3m0", **common),
    ]
    found = bench.run_in_lab(jobs, None)
    ddp = statistics.mean(wire_bytes(found["ddp"])[2:])  # DDP builds its buckets in the first steps
    local = statistics.mean(wire_bytes(found["local"]))
    counted = sum(found["local"].sent_bytes) / len(found["local"].sent_bytes)
    claim = "wire bytes per token against every-step DDP, every=100, fp4"
    is_met = local <= ddp / 400
    return Row(
        key="bytes", claim=claim, required="<= 1/400", measured=f"1/{ddp / local:.0f}", is_met=is_met,
        note=(
            f"sent by island 0 at the lab's interface: {local / 1e3:.2f} kB a step (counted {counted / 1e3:.2f} kB) "
            f"against {ddp / 1e3:.0f} kB; equal tokens per step. Arithmetic says 1/{_bytes_arithmetic():.0f}: DDP's "
            "ring sends 3/2 of the gradients in fp32; the two trips of an exchange send 3/2 of the pseudo-gradients in "
            "codes of 4 bits with one scale a block."
        ),
    )  # fmt: skip


def _bytes_arithmetic() -> float:
    numel = 2**20
    return 100 * 4 * numel / codec_named("e3m0").payload_bytes(numel)


def peak(bench: Bench) -> Row:
    common = {"shape": bench.shape, "warmup_steps": 5, "codec": "e3m0", "every": 40, "steps": 80, **SMALL_STEP}
    jobs = [Job(name="diloco", **common), Job(name="streamed", fragments=8, **common)]  # type: ignore[arg-type]
    found = bench.run_in_lab(jobs, None)
    largest = {name: max(wire_bytes(answer)) for name, answer in found.items()}
    streamed, diloco = largest["streamed"], largest["diloco"]
    return Row(
        key="peak",
        claim="peak wire rate of streaming against DiLoCo, 8 fragments",
        required="<= 1/6",
        measured=f"1/{diloco / streamed:.2f}",
        is_met=streamed <= diloco / 6,
        note=(
            f"the most bytes that island 0 sent in one step: {streamed / 1e3:.1f} against "
            f"{diloco / 1e3:.1f} kB. Not 1/8, because one fragment also has the embeddings and the output layer."
        ),
    )
