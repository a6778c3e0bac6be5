"""How well models train under each rule: a small Llama on Python's standard library, image models on digits.

One process plays all workers (the runtime without a mesh), which gives the same bits as N processes; rule dp computes
what DDP does. For each rule, the study chooses the setting with the least result on validation data over some of the
seeds. It reports the results on test data over all seeds.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cyclic.bench import BENCHMARK, Bench, Setting
from laconic.config import DataConfig
from laconic.cyclic import CyclicDataParallel, cut
from laconic.cyclic.worker import LossFn
from laconic.data.tokens import TokenFiles, open_tokens, prepare, rows_at
from laconic.hf.causal_lm import cut_causal_lm
from laconic.models.tokenizer import ByteTokenizer
from tests.support.launch import launch
from tests.support.record import Row

WORKERS = 4
_TIMEOUT_S = 6 * 3600.0
RULES = ("dp", "v1", "v2", "lag2")
_LENGTH, _HELD_ROWS = 64, 512


Batch = list[tuple[Tensor, Tensor]]
"""The inputs and targets of every worker."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(abc.ABC):
    """A task, and the settings and seeds to train with."""

    settings: tuple[Setting, ...]
    seeds: int
    tuning_seeds: int
    """The number of seeds, from the first on, with which the study chooses the setting."""
    steps: int
    plain_steps: int
    """The number of steps at the beginning that run under rule dp."""

    @property
    @abc.abstractmethod
    def loss_fn(self) -> LossFn: ...

    @abc.abstractmethod
    def stages(self) -> list[nn.Module]:
        """Return a new model in stages."""

    @abc.abstractmethod
    def optimizer(self, parameters: list[nn.Parameter], setting: Setting) -> torch.optim.Optimizer:
        """Return a new optimizer of a stage."""

    @abc.abstractmethod
    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield the micro-batches of all workers, step by step, without end."""

    @abc.abstractmethod
    def results(self, stages: Sequence[nn.Module], seed: int) -> tuple[float, float]:
        """Return the results (validation, test) of a seed's trained model, for which less is better."""

    def begin(
        self, rule: str, setting: Setting, seed: int, **arguments: Any
    ) -> tuple[list[nn.Module], CyclicDataParallel]:
        """Return a seed's model in stages, and their trainer with further `arguments`."""
        torch.manual_seed(seed)
        stages = self.stages()
        make = functools.partial(self.optimizer, setting=setting)
        return stages, CyclicDataParallel(stages, self.loss_fn, make, rule=rule, **arguments)

    def run(
        self, trainer: CyclicDataParallel, setting: Setting, seed: int, steps: range, worker: int | None = None
    ) -> None:
        """Train with the micro-batches of one worker or, by default, of all; then drain."""
        for step, batch in zip(steps, itertools.islice(self.batches(seed), steps.start, None), strict=False):
            trainer.set_hyperparameters(lr=setting.lr * warmed_cosine((step + 1) / self.steps))
            trainer.step(batch if worker is None else batch[worker])
        trainer.drain()

    def about(self, chosen: str) -> str:
        """Return the sentences about how rules were compared; `chosen` has the setting of every rule."""
        first = f", the first {self.plain_steps} under rule dp" if self.plain_steps else ""
        return (
            f"mean ± standard deviation between seeds, {self.steps} steps{first}, {WORKERS} workers; noise: the larger "
            f"of the two deviations. Learning rates and, in brackets, momenta {chosen}, chosen from "
            f"{', '.join(map(str, self.settings))} on validation data with the first {self.tuning_seeds} seeds"
        )


def _evaluated(stages: Sequence[nn.Module], inputs: Tensor) -> Tensor:
    """The output of a trained model."""
    values: Any = (inputs,)
    with torch.no_grad():
        for stage in stages:
            values = stage.eval()(*values)
            values = values if isinstance(values, tuple) else (values,)
    return values[0]


# -- a small Llama -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language(Study):
    """A small Llama, whose results are losses."""

    folder: Path
    """Where the tokens are."""

    @property
    def loss_fn(self) -> LossFn:
        return next_token_loss

    def stages(self) -> list[nn.Module]:
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=ByteTokenizer().vocab_size, max_position_embeddings=_LENGTH,
                tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            )
        )  # fmt: skip
        return list(cut_causal_lm(model, WORKERS, by="parameters", example=_held_rows(self.folder)[:1]))

    def optimizer(self, parameters: list[nn.Parameter], setting: Setting) -> torch.optim.Optimizer:
        return _adam(parameters, setting)

    def batches(self, seed: int) -> Iterator[Batch]:
        generator, tokens = torch.Generator().manual_seed(seed), _files(self.folder).train
        while True:
            where = torch.randint(len(tokens) - _LENGTH, (WORKERS, 1), generator=generator)
            yield [(part, part) for part in torch.as_tensor(rows_at(tokens, where.numpy(), _LENGTH))]

    def results(self, stages: Sequence[nn.Module], seed: int) -> tuple[float, float]:
        held = _held_rows(self.folder)  # both parts have rows of all files
        validation, test = (float(next_token_loss(_evaluated(stages, held[k::2]), held[k::2])) for k in range(2))
        return validation, test


@functools.cache
def _files(folder: Path) -> TokenFiles:
    data = DataConfig(kind="python-stdlib", tokenizer="bytes", sequence_length=_LENGTH, eval_fraction=0.05)
    return open_tokens(prepare(data, ByteTokenizer(), folder), data)


@functools.cache
def _held_rows(folder: Path) -> Tensor:
    """Rows at equal distances of the files that are held out."""
    tokens = _files(folder).evaluation
    where = np.linspace(0, len(tokens) - _LENGTH, _HELD_ROWS).astype(np.int64)
    return torch.as_tensor(rows_at(tokens, where, _LENGTH))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of every token but the first."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def warmed_cosine(progress: float) -> float:
    """Return a factor that rises over the first tenth of a run, and then falls as a cosine to 0."""
    return progress / 0.1 if progress < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (progress - 0.1) / 0.9)


def _adam(parameters: list[nn.Parameter], setting: Setting) -> torch.optim.Optimizer:
    common = {"lr": setting.lr, "betas": (setting.momentum, 0.95), "weight_decay": 0.1}
    if not setting.nesterov:
        return torch.optim.AdamW(parameters, **common)
    # With this momentum_decay the momentum reaches its full value in some dozens of steps, not in tens of thousands.
    return torch.optim.NAdam(parameters, **common, decoupled_weight_decay=True, momentum_decay=1.0)


# -- image models ------------------------------------------------------------------------------------------------------

_PARTS = 1078, 360, 359
"""The images to train on, to validate and to test."""
_CLASSES = 10


class OfFirstToken(nn.Module):
    """The last norm of a ViT, and its classifier."""

    def __init__(self, norm: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.norm, self.classifier = norm, classifier

    def forward(self, hidden: Tensor) -> Tensor:
        return self.classifier(self.norm(hidden)[:, 0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(Study):
    """ResNet-50 with narrow layers, or a small ViT, on scikit-learn's digits; the results are shares of wrong answers.

    The images have 8 x 8 pixels, so ResNet-50 begins with a convolution of 3 x 3 that keeps them, as on CIFAR.
    """

    is_vit: bool
    rows: int
    """The images of a micro-batch."""

    @property
    def loss_fn(self) -> LossFn:
        return functional.cross_entropy

    def stages(self) -> list[nn.Module]:
        if self.is_vit:
            from transformers import ViTConfig, ViTForImageClassification

            vit = ViTForImageClassification(
                ViTConfig(
                    image_size=8, patch_size=2, num_channels=1, num_labels=_CLASSES, hidden_size=48,
                    num_hidden_layers=4, num_attention_heads=4, intermediate_size=96,
                )
            ).train()  # fmt: skip
            head = OfFirstToken(vit.vit.layernorm, vit.classifier)
            return list(cut([vit.vit.embeddings, *vit.vit.layers, head], WORKERS, by=[0, 1, 1, 1, 1, 0]))
        from transformers import ResNetConfig, ResNetForImageClassification

        resnet = ResNetForImageClassification(
            ResNetConfig(
                num_channels=1, num_labels=_CLASSES, depths=[3, 4, 6, 3], layer_type="bottleneck", embedding_size=4,
                hidden_sizes=[16, 32, 64, 128],
            )
        ).train()  # fmt: skip
        blocks = [layer for stage in resnet.resnet.encoder.stages for layer in stage.layers]
        stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        head = nn.Sequential(resnet.resnet.pooler, resnet.classifier)
        # The first convolution, blocks of equal FLOPs, and the classifier: stages of equal FLOPs are the paper's.
        flops = [0.5, *[1.0] * len(blocks), 0.0]
        return list(cut([stem, *blocks, head], WORKERS, by=flops))

    def optimizer(self, parameters: list[nn.Parameter], setting: Setting) -> torch.optim.Optimizer:
        if self.is_vit:
            return _adam(parameters, setting)
        return torch.optim.SGD(
            parameters, lr=setting.lr, momentum=setting.momentum, nesterov=setting.nesterov, weight_decay=5e-4
        )

    def batches(self, seed: int) -> Iterator[Batch]:
        (images, labels), *_ = _digits(seed)
        generator, size = torch.Generator().manual_seed(seed), self.rows * WORKERS
        while True:
            for chosen in torch.randperm(len(labels), generator=generator).split(size)[: len(labels) // size]:
                yield [(images[part], labels[part]) for part in chosen.split(self.rows)]

    def results(self, stages: Sequence[nn.Module], seed: int) -> tuple[float, float]:
        _, *held = _digits(seed)
        validation, test = (float((_evaluated(stages, x).argmax(1) != y).float().mean()) for x, y in held)
        return validation, test


@functools.cache
def _digits(seed: int) -> list[tuple[Tensor, Tensor]]:
    """The images (n, 1, 8, 8) and labels (n) to train on, to validate and to test, as a seed deals them out."""
    from sklearn.datasets import load_digits

    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    images = (images.float().view(-1, 1, 8, 8) - 8) / 8
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return [(images[part], labels[part]) for part in order.split(_PARTS)]


# -- the study ---------------------------------------------------------------------------------------------------------

Run = tuple[str, Setting, int]
"""The rule, the setting and the seed of a training."""


def train(study: Study, rule: str, setting: Setting, seed: int) -> tuple[float, float]:
    """Train once, and return the results (validation, test)."""
    stages, trainer = study.begin(rule, setting, seed)
    if study.plain_steps:
        trainer.load_state_dict(plain_state(study, setting, seed))
    study.run(trainer, setting, seed, range(study.plain_steps, study.steps))
    return study.results(stages, seed)


@functools.cache
def plain_state(study: Study, setting: Setting, seed: int) -> dict[str, Any]:
    """Return the state of a trainer after the plain steps."""
    _, trainer = study.begin("dp", setting, seed)
    study.run(trainer, setting, seed, range(study.plain_steps))
    return trainer.state_dict()


def train_part(study: Study, runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Train this process's part of the runs, in order. Neighbours in `runs` share their plain steps."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for each in runs[rank * len(runs) // count : (rank + 1) * len(runs) // count]:
        found.append(train(study, *each))
        print(f"{', '.join(map(str, each))}: {found[-1]}", flush=True)
    return found


def _train_all(study: Study, runs: Sequence[Run]) -> dict[Run, tuple[float, float]]:
    """Return the results (validation, test) of runs, which are spread over the processors."""
    count = min(len(runs), len(os.sched_getaffinity(0)))
    parts = launch(train_part, study, runs, num_ranks=count, backend=None, timeout_s=_TIMEOUT_S) if runs else []
    return dict(zip(runs, itertools.chain.from_iterable(parts), strict=True))


def outcomes(study: Study) -> dict[str, tuple[Setting, list[float]]]:
    """Return for every rule the setting that validates best, and its test results by seed."""
    tuning, rest = range(study.tuning_seeds), range(study.tuning_seeds, study.seeds)
    runs = itertools.product(study.settings, tuning, RULES)
    found = _train_all(study, [(rule, setting, seed) for setting, seed, rule in runs])

    def validated(rule: str, setting: Setting) -> float:
        return statistics.mean(found[rule, setting, seed][0] for seed in tuning)

    best = {rule: min(study.settings, key=functools.partial(validated, rule)) for rule in RULES}
    found |= _train_all(study, [(rule, best[rule], seed) for seed in rest for rule in RULES])
    return {rule: (best[rule], [found[rule, best[rule], seed][1] for seed in range(study.seeds)]) for rule in RULES}


def is_within_noise(plain: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether `other` is less than `plain`, or larger by no more than the deviation between seeds."""
    return statistics.mean(other) - statistics.mean(plain) <= max(map(statistics.stdev, (plain, other)))


@BENCHMARK.row("language")
def language(bench: Bench) -> Row:
    """Every rule against plain training, each with its best setting."""
    return _row(
        Language(**bench.language, folder=bench.out / "tokens"),
        "eval loss on the trainer's corpus, a small Llama",
        "eval loss",
        tried=(
            "500 steps, all under the rule: dp 2.2264 ± 0.0182, v1 2.5328 ± 0.0408, v2 2.3576 ± 0.1042, lag2 "
            "2.5179 ± 0.0329, which is not within the noise."
        ),
    )


@BENCHMARK.row("resnet")
def resnet(bench: Bench) -> Row:
    """The same for images and ResNet-50's layers."""
    return _image_row(bench.resnet, "ResNet-50 of 1/16 width")


@BENCHMARK.row("vit")
def vit(bench: Bench) -> Row:
    """The same for images and a ViT."""
    return _image_row(bench.vit, "a ViT of 4 layers")


def _image_row(arguments: dict[str, Any], model: str) -> Row:
    claim = f"wrong answers on scikit-learn's digits, {model}"
    return _row(Images(**arguments), claim, f"% of {_PARTS[2]} images; {_PARTS[0]} train", scale=100)


def _row(study: Study, claim: str, measure: str, *, scale: float = 1.0, tried: str = "") -> Row:
    found = {
        rule: (setting, [scale * result for result in results]) for rule, (setting, results) in outcomes(study).items()
    }
    _, plain = found["dp"]
    differences = {rule: [a - b for a, b in zip(each, plain, strict=True)] for rule, (_, each) in found.items()}
    apart = ", ".join(f"{rule} {_with_spread(each, '+')}" for rule, each in differences.items() if rule != "dp")
    chosen = ", ".join(f"{rule} {setting}" for rule, (setting, _) in found.items())
    return Row(
        claim=f"{claim}, tuned, {study.seeds} seeds, rules against dp",
        measured=", ".join(f"{rule} {_with_spread(each)}" for rule, (_, each) in found.items()),
        note=f"{measure}, {study.about(chosen)}. Differences from dp, seed by seed: {apart}.",
        tried=tried,
    )


def _with_spread(values: Sequence[float], sign: str = "") -> str:
    return f"{statistics.mean(values):{sign}.4f} ± {statistics.stdev(values):.4f}"
