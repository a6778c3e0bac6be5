"""What optimizers that need whole blocks or whole matrices cost when the model is sharded, and that they train alike.

    python benchmarks/optimizers.py                      all rows, some 15 minutes on 2 cores, recorded in RESULTS.md
    python benchmarks/optimizers.py --rows muon-bytes    some of them, recorded too
    python benchmarks/optimizers.py --quick              all rows on a tiny job, printed only: does the method work?

[Note: Whose bytes are compared how]
Bytes received, summed over the ranks, of one optimizer step, over the bytes of all matrices in fp32; levels together.
laconic's are its own counters' (purpose "optimizer"). Of torch.optim.Muon on FSDP2 every functional collective that
DTensor issues is counted as the best algorithm for it moves it (benchmarks/_collective_bytes.py).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _collective_bytes import CollectiveBytes
from _launch import launch
from _llama import Llama, decoder_layers
from measure import measure, options_of
from record import Record, Row, rows_table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import laconic
from laconic.config.job import Config, load
from laconic.optim import AdamW8bit, Muon, matrices_and_rest

_HERE = Path(__file__).parent
_JOB = _HERE / "optimizers.toml"
_NODES, _LOCAL = 2, 2
_FLOAT32_BYTES = 4
_MIX = Llama(hidden=512, intermediate=1408, layers=2, heads=8, kv_heads=2, vocab=512, batch=1, sequence=8)
_TINY_MIX = dataclasses.replace(_MIX, hidden=64, intermediate=176, layers=2, vocab=64)
_TIMEOUT_S = 1800.0

LAST_STEPS = 20
"""Of a training run: their mean loss is compared."""
SETTINGS: dict[str, dict[str, Any]] = {"muon": {"adjust_lr_fn": "match_rms_adamw"}, "shampoo": {"block_size": 128}}
"""Of the trainer's optimizers, beside the job's; learning rates are the job's for all of them."""
RANKS_TOLERANCE = 1e-3
"""Relative, of the loss of every step on 4 ranks against 1. Sums in another order differ by an ulp of fp32; Muon and
AdamW8bit round to fewer bits, and all of them divide by small numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """How large everything is."""

    mix: Llama
    loss_steps: int
    loss_seeds: int
    rank_steps: int
    out: Path


# ------------------------------------------------------------------------------------------------ on the ranks


def _sharded(mix: Llama, granularity: Callable[[str, Tensor], int] | None = None) -> Any:
    mesh = laconic.init_mesh("cpu")
    model = mix.build(torch.device("cpu"), torch.float32)
    for layer in decoder_layers(model):
        laconic.fully_shard(layer, mesh=mesh, granularity=granularity)
    return laconic.fully_shard(model, mesh=mesh, granularity=granularity)


def _whole(name: str, parameter: Tensor) -> int:
    return parameter.numel()


def _sum_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def measure_muon(mix: Llama) -> dict[str, float]:
    """Multiples of the matrices' fp32 bytes that one step of Muon moves, by kind of sharding."""
    return {
        "rows": _laconic_muon_bytes(mix, None),
        "whole": _laconic_muon_bytes(mix, _whole),
        "fsdp2": _torch_muon_bytes(mix),
    }


def _laconic_muon_bytes(mix: Llama, granularity: Callable[[str, Tensor], int] | None) -> float:
    model = _sharded(mix, granularity)
    matrices = matrices_and_rest(model)[0]["params"]
    for parameter in matrices:
        parameter.grad = torch.randn_like(parameter)
    before = model.traffic.snapshot()
    Muon(matrices).step()
    moved = model.traffic.snapshot() - before
    return _sum_over_ranks(moved.total(purpose="optimizer", direction="received")) / _matrix_bytes(matrices)


def _torch_muon_bytes(mix: Llama) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = mix.build(torch.device("cpu"), torch.float32)
    matrices = matrices_and_rest(model)[0]["params"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    chosen = {names[parameter] for parameter in matrices}
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = [parameter for name, parameter in model.named_parameters() if name in chosen]
    for p in sharded:
        assert isinstance(p, DTensor)
        local = torch.randn_like(p.to_local())
        p.grad = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    optimizer = torch.optim.Muon(sharded)
    with CollectiveBytes(dist.get_world_size()).counting() as counted:
        optimizer.step()
    return _sum_over_ranks(counted.received_bytes) / _matrix_bytes(sharded)


def _matrix_bytes(matrices: list[nn.Parameter]) -> int:
    return _FLOAT32_BYTES * sum(parameter.numel() for parameter in matrices)


def measure_adamw8bit(mix: Llama, steps: int) -> dict[str, float]:
    """State bytes per parameter, and whether given gradients give the same bits as in one process."""
    model, alone = _sharded(mix, AdamW8bit.granularity), mix.build(torch.device("cpu"), torch.float32)
    optimizers = [AdamW8bit(m.parameters(), lr=1e-2) for m in (model, alone)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for sharded, plain in zip(model.parameters(), alone.parameters(), strict=True):
            plain.grad = torch.randn(plain.shape, generator=generator)
            sharded.grad = sharded.detach().like(sharded.spec.part_of(plain.grad).clone())
        for optimizer in optimizers:
            optimizer.step()
    is_equal = all(
        torch.equal(sharded.full_tensor(), plain)
        for sharded, plain in zip(model.parameters(), alone.parameters(), strict=True)
    )
    held = sum(_local_bytes(value) for state in optimizers[0].state.values() for value in state.values())
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"state_bytes": _sum_over_ranks(held) / num_parameters, "is_equal": float(is_equal)}


def _local_bytes(value: Any) -> int:
    local = value.to_local() if isinstance(value, laconic.RaggedTensor) else value
    return local.nbytes if isinstance(local, Tensor) else 0


def train(config: Config) -> dict[str, Any]:
    """One rank of `laconic train`."""
    from laconic.train.loop import run

    torch.set_num_threads(1)  # as many on one rank as on four
    return run(config)


def trained(bench: Bench, name: str, *, ranks: int, rows: int, steps: int, seed: int = 0) -> list[float]:
    """Losses of a run of the trainer, step by step; `rows` per step over all ranks."""
    base = load(_JOB)
    output = bench.out / f"{name}-{ranks}-{steps}-{seed}"
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, init_seed=seed),
        data=dataclasses.replace(base.data, cache=str(bench.out / "tokens"), seed=seed),
        log=dataclasses.replace(base.log, progress=False),
        optimizer=dataclasses.replace(base.optimizer, name=name, **SETTINGS.get(name, {})),
        train=dataclasses.replace(base.train, steps=steps, micro_batch_size=rows // ranks, output=str(output)),
    )
    launch(train, ranks, min(ranks, _LOCAL), config, backend=None, timeout_s=_TIMEOUT_S)
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line and "step" in line}
    assert sorted(losses) == list(range(1, steps + 1))
    return [losses[step] for step in range(1, steps + 1)]


# ------------------------------------------------------------------------------------------------ the rows


def muon_bytes(bench: Bench) -> Row:
    measured = launch(measure_muon, _NODES * _LOCAL, _LOCAL, bench.mix, backend="gloo", timeout_s=_TIMEOUT_S)[0]
    ratio = measured["rows"] / measured["fsdp2"]
    return Row(
        key="muon-bytes",
        claim="Muon's extra wire + local bytes per step, in multiples of matrix bytes / against torch.optim.Muon on "
        "FSDP2 / with whole-matrix blocks",
        required="<= 2.0 / <= 0.5x / 0",
        measured=f"{measured['rows']:.2f} / {ratio:.3f}x / {measured['whole']:.0f}",
        is_met=measured["rows"] <= 2 and ratio <= 0.5 and measured["whole"] == 0,
        note=(
            f"hidden matrices of {bench.mix}, {_NODES} x {_LOCAL} ranks: bytes received, summed over ranks, over the "
            f"matrices' fp32 bytes; FSDP2 {measured['fsdp2']:.2f}, each collective counted as its best algorithm moves "
            "it, and DTensor's gathers that stand in for an all-to-all on CPU counted as all-to-all."
        ),
    )


def adamw8bit_state(bench: Bench) -> Row:
    measured = _adamw8bit(bench)["state_bytes"]
    return Row(
        key="adamw8bit-state",
        claim="AdamW8bit state bytes per parameter",
        required="<= 2.2",
        measured=f"{measured:.3f}",
        is_met=measured <= 2.2,
        note=f"all ranks' state of {bench.mix}, over its parameters; AdamW's is 8.",
    )


def _adamw8bit(bench: Bench) -> dict[str, float]:
    ranks = _NODES * _LOCAL
    return launch(measure_adamw8bit, ranks, _LOCAL, bench.mix, 3, backend="gloo", timeout_s=_TIMEOUT_S)[0]


def adamw8bit_loss(bench: Bench) -> Row:
    steps = bench.loss_steps
    pairs = []
    for seed in range(bench.loss_seeds):
        runs = (trained(bench, name, ranks=1, rows=8, steps=steps, seed=seed) for name in ("adamw8bit", "adamw"))
        pairs.append(tuple(statistics.mean(losses[-LAST_STEPS:]) for losses in runs))
    mine, other = (statistics.mean(side) for side in zip(*pairs, strict=True))
    difference = mine / other - 1
    return Row(
        key="adamw8bit-loss",
        claim=f"loss after {steps} steps of the trainer, AdamW8bit against AdamW",
        required="within 0.5 %",
        measured=f"{difference:+.3%}",
        is_met=abs(difference) <= 0.005,
        note=(
            f"mean of the last {LAST_STEPS} steps and of {bench.loss_seeds} seeds, on identical batches: {mine:.4f} "
            f"against {other:.4f}; by seed {', '.join(f'{a / b - 1:+.2%}' for a, b in pairs)}. {_JOB.name}, 8 rows of "
            "128 bytes a step."
        ),
    )


def ranks(bench: Bench) -> Row:
    worst, each = 0.0, []
    for name in ("muon", "shampoo", "adamw8bit"):
        many, one = (trained(bench, name, ranks=r, rows=8, steps=bench.rank_steps) for r in (_NODES * _LOCAL, 1))
        difference = max(abs(a / b - 1) for a, b in zip(many, one, strict=True))
        worst = max(worst, difference)
        each.append(f"{name} {difference:.1e}, {one[0]:.3f} to {one[-1]:.3f}")
    is_equal = bool(_adamw8bit(bench)["is_equal"])
    return Row(
        key="ranks",
        claim=f"loss of each of {bench.rank_steps} steps on 4 ranks against 1 rank: Muon, Shampoo, AdamW8bit / "
        "AdamW8bit given equal gradients",
        required=f"within {RANKS_TOLERANCE:.1%} / equal bits",
        measured=f"within {worst:.1e} / {'equal' if is_equal else 'different'} bits",
        is_met=worst <= RANKS_TOLERANCE and is_equal,
        note=f"{'; '.join(each)}. The gradients differ in the order of their sums. {_JOB.name}, 8 rows a step.",
    )


ROWS: dict[str, Callable[[Bench], Row]] = {
    "muon-bytes": muon_bytes,
    "adamw8bit-state": adamw8bit_state,
    "adamw8bit-loss": adamw8bit_loss,
    "ranks": ranks,
}
"""In the order of the table."""


# ------------------------------------------------------------------------------------------------ the command


def main() -> int:
    options = options_of(__doc__, ROWS, quick="a tiny job and few steps")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            mix=_TINY_MIX if options.quick else _MIX,
            loss_steps=LAST_STEPS if options.quick else 300,
            loss_seeds=1 if options.quick else 6,
            rank_steps=4 if options.quick else 40,
            out=Path(folder),
        )
        rows = measure(ROWS, options, bench, lambda found: Record(Path(__file__).name, found, ROWS).save())
    print(f"\n{rows_table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
