"""The row about equal numbers: every client trains with DDP and with laconic, and their logs are compared."""

from __future__ import annotations

import importlib
import tempfile

from benchmarks.clients.bench import BENCHMARK, TIMEOUT_S, Bench
from tests.support.launch import launch
from tests.support.record import Row

TOLERANCE = 1e-5
CLIENTS = {
    "Trainer": "trainer",
    "Trainer with accumulation": "accumulation",
    "SFT LoRA": "sft_lora",
    "DPO LoRA": "dpo_lora",
    "DPO with a reference model": "dpo",
    "Reward": "reward",
    "accelerate loop": "accelerate_jobs",
    "Lightning": "lightning_jobs",
}
"""The job of each client: a name of `trainers.JOBS`, or a module with a function `train`."""

Log = dict[str, list[float]]


@BENCHMARK.row("losses")
def losses(bench: Bench) -> Row:
    gaps, first, last = {}, {}, {}
    for client, job in CLIENTS.items():
        for world in bench.worlds:
            ddp, laconic = (_launch(job, strategy, bench.steps, world) for strategy in ("ddp", "laconic"))
            gaps[client, world] = largest_gap(ddp, laconic)
            first[client], last[client] = next(iter(laconic.values()))[0], next(iter(laconic.values()))[-1]
            print(f"{client}, {world} ranks: {gaps[client, world]:.1e}", flush=True)
    worst = max(gaps, key=lambda key: gaps[key])
    each = "; ".join(
        f"{client} {', '.join(f'{gaps[client, world]:.1e}' for world in bench.worlds)} "
        f"({first[client]:.4f} to {last[client]:.4f})"
        for client in CLIENTS
    )
    return Row(
        claim=(
            f"losses and gradient norms against DDP, {bench.steps} steps, "
            f"{' and '.join(map(str, bench.worlds))} ranks, fp32, largest difference"
        ),
        required=f"<= {TOLERANCE:.0e}",
        measured=f"{gaps[worst]:.1e} ({worst[0]}, {worst[1]} ranks)",
        is_met=gaps[worst] <= TOLERANCE,
        note=(
            f"largest absolute difference of any loss and any gradient norm, and laconic's first and last loss: "
            f"{each}. DDP adds the gradients of all ranks in another order, which rounds differently."
        ),
    )


def largest_gap(left: Log, right: Log) -> float:
    """Return the largest absolute difference between two logs, which have the same figures of the same steps."""
    pairs = [pair for key in left for pair in zip(left[key], right[key], strict=True)]
    return max(abs(x - y) for x, y in pairs)


def _launch(job: str, strategy: str, steps: int, world: int) -> Log:
    log: Log = launch(train, job, strategy, steps, num_ranks=world, timeout_s=TIMEOUT_S)[0]
    if any(len(figures) != steps for figures in log.values()):
        raise RuntimeError(f"{job} under {strategy} logged {log}, not {steps} steps")
    return log


def train(job: str, strategy: str, steps: int) -> Log:
    """Train a job on this rank, and return its log."""
    if job.endswith("_jobs"):
        return importlib.import_module(f"benchmarks.clients.{job}").train(strategy, steps)
    from laconic.integrations import LaconicArguments
    from tests.support import trainers

    with tempfile.TemporaryDirectory() as folder:
        return trainers.run(job, folder, steps, LaconicArguments() if strategy == "laconic" else None)
