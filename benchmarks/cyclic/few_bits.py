"""The row about messages in few bits: the small Llama of accuracy.py, on N processes, each a node of its own.

Runs of a seed begin with the same plain steps and see the same batches, so they differ by what crosses alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cyclic.accuracy import WORKERS, Language, Study, plain_state
from benchmarks.cyclic.bench import BENCHMARK, Bench, Setting
from laconic import Wire
from tests.support.launch import launch
from tests.support.record import Row

RULE = "lag2"
_TIMEOUT_S = 900.0
EXACT = "exact"
WIRES = {
    EXACT: Wire(),
    "int8 with feedback": Wire(weights="int8", gradients="int8", feedback=True),
    "int8": Wire(weights="int8", gradients="int8"),
    "int4 with feedback": Wire(weights="int4", gradients="int4", feedback=True),
}
CLAIMED = "int8 with feedback"
MOST_BYTES, MOST_LOSS = 0.3, 1e-3
"""The requirements: bytes as a share of those of exact messages, and the relative distance of the loss."""


@BENCHMARK.row("few-bits")
def few_bits(bench: Bench) -> Row:
    study = Language(**{**bench.language, **bench.few_bits}, folder=bench.out / "tokens")
    setting = study.settings[0]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WIRES}
    for seed in range(study.seeds):
        state = bench.out / f"plain-{seed}.pt"
        torch.save(plain_state(study, setting, seed), state)
        for name, wire in WIRES.items():
            ranks = launch(
                train_rank, study, setting, seed, wire, state, num_ranks=WORKERS, num_local=1, timeout_s=_TIMEOUT_S
            )  # fmt: skip
            found[name].append((ranks[0][0], sum(sent for _, sent in ranks)))
            print(f"seed {seed}, {name}: test loss {found[name][-1][0]:.4f}, {found[name][-1][1]:,.0f} bytes a step")
    exact = found.pop(EXACT)
    distances = {
        name: [loss / plain - 1 for (loss, _), (plain, _) in zip(runs, exact, strict=True)]
        for name, runs in found.items()
    }
    shares = {name: runs[0][1] / exact[0][1] for name, runs in found.items()}
    share, distance = shares[CLAIMED], statistics.mean(distances[CLAIMED])
    others = ", ".join(
        f"{name} {share:.3f}x and {_with_spread(distances[name])}" for name, share in shares.items() if name != CLAIMED
    )
    return Row(
        claim="cyclic with few bits, bytes against exact; loss",
        measured=f"{share:.3f}x; {distance:+.3%}",
        note=(
            f"{CLAIMED}, rule {RULE}, replicated states, {WORKERS} workers on nodes of their own: weights as "
            f"differences to the workers' copies, sums of gradients at every hop. A small Llama: eval loss after "
            f"{study.steps} steps, the first {study.plain_steps} plain and exact; learning rate {setting}; exact "
            f"{statistics.mean(loss for loss, _ in exact):.4f}. Seed by seed, mean ± standard deviation of "
            f"{study.seeds} seeds: {_with_spread(distances[CLAIMED])}; {others}. Bytes are counted at the senders, "
            "without batons, over the steps and the drain, whose last weights are exact."
        ),
    )


def _with_spread(distances: Sequence[float]) -> str:
    return f"{statistics.mean(distances):+.3%} ± {statistics.stdev(distances):.3%}"


def train_rank(study: Study, setting: Setting, seed: int, wire: Wire, state: Path) -> tuple[float, float]:
    """Go on from the plain state as one worker. Returns the test loss, and the bytes that it sent a step."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    stages, trainer = study.begin(RULE, setting, seed, mesh=mesh, wire=wire)
    values = torch.load(state, weights_only=False)
    own = {key.replace("devices.0.", f"devices.{rank}.", 1): value for key, value in values.items()}
    trainer.load_state_dict(own)
    before = trainer.traffic.snapshot()
    study.run(trainer, setting, seed, range(study.plain_steps, study.steps), worker=rank)
    traffic = trainer.traffic.snapshot() - before
    sent = traffic.wire("sent", "weights") + traffic.wire("sent", "gradients")
    _, loss = study.results(stages, seed)
    return loss, sent / (study.steps - study.plain_steps)
