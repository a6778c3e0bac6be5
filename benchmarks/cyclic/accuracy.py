"""How well a model trains under each rule: a study of settings and seeds, and the study of text.

One process plays all workers (the runtime without a mesh), which gives the same bits as N processes. For each rule, the
study chooses the setting with the best mean result on validation data over some of the seeds. It reports the results on
test data over all seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cyclic.bench import BENCHMARK, Bench, Setting
from laconic.cyclic import CyclicDataParallel
from laconic.cyclic.cut import Criterion, cut
from tests.support.launch import launch
from tests.support.record import Row

WORKERS = 4
_TIMEOUT_S = 6 * 3600.0
RULES = ("dp", "v1", "v2", "lag2")
Batch = list[tuple[Tensor, Tensor]]
"""The inputs and targets of every worker."""


def warmed_cosine(progress: float) -> float:
    """Return a factor that rises over the first tenth of a run, and then falls as a cosine to 0."""
    return progress / 0.1 if progress < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (progress - 0.1) / 0.9)


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
    schedule: Callable[[float], float] = warmed_cosine
    """The factor of the learning rate at a progress from 0 to 1."""
    task: Callable[[int], Task]
    """The function that makes the task of a seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One seed's model and data."""

    model: nn.Module | Sequence[nn.Module]
    example: Tensor
    by: Criterion | Sequence[float] = "parameters"
    """The cost that stages share equally."""
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


R = TypeVar("R")
MakeStudy = Callable[..., Study]
Run = tuple[str, Setting, int]
"""The rule, the setting and the seed of a training."""


def outcomes(make: MakeStudy, arguments: dict[str, Any]) -> list[Outcome]:
    """Train under every rule: with all settings on some seeds, and with the best setting on all seeds.

    `make(**arguments)` returns the study. Runs are spread over the processors.
    """
    study = make(**arguments)
    tuning = range(study.tuning_seeds)
    found = _train_all(
        make, arguments, [(r, setting, seed) for setting in study.settings for seed in tuning for r in RULES]
    )
    sign = 1 if study.is_loss else -1

    def validated(rule: str, setting: Setting) -> float:
        return sign * statistics.mean(found[rule, setting, seed][0] for seed in tuning)

    best = {rule: min(study.settings, key=functools.partial(validated, rule)) for rule in RULES}
    rest = range(study.tuning_seeds, study.seeds)
    found |= _train_all(make, arguments, [(rule, best[rule], seed) for seed in rest for rule in RULES])
    return [
        Outcome(
            rule=rule,
            setting=best[rule],
            results=tuple(found[rule, best[rule], seed][1] for seed in range(study.seeds)),
        )
        for rule in RULES
    ]


def _train_all(make: MakeStudy, arguments: dict[str, Any], runs: Sequence[Run]) -> dict[Run, tuple[float, float]]:
    """Return the results (validation, test) of runs."""
    return dict(zip(runs, spread(train, make, arguments, runs), strict=True))


def spread(train_one: Callable[..., R], make: MakeStudy, arguments: dict[str, Any], runs: Sequence[Any]) -> list[R]:
    """Return `train_one(make(**arguments), *run)` of all runs, which are spread over the processors.

    Neighbours in `runs` share a process, and so their plain steps.
    """
    if not runs:
        return []
    count = min(len(runs), os.cpu_count() or 1)
    parts = launch(
        train_part, train_one, make, arguments, runs, num_ranks=count, backend=None, timeout_s=_TIMEOUT_S
    )  # fmt: skip
    return list(itertools.chain.from_iterable(parts))


def train_part(train_one: Callable[..., R], make: MakeStudy, arguments: dict[str, Any], runs: Sequence[Any]) -> list[R]:
    """Train this process's part of the runs, in order."""
    study, rank, count = make(**arguments), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for each in runs[rank * len(runs) // count : (rank + 1) * len(runs) // count]:
        found.append(train_one(study, *each))
        print(f"{study.name}, {', '.join(map(str, each))}: {found[-1]}", flush=True)
    return found


def train(study: Study, rule: str, setting: Setting, seed: int) -> tuple[float, float]:
    """Train once, and return the results (validation, test)."""
    task, stages, trainer = begin(study, rule, setting, seed)
    if study.plain_steps:
        trainer.load_state_dict(plain_state(study, setting, seed))
    run(study, task, trainer, setting, range(study.plain_steps, study.steps))
    return results_of(task, stages)


def results_of(task: Task, stages: Sequence[nn.Module]) -> tuple[float, float]:
    """Return the results (validation, test) of a trained model."""

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


def begin(
    study: Study, rule: str, setting: Setting, seed: int, **arguments: Any
) -> tuple[Task, list[nn.Module], CyclicDataParallel]:
    """Return a seed's task, its model in stages, and their trainer with further `arguments`."""
    torch.manual_seed(seed)
    task = study.task(seed)
    stages = cut(task.model, WORKERS, by=task.by, example=task.example)
    trainer = CyclicDataParallel(stages, task.loss, lambda ps: task.optimizer(ps, setting), rule=rule, **arguments)
    return task, stages, trainer


@functools.cache
def plain_state(study: Study, setting: Setting, seed: int) -> dict[str, Any]:
    """Return the state of a trainer after the plain steps."""
    task, _, trainer = begin(study, "dp", setting, seed)
    run(study, task, trainer, setting, range(study.plain_steps))
    return trainer.state_dict()


def run(
    study: Study, task: Task, trainer: CyclicDataParallel, setting: Setting, steps: range, worker: int | None = None
) -> None:
    """Train with the micro-batches of one worker or, by default, of all; then drain."""
    for step, batch in zip(steps, itertools.islice(task.batches(steps.stop), steps.start, None), strict=True):
        trainer.set_hyperparameters(lr=setting.lr * study.schedule((step + 1) / study.steps))
        trainer.step(batch if worker is None else batch[worker])
    trainer.drain()


def is_within_noise(study: Study, plain: Outcome, other: Outcome) -> bool:
    """Return whether `other` is better than `plain`, or worse by no more than the deviation between seeds."""
    return _worse(study, plain, other) <= max(plain.deviation, other.deviation)


def is_within_error(study: Study, plain: Outcome, other: Outcome) -> bool:
    """Return whether `other` is better than `plain`, or worse by no more than the standard error of the difference."""
    errors = (outcome.deviation / math.sqrt(len(outcome.results)) for outcome in (plain, other))
    return _worse(study, plain, other) <= math.hypot(*errors)


def _worse(study: Study, plain: Outcome, other: Outcome) -> float:
    return (other.mean - plain.mean) * (1 if study.is_loss else -1)


Verdict = Callable[[Study, Outcome, Mapping[str, Outcome]], bool]
"""Whether a study, its outcome under rule dp, and those under the other rules, by name, meet the claim."""


def all_within_noise(study: Study, plain: Outcome, others: Mapping[str, Outcome]) -> bool:
    """Return whether all rules are within the noise of rule dp."""
    return all(is_within_noise(study, plain, other) for other in others.values())


def measure_study(
    make: MakeStudy, arguments: dict[str, Any], claim: str, *, required: str = "within seed noise of dp",
    is_met: Verdict = all_within_noise, tried: str = "",
) -> Row:  # fmt: skip
    """Train the study that `make(**arguments)` returns, and return its row."""
    study, found = make(**arguments), outcomes(make, arguments)
    plain, *others = found
    num_digits, scale = (4, 1) if study.is_loss else (2, 100)

    def described(outcome: Outcome) -> str:
        return f"{outcome.rule} {scale * outcome.mean:.{num_digits}f} ± {scale * outcome.deviation:.{num_digits}f}"

    def paired(outcome: Outcome) -> str:
        by_seed = [scale * (a - b) for a, b in zip(outcome.results, plain.results, strict=True)]
        mean, deviation = statistics.mean(by_seed), statistics.stdev(by_seed)
        return f"{outcome.rule} {mean:+.{num_digits}f} ± {deviation:.{num_digits}f}"

    is_tuned = len(study.settings) > 1
    settings = ", ".join(map(str, study.settings))
    chosen = (
        f", chosen from {settings} on validation data with the first {study.tuning_seeds} seeds" if is_tuned else ""
    )
    first = f", the first {study.plain_steps} under rule dp" if study.plain_steps else ""
    return Row(
        claim=f"{claim},{' tuned,' if is_tuned else ''} {study.seeds} seeds, rules against dp",
        required=required,
        measured=", ".join(map(described, found)) + ("" if study.is_loss else " %"),
        is_met=is_met(study, plain, {outcome.rule: outcome for outcome in others}),
        note=(
            f"{study.measure}, mean ± standard deviation between seeds, {study.steps} steps{first}, {WORKERS} "
            "workers; noise: the larger of the two deviations. Differences from dp, seed by seed: "
            f"{', '.join(map(paired, others))}. Learning rates and, in brackets, momenta "
            f"{', '.join(f'{outcome.rule} {outcome.setting}' for outcome in found)}{chosen}."
        ),
        tried=tried,
    )


@BENCHMARK.row("language")
def language(bench: Bench) -> Row:
    return measure_study(
        language_study,
        {**bench.language, "folder": bench.out / "tokens"},
        "eval loss on the trainer's corpus, a small Llama",
        tried=(
            "500 steps, all under the rule: dp 2.2264 ± 0.0182, v1 2.5328 ± 0.0408, v2 2.3576 ± 0.1042, lag2 "
            "2.5179 ± 0.0329, which is not within the noise."
        ),
    )


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of every token but the first."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def language_study(
    *, seeds: int, tuning_seeds: int, plain_steps: int, steps: int, settings: Sequence[Setting], folder: Path
) -> Study:
    """Return the study of text: sources of Python's standard library, with files held out to validate and to test."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from laconic.config import DataConfig
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
            # Every second row, so that validation and test have rows of all files.
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
    # With this momentum_decay the momentum reaches its full value in some dozens of steps, not in tens of thousands.
    return torch.optim.NAdam(parameters, **common, decoupled_weight_decay=True, momentum_decay=1.0)


def _spread(last: int, count: int) -> Any:
    """The offsets of `count` rows at equal distances, from 0 to `last`."""
    import numpy as np

    return np.linspace(0, last, count).astype(np.int64)
