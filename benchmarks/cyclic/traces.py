"""The bytes that autograd keeps between forward and backward, over the operations of one step.

The bytes are counted as `laconic.cyclic.ActivationMeter` counts them: see [Note: Live activations].
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, ops
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.cyclic.bench import BENCHMARK, Bench
from benchmarks.llama import Llama, loss_of
from laconic import rehearse
from laconic.cyclic import ActivationMeter, CyclicDataParallel
from tests.support.record import Row

# torch's own counter knows attention on GPUs only.
_ATTENTION_ON_CPU: dict[Any, tuple[Callable[..., int], int]] = {
    ops.aten._scaled_dot_product_flash_attention_for_cpu: (sdpa_flop_count, 3),
    ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (sdpa_backward_flop_count, 4),
}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The bytes saved for backward over one forward and backward of one worker, as a step function of the work done."""

    flops: int
    """The floating-point operations (FLOPs) of the whole step, as torch counts them. This is the length of the step."""
    times: tuple[int, ...]
    """The moments at which the bytes change, in FLOPs done, ascending; the first is 0, the last is before `flops`."""
    most_bytes: tuple[int, ...]
    """The most bytes at each of `times`; at one moment any number of operations without FLOPs may run."""
    held_bytes: tuple[int, ...]
    """The bytes from each of `times` to the next."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes that one worker holds."""
        return max(self.most_bytes)

    @property
    def mean_bytes(self) -> float:
        """The bytes that one worker holds on average. The staggered total of many workers is about so much for each."""
        lengths = (end - start for start, end in pairwise((*self.times, self.flops)))
        return sum(length * size for length, size in zip(lengths, self.held_bytes, strict=True)) / self.flops

    def total_peak_bytes(self, workers: int, *, staggered: bool) -> int:
        """The most bytes that all workers hold together.

        All workers run at once or, if staggered, each worker begins 1 / workers of a step after the previous worker.
        The result is exact: the sum changes only when the bytes of one worker change, and repeats after 1 / workers of
        a step.
        """
        if not staggered:
            return workers * self.peak_bytes
        scaled = [time * workers for time in self.times]

        def at(moment: int) -> int:
            index = bisect_right(scaled, moment) - 1
            return (self.most_bytes if scaled[index] == moment else self.held_bytes)[index]

        moments = {time % self.flops for time in scaled}
        return max(sum(at(moment + worker * self.flops) for worker in range(workers)) for moment in moments)

    def reduction(self, workers: int) -> float:
        """The share of the total peak that staggering saves, 0 to 1."""
        return 1 - self.total_peak_bytes(workers, staggered=True) / self.total_peak_bytes(workers, staggered=False)


def trace(module: nn.Module, loss: Callable[[], Tensor]) -> Trace:
    """Run `loss().backward()` and record the bytes saved for backward over the floating-point operations done.

    Matrix products, convolutions and attention take time in proportion to their FLOPs; other operations take no time.

    Args:
        module: the model. Its parameters and buffers are not counted; its parameters get gradients.
        loss: a function that runs the forward of `module` and returns a scalar that requires a gradient.

    Raises:
        ValueError: no operation in `loss` takes time.
    """
    meter = ActivationMeter()
    with _FlopRecorder(meter) as recorder:
        with meter.forward(module):
            value = loss()
        value.backward()
        del value
        recorder.record()
    if not recorder.flops:
        raise ValueError("the traced loss has no matrix product, convolution or attention, so no time passes in it")
    most, held = recorder.most, recorder.held
    end = recorder.flops  # the end of this step is the beginning of the next
    most[0] = max(most[0], most.pop(end))
    del held[end]
    return Trace(flops=end, times=tuple(most), most_bytes=tuple(most.values()), held_bytes=tuple(held.values()))


class _FlopRecorder(TorchDispatchMode):
    """Counts FLOPs as operations run, and records the saved bytes before each operation."""

    def __init__(self, meter: ActivationMeter) -> None:
        super().__init__()
        self.flops = 0
        self.most: dict[int, int] = {0: 0}
        self.held: dict[int, int] = {0: 0}
        """Moment -> bytes after the last operation at the moment; `most`: moment -> most bytes. In order of time."""
        self._meter = meter

    def record(self) -> None:
        """Record the bytes that are saved now."""
        now = self._meter.live_bytes
        self.most[self.flops] = max(self.most.get(self.flops, 0), now)
        self.held[self.flops] = now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.record()
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        elif packet in _ATTENTION_ON_CPU:
            count, num_tensors = _ATTENTION_ON_CPU[packet]
            self.flops += count(*(tensor.shape for tensor in args[:num_tensors]))
        return result


def _resnet50() -> Traced:
    from transformers import ResNetConfig, ResNetForImageClassification

    return _classifier(ResNetForImageClassification(ResNetConfig(num_labels=_CLASSES)))


def _vit_b16() -> Traced:
    from transformers import ViTConfig, ViTForImageClassification

    return _classifier(ViTForImageClassification(ViTConfig(num_labels=_CLASSES)))


def _classifier(model: nn.Module) -> Traced:
    """An image model, and a function that returns its loss on one image."""
    image, label = torch.randn(1, 3, 224, 224), torch.tensor([0])
    return model.train(), lambda: functional.cross_entropy(model(image).logits, label)


def _llama() -> Traced:
    shape = Llama(
        hidden=768, intermediate=2048, layers=12, heads=12, kv_heads=12, vocab=32_000, batch=1, sequence=1024
    )  # fmt: skip
    model = shape.build(torch.device("cpu"), torch.float32)
    tokens = shape.tokens(torch.device("cpu"), seed=0)
    return model, lambda: loss_of(model, tokens)


_CLASSES = 1000
Traced = tuple[nn.Module, Callable[[], Tensor]]
"""A model in fp32, and a function that returns its loss on one sample."""
MODELS: dict[str, Callable[[], Traced]] = {
    "ResNet-50": _resnet50, "ViT-B/16": _vit_b16, "Llama 768 x 12 layers": _llama
}  # fmt: skip


@BENCHMARK.row("bytes")
def traced_bytes(bench: Bench) -> Row:
    measured, notes = [], []
    for name, build in MODELS.items():
        torch.manual_seed(0)
        found = trace(*build())
        reductions = [found.reduction(num_workers) for num_workers in (8, 32)]
        measured.append(f"{name} {' / '.join(f'{reduction:.1%}' for reduction in reductions)}")
        notes.append(
            f"{name}: {found.peak_bytes / 2**20:.1f} MiB a worker at its peak, limit "
            f"{1 - found.mean_bytes / found.peak_bytes:.1%}"
        )
    return Row(
        claim="total peak of bytes saved for backward, N = 8 / 32, against all at once",
        measured="; ".join(measured),
        note=(
            f"{'; '.join(notes)}. Traced on one worker, fp32, one sample (224 x 224; 1024 tokens): unique storages "
            "without parameters, time by FLOPs, the exact maximum over time of the staggered sum."
        ),
    )


# -- a run of many batches ---------------------------------------------------------------------------------------------

_WORKERS, _FILLED = 4, 2
"""The workers and stages of the run, and the batches that fill the schedule."""


class _Takes(torch.autograd.Function):
    """Passes a tensor on after one second of the rehearsal's clock, and its gradient after two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(1)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(2)
        return grad


class _Metered(nn.Module):
    """A stage that calls `record` when it has saved its bytes. All stages save equally many."""

    def __init__(self, meter: ActivationMeter, record: Callable[[], None]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        self.meter, self.record = meter, record

    def forward(self, x: Tensor) -> Tensor:
        with self.meter.forward(self.layers):
            y = self.layers(x)
        self.record()
        return _Takes.apply(y)


def peaks_of_run(rule: str, batches: int) -> list[int]:
    """The most bytes that all workers hold together, in each batch of worker 0 after those that fill the schedule."""
    held, found = [0] * _WORKERS, list[int]()

    def work() -> None:
        dist.init_process_group("gloo")
        worker, meter = dist.get_rank(), ActivationMeter()

        def record() -> None:
            held[worker] = meter.live_bytes
            if found:
                found[-1] = max(found[-1], sum(held))

        run = CyclicDataParallel(
            [_Metered(meter, record) for _ in range(_WORKERS)], functional.mse_loss,
            lambda parameters: torch.optim.SGD(parameters, lr=0.1), init_device_mesh("cpu", (_WORKERS,)), rule=rule,
        )  # fmt: skip
        add_live = run.report.add_live

        def after_op(change: int) -> None:
            add_live(change)
            record()

        run.report.add_live = after_op  # type: ignore[method-assign]
        for batch in range(batches):
            if worker == 0 and batch >= _FILLED:
                found.append(sum(held))
            run.step((torch.randn(8, 32), torch.randn(8, 32)))
        if worker == 0:
            found.append(0)  # what follows is the end of the run
        run.drain()

    rehearse.ranks(work, local=_WORKERS)
    return found[:-1]


@BENCHMARK.row("run")
def run_bytes(bench: Bench) -> Row:
    at_once, staggered = (peaks_of_run(rule, bench.batches) for rule in ("dp", "lag2"))
    share = max(staggered) / max(at_once)
    return Row(
        claim=f"peak of bytes saved for backward in each of {bench.batches} batches of a run, N = 4, against dp",
        measured=f"{min(staggered) / max(at_once):.1%} to {share:.1%}",
        note=(
            f"Rule lag2 against dp, which holds {max(at_once) / 2**10:.0f} KiB in each batch. The peak of each batch "
            f"from the third on, so the schedule is full: the run is not drained between batches. Stages are equal, "
            "and a backward takes twice as long as a forward, on the clock of the rehearsal. The schedule alone holds "
            f"(N + 1) / 2 N = {(_WORKERS + 1) / (2 * _WORKERS):.1%}; at the end of an op up to N / 2 workers may have "
            "begun their next forward before others have ended a backward."
        ),
    )
