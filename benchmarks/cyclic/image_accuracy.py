"""The rows about the accuracy of image models: digits of 8 x 8 on a small ResNet, and Fashion-MNIST on ResNet-18."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cyclic.accuracy import WORKERS, Batch, Study, Task, is_within_error, measure_study
from benchmarks.cyclic.bench import BENCHMARK, Bench, Setting
from benchmarks.cyclic.images import resnet
from laconic.cyclic.cut import Criterion
from tests.support.record import Row

FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist has its four files: 60,000 images to train on, and 10,000 to test."""
_CLASSES = 10
_PIXELS_AT = 16  # the images begin after four integers, and the labels after two
_LABELS_AT = 8


@BENCHMARK.row("digits")
def digits(bench: Bench) -> Row:
    return measure_study(digits_study, bench.digits, "accuracy on scikit-learn's digits, a small ResNet")


@BENCHMARK.row("fashion", section="images")
def fashion(bench: Bench) -> Row:
    return measure_study(
        fashion_study,
        bench.fashion,
        "accuracy on Fashion-MNIST, ResNet-18",
        required="v2 within one standard error of dp",
        is_met=lambda study, plain, others: is_within_error(study, plain, others["v2"]),
    )


def digits_study(*, seeds: int, tuning_seeds: int, epochs: int, settings: Sequence[Setting]) -> Study:
    """Return the study of digits: 1797 images, 60 % to train on, and 20 % each to validate and to test."""
    from sklearn.datasets import load_digits

    images, labels = (torch.as_tensor(values) for values in load_digits(return_X_y=True))
    images = (images.float().view(-1, 1, 8, 8) - 8) / 8
    num_train, num_validation, rows = 1078, 360, 16

    def task(seed: int) -> Task:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(images), generator=generator)
        parts = order.split([num_train, num_validation, len(images) - num_train - num_validation])
        return _task(small_resnet(), images, labels, parts, rows, generator, by="parameters")

    return Study(
        name="ResNet on digits", measure="test accuracy", is_loss=False, settings=tuple(settings), seeds=seeds,
        tuning_seeds=tuning_seeds, steps=epochs * (num_train // (rows * WORKERS)), task=task,
    )  # fmt: skip


def fashion_study(*, seeds: int, tuning_seeds: int, epochs: int, num_train: int, settings: Sequence[Setting]) -> Study:
    """Return the study of Fashion-MNIST: the first images to train on, 10,000 each to validate and to test.

    The model is ResNet-18 for one channel and ten classes; its four stages have equal FLOPs, as the paper's. Its
    schedule is the paper's for CIFAR-10, scaled: the rate falls to a fifth after 3, 6 and 9 tenths.

    Raises:
        FileNotFoundError: the data is not there.
    """
    images, labels = (torch.cat(both) for both in zip(_fashion("train"), _fashion("t10k"), strict=True))
    num_held, rows = len(labels) // 7, 16
    parts = (torch.arange(num_train), *torch.arange(len(labels))[-2 * num_held :].split(num_held))

    def task(seed: int) -> Task:
        blocks = resnet(2, 2, 2, 2, layer_type="basic", widest=512, channels=1, classes=_CLASSES)
        flops = [0.5, *[1.0] * (len(blocks) - 2), 0.0]  # the first layer, equal blocks, and the last layer
        return _task(blocks, images, labels, parts, rows, torch.Generator().manual_seed(seed), by=flops)

    return Study(
        name="ResNet-18 on Fashion-MNIST", measure="test accuracy", is_loss=False, settings=tuple(settings),
        seeds=seeds, tuning_seeds=tuning_seeds, steps=epochs * (num_train // (rows * WORKERS)), task=task,
        schedule=thrice_a_fifth,
    )  # fmt: skip


def thrice_a_fifth(progress: float) -> float:
    """Return a factor that falls to a fifth after 3, 6 and 9 tenths of a run."""
    return 0.2 ** min(int(progress / 0.3), 3)


def _fashion(part: str) -> tuple[Tensor, Tensor]:
    """The images (n, 1, 28, 28), of mean 0 and deviation 1 over all, and the labels (n)."""
    if not FASHION.exists():
        raise FileNotFoundError(f"{FASHION} is not there; on Debian: apt-get install dataset-fashion-mnist")

    def values(name: str, offset: int) -> Tensor:
        data = gzip.decompress((FASHION / f"{part}-{name}-ubyte.gz").read_bytes())
        return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=offset)

    pixels = values("images-idx3", _PIXELS_AT).view(-1, 1, 28, 28).float()
    return (pixels / 255 - 0.286) / 0.353, values("labels-idx1", _LABELS_AT).long()


def _task(
    model: nn.Module | Sequence[nn.Module], images: Tensor, labels: Tensor, parts: Sequence[Tensor], rows: int,
    generator: torch.Generator, *, by: Criterion | Sequence[float],
) -> Task:  # fmt: skip
    """A task of images, of which `parts` are to train on, to validate and to test; a worker takes `rows` at a time.

    It is on a GPU if there is one.
    """
    if torch.cuda.is_available():
        images, labels = images.cuda(), labels.cuda()
        for block in (model,) if isinstance(model, nn.Module) else model:
            block.cuda()
    train, *held = parts
    steps_per_epoch = len(train) // (rows * WORKERS)

    def batches(steps: int) -> Iterator[Batch]:
        for step in range(steps):
            if step % steps_per_epoch == 0:
                shuffled = train[torch.randperm(len(train), generator=generator)]
            start = step % steps_per_epoch * rows * WORKERS
            chosen = shuffled[start : start + rows * WORKERS].split(rows)
            yield [(images[part], labels[part]) for part in chosen]

    def evaluate(predict: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        validation, test = (_accuracy(predict, images[part], labels[part]) for part in held)
        return validation, test

    return Task(
        model=model, example=images[:rows], by=by, loss=functional.cross_entropy, batches=batches, evaluate=evaluate,
        optimizer=lambda parameters, setting: torch.optim.SGD(
            parameters, lr=setting.lr, momentum=setting.momentum, nesterov=setting.nesterov, weight_decay=5e-4
        ),
    )  # fmt: skip


def _accuracy(predict: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> float:
    right = [
        (predict(some).argmax(1) == of_them).sum()
        for some, of_them in zip(images.split(500), labels.split(500), strict=True)
    ]
    return float(sum(right)) / len(labels)


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
