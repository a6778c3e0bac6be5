"""The row about the states of AdamW8bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import laconic
from benchmarks.llama import Llama
from benchmarks.optimizers.bench import BENCHMARK, Bench, sum_over_ranks
from benchmarks.optimizers.muon import sharded
from laconic.optim import AdamW8bit
from tests.support.record import Row

NUM_STEPS = 3


@BENCHMARK.row("adamw8bit-state")
def adamw8bit_state(bench: Bench) -> Row:
    measured = bench.on_ranks(measure_adamw8bit, NUM_STEPS)["state_bytes"]
    note = f"all ranks' state of {bench.mix}, over its parameters; AdamW's is 8."
    return Row(
        claim="AdamW8bit state bytes per parameter", required="<= 2.2",
        measured=f"{measured:.3f}", is_met=measured <= 2.2, note=note,
    )  # fmt: skip


def measure_adamw8bit(mix: Llama, num_steps: int) -> dict[str, float]:
    """Return the state bytes per parameter, and whether equal gradients give the same bits as in one process."""
    models = sharded(mix, AdamW8bit.granularity), mix.build(torch.device("cpu"), torch.float32)
    optimizers = [AdamW8bit(model.parameters(), lr=1e-2) for model in models]
    pairs = list(zip(*(model.parameters() for model in models), strict=True))
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        for ragged, plain in pairs:
            plain.grad = torch.randn(plain.shape, generator=generator)
            ragged.grad = ragged.detach().like(ragged.spec.part_of(plain.grad).clone())
        for optimizer in optimizers:
            optimizer.step()
    is_equal = all(torch.equal(ragged.full_tensor(), plain) for ragged, plain in pairs)
    held = sum(_local_bytes(value) for state in optimizers[0].state.values() for value in state.values())
    num_parameters = sum(ragged.numel() for ragged, _ in pairs)
    return {"state_bytes": sum_over_ranks(held) / num_parameters, "is_equal": float(is_equal)}


def _local_bytes(value: Any) -> int:
    local = value.to_local() if isinstance(value, laconic.RaggedTensor) else value
    return local.nbytes if isinstance(local, Tensor) else 0
