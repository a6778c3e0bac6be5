"""The cost of optimizers that need whole blocks or whole matrices of a sharded model, and proof that they train alike.

    python -m benchmarks.optimizers                      all rows, some 15 minutes on 2 cores, recorded in RESULTS.md
    python -m benchmarks.optimizers --rows muon-bytes    some rows, recorded too
    python -m benchmarks.optimizers --quick              all rows on a tiny job, printed only: does the method work?

[Note: Bytes of an optimizer step]
The rows compare the bytes that all ranks receive in one optimizer step, over all levels, with the bytes of all matrices
in fp32. laconic counts its own bytes, with purpose "optimizer". For torch.optim.Muon on FSDP2, every functional
collective that DTensor issues counts as if it used its best algorithm (CollectiveBytes).
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, placement_types
from torch.utils._python_dispatch import TorchDispatchMode

import laconic
from benchmarks.llama import Llama, decoder_layers
from laconic.config import Config, load
from laconic.optim import AdamW8bit, Muon, Shampoo, matrices_and_rest
from tests.support.launch import launch
from tests.support.measure import Benchmark, Options
from tests.support.owner_bytes import elements_to_owners, received_bytes
from tests.support.record import Row

NODES, LOCAL = 2, 2
LAST_STEPS = 20
"""The number of steps at the end of a run whose mean loss the rows compare."""
MIX = Llama(hidden=512, intermediate=1408, layers=2, heads=8, kv_heads=2, vocab=512, batch=1, sequence=8)
TINY_MIX = dataclasses.replace(MIX, hidden=64, intermediate=176, vocab=64)
TIMEOUT_S = 1800.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The model and the lengths of the runs."""

    mix: Llama
    loss_steps: int
    loss_seeds: int
    rank_steps: int
    out: Path

    def on_ranks(self, function: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
        """Run a measurement of `mix` on 2 nodes x 2 ranks, and return the result of rank 0."""
        return launch(function, self.mix, *args, num_ranks=NODES * LOCAL, num_local=LOCAL, timeout_s=TIMEOUT_S)[0]


def _prepare(options: Options) -> Bench:
    quick = options.quick
    return Bench(
        mix=TINY_MIX if quick else MIX,
        loss_steps=LAST_STEPS if quick else 300,
        loss_seeds=1 if quick else 6,
        rank_steps=4 if quick else 40,
        out=options.out,
    )


BENCHMARK = Benchmark(
    measures=("laconic.optim", "laconic.ragged", "laconic.shard"), name="optimizers", prepare=_prepare
)


def sum_over_ranks(value: float) -> float:
    """Return the sum of every rank's value."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


_MOVE_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")


class CollectiveBytes(TorchDispatchMode):
    """Counts the bytes that this rank receives in functional collectives, as if each used its best algorithm.

    On R ranks, an all-gather brings R - 1 pieces. A reduce-scatter and an all-to-all bring (R - 1) / R of the input, an
    all-reduce twice as much. On CPU, DTensor gathers instead of an all-to-all; such a gather counts as an all-to-all.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.received_bytes = 0.0
        self.calls: dict[str, int] = {}
        self._num_ranks = num_ranks
        self._in_all_to_all = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again with local tensors and collectives
        moves = func.namespace in ("_c10d_functional", "_dtensor") and func._opname not in _MOVE_NOTHING
        if moves:
            self._count(func._opname, args[0])
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, tensor: Tensor) -> None:
        others = self._num_ranks - 1
        if "all_gather" in name and not self._in_all_to_all:
            received = others * tensor.nbytes
        elif "all_reduce" in name:
            received = 2 * others * tensor.nbytes / self._num_ranks
        elif "reduce_scatter" in name or "all_to_all" in name or "alltoall" in name or self._in_all_to_all:
            received = others * tensor.nbytes / self._num_ranks
        else:
            raise NotImplementedError(f"no rule for the bytes of {name}")
        self.received_bytes += received
        key = "all_to_all" if self._in_all_to_all else name
        self.calls[key] = self.calls.get(key, 0) + 1

    @contextmanager
    def counting(self) -> Iterator[CollectiveBytes]:
        """Count the collectives of the body."""
        exchange = placement_types.shard_dim_alltoall

        def marked_exchange(*args: Any, **kwargs: Any) -> Any:
            self._in_all_to_all = True
            try:
                return exchange(*args, **kwargs)
            finally:
                self._in_all_to_all = False

        with mock.patch.object(placement_types, "shard_dim_alltoall", marked_exchange), self:
            yield self


_FLOAT32_BYTES = 4


@BENCHMARK.row("muon-bytes")
def muon_bytes(bench: Bench) -> Row:
    measured = bench.on_ranks(measure_muon)
    ratio = measured["rows"] / measured["fsdp2"]
    return Row(
        claim="Muon's extra wire + local bytes per step, in multiples of matrix bytes / against torch.optim.Muon on "
        "FSDP2 / with whole-matrix blocks",
        required="<= 2.0 / <= 0.5x / 0",
        measured=f"{measured['rows']:.2f} / {ratio:.3f}x / {measured['whole']:.0f}",
        is_met=measured["rows"] <= 2 and ratio <= 0.5 and measured["whole"] == 0,
        note=(
            f"hidden matrices of {bench.mix}, {NODES} x {LOCAL} ranks: bytes received, summed over ranks, over the "
            f"matrices' fp32 bytes; FSDP2 {measured['fsdp2']:.2f}, where each collective counts as if it used its best "
            "algorithm, and a gather by which DTensor replaces an all-to-all on CPU counts as the all-to-all."
        ),
    )


def measure_muon(mix: Llama) -> dict[str, float]:
    """Return the bytes that one step of Muon moves, in multiples of the matrices' fp32 bytes, by kind of sharding."""
    return {
        "rows": _laconic_bytes(mix, None),
        "whole": _laconic_bytes(mix, _whole),
        "fsdp2": _torch_bytes(mix),
    }


def sharded(mix: Llama, granularity: Callable[[str, Tensor], int] | None = None) -> Any:
    """Build the model and shard it with laconic."""
    mesh = laconic.init_mesh("cpu")
    model = mix.build(torch.device("cpu"), torch.float32)
    for layer in decoder_layers(model):
        laconic.fully_shard(layer, mesh=mesh, granularity=granularity)
    return laconic.fully_shard(model, mesh=mesh, granularity=granularity)


def _whole(name: str, parameter: Tensor) -> int:
    return parameter.numel()


def _laconic_bytes(mix: Llama, granularity: Callable[[str, Tensor], int] | None) -> float:
    model = sharded(mix, granularity)
    matrices = matrices_and_rest(model)[0]["params"]
    for parameter in matrices:
        parameter.grad = torch.randn_like(parameter)
    before = model.traffic.snapshot()
    Muon(matrices).step()
    moved = model.traffic.snapshot() - before
    return sum_over_ranks(moved.total(purpose="optimizer", direction="received")) / _matrix_bytes(matrices)


def _torch_bytes(mix: Llama) -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = mix.build(torch.device("cpu"), torch.float32)
    matrices = matrices_and_rest(model)[0]["params"]
    names = {parameter: name for name, parameter in model.named_parameters()}
    chosen = {names[parameter] for parameter in matrices}
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = [parameter for name, parameter in model.named_parameters() if name in chosen]
    for p in parameters:
        assert isinstance(p, DTensor)
        local = torch.randn_like(p.to_local())
        p.grad = DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
    optimizer = torch.optim.Muon(parameters)
    with CollectiveBytes(dist.get_world_size()).counting() as counted:
        optimizer.step()
    return sum_over_ranks(counted.received_bytes) / _matrix_bytes(parameters)


def _matrix_bytes(matrices: list[nn.Parameter]) -> int:
    return _FLOAT32_BYTES * sum(parameter.numel() for parameter in matrices)


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


_JOB = Path(__file__).parent / "jobs" / "optimizers.toml"
SETTINGS: dict[str, dict[str, Any]] = {"muon": {"adjust_lr_fn": "match_rms_adamw"}, "shampoo": {"block_size": 128}}
"""The settings of the trainer's optimizers in addition to those in the job file. The learning rate is the job's."""
RANKS_TOLERANCE = 1e-3
"""The largest allowed relative difference, at any step, between the loss on 4 ranks and on 1. Sums in another order
differ in the last bit of fp32. Muon and AdamW8bit round to fewer bits, and all optimizers divide by small numbers."""


@BENCHMARK.row("adamw8bit-loss")
def adamw8bit_loss(bench: Bench) -> Row:
    steps = bench.loss_steps
    pairs = []
    for seed in range(bench.loss_seeds):
        runs = (train(bench, name, ranks=1, steps=steps, seed=seed) for name in ("adamw8bit", "adamw"))
        pairs.append(tuple(statistics.mean(losses[-LAST_STEPS:]) for losses in runs))
    adamw8bit, adamw = (statistics.mean(losses) for losses in zip(*pairs, strict=True))
    difference = adamw8bit / adamw - 1
    return Row(
        claim=f"loss after {steps} steps of the trainer, AdamW8bit against AdamW",
        required="within 0.5 %",
        measured=f"{difference:+.3%}",
        is_met=abs(difference) <= 0.005,
        note=(
            f"mean of the last {LAST_STEPS} steps and of {bench.loss_seeds} seeds, on identical batches: "
            f"{adamw8bit:.4f} against {adamw:.4f}; by seed {', '.join(f'{a / b - 1:+.2%}' for a, b in pairs)}. "
            f"{_JOB.name}, 8 rows of 128 bytes a step."
        ),
    )


@BENCHMARK.row("ranks")
def ranks(bench: Bench) -> Row:
    worst, each = 0.0, []
    for name in ("muon", "shampoo", "adamw8bit"):
        many, one = (train(bench, name, ranks=ranks, steps=bench.rank_steps) for ranks in (NODES * LOCAL, 1))
        difference = max(abs(a / b - 1) for a, b in zip(many, one, strict=True))
        worst = max(worst, difference)
        each.append(f"{name} {difference:.1e}, {one[0]:.3f} to {one[-1]:.3f}")
    is_equal = bool(bench.on_ranks(measure_adamw8bit, NUM_STEPS)["is_equal"])
    return Row(
        claim=f"loss of each of {bench.rank_steps} steps on 4 ranks against 1 rank: Muon, Shampoo, AdamW8bit / "
        "AdamW8bit given equal gradients",
        required=f"within {RANKS_TOLERANCE:.1%} / equal bits",
        measured=f"within {worst:.1e} / {'equal' if is_equal else 'different'} bits",
        is_met=worst <= RANKS_TOLERANCE and is_equal,
        note=f"{'; '.join(each)}. The gradients differ in the order of their sums. {_JOB.name}, 8 rows a step.",
    )


@BENCHMARK.row("cuts")
def cuts(bench: Bench) -> Row:
    found = [
        result
        for sizes in CUTS
        for result in launch(
            measure_cuts, sizes, num_ranks=math.prod(sizes), num_local=min(LOCAL, math.prod(sizes)), timeout_s=TIMEOUT_S
        )[0]
    ]
    are_bits_equal = all(each["off"] == 0 for each in found if each["rule"] == "adamw8bit")
    off = {name: max(each["off"] for each in found if each["rule"] == name) for name in CUT_RULES}
    worst = max(off["muon"], off["shampoo"])
    is_counted = all(each["counted"] == each["predicted"] for each in found)
    moved = "; ".join(
        f"{_named(each['sizes'])} {each['rule']} {each['counted']:,.0f}"
        for each in found
        if each["rule"] != "adamw8bit" and each["ranks"] == max(map(math.prod, CUTS))
    )
    return Row(
        claim="Muon, Shampoo, AdamW8bit x {EP, TP, EP + TP, none} on 1, 2, 4, 8 ranks against one process",
        required="equal to the bit (8-bit), <= 1e-5 (fp32 matrices); bytes by formula",
        measured=f"{'equal' if are_bits_equal else 'different'} bits, {worst:.1e}; "
        f"bytes {'by formula' if is_counted else 'differ from the formula'}",
        is_met=are_bits_equal and worst <= CUT_TOLERANCE and is_counted,
        note=(
            f"a layer of {NUM_EXPERTS} experts ({HIDDEN} x {INTERMEDIATE}), attention and vectors, {CUT_STEPS} steps, "
            "each rank given its part of equal gradients: the largest difference of a parameter or a state, relative "
            f"to its largest magnitude; muon {off['muon']:.1e}, shampoo {off['shampoo']:.1e}. {len(CUTS)} meshes "
            f"(dp, ep, tp): {', '.join(map(str, CUTS))}. Bytes received in a step under purpose optimizer, summed over "
            f"ranks, equal 2 x itemsize x moved elements; on 8 ranks: {moved}. AdamW8bit moves none."
        ),
    )


CUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
CUTS += [(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 2, 2)]
"""The numbers of ranks for data, experts and tensors."""
CUT_RULES: dict[str, Callable[..., Any]] = {
    "muon": lambda module: Muon(matrices_and_rest(module), lr=0.1),
    "shampoo": lambda module: Shampoo(matrices_and_rest(module), lr=0.1, update_every=2, block_size=64),
    "adamw8bit": lambda module: AdamW8bit(module.parameters(), lr=1e-2),
}
CUT_TOLERANCE, CUT_STEPS = 1e-5, 3
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 5, 64, 128


class MoELayer(nn.Module):
    """The parameters of a layer: experts, attention, a router and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts = nn.Module(), nn.Module()
        self.attention.q = nn.Parameter(torch.randn(2 * HIDDEN, HIDDEN))
        self.attention.out = nn.Parameter(torch.randn(HIDDEN, 2 * HIDDEN))
        self.attention.router = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN))
        self.attention.norm = nn.Parameter(torch.randn(HIDDEN))
        self.experts.up = nn.Parameter(torch.randn(NUM_EXPERTS, INTERMEDIATE, HIDDEN))
        self.experts.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE))

    def shard(self, sizes: tuple[int, ...], granularity: Any) -> None:
        """Cut the experts over ep, tp and then dp, and the rest over tp, and then dp and ep."""
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep", "tp"))
        for name, by_tensor in {"up": Shard(1), "down": Shard(2)}.items():
            _distribute(self.experts, name, mesh["ep", "tp"], [Shard(0), by_tensor])
        for name, by_tensor in {"q": Shard(0), "out": Shard(1), "router": Replicate(), "norm": Replicate()}.items():
            _distribute(self.attention, name, mesh, [Replicate(), Replicate(), by_tensor])
        laconic.fully_shard(self.experts, mesh=mesh["dp"], granularity=granularity)
        dims = SimpleNamespace(shard=("dp", "ep"), replicate=None)  # torch 2.11 has no DataParallelMeshDims
        laconic.fully_shard(self.attention, mesh=mesh, dp_mesh_dims=dims, granularity=granularity)  # type: ignore[arg-type]


def _distribute(module: nn.Module, name: str, mesh: Any, placements: Sequence[Any]) -> None:
    whole = module.get_parameter(name).detach()
    setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None)))


def measure_cuts(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """For each rule the largest relative difference to one process, and the bytes of a step, counted and by formula."""
    found = []
    for name, make in CUT_RULES.items():
        modules = []
        for _ in range(2):
            torch.manual_seed(0)
            modules.append(MoELayer())
        cut, alone = modules
        cut.shard(sizes, AdamW8bit.granularity if name == "adamw8bit" else None)
        optimizers = make(cut), make(alone)
        generator = torch.Generator().manual_seed(1)
        before = received_bytes(cut, optimizers[0])
        for _ in range(CUT_STEPS):
            for ragged, plain in zip(cut.parameters(), alone.parameters(), strict=True):
                plain.grad = torch.randn(plain.shape, generator=generator)
                ragged.grad = ragged.detach().like(ragged.spec.part_of(plain.grad).clone())
            for optimizer in optimizers:
                optimizer.step()
        counted = received_bytes(cut, optimizers[0]) - before
        itemsize = {"muon": 2, "shampoo": 4, "adamw8bit": 0}[name]
        each_way = elements_to_owners(optimizers[0].owners) if itemsize else 0
        found.append({
            "rule": name, "sizes": sizes, "ranks": math.prod(sizes), "off": _off(cut, alone, optimizers),
            "counted": counted / CUT_STEPS, "predicted": 2 * itemsize * each_way,
        })  # fmt: skip
    return found


def _off(cut: nn.Module, alone: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> float:
    """The largest difference of a parameter or a state, relative to its largest magnitude. Collective."""
    off = 0.0
    for ragged, plain in zip(cut.parameters(), alone.parameters(), strict=True):
        states = (optimizer.state[p] for optimizer, p in zip(optimizers, (ragged, plain), strict=True))
        got, want = ({"": p, **state} for p, state in zip((ragged, plain), states, strict=True))
        assert got.keys() == want.keys()
        for key, value in want.items():
            whole = got[key].full_tensor() if isinstance(got[key], laconic.RaggedTensor) else got[key]
            difference = (whole.double() - value.double()).abs().max().item()
            off = max(off, difference / max(value.double().abs().max().item(), 1e-30))
    return off


def _named(sizes: tuple[int, ...]) -> str:
    """The parallelisms of a mesh."""
    _, experts, tensors = sizes
    return " + ".join([*["EP"] * (experts > 1), *["TP"] * (tensors > 1)]) or "none"


def train(bench: Bench, optimizer: str, *, ranks: int, steps: int, rows: int = 8, seed: int = 0) -> list[float]:
    """Train with the trainer, `rows` per step over all ranks, and return the loss of every step."""
    base = load(_JOB)
    output = bench.out / f"{optimizer}-{ranks}-{steps}-{seed}"
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, init_seed=seed),
        data=dataclasses.replace(base.data, cache=str(bench.out / "tokens"), seed=seed),
        log=dataclasses.replace(base.log, progress=False),
        optimizer=dataclasses.replace(base.optimizer, name=optimizer, **SETTINGS.get(optimizer, {})),
        train=dataclasses.replace(base.train, steps=steps, micro_batch_size=rows // ranks, output=str(output)),
    )
    launch(_train_rank, config, num_ranks=ranks, num_local=min(ranks, LOCAL), backend=None, timeout_s=TIMEOUT_S)
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line and "step" in line}
    assert sorted(losses) == list(range(1, steps + 1))
    return [losses[step] for step in range(1, steps + 1)]


def _train_rank(config: Config) -> dict[str, Any]:
    """Run one rank of `laconic train`."""
    from laconic.train.loop import run

    return run(config)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
