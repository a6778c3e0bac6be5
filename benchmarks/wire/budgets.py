"""`cache="auto"` in little memory: random models and budgets, on real processes that get no more than was agreed.

Each case trains twice, on new processes: without a cache, and then with `cache="auto"` under a limit of the process's
data (RLIMIT_DATA). Half of the cases have a budget; the limit is what the first training took, and the budget. The
others have none, and the limit alone says how much there is: what shall stay is tried, and halved until it fits.
"""

from __future__ import annotations

import ctypes
import gc
import random
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from benchmarks.wire.bench import BENCHMARK, Bench
from laconic.strategies.memory import measured_peak
from tests.support.launch import run_ranks
from tests.support.record import Row

_CASES = 60
_MESHES = ((2, 1), (2, 2), (1, 2), (3, 1), (1, 4))
_ROWS, _STEPS = 16, 5
_SLACK_BYTES = 24 << 20
"""The bytes that a process may take beside tensors: the backend's buffers, stacks of threads, gaps of the heap."""
_ALIGNMENT = 1.002
"""Blocks of the allocator are a little larger than tensors."""
_ROUNDED = 1e-5
"""Gradients that wait whole are summed over micro-batches first: sums of another order."""
_M_MMAP_THRESHOLD = -3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a cluster and a budget."""

    seed: int
    mesh: tuple[int, int]
    """Nodes and local ranks."""
    width: int
    hidden: tuple[int, ...]
    """The widths of the blocks."""
    is_adapted: bool
    """Blocks are frozen, and adapters of them train."""
    micro_batches: int
    share: float
    """The bytes that weights at rest may take, as a share of all weights."""
    is_told: bool
    """The share is a budget; otherwise the process's limit is all that is known."""

    @staticmethod
    def draw(seed: int) -> Case:
        """Draw a case."""
        draw = random.Random(seed)
        return Case(
            seed=seed,
            mesh=draw.choice(_MESHES),
            width=draw.choice((257, 512, 768)),
            hidden=tuple(draw.choice((301, 700, 1024, 2048)) for _ in range(draw.randint(2, 6))),
            is_adapted=draw.random() < 0.3,
            micro_batches=draw.choice((1, 1, 2, 3)),
            share=draw.choice((0.0, 0.1, 0.3, 0.6, 1.0, 1.5)),
            is_told=seed % 2 == 0,
        )

    @property
    def num_ranks(self) -> int:
        """The number of processes."""
        return self.mesh[0] * self.mesh[1]

    def build(self) -> nn.Module:
        """The model, equal on all ranks."""
        torch.manual_seed(self.seed)
        return nn.Sequential(*(_Block(self.width, hidden, self.is_adapted) for hidden in self.hidden))

    @property
    def more_bytes(self) -> int:
        """The bytes that weights at rest may take."""
        return int(self.share * sum(parameter.nbytes for parameter in self.build().parameters()))


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int, is_adapted: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.adapter: nn.Module | None = None
        if is_adapted:
            self.requires_grad_(False)
            self.adapter = nn.Sequential(nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return x + (y if self.adapter is None else y + self.adapter(x))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One rank's training of a case."""

    losses: list[float]
    peak_bytes: int
    """The most bytes of tensors in a warm step."""
    rests: tuple[str, ...]
    """Where units rest, in their order."""


def train(case: Case, cache: laconic.Cache, limit_bytes: int | None) -> Outcome:
    """Train a case, as one rank. A `limit_bytes` is of all data that the process takes from now on."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back to the system
    mesh = laconic.init_mesh("cpu", nodes=case.mesh[0], local=case.mesh[1])
    model: Any = case.build()
    for module in (*model, model):
        laconic.fully_shard(module, mesh=mesh, cache=cache)
    gc.collect()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    step = partial(_step, case, model, optimizer)
    if limit_bytes is not None:
        held = sum(each.untyped_storage().nbytes() for each in _shards(model))
        soft = _data_bytes() - held + limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.RLIM_INFINITY))
    losses = [step(number) for number in range(_STEPS)]
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with measured_peak() as peak:  # the profiler takes memory of its own
        losses.append(step(_STEPS))
    states = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    state_bytes = sum(value.to_local().nbytes for value in states if isinstance(value, laconic.RaggedTensor))
    return Outcome(
        losses=losses,
        peak_bytes=(peak.nbytes or 0) + model.memory().device_bytes + state_bytes,
        rests=tuple(each.weights for each in model.placements().values()),
    )


def _step(case: Case, model: Any, optimizer: torch.optim.Optimizer, number: int) -> float:
    total = 0.0
    for micro in range(case.micro_batches):
        generator = torch.Generator().manual_seed(1000 * number + 10 * micro + dist.get_rank())
        model.set_requires_gradient_sync(micro == case.micro_batches - 1)
        loss = model(torch.randn(_ROWS, case.width, generator=generator)).square().mean()
        loss.backward()
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return total


def _shards(model: nn.Module) -> Iterator[Tensor]:
    """The storages of a model's parameters on this rank, each once."""
    found = {each.to_local().untyped_storage().data_ptr(): each.to_local() for each in model.parameters()}  # type: ignore[operator]
    yield from found.values()


def _data_bytes() -> int:
    """The bytes of data of this process, as RLIMIT_DATA counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))


@dataclass(frozen=True)
class _Found:
    case: Case
    error: str
    """That of a rank; "" if none had one."""
    excess: float
    """The most bytes that a rank took, as a share of what was agreed."""
    is_equal: bool
    rests: tuple[str, ...]


def tried(case: Case) -> _Found:
    """Train a case twice, and compare."""
    more_bytes = case.more_bytes
    plain: list[Outcome] = run_ranks(train, case.num_ranks, case, laconic.Cache(), None, local=case.mesh[1])
    most = max(outcome.peak_bytes for outcome in plain)
    budget = {"device_bytes": more_bytes, "host_bytes": 0} if case.is_told else {}
    cache = laconic.Cache(where="auto", **budget)
    limit_bytes = most + more_bytes + _SLACK_BYTES
    try:
        found: list[Outcome] = run_ranks(train, case.num_ranks, case, cache, limit_bytes, local=case.mesh[1])
    except (RuntimeError, TimeoutError) as error:
        return _Found(case, str(error), 0.0, False, ())
    agreed = [outcome.peak_bytes + more_bytes + (0 if case.is_told else _SLACK_BYTES) for outcome in plain]
    excess = max(outcome.peak_bytes / bytes_ for outcome, bytes_ in zip(found, agreed, strict=True))
    losses = ([loss for each in outcomes for loss in each.losses] for outcomes in (plain, found))
    apart = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    are_equal = apart <= (0.0 if case.micro_batches == 1 else _ROUNDED)
    return _Found(case, "", excess, are_equal, found[0].rests)


@BENCHMARK.row("auto-budget", section="placement")
def auto_budget(bench: Bench) -> Row:
    """Random models and budgets, under a limit."""
    cases = [Case.draw(seed) for seed in range(6 if bench.quick else _CASES)]
    found = [tried(case) for case in cases]
    failed = [each for each in found if each.error]
    above = [each for each in found if each.excess > _ALIGNMENT]
    unequal = [each for each in found if not each.error and not each.is_equal]
    return Row(
        claim=f'`cache="auto"` in {len(found)} random models and budgets, real processes under a limit: out of memory; '
        "above what was agreed; losses that are not those without a cache",
        required="0; 0; 0",
        measured=f"{len(failed)}; {len(above)}; {len(unequal)}",
        is_met=not (failed or above or unequal),
        note=(
            f"Models of 2 to 6 blocks, a third of them LoRA-like, on {', '.join(f'{n} x {k}' for n, k in _MESHES)} "
            f"processes, 0 to 1.5 of the weights' bytes at rest. RLIMIT_DATA is what a run without a cache took, the "
            f"budget and {_SLACK_BYTES >> 20} MiB; every other case has no budget but this limit. {_placed(found)}"
            f"{_described(failed + above + unequal)}"
        ),
    )


def _placed(found: Sequence[_Found]) -> str:
    rests = [rest for each in found for rest in each.rests]
    counts = {name: rests.count(name) for name in ("none", "host", "device", "rank")}
    placed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"Units rest: {placed}; the most bytes against those agreed: {max(each.excess for each in found):.3f}."


def _described(found: Sequence[_Found]) -> str:
    lines = (
        f" Seed {each.case.seed}: {(each.error.strip().splitlines() or [f'{each.excess:.3f}'])[-1]}." for each in found
    )
    return "".join(lines)
