"""Islands that run on their own and agree rarely: DiLoCo (arXiv 2311.08105), streamed (arXiv 2501.18512).

[Note: One thread, one order]
An exchange has two trips with a sum between them, and runs behind the next inner steps. It runs whole in one background
thread, which alone uses the group of islands, one exchange after the other; so messages keep one order on all islands,
and the training thread only submits after one step and waits after another. Both follow from the step alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laconic.codec.codecs import Codec, codec_named
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import all_reduce
from laconic.islands.all_reduce import CompressedAllReduce, Mean
from laconic.islands.fragments import FragmentPattern, SyncSchedule, fragment_of
from laconic.islands.holders import Holders
from laconic.islands.outer_optimizer import MakeOuter, OuterFragment, nesterov
from laconic.islands.recovery import Recovery


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """One fragment's agreement, as this island saw it."""

    step: int
    """Inner step after which it was applied."""
    fragment: int
    drift_norm: float
    """Of this island's pseudo-gradient."""
    mean_norm: float
    """Of the mean over islands."""
    cosine: float
    """Between the two: 1 where islands pull one way, 1 / sqrt(I) where they are unrelated."""
    codec_error: float
    """|decoded - own| / |own|, of what this island sent."""
    sent_bytes: int
    """Out of this rank."""
    hidden_s: float
    """Of the exchange, behind inner steps."""
    exposed_s: float
    """That training stood still for it."""


@dataclass(frozen=True, kw_only=True)
class _UnderWay:
    fragment: int
    drift: Tensor
    mean: Future[tuple[Mean, float]]


class LocalSteps:
    """Wraps an optimizer so that islands agree only every so many steps.

    `step()` takes an inner step; when it is a fragment's turn, islands exchange how far they have drifted from the
    outer parameters, which they share, take one outer step along the mean, and go on from there. Inner optimizer state
    stays. Outer parameters and momentum rest in host memory, cut like the model: a rank talks only to the ranks at its
    own place in other islands, about its own part.

    Use it around a model that `fully_shard` cut over the same mesh, or a plain one; learning-rate schedules and
    gradient clipping act on the inner optimizer and the model as always. Evaluate and export the outer parameters
    (`with local.outer_parameters()`): they are better than any island's own.

    Args:
        model: its trainable parameters are synced, and with `partial_updates` all slices, each averaged over the
            islands that train it; the others are taken to be equal everywhere.
        optimizer: the inner one.
        mesh: with an axis of islands: `laconic.init_mesh(device, islands=...)`.
        every: inner steps between two syncs of a parameter.
        outer: from a list of parameters to the outer optimizer. Default: SGD, lr 0.7, Nesterov momentum 0.9.
        fragments, pattern: parts of the model that are synced in turn, and how layers are dealt to them.
        overlap: inner steps that an exchange may take before its mean is applied.
        mixing: how much of the inner parameters is kept when it is; with overlap, what the last steps learned.
        codec: "fp32", "bf16", "int8", "fp4", "fp4-e2m1", or a `Codec`.
        error_feedback: add to each pseudo-gradient what encoding the last one lost.
        recovery: a folder on each machine where the last agreement is kept, and found again when islands are re-formed
            after a loss: [Note: Re-forming] in islands/recovery.py. `steps` then says where to go on.

    Raises:
        ValueError: a schedule that cannot be kept, an unknown codec, nothing to train, or mixing outside [0, 1).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh,
        every: int = 100,
        outer: MakeOuter = nesterov,
        fragments: int = 1,
        pattern: FragmentPattern = "strided",
        overlap: int = 0,
        mixing: float = 0.0,
        codec: str | Codec = "fp32",
        error_feedback: bool = False,
        recovery: str | Path | None = None,
    ) -> None:
        if not 0 <= mixing < 1:
            raise ValueError(f"mixing={mixing} must lie in [0, 1): 0 takes the outer parameters as they are")
        self.optimizer = optimizer
        self.schedule = SyncSchedule(every=every, fragments=fragments, overlap=overlap)
        self.mixing, self.error_feedback = mixing, error_feedback
        self.steps = 0
        """Inner steps so far."""
        self.reports: list[SyncReport] = []
        """Of the last step."""
        self.cluster = Cluster.of(mesh)
        self._exchange = CompressedAllReduce(self.cluster, codec_named(codec))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="laconic-islands")
        self._under_way: _UnderWay | None = None
        holders = Holders(model, self.cluster)
        trainable = {name: p for name, p in model.named_parameters() if holders.is_synced(name, p)}
        if not trainable:
            raise ValueError("no parameter of the model is trainable, so islands would have nothing to agree on")
        homes = fragment_of(trainable, fragments, pattern)
        self.fragments: list[OuterFragment] = []
        """What islands share, in the order of the schedule."""
        for index in range(fragments):
            own = {name: parameter for name, parameter in trainable.items() if homes[name] == index}
            counts = {name: holders.count(name) for name in own}
            is_shared = all(count == self.cluster.num_islands for count in counts.values())
            self.fragments.append(OuterFragment(own, outer, None if is_shared else counts))
        self._lost = [torch.zeros_like(fragment.flat.detach()) for fragment in self.fragments]
        self._recovery = Recovery(recovery, self.cluster) if recovery is not None else None
        self._begin()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take an inner step, and what is due of the outer ones. Collective over islands on the steps that sync."""
        loss = self.optimizer.step(closure)
        self.advance()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def advance(self) -> None:
        """Count an inner step that was taken elsewhere (by a gradient scaler, also if it skipped), and sync if due."""
        self.steps += 1
        self.reports = []
        sent = self.schedule.sends(self.steps)
        if sent is not None:
            self._send(sent)
        applied = self.schedule.applies(self.steps)
        if applied is not None:
            self._apply(applied)

    @torch.no_grad()
    def finish(self) -> None:
        """Apply what is still under way: at the end of training."""
        if self._under_way is not None:
            self._apply(self._under_way.fragment)

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Have the model hold the outer parameters inside the block: for evaluation and export."""
        with torch.no_grad():
            inner = [fragment.gathered() for fragment in self.fragments]
            for fragment in self.fragments:
                fragment.write(fragment.flat.detach())
        try:
            yield
        finally:
            with torch.no_grad():
                for fragment, values in zip(self.fragments, inner, strict=True):
                    fragment.write(values)

    # -- one fragment's agreement --------------------------------------------------------------------------------------

    def _send(self, index: int) -> None:
        drift = self.fragments[index].drift()
        message = drift + self._lost[index] if self.error_feedback else drift
        self._under_way = _UnderWay(
            fragment=index,
            drift=message,
            mean=self._thread.submit(_timed, self._exchange.mean, message, self.fragments[index].divisor),
        )

    def _apply(self, index: int) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is None:  # sent before a checkpoint was loaded that knows nothing of it
            return
        assert under_way.fragment == index
        began = time.perf_counter()
        mean, took_s = under_way.mean.result()
        exposed_s = time.perf_counter() - began
        if self.error_feedback:
            self._lost[index] = under_way.drift - mean.sent
        fragment = self.fragments[index]
        with torch.enable_grad():
            fragment.step(mean.value)
        fragment.write(fragment.flat.detach(), keep=self.mixing)
        if self._recovery is not None:
            self._recovery.keep(self.steps, self.fragments, self.optimizer)
        self.reports.append(self._report(index, under_way.drift, mean, took_s, exposed_s))

    def _report(self, index: int, drift: Tensor, mean: Mean, took_s: float, exposed_s: float) -> SyncReport:
        lost = drift - mean.sent
        products = [drift @ drift, mean.value @ mean.value, drift @ mean.value, lost @ lost]
        sums = all_reduce(self.cluster, torch.stack(products).to(self.cluster.device))  # over the island's parts
        own, common, product, error = sums.tolist()
        return SyncReport(
            step=self.steps,
            fragment=index,
            drift_norm=own**0.5,
            mean_norm=common**0.5,
            cosine=product / max((own * common) ** 0.5, 1e-30),
            codec_error=(error / own) ** 0.5 if own else 0.0,
            sent_bytes=mean.sent_bytes,
            hidden_s=max(0.0, took_s - exposed_s),
            exposed_s=exposed_s,
        )

    def _begin(self) -> None:
        """Islands start from the last agreement that any of them remembers, or from island 0's parameters."""
        if self._recovery is not None:
            self.steps = self._recovery.restore(self.fragments, self.optimizer)
        with torch.no_grad():
            for fragment in self.fragments:
                if self.steps == 0 and self.cluster.island_group is not None:
                    dist.broadcast(fragment.flat.detach(), group=self.cluster.island_group, group_src=0)
                fragment.write(fragment.flat.detach())

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Outer parameters, outer optimizer state and what is under way, by the names of parameters.

        Tensors are views, cut like the parameters: torch.distributed.checkpoint can save them and load into them.
        Inner parameters and the inner optimizer are the caller's to save, for each island its own.
        """
        state: dict[str, Any] = {"steps": self.steps}
        for index, fragment in enumerate(self.fragments):
            state |= {f"outer.{name}": value for name, value in fragment.named(fragment.flat.detach()).items()}
            for key, name, value in fragment.state():
                state[f"outer_optimizer.{name}.{key}" if name else f"outer_optimizer.{index}.{key}"] = value
            if self.error_feedback:
                state |= {f"lost.{name}": value for name, value in fragment.named(self._lost[index]).items()}
        if self._under_way is not None:
            fragment = self.fragments[self._under_way.fragment]
            mean, _ = self._under_way.mean.result()
            for key, value in (("drift", self._under_way.drift), ("mean", mean.value), ("sent", mean.sent)):
                state |= {f"{key}.{name}": part for name, part in fragment.named(value).items()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken.

        Raises:
            ValueError: the state is of other parameters.
        """
        missing = [name for fragment in self.fragments for name in fragment.parameters if f"outer.{name}" not in state]
        if missing:
            raise ValueError(f"the state has no outer parameters for {', '.join(missing[:8])}; it is another model's")
        self.steps = int(state["steps"])
        self._under_way = None
        for index, fragment in enumerate(self.fragments):
            with torch.enable_grad():
                fragment.have_state()
            _fill(fragment.named(fragment.flat.detach()), "outer.{}", state)
            for key, name, value in list(fragment.state()):
                saved = state[f"outer_optimizer.{name}.{key}" if name else f"outer_optimizer.{index}.{key}"]
                if isinstance(value, Tensor):
                    value.copy_(saved)
                else:
                    fragment.optimizer.state[fragment.flat][key] = saved
            if self.error_feedback:
                _fill(fragment.named(self._lost[index]), "lost.{}", state)
            if fragment.parameters and f"mean.{next(iter(fragment.parameters))}" in state:
                self._under_way = self._arrived(index, state)

    def _arrived(self, index: int, state: dict[str, Any]) -> _UnderWay:
        """What was under way when `state` was taken."""
        fragment = self.fragments[index]
        drift, value, sent = (torch.zeros_like(fragment.flat.detach()) for _ in range(3))
        for key, into in (("drift", drift), ("mean", value), ("sent", sent)):
            _fill(fragment.named(into), f"{key}.{{}}", state)
        future: Future[tuple[Mean, float]] = Future()
        future.set_result((Mean(value=value, sent=sent, sent_bytes=0), 0.0))
        return _UnderWay(fragment=index, drift=drift, mean=future)


def _fill(parts: dict[str, Tensor], key: str, state: dict[str, Any]) -> None:
    for name, part in parts.items():
        part.copy_(state[key.format(name)])


def _timed(action: Callable[..., Mean], *arguments: Any) -> tuple[Mean, float]:
    began = time.perf_counter()
    with torch.no_grad():
        return action(*arguments), time.perf_counter() - began
