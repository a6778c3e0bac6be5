"""The row about a small ResNet on scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cyclic.accuracy import WORKERS, Batch, Setting, Study, Task, measure_study
from benchmarks.cyclic.bench import BENCHMARK, Bench
from tests.support.record import Row


@BENCHMARK.row("digits")
def digits(bench: Bench) -> Row:
    return measure_study(study(**bench.digits), "accuracy on scikit-learn's digits, a small ResNet")


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
    """Return seven layers of convolutions for 8 x 8 images of one channel."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)),
    )  # fmt: skip


def study(*, seeds: int, tuning_seeds: int, epochs: int, settings: Sequence[Setting]) -> Study:
    """Return the study: 1797 images, 60 % to train on, and 20 % each to validate and to test."""
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
