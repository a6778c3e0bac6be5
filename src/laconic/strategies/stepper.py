"""The interface between the training loop and a strategy.

A `Stepper` is made from a `Setup`, turns rows into new weights, and knows which state belongs in a checkpoint. There
are three: `Simultaneous` for the engine and PyTorch's baselines, with islands or without, `PipelineStepper` for stages
of a model, which is one of these, and `CyclicStepper` for the cyclic schedule.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from laconic.checkpoint import commit
from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Snapshot
from laconic.config import Config, JobError, TrainConfig
from laconic.data.batches import Batch
from laconic.hf.layers import base_model
from laconic.islands.exchange import SyncReport
from laconic.shard.ledger import Ledger
from laconic.shard.policies import Placement

Save = Callable[..., Any]
"""A function `save(model=, optimizer=, extra=, local_steps=)` that writes a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Setup(Config):
    """A job on one rank: what a strategy needs to shard a model and to train it."""

    ranks: RankInfo
    device: torch.device

    @classmethod
    def of(cls, config: Config, ranks: RankInfo, device: torch.device) -> Self:
        """The setup of a job on this rank."""
        return cls(**vars(config), ranks=ranks, device=device)


CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in its output folder."""


def checkpoints_to_load(train: TrainConfig) -> Path:
    """The folder of the checkpoints to go on from: the run's own if there are any, else what train.resume names."""
    own = Path(train.output) / CHECKPOINTS
    if train.resume in ("never", "auto") or commit.candidates(own):
        return own
    given = Path(str(train.resume))
    return given / CHECKPOINTS if (given / CHECKPOINTS).is_dir() else given


def loss_of_logits(model: nn.Module) -> Any:
    """The model's own loss, which shifts the labels, as a function of logits and a batch.

    Raises:
        JobError: routers add a loss of their own.
    """
    base: Any = base_model(model)
    if getattr(base.config, "output_router_logits", False):
        raise JobError(
            "model.config.output_router_logits = true adds a loss of all layers' routers, which no single stage can "
            "compute; set it to false"
        )
    loss_function, vocab_size = base.loss_function, base.config.vocab_size

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        arguments = {key: value for key, value in batch.arguments().items() if key in ("labels", "num_items_in_batch")}
        return loss_function(logits=logits, vocab_size=vocab_size, **arguments)

    return loss


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The figures of one step on one rank."""

    loss: float | None
    """The mean over this rank's micro-batches, whose mean over ranks is the mean over the tokens of the global batch:
    [Note: Mean over tokens] in data/batches.py. None on a rank that does not compute it."""
    grad_norm: float | None
    """The norm before clipping, the same on all ranks of an island; None if it is not measured."""
    syncs: tuple[SyncReport, ...] = ()
    """The syncs of islands that ended with this step; every rank has the same number."""
    loss_scale: float | None = None
    """The factor of the loss in this step: [Note: Loss scaling] in simultaneous.py. None without loss scaling."""
    skipped_steps: int | None = None
    """The steps of the run so far whose gradients overflowed, so that the weights stayed; None without loss scaling."""


@dataclass(kw_only=True, eq=False)
class NotFiniteError(Exception):
    """The loss or the gradient norm is not finite, so training cannot go on."""

    loss: float
    grad_norm: float | None
    is_on_all_ranks: bool
    """Whether every rank raises this error."""
    weights: str
    """The end of a sentence that begins "The weights are"; {step} stands for the last complete step."""


class Stepper(ABC):
    """Takes the steps of one rank. Every rank makes one; all ranks call a collective method together."""

    module: Any
    """The model, under its ordinary names."""
    about: str = ""
    """A line for the user: how the model was cut."""
    optimizer: torch.optim.Optimizer
    """The optimizer, in whose groups the loop sets learning rates before each step."""
    num_workers: int
    """The number of parts of the global batch, one for each worker or rank."""
    workers: range
    """The parts of the global batch that this rank trains on."""
    peers: range
    """The parts of the global batch that share an optimizer step with this rank's: those of its island, or all."""
    held_out: range | None = None
    """The parts of the held-out rows that this rank evaluates; None: its own, by its number among all ranks."""
    steps_per_sync: int | None = None
    """Steps between two syncs of islands; None without islands."""
    recovered_steps: int = 0
    """The number of steps taken at the last sync that a machine has kept for recovery; 0 without one."""

    num_skipped: int = 0
    """The steps of the whole run that were skipped. The learning-rate schedule does not count them."""

    def enter(self, step: int) -> int:
        """Enter the islands that train already, with a state after `step`. Returns the step to go on from. Collective.

        Raises:
            JobError: see `LocalSteps.enter`.
        """
        return step

    def begin(self) -> None:
        """Prepare a step. The time of the step does not include this."""
        self.set_training(True)

    def set_training(self, mode: bool) -> None:
        """Let modules train, or evaluate: see `nn.Module.train`."""
        self.module.train(mode)

    @abstractmethod
    def step(self, batches: Sequence[Batch], *, is_last: bool) -> StepResult:
        """Train on this rank's micro-batches. Collective.

        With `is_last`, transfers that otherwise run during the next steps are complete at the end.

        Raises:
            NotFiniteError: before the optimizer's step.
        """

    def loss(self, batch: Batch) -> Tensor:
        """The next-token loss of a micro-batch, plus the model's own losses. Collective."""
        return self.module(**batch.arguments(), use_cache=False).loss  # the model shifts the labels

    def outputs(self, batch: Batch) -> Any:
        """A transformers output with the loss and the logits of a batch, before the first step. Collective."""
        with self.consistent(), torch.no_grad():
            self.set_training(False)
            return self.module(**batch.arguments(), use_cache=False)

    def consistent(self) -> AbstractContextManager[Any]:
        """A context in which all ranks have the same model, as an evaluation needs. Collective."""
        return contextlib.nullcontext()

    def save(self, save: Save, extra: dict[str, Any]) -> None:
        """Call `save` with the state that a checkpoint needs, and with `extra`. Collective.

        A strategy whose runs save nothing lacks this method and `load`; `check_job` refuses jobs that would call them.
        """
        raise NotImplementedError

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Load the newest intact checkpoint; return its `extra`, or None if there is no checkpoint. Collective.

        Raises:
            ValueError: the checkpoint belongs to another job.
        """
        raise NotImplementedError

    def traffic(self, before: Snapshot | None = None) -> Snapshot | None:
        """The bytes sent and received so far; None if the strategy does not count them.

        `before` has the counts after the last step. Bytes sent since then are left out if they belong to the next step.
        """
        return None

    def placements(self) -> Mapping[str, Placement]:
        """Where each unit rests, by its name, once `shard.cache = "auto"` has chosen; empty before, and without it."""
        return {}

    def memory(self) -> Ledger | None:
        """The bytes that the engine holds; None for a strategy without the engine."""
        return None

    @abstractmethod
    def resting_bytes(self) -> int:
        """The bytes of weights and optimizer state on this rank between steps."""

    def close(self) -> None:  # noqa: B027  # some steppers have nothing to release
        """Release threads and connections after the last step. Collective."""
