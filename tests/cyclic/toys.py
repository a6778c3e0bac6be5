"""Small stages for many ranks, and runs of them beside the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from laconic.cyclic.program import Compute, Message, Send, program
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import Rule, Schedule, StageCache, StatePlacement
from laconic.cyclic.stages import trainable
from laconic.shard.policies import Wire
from tests.reference.cyclic import Oracle

WIDTH = 6
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
}


class First(nn.Module):
    """Returns hidden states, a mask that requires no gradient, and a skip connection that requires one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Parameter(torch.ones(3))  # no batch uses it

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.linear(x)
        return hidden.tanh(), hidden > 0, hidden * scale


class Middle(nn.Module):
    """Has parameters with an odd number of elements, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, hidden: Tensor, mask: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.frozen(hidden + self.down(self.up(hidden).relu()))
        return hidden * mask, mask, skip


class Last(nn.Module):
    """Returns one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor, mask: Tensor, skip: Tensor) -> Tensor:
        return self.linear(hidden + skip)


class Alone(nn.Module):
    """The only stage of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x * scale)


def make_stages(count: int, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [Alone()] if count == 1 else [First(), *(Middle() for _ in range(count - 2)), Last()]


def make_batch(count: int, step: int, rows: int = 4) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    """The micro-batches of all workers."""
    generator = torch.Generator().manual_seed(step)
    return [
        (
            (torch.randn(rows, WIDTH, generator=generator), torch.full((1,), 0.5 + worker)),
            torch.randint(3, (rows,), generator=generator),
        )
        for worker in range(count)
    ]


def learning_rate(step: int) -> float:
    return 0.1 if step < 2 else 0.01 / (step + 1)


def sent(schedule: Schedule, batches: int) -> list[tuple[int, int, Message]]:
    """(time step, batch, message) for all messages between devices in the first batches of a run, by its programs."""
    found = []
    for device, batch in product(range(schedule.num_devices), range(batches)):
        step = schedule.ops(device, batch)[0].step
        for instruction in program(schedule, device, batch):
            if isinstance(instruction, Compute):
                step = instruction.op.step + 1
            elif isinstance(instruction, Send) and instruction.message.target != device:
                found.append((step, batch, instruction.message))
    return found


def values(stages: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            yield f"{number}.{name}", parameter.detach()


@dataclass(frozen=True, kw_only=True)
class Course:
    """A cyclic run as a row of a table."""

    rule: str = "v2"
    states: StatePlacement = "replicated"
    """"single" has no mesh, others that of all ranks."""
    cache: StageCache = "none"
    count: int = 3
    optimizer: str = "sgd"
    max_grad_norm: float | None = None
    wire: Wire = field(default_factory=Wire)
    local: int | None = None
    """The ranks of a node. Default: all."""
    loss_fn: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    make: Callable[[int, int], list[nn.Module]] = make_stages
    batch: Callable[[int, int], list[Any]] = make_batch
    """The micro-batches of all workers by their number and the step."""
    end: int = 6
    saves: tuple[int, ...] = ()
    """The steps before which the state is saved; a new run resumes each of them."""

    @property
    def worker(self) -> int | None:
        return None if self.states in ("single", "shared") else dist.get_rank()

    def run(self, seed: int = 0) -> CyclicDataParallel:
        mesh = None if self.states == "single" else init_device_mesh("cpu", (dist.get_world_size(),))
        return CyclicDataParallel(
            self.make(self.count, seed), self.loss_fn, OPTIMIZERS[self.optimizer], mesh, rule=self.rule,
            states=self.states, cache=self.cache, wire=self.wire, max_grad_norm=self.max_grad_norm,
        )  # fmt: skip

    def oracle(self) -> Oracle:
        return Oracle(
            self.make(self.count, 0), self.loss_fn, OPTIMIZERS[self.optimizer], Rule.named(self.rule, self.count),
            self.max_grad_norm, wire=self.wire, states=self.states,
            nodes=[rank // self.local for rank in range(dist.get_world_size())] if self.local else (),
        )  # fmt: skip

    def train(self, run: CyclicDataParallel, steps: range) -> list[Tensor | None]:
        losses = []
        for step in steps:
            run.set_hyperparameters(lr=learning_rate(step))
            batch = self.batch(self.count, step)
            losses.append(run.step(batch if self.worker is None else batch[self.worker]))
        return losses

    def train_oracle(self, oracle: Oracle, steps: range) -> list[list[Tensor]]:
        losses = []
        for step in steps:
            oracle.set(lr=learning_rate(step))
            losses.append(oracle.step(self.batch(self.count, step)))
        return losses


def assert_equal(run: CyclicDataParallel, oracle: Oracle, case: object) -> None:
    for (name, got), (_, want) in zip(values(run.stages), values(oracle.stages), strict=True):
        assert torch.equal(got, want), f"{case}: {name} differs by {(got - want).abs().max()}"
        assert (got.stride(), got.dtype) == (want.stride(), want.dtype), f"{case}: {name}"


def together(state: dict[str, Any]) -> dict[str, Any]:
    """The parts of all ranks, as in a checkpoint folder, which holds copies."""
    parts = [state]
    if dist.is_initialized():
        parts = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, state)
    keys = [key for part in parts for key in part if key.startswith("stages.")]
    assert len(keys) == len(set(keys)), "a tensor is saved twice"
    whole = {key: value for part in parts for key, value in part.items()}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in whole.items()}


def assert_equals_oracle(course: Course) -> None:
    """Assert that a run, and those that resume it, equal the oracle to the bit: losses, parameters.

    All drain in the middle and at the end.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    run, oracle = course.run(seed=rank), course.oracle()  # all begin with the values of the first rank
    drains, saved, versions = (4, course.end), {}, [oracle.newest]
    for step in range(course.end):
        if step in course.saves:
            saved[step] = together(run.state_dict()), oracle.exact
            oracle.lost.clear()  # as a snapshot asks for
        (loss,) = course.train(run, range(step, step + 1))
        (row,) = course.train_oracle(oracle, range(step, step + 1))
        versions.append(oracle.newest)
        if course.worker is not None:
            assert loss == row[course.worker], course
            if step + 1 in drains and course.rule != "dp":
                _assert_copies_equal(run, versions, course)
        elif course.states == "single" or rank == dist.get_world_size() - 1:
            assert loss == torch.stack(row).mean(), course
        else:
            assert loss is None
        if step + 1 in drains:
            run.drain()
            oracle.restart()
            versions = [oracle.newest]
            with run.consistent_parameters() as version:
                assert version == step + 1
                assert_equal(run, oracle, course)
            if course.states == "replicated":
                assert_equal(run, oracle, course)
    plain = replace(course, wire=Wire(), max_grad_norm=None).oracle()
    if course.wire != Wire() or course.max_grad_norm:
        for steps in (range(4), range(4, course.end)):
            course.train_oracle(plain, steps)
            plain.restart()
        with run.consistent_parameters(), pytest.raises(AssertionError, match="differs"):  # it changed something
            assert_equal(run, plain, "")
    run.close()
    if saved:
        resumed = course.run(seed=1)
        for step, (state, exact) in saved.items():
            resumed.load_state_dict(state)
            resumed.drain()  # without a batch
            with resumed.consistent_parameters() as version:
                assert version == step
                for stage, wanted in zip(resumed.stages, exact, strict=True):
                    assert all(map(torch.equal, trainable(stage).values(), wanted)), f"{course}, drained at {step}"
            resumed.load_state_dict(state)
            assert resumed.num_batches == step
            again = together(resumed.state_dict())  # before anything has run
            held = [(value, again[key]) for key, value in state.items() if key.startswith("stages.") and key in again]
            assert all(torch.equal(*pair) for pair in held if isinstance(pair[0], Tensor))
            for steps in (range(step, 4), range(max(step, 4), course.end)):
                if steps:
                    course.train(resumed, steps)
                    resumed.drain()
            with resumed.consistent_parameters():
                assert_equal(resumed, oracle, f"{course}, resumed at {step}")
        resumed.close()


def _assert_copies_equal(run: Any, versions: list[Any], course: Course) -> None:
    """In the middle of a run, a device computes with the bits that the oracle has for the device's version."""
    placement = run._placement
    for stage in range(len(run.stages)) if course.states == "replicated" else placement.updated:
        own = placement.layouts[stage].views(placement.buffers[stage])
        assert all(map(torch.equal, own, versions[placement.version[stage]][stage])), f"{course}, stage {stage}"
