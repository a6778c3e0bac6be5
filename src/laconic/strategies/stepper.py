"""How a job takes its steps: what the loop asks, and the answer of ranks that run at the same time.

The loop knows rows, learning rates, clocks and records. What happens between rows and new weights, and what a
checkpoint holds of it, is a `Stepper`'s: of the engine (`Simultaneous`, with islands or without), or of the cyclic
schedule (strategies/staggered.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import laconic.checkpoint
from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Snapshot
from laconic.config.job import Config
from laconic.islands.local_steps import LocalSteps, SyncReport
from laconic.strategies.memory import local_nbytes, state_nbytes
from laconic.strategies.optimizers import make_optimizer
from laconic.strategies.spread import Memory, Spread, spread
from laconic.strategies.staggering import Staggering
from laconic.strategies.sync import make_local_steps

Save = Callable[..., Any]
"""`save(model=, optimizer=, extra=, local_steps=)`, of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A step as one rank saw it."""

    loss: float | None
    """Mean over the rows of this rank's micro-batches; None where another rank has it."""
    grad_norm: float | None
    """Before clipping; None if nobody has measured it."""
    syncs: tuple[SyncReport, ...] = ()
    """What islands agreed on."""
    staggering: Staggering | None = None
    """What the cyclic schedule did."""


class NotFinite(Exception):
    """The loss or the gradient norm is not, and no more steps must be taken."""

    def __init__(self, *, loss: float, grad_norm: float | None, is_known_to_all: bool, weights: str) -> None:
        super().__init__(f"loss {loss}, gradient norm {grad_norm}")
        self.loss, self.grad_norm = loss, grad_norm
        self.is_known_to_all = is_known_to_all
        """Whether every rank raises this."""
        self.weights = weights
        """In what state they are: a sentence's end, with the step before as {step}."""


class Stepper(Protocol):
    """Takes the steps of one rank. All ranks make it, and call what is said to be collective, alike."""

    module: nn.Module
    """The model, under its ordinary names."""
    optimizer: torch.optim.Optimizer
    """Whose groups the learning rates are set in before each step."""
    num_workers: int
    """Shares of the global batch."""
    workers: range
    """Those whose rows this rank is given."""
    steps_per_sync: int | None
    """Between two agreements of islands; None without islands."""
    recovered_steps: int
    """Of what islands remember beside checkpoints; 0: nothing."""

    def begin(self) -> None:
        """Before each step, outside its time."""
        ...

    def step(self, rows: Tensor, *, is_last: bool) -> Taken:
        """Train on rows of shape (micro-batches, rows, tokens); after the last step nothing may be under way.
        Collective. Raises: NotFinite."""
        ...

    def loss(self, rows: Tensor) -> Tensor:
        """Mean next-token loss of rows of shape (rows, tokens). Collective."""
        ...

    def consistent(self) -> AbstractContextManager[Any]:
        """Inside, the model is one that all ranks have, as an evaluation needs. Collective."""
        ...

    def save(self, save: Save, extra: dict[str, Any]) -> None:
        """Call `save` with what goes into a checkpoint beside `extra`. Collective."""
        ...

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Go on from the newest intact checkpoint; returns its `extra`, or None if there is none. Collective.
        Raises: ValueError."""
        ...

    def traffic(self, before: Snapshot | None = None) -> Snapshot | None:
        """Bytes so far, where they are counted; `before` is where the step before ended."""
        ...

    def memory(self) -> Memory | None:
        """Bytes held, where they are accounted for."""
        ...

    def resting_bytes(self) -> int:
        """Weights and optimizer state between steps."""
        ...

    def close(self) -> None:
        """After the last step. Collective."""
        ...


class Simultaneous:
    """All ranks run at the same time, under the strategy of config.shard; as islands, under config.sync."""

    def __init__(self, model: nn.Module, config: Config, ranks: RankInfo, device: torch.device) -> None:
        self.spread: Spread = spread(model, config, ranks, device)
        self.module = self.spread.module
        self.optimizer = make_optimizer(model, config)
        self.local: LocalSteps | None = None
        """What steps in the optimizer's place where there are islands."""
        if config.sync.is_local:
            assert self.spread.mesh is not None
            self.local = make_local_steps(self.module, self.optimizer, config.sync, self.spread.mesh)
        self.num_workers, self.workers = ranks.world_size, range(ranks.rank, ranks.rank + 1)
        self.steps_per_sync = self.local.schedule.interval if self.local else None
        self.recovered_steps = self.local.steps if self.local else 0
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._max_grad_norm = config.optimizer.max_grad_norm or math.inf  # an infinite limit only measures

    def begin(self) -> None:
        """See Stepper."""
        self.module.train()
        self.spread.reset_peak_memory()

    def step(self, rows: Tensor, *, is_last: bool) -> Taken:
        """See Stepper."""
        losses = []
        for index, micro_batch in enumerate(rows):
            self.spread.set_sync(index == len(rows) - 1)
            loss = self.loss(micro_batch) / len(rows)
            loss.backward()
            losses.append(loss.detach())
        grad_norm, mean_loss = self._clip(), float(sum(losses))
        if not math.isfinite(grad_norm) or not math.isfinite(mean_loss):
            self._refuse_to_go_on(mean_loss, grad_norm)
        syncs = self._update(is_last=is_last)
        self.optimizer.zero_grad(set_to_none=True)
        return Taken(loss=mean_loss, grad_norm=grad_norm, syncs=syncs)

    def loss(self, rows: Tensor) -> Tensor:
        """See Stepper; the model shifts the labels and adds losses of its own (a router's, say)."""
        return self.spread.forward_module(input_ids=rows, labels=rows, use_cache=False).loss

    def _clip(self) -> float:
        """Global norm of the gradients before clipping: one number, the same on every rank of an island."""
        norm = nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _refuse_to_go_on(self, loss: float, grad_norm: float) -> None:
        """[Note: Non-finite losses] A loss that is not finite on one rank makes the gradients, and so the norm, not
        finite on all of its island: no rank needs to be asked, and none takes the optimizer's step. Other islands know
        nothing of it, nor can they be asked for their figures; they end as with any rank that fails, [Note: Failing
        together] in launch.py. So it is with the workers of the cyclic schedule, which have no common norm."""
        raise NotFinite(
            loss=loss,
            grad_norm=grad_norm,
            is_known_to_all=not math.isfinite(grad_norm) and self.local is None,
            weights="as after step {step}",
        )

    def _update(self, *, is_last: bool) -> tuple[SyncReport, ...]:
        """Take the optimizer's step, and what is due of the islands' agreements."""
        if self.local is None:
            self.optimizer.step()
            return ()
        self.local.step()
        if is_last:
            self.local.finish()
        return tuple(self.local.reports)

    def consistent(self) -> AbstractContextManager[Any]:
        """See Stepper: the model that islands agreed on."""
        return self.local.outer_parameters() if self.local else contextlib.nullcontext()

    def save(self, save: Save, extra: dict[str, Any]) -> None:
        """See Stepper."""
        save(model=self.module, optimizer=self.optimizer, local_steps=self.local, extra=extra)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """See Stepper."""
        return laconic.checkpoint.load_checkpoint(
            folder, model=self.module, optimizer=self.optimizer, local_steps=self.local
        )

    def traffic(self, before: Snapshot | None = None) -> Snapshot | None:
        """See Stepper. What islands exchange behind training, between two steps too, is the next step's."""
        now = self.spread.traffic()
        if now is None or before is None or self.local is None:
            return now
        sizes = {key: before.sizes.get(key, 0) if key[1] == "outer" else size for key, size in now.sizes.items()}
        return replace(now, sizes=sizes)

    def memory(self) -> Memory | None:
        """See Stepper."""
        return self.spread.memory()

    def resting_bytes(self) -> int:
        """See Stepper."""
        memory = self.memory()
        weights = memory.device_bytes if memory else local_nbytes(self.module.parameters())
        return weights + state_nbytes(self.optimizer)

    def close(self) -> None:
        """See Stepper."""
