"""How well models train under each rule: a small ResNet on digits, a small Llama on the corpus of the trainer.

All workers are played by one process (the runtime without a mesh), which gives the bits that N processes give. For each
rule the settings are those of a grid with the best mean on validation data, over some of the seeds; what is reported is
another part of the data, over all seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.cyclic import CyclicDataParallel
from laconic.cyclic.stages.cut import cut

WORKERS = 4
RULES = ("dp", "v1", "v2", "lag2")
Batch = list[tuple[Tensor, Tensor]]
"""Inputs and targets of every worker."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Of the optimizer; staleness narrows the range of learning rates by momentum, and what Nesterov's brings back."""

    lr: float
    momentum: float
    """Or Adam's first beta."""
    nesterov: bool = False
    """With Adam: NAdam."""

    def __str__(self) -> str:
        return f"{self.lr:g} ({self.momentum:g}{', Nesterov' if self.nesterov else ''})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A task, and the settings and seeds to train it with."""

    name: str
    measure: str
    """What is reported."""
    is_loss: bool
    """Whether less is better."""
    settings: tuple[Setting, ...]
    seeds: int
    tuning_seeds: int
    """The first of them, which choose the setting."""
    steps: int
    plain_steps: int = 0
    """How many of them, the first, are taken under rule dp."""
    task: Callable[[int], Task]
    """From a seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One seed's model and data."""

    model: nn.Module
    example: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[list[nn.Parameter], Setting], torch.optim.Optimizer]
    """The learning rate is set before every step."""
    batches: Callable[[int], Iterator[Batch]]
    """So many of them."""
    evaluate: Callable[[Callable[[Tensor], Tensor]], tuple[float, float]]
    """(validation, test) of a trained model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one rule: test results with the setting that validates best."""

    rule: str
    setting: Setting
    results: tuple[float, ...]
    """By seed."""

    @property
    def mean(self) -> float:
        """Over seeds."""
        return statistics.mean(self.results)

    @property
    def deviation(self) -> float:
        """Between seeds."""
        return statistics.stdev(self.results)


def outcomes(study: Study, progress: Callable[[str], None]) -> list[Outcome]:
    """Train with every rule: all settings with some seeds, and the best of them with all."""
    return [_outcome(study, rule, progress) for rule in RULES]


def _outcome(study: Study, rule: str, progress: Callable[[str], None]) -> Outcome:
    def run(setting: Setting, seeds: range) -> list[tuple[float, float]]:
        found = [train(study, rule, setting, seed) for seed in seeds]
        told = ", ".join(f"{valid:.4f} / {test:.4f}" for valid, test in found)
        progress(f"{study.name}, {rule}, {setting}: validation / {study.measure} {told}")
        return found

    tried = {setting: run(setting, range(study.tuning_seeds)) for setting in study.settings}
    sign = 1 if study.is_loss else -1
    best = min(tried, key=lambda setting: sign * statistics.mean(valid for valid, _ in tried[setting]))
    runs = [*tried[best], *run(best, range(study.tuning_seeds, study.seeds))]
    return Outcome(rule=rule, setting=best, results=tuple(test for _, test in runs))


def train(study: Study, rule: str, setting: Setting, seed: int) -> tuple[float, float]:
    """(validation, test) after one run; the learning rate warms up over a tenth of it and falls as a cosine."""
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
    """Of a trainer that has taken the plain steps."""
    task, _, trainer = _begin(study, "dp", setting, seed)
    _run(study, task, trainer, setting, range(study.plain_steps))
    return trainer.state_dict()


def _run(study: Study, task: Task, trainer: CyclicDataParallel, setting: Setting, steps: range) -> None:
    for step, batch in zip(steps, itertools.islice(task.batches(steps.stop), steps.start, None), strict=True):
        trainer.set_hyperparameters(lr=setting.lr * _schedule((step + 1) / study.steps))
        trainer.step(batch)
    trainer.drain()


def _schedule(share: float) -> float:
    return share / 0.1 if share < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (share - 0.1) / 0.9)


def is_within_noise(study: Study, plain: Outcome, other: Outcome) -> bool:
    """Whether the means differ by no more than seeds do, or differ for the better."""
    worse = (other.mean - plain.mean) * (1 if study.is_loss else -1)
    return worse <= max(plain.deviation, other.deviation)


# ------------------------------------------------------------------------------------------------ digits


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def small_resnet(width: int = 8) -> nn.Sequential:
    """Seven layers of convolutions for 8 x 8 images of one channel."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)),
    )  # fmt: skip


def digits(*, seeds: int, tuning_seeds: int, epochs: int, settings: Sequence[Setting]) -> Study:
    """1797 images, 60 % to train on, 20 % each to validate and to test."""
    from sklearn.datasets import load_digits

    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    images = (images.float().view(-1, 1, 8, 8) - 8) / 8
    num_train, num_validation, rows = 1078, 360, 16
    steps_per_epoch = num_train // (rows * WORKERS)

    def task(seed: int) -> Task:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(images), generator=generator)
        parts = order[:num_train], order[num_train : num_train + num_validation], order[num_train + num_validation :]

        def batches(steps: int) -> Iterator[Batch]:
            for step in range(steps):
                if step % steps_per_epoch == 0:
                    shuffled = parts[0][torch.randperm(num_train, generator=generator)]
                start = step % steps_per_epoch * rows * WORKERS
                chosen = shuffled[start : start + rows * WORKERS].split(rows)
                yield [(images[part], labels[part]) for part in chosen]

        def evaluate(predict: Callable[[Tensor], Tensor]) -> tuple[float, float]:
            validation, test = (
                float((predict(images[part]).argmax(1) == labels[part]).float().mean()) for part in parts[1:]
            )
            return validation, test

        return Task(
            model=small_resnet(),
            example=images[:rows],
            loss=functional.cross_entropy,
            optimizer=lambda parameters, setting: torch.optim.SGD(
                parameters, lr=setting.lr, momentum=setting.momentum, nesterov=setting.nesterov, weight_decay=5e-4
            ),
            batches=batches,
            evaluate=evaluate,
        )

    return Study(
        name="ResNet on digits", measure="test accuracy", is_loss=False, settings=tuple(settings), seeds=seeds,
        tuning_seeds=tuning_seeds, steps=epochs * steps_per_epoch, task=task,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ language


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of every token but the first."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def language(
    *, seeds: int, tuning_seeds: int, plain_steps: int, steps: int, settings: Sequence[Setting], folder: Path
) -> Study:
    """A byte-level Llama on the sources of Python's standard library; files held out to validate and to test."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from laconic.config.job import DataConfig
    from laconic.data.tokens import open_tokens, prepare, rows_at
    from laconic.hf.tokenizer import ByteTokenizer

    length, rows = 64, 1
    data = DataConfig(kind="python-stdlib", tokenizer="bytes", sequence_length=length, eval_fraction=0.05)
    tokenizer = ByteTokenizer()
    files = open_tokens(prepare(data, tokenizer, folder), data)
    held = torch.as_tensor(rows_at(files.evaluation, _spread(len(files.evaluation) - length, 512), length))

    def task(seed: int) -> Task:
        generator = torch.Generator().manual_seed(seed)

        def batches(steps: int) -> Iterator[Batch]:
            for _ in range(steps):
                where = torch.randint(len(files.train) - length, (WORKERS, rows), generator=generator)
                yield [(part, part) for part in torch.as_tensor(rows_at(files.train, where.numpy(), length))]

        def evaluate(predict: Callable[[Tensor], Tensor]) -> tuple[float, float]:
            # every second row, so that both come from all files
            validation, test = (float(next_token_loss(predict(held[k::2]), held[k::2])) for k in range(2))
            return validation, test

        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=tokenizer.vocab_size, max_position_embeddings=length,
                tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            )
        )  # fmt: skip
        return Task(
            model=model,
            example=held[:1],
            loss=next_token_loss,
            optimizer=_adam,
            batches=batches,
            evaluate=evaluate,
        )

    return Study(
        name="Llama on the trainer's corpus", measure="eval loss", is_loss=True, settings=tuple(settings), seeds=seeds,
        tuning_seeds=tuning_seeds, plain_steps=plain_steps, steps=steps, task=task,
    )  # fmt: skip


def _adam(parameters: list[nn.Parameter], setting: Setting) -> torch.optim.Optimizer:
    common = {"lr": setting.lr, "betas": (setting.momentum, 0.95), "weight_decay": 0.1}
    if not setting.nesterov:
        return torch.optim.AdamW(parameters, **common)
    # momentum_decay: momentum at its full value after some dozens of steps, not after tens of thousands
    return torch.optim.NAdam(parameters, **common, decoupled_weight_decay=True, momentum_decay=1.0)


def _spread(last: int, count: int) -> Any:
    import numpy as np

    return np.linspace(0, last, count).astype(np.int64)
