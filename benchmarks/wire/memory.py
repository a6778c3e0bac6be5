"""Rows about the memory and the losses of full training."""

from __future__ import annotations

import math

from benchmarks.wire.bench import BENCHMARK, FLOAT32_BYTES, Bench
from tests.support.record import Row


@BENCHMARK.row("device-memory")
def device_memory(bench: Bench) -> Row:
    host, none, device = (bench.result(name) for name in ("host", "none", "device"))
    # Gathers that run ahead take memory, so FSDP2 may have less without them.
    fsdp2 = min(map(bench.result, ("fsdp2", "fsdp2-gloo")), key=lambda run: run.allocated_peak_bytes or math.inf)
    by_torch = [run.allocated_peak_bytes or math.nan for run in (host, none, device, fsdp2)]
    by_engine = [run.engine_peak_bytes or math.nan for run in (host, none, device)]
    return Row(
        claim="peak device bytes, cache=host",
        measured=f"{by_torch[0] / by_torch[1]:.3f}x none, {by_torch[0] / by_torch[3]:.3f}x FSDP2",
        note=(
            "the most that torch's allocator held on a rank in a step, as its profiler reports it, together with the "
            "memory that stays allocated between steps: host "
            f"{by_torch[0] / 1e6:.2f}, none {by_torch[1] / 1e6:.2f}, device {by_torch[2] / 1e6:.2f}, FSDP2 "
            f"{by_torch[3] / 1e6:.2f} MB. The engine's own buffers: host {by_engine[0] / 1e6:.2f}, none "
            f"{by_engine[1] / 1e6:.2f}, device {by_engine[2] / 1e6:.2f} MB. FSDP2 has "
            f"its gathers ahead or not, whichever takes less ({fsdp2.strategy})."
        ),
    )


@BENCHMARK.row("host-memory")
def host_memory(bench: Bench) -> Row:
    run = bench.result("host")
    weights_bytes = run.num_parameters * FLOAT32_BYTES
    excess = run.host_bytes_per_node / weights_bytes - 1
    return Row(
        claim="host bytes per node",
        measured=f"one copy {excess:+.3%}",
        note=f"{run.host_bytes_per_node / 1e6:.3f} MB for {weights_bytes / 1e6:.3f} MB of weights.",
    )


@BENCHMARK.row("losses")
def losses(bench: Bench) -> Row:
    host, fsdp2 = bench.result("host").losses, bench.result("fsdp2").losses
    worst = max(abs(a / b - 1) for a, b in zip(host, fsdp2, strict=True))
    return Row(
        claim=f"losses over {bench.loss_steps} steps",
        measured=f"within {worst:.1e}",
        note=f"the loss falls from {fsdp2[0]:.3f} to {fsdp2[-1]:.3f}.",
    )
