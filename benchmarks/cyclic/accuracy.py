"""How well a model trains under each rule: a study of settings and seeds, and its row.

One process plays all workers (the runtime without a mesh), which gives the same bits as N processes. For each rule, the
study chooses the setting with the best mean result on validation data over some of the seeds. It reports the results on
test data over all seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from laconic.cyclic import CyclicDataParallel
from laconic.cyclic.stages.cut import cut
from tests.support.record import Row

WORKERS = 4
RULES = ("dp", "v1", "v2", "lag2")
Batch = list[tuple[Tensor, Tensor]]
"""The inputs and targets of every worker."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the optimizer. With stale parameters, momentum narrows the range of learning rates that work."""

    lr: float
    momentum: float
    """The momentum of SGD, or Adam's first beta."""
    nesterov: bool = False
    """Whether momentum is Nesterov's; with Adam this is NAdam."""

    def __str__(self) -> str:
        return f"{self.lr:g} ({self.momentum:g}{', Nesterov' if self.nesterov else ''})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A task, and the settings and seeds to train it with."""

    name: str
    measure: str
    """The name of the reported result."""
    is_loss: bool
    """Whether a smaller result is better."""
    settings: tuple[Setting, ...]
    seeds: int
    tuning_seeds: int
    """The number of seeds, from the first on, with which the study chooses the setting."""
    steps: int
    plain_steps: int = 0
    """The number of steps at the beginning that run under rule dp."""
    task: Callable[[int], Task]
    """The function that makes the task of a seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One seed's model and data."""

    model: nn.Module
    example: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[list[nn.Parameter], Setting], torch.optim.Optimizer]
    """The function that makes an optimizer. The study sets the learning rate before every step."""
    batches: Callable[[int], Iterator[Batch]]
    """The function that yields a given number of batches."""
    evaluate: Callable[[Callable[[Tensor], Tensor]], tuple[float, float]]
    """The function that returns the results of a trained model on validation and test data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The test results of one rule with the setting that validates best."""

    rule: str
    setting: Setting
    results: tuple[float, ...]
    """The results by seed."""

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.mean(self.results)

    @property
    def deviation(self) -> float:
        """The standard deviation between seeds."""
        return statistics.stdev(self.results)


def outcomes(study: Study, progress: Callable[[str], None]) -> list[Outcome]:
    """Train under every rule: with all settings on some seeds, and with the best setting on all seeds."""
    return [_outcome(study, rule, progress) for rule in RULES]


def _outcome(study: Study, rule: str, progress: Callable[[str], None]) -> Outcome:
    def run(setting: Setting, seeds: range) -> list[tuple[float, float]]:
        found = [train(study, rule, setting, seed) for seed in seeds]
        results = ", ".join(f"{valid:.4f} / {test:.4f}" for valid, test in found)
        progress(f"{study.name}, {rule}, {setting}: validation / {study.measure} {results}")
        return found

    tried = {setting: run(setting, range(study.tuning_seeds)) for setting in study.settings}
    sign = 1 if study.is_loss else -1
    best = min(tried, key=lambda setting: sign * statistics.mean(valid for valid, _ in tried[setting]))
    runs = [*tried[best], *run(best, range(study.tuning_seeds, study.seeds))]
    return Outcome(rule=rule, setting=best, results=tuple(test for _, test in runs))


def train(study: Study, rule: str, setting: Setting, seed: int) -> tuple[float, float]:
    """Train once, and return the results (validation, test)."""
    task, stages, trainer = _begin(study, rule, setting, seed)
    if study.plain_steps:
        trainer.load_state_dict(_plain_state(study, setting, seed))
    _run(study, task, trainer, setting, range(study.plain_steps, study.steps))

    def predict(inputs: Tensor) -> Tensor:
        values: Any = (inputs,)
        for stage in stages:
            values = stage(*values)
            values = values if isinstance(values, tuple) else (values,)
        return values[0]

    for stage in stages:
        stage.eval()
    with torch.no_grad():
        return task.evaluate(predict)


def _begin(study: Study, rule: str, setting: Setting, seed: int) -> tuple[Task, list[nn.Module], CyclicDataParallel]:
    torch.manual_seed(seed)
    task = study.task(seed)
    stages = cut(task.model, WORKERS, by="parameters", example=task.example)
    return task, stages, CyclicDataParallel(stages, task.loss, lambda ps: task.optimizer(ps, setting), None, rule=rule)


@functools.cache
def _plain_state(study: Study, setting: Setting, seed: int) -> dict[str, Any]:
    """The state of a trainer after the plain steps."""
    task, _, trainer = _begin(study, "dp", setting, seed)
    _run(study, task, trainer, setting, range(study.plain_steps))
    return trainer.state_dict()


def _run(study: Study, task: Task, trainer: CyclicDataParallel, setting: Setting, steps: range) -> None:
    for step, batch in zip(steps, itertools.islice(task.batches(steps.stop), steps.start, None), strict=True):
        trainer.set_hyperparameters(lr=setting.lr * _schedule((step + 1) / study.steps))
        trainer.step(batch)
    trainer.drain()


def _schedule(progress: float) -> float:
    """The factor of the learning rate: it rises over the first tenth of a run, and then falls as a cosine to 0."""
    return progress / 0.1 if progress < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (progress - 0.1) / 0.9)


def is_within_noise(study: Study, plain: Outcome, other: Outcome) -> bool:
    """Return whether `other` is better than `plain`, or worse by no more than the deviation between seeds."""
    worse = (other.mean - plain.mean) * (1 if study.is_loss else -1)
    return worse <= max(plain.deviation, other.deviation)


def measure_study(study: Study, claim: str, tried: str = "") -> Row:
    """Train the study, and return its row."""
    found = outcomes(study, lambda line: print(line, flush=True))
    plain, *others = found
    num_digits, scale = (4, 1) if study.is_loss else (2, 100)

    def described(outcome: Outcome) -> str:
        return f"{outcome.rule} {scale * outcome.mean:.{num_digits}f} ± {scale * outcome.deviation:.{num_digits}f}"

    def paired(outcome: Outcome) -> str:
        by_seed = [scale * (a - b) for a, b in zip(outcome.results, plain.results, strict=True)]
        mean, deviation = statistics.mean(by_seed), statistics.stdev(by_seed)
        return f"{outcome.rule} {mean:+.{num_digits}f} ± {deviation:.{num_digits}f}"

    first = f", the first {study.plain_steps} under rule dp" if study.plain_steps else ""
    return Row(
        claim=f"{claim}, tuned, {study.seeds} seeds, rules against dp",
        required="within seed noise of dp",
        measured=", ".join(map(described, found)) + ("" if study.is_loss else " %"),
        is_met=all(is_within_noise(study, plain, other) for other in others),
        note=(
            f"{study.measure}, mean ± standard deviation between seeds, {study.steps} steps{first}, {WORKERS} "
            "workers; noise: the larger of the two deviations. Differences from dp, seed by seed: "
            f"{', '.join(map(paired, others))}. Learning rates and, in brackets, momenta "
            f"{', '.join(f'{outcome.rule} {outcome.setting}' for outcome in found)}, chosen from "
            f"{', '.join(map(str, study.settings))} on validation data with the first "
            f"{study.tuning_seeds} seeds."
        ),
        tried=tried,
    )
