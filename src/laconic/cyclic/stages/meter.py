"""How many bytes autograd keeps between forward and backward: now, at most, and over the operations of a step.

[Note: What counts as a live activation]
Every storage that a backward node has saved, once however many nodes saved it, from the moment it is saved until the
last of those nodes has run (or its graph is dropped); parameters and buffers of the module are not counted, its inputs
are. A stage activation is what one forward of one stage has saved; it is live as long as any of it is.
Hooks on saved tensors see all of that exactly, but autograd does not check versions of what hooks have packed. So the
meter checks them itself, for parameters too: an optimizer that steps between a stage's forward and its backward is
caught with the meter as without.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten
# torch's own counter knows attention on GPUs alone.
_ATTENTION_ON_CPU: dict[Any, tuple[Callable[..., int], int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (sdpa_flop_count, 3),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (sdpa_backward_flop_count, 4),
}


class ActivationMeter:
    """Live activations of all forwards that ran under `forward`; see [Note: What counts as a live activation].

    meter = ActivationMeter()
    with meter.forward(stage):
        output = stage(input)
    meter.live_bytes, meter.live_stages  # until output.backward() has passed the stage
    """

    def __init__(self) -> None:
        self._bytes: Counter[int] = Counter()
        """Of each live storage."""
        self._holders: Counter[int] = Counter()
        """How many saved tensors are in each live storage."""
        self._saved: Counter[int] = Counter()
        """How many saved tensors each live stage activation has."""
        self._released: deque[tuple[int, int]] = deque()
        """(storage, activation) of saved tensors that died, by any thread, since the last look."""
        self._num_forwards = 0
        self._live_bytes = self._peak_bytes = self._peak_stages = 0

    @property
    def live_bytes(self) -> int:
        """Bytes saved for backward now."""
        self._settle()
        return self._live_bytes

    @property
    def live_stages(self) -> int:
        """Stage activations live now."""
        self._settle()
        return len(self._saved)

    @property
    def peak_bytes(self) -> int:
        """The most since the last reset."""
        return self._peak_bytes

    @property
    def peak_stages(self) -> int:
        """The most since the last reset."""
        return self._peak_stages

    def reset_peak(self) -> None:
        """Start a new peak at what is live now."""
        self._peak_bytes, self._peak_stages = self.live_bytes, self.live_stages

    @contextmanager
    def forward(self, module: nn.Module) -> Iterator[None]:
        """Count what the body, one forward of `module` as one stage, saves.

        Raises: RuntimeError in the backward that follows, if a saved tensor was changed in place in between.
        """
        own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
        activation = self._num_forwards
        self._num_forwards += 1

        def pack(tensor: Tensor) -> _Saved:
            storage = tensor.untyped_storage()
            is_counted = storage._cdata not in own
            if is_counted:
                self._add(storage, activation)
            return _Saved(tensor, self._released if is_counted else None, activation)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield

    def _add(self, storage: torch.UntypedStorage, activation: int) -> None:
        self._settle()
        key = storage._cdata
        if key not in self._holders:
            self._bytes[key] = storage.nbytes()
            self._live_bytes += storage.nbytes()
        self._holders[key] += 1
        self._saved[activation] += 1
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        self._peak_stages = max(self._peak_stages, len(self._saved))

    def _settle(self) -> None:
        """Take away what died. Only here, never in a destructor, which may run in the midst of anything."""
        while self._released:
            key, activation = self._released.popleft()
            _decrement(self._saved, activation)
            if _decrement(self._holders, key) == 0:
                self._live_bytes -= self._bytes.pop(key)


def _decrement(counts: Counter[int], key: int) -> int:
    counts[key] -= 1
    return counts[key] or counts.pop(key)


class _Saved:
    """A saved tensor in a graph; dies with its node's backward. Holds the storage, so that none takes its place.

    Without the tensor's own graph: an output's would hold the node that holds this, and neither would ever die.
    """

    def __init__(self, tensor: Tensor, released: deque[tuple[int, int]] | None, activation: int) -> None:
        self.tensor, self.version = tensor.detach(), tensor._version
        self._released, self._activation = released, activation

    def __del__(self) -> None:
        if self._released is not None:
            self._released.append((self.tensor.untyped_storage()._cdata, self._activation))


def _unpack(saved: _Saved) -> Tensor:
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs was changed in place after forward: it "
            f"is at version {saved.tensor._version}, expected {saved.version}; let the optimizer step, or whatever "
            "changed it, wait until the backward that uses it is done"
        )
    return saved.tensor


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Bytes saved for backward over one forward and backward of one worker, a step function of the work done."""

    flops: int
    """Of the whole, as torch's counter has them: the length of the step, and the unit of `times`."""
    times: tuple[int, ...]
    """When the bytes change, ascending, the first 0, the last before `flops`."""
    most_bytes: tuple[int, ...]
    """The most at each of these moments, at which any number of operations without FLOPs run."""
    held_bytes: tuple[int, ...]
    """From each of these moments to the next."""

    @property
    def peak_bytes(self) -> int:
        """The most that one worker holds."""
        return max(self.most_bytes)

    @property
    def mean_bytes(self) -> float:
        """Over time: what a worker holds on average; a share of the staggered total has this limit for many workers."""
        lengths = (end - start for start, end in pairwise((*self.times, self.flops)))
        return sum(length * size for length, size in zip(lengths, self.held_bytes, strict=True)) / self.flops

    def total_peak_bytes(self, workers: int, *, staggered: bool) -> int:
        """The most that `workers` hold together, running at once or each 1 / workers of a step after the one before.

        Exact: the sum changes only where one of them changes, and repeats after 1 / workers of a step.
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
        """Share of the total peak that staggering saves; 0.0 for none."""
        return 1 - self.total_peak_bytes(workers, staggered=True) / self.total_peak_bytes(workers, staggered=False)


def trace(module: nn.Module, loss: Callable[[], Tensor]) -> Trace:
    """Run `loss().backward()` and record what is saved for backward over the floating-point operations done.

    Matrix products, convolutions and attention take time, by their operations; everything else takes none.

    Args:
        module: whose parameters and buffers are not counted, and get gradients.
        loss: runs the forward of `module` and returns a scalar that requires a gradient.

    Raises:
        ValueError: nothing in `loss` takes time.
    """
    meter = ActivationMeter()
    with _Recorder(meter) as recorder:
        with meter.forward(module):
            value = loss()
        value.backward()
        del value
        recorder.note()
    if not recorder.flops:
        raise ValueError("the traced loss has no matrix product, convolution or attention, so no time passes in it")
    most, held = recorder.most, recorder.held
    end = recorder.flops  # is the beginning of the next step
    most[0] = max(most[0], most.pop(end))
    del held[end]
    return Trace(flops=end, times=tuple(most), most_bytes=tuple(most.values()), held_bytes=tuple(held.values()))


class _Recorder(TorchDispatchMode):
    """Counts operations as they run, and with each the bytes that are saved."""

    def __init__(self, meter: ActivationMeter) -> None:
        super().__init__()
        self.flops = 0
        self.most: dict[int, int] = {0: 0}
        self.held: dict[int, int] = {0: 0}
        """Bytes by the operations done until then, in order."""
        self._meter = meter

    def note(self) -> None:
        now = self._meter.live_bytes
        self.most[self.flops] = max(self.most.get(self.flops, 0), now)
        self.held[self.flops] = now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.note()
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=result)
        elif packet in _ATTENTION_ON_CPU:
            count, num_tensors = _ATTENTION_ON_CPU[packet]
            self.flops += count(*(tensor.shape for tensor in args[:num_tensors]))
        return result
