"""Islands that train on their own and sync rarely: DiLoCo (arXiv 2311.08105), streamed (arXiv 2501.18512).

[Note: One thread, one order]
An all-reduce over islands has two trips with a sum between them, and runs while the next inner steps compute. Each rank
has one background thread, which makes both trips and the sum. Only this thread uses the group of islands, for one
all-reduce after the other, so messages have the same order on all islands. The training thread submits an all-reduce
after one step and waits for it after a later step. The step counter alone determines both steps.
"""

import time
import warnings
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

from laconic.codec import Codec, codec_named
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import all_reduce
from laconic.islands.all_reduce import CompressedAllReduce, Mean
from laconic.islands.fragments import FragmentPattern, SyncSchedule, fragment_of
from laconic.islands.holders import Holders
from laconic.islands.outer_optimizer import MakeOuter, OuterFragment, nesterov
from laconic.islands.recovery import Recovery
from laconic.ragged.parts import walk_sliced
from laconic.shard.unit import unit_of


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """One fragment's sync on this island."""

    step: int
    """The inner step after which the mean was applied."""
    fragment: int
    drift_norm: float
    """The norm of this island's pseudo-gradient."""
    mean_norm: float
    """The norm of the mean of all islands' pseudo-gradients."""
    cosine: float
    """The cosine between this pseudo-gradient and the mean: 1 if all islands agree, 1 / sqrt(I) if unrelated."""
    codec_error: float
    """The relative error |decoded - own| / |own| of the pseudo-gradient that this island sent."""
    sent_bytes: int
    hidden_s: float
    """The seconds of the all-reduce that ran behind inner steps."""
    exposed_s: float
    """The seconds that training waited for the all-reduce."""


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    """A fragment that has been sent and not yet applied."""

    fragment: int
    message: Tensor
    """The pseudo-gradient; with error feedback, plus a share of what encoding has lost so far."""
    result: Future[Mean]

    def vectors(self) -> dict[str, Tensor]:
        """Return the vectors that a checkpoint needs, by key. Waits for the mean."""
        mean = self.result.result()
        return {"drift": self.message, "mean": mean.value, "sent": mean.sent}


class LocalSteps:
    """An optimizer whose islands sync only once in a number of steps.

    `step()` takes an inner step. When it is a fragment's turn, the islands average their pseudo-gradients: the outer
    parameters, which all islands share, minus the island's own. Each island takes one outer step along the mean and
    goes on from the result. Inner optimizer state stays. Outer parameters and their momentum are in host memory,
    sharded as the model is: a rank sends only its own part, and only to the ranks at its place in other islands.

    The model may be plain or sharded by `fully_shard` over the same mesh. Learning-rate schedules and gradient clipping
    act on the inner optimizer and the model as usual. Evaluate and export the outer parameters
    (`with local.outer_parameters()`): they are better than the parameters of any island.

    An island may be a `CyclicDataParallel` run with replicated states: give its `optimizer`, and call `step()` after
    its `step`. Such an optimizer has `settle()`, which drains the run before each sync, so that the island has one
    version of all parameters.

    Args:
        model: the model. Its trainable parameters sync, and with `partial_updates` all slices, each averaged over the
            islands that train it. All other parameters must be equal on all islands.
        optimizer: the inner optimizer of the model's parameters.
        mesh: a mesh with an island axis: `laconic.init_mesh(device, islands=...)`.
        every: inner steps between two syncs of a parameter.
        outer: makes the outer optimizer of a fragment from a list of parameter groups, one for each number of islands
            that train them: [Note: Outer parameter groups] in islands/holders.py. `outer_sgd` returns such functions;
            `functools.partial(torch.optim.SGD, lr=1.0)` is one, too. Default: SGD, lr 0.7, Nesterov momentum 0.9.
        fragments: the number of parts of the model that sync in turn.
        pattern: how layers are assigned to fragments; see `fragment_of`.
        overlap: inner steps between sending a fragment and applying its mean.
        mixing: the weight of an island's own parameters when a mean is applied. With overlap this keeps part of the
            inner steps that the island took while the mean was on its way.
        codec: the format of pseudo-gradients on the wire: "fp32", "bf16", "int8", "int4", "int3", "int2", "e2m1",
            "e3m0", "top64", or a `Codec`. One island alone sends nothing, and uses "fp32".
        error_feedback: add to each pseudo-gradient what encoding has lost of the earlier ones: all of it (True), or
            this share at each sync, below 1. "top64" needs it.
        recovery: a folder on each machine for the state of the last sync, from which islands go on after a restart:
            [Note: Re-forming] in islands/recovery.py. Then `steps` is the step after which training goes on.

    Raises:
        ValueError: the schedule is not valid, the codec is unknown, no parameter is trainable, no slice of a sliced
            model is trainable, or `mixing` or `error_feedback` is out of its range; or the optimizer belongs to a
            cyclic run, and its workers do not hold all parameters or `recovery` is given. `step`: the codec cannot
            encode a pseudo-gradient, such as NaN.
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
        codec: str | Codec = "int4",
        error_feedback: float = False,
        recovery: str | Path | None = None,
    ) -> None:
        if not 0 <= error_feedback <= 1:
            raise ValueError(
                f"error_feedback={error_feedback} must lie in [0, 1]: 0 forgets all that encoding has lost"
            )
        if not 0 <= mixing < 1:
            raise ValueError(f"mixing={mixing} must lie in [0, 1): 0 takes the outer parameters as they are")
        if recovery is not None and hasattr(optimizer, "settle"):
            raise ValueError(
                "recovery= and the optimizer of a cyclic run, whose states are with the owners of its stages: a "
                "machine's folder would lack them; leave recovery out, and save checkpoints of the run"
            )
        self.optimizer = optimizer
        self._settle()
        self.schedule = SyncSchedule(every=every, fragments=fragments, overlap=overlap)
        self.mixing, self.error_feedback = mixing, error_feedback
        self.steps = 0
        self.reports: list[SyncReport] = []
        """The reports of the syncs in the last step."""
        self.cluster = Cluster.of(mesh)
        self._all_reduce = CompressedAllReduce(self.cluster, codec_named(codec))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="laconic-islands")
        self._in_flight: _InFlight | None = None
        holders = Holders(model, self.cluster)
        synced = {name: p for name, p in model.named_parameters() if holders.is_synced(name, p)}
        if not synced:
            raise ValueError("no parameter of the model is trainable, so islands would have nothing to sync")
        _refuse_frozen_slices(model)
        assigned = fragment_of(synced, fragments, pattern)
        self.fragments: list[OuterFragment] = []
        for index in range(fragments):
            own = {name: parameter for name, parameter in synced.items() if assigned[name] == index}
            self.fragments.append(OuterFragment(own, outer, holders))
        self._residuals = [torch.zeros_like(fragment.flat) for fragment in self.fragments]
        self._recovery = Recovery(recovery, self.cluster) if recovery is not None else None
        units = filter(None, map(unit_of, model.modules()))
        buckets = [bucket for unit in units for bucket in unit.buckets if bucket.cluster is self.cluster]
        for bucket in buckets:
            bucket.replicas_diverge = True
        if self.cluster.num_nodes == 1 and not all(bucket.wire.is_exact for bucket in buckets):
            warnings.warn(
                "fully_shard's wire= does nothing here: every island has one node, and islands sync by LocalSteps, "
                "whose bits are those of its codec=; leave wire= out",
                stacklevel=2,
            )
        self._begin()

    def _begin(self) -> None:
        """Start all islands from the newest saved state, or from island 0's parameters."""
        if self._recovery is not None:
            self.steps = self._recovery.restore(self.fragments, self.optimizer)
        with torch.no_grad():
            for fragment in self.fragments:
                if self.steps == 0 and self.cluster.island_group is not None:
                    dist.broadcast(fragment.flat, group=self.cluster.island_group, group_src=0)
                fragment.write_inner(fragment.flat)

    def _settle(self) -> None:
        """Complete updates of the inner optimizer that are still under way, if it is of a kind that has such."""
        settle = getattr(self.optimizer, "settle", None)
        if settle is not None:
            settle()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take an inner step, and sync (collective over islands) if the schedule says so. Return the closure's loss."""
        loss = self.optimizer.step(closure)
        self.advance()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.optim.Optimizer.zero_grad`."""
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def advance(self) -> None:
        """Count an inner step that other code took or skipped, such as a gradient scaler, and sync if it is due."""
        self.steps += 1
        self.reports = []
        sent, is_due = self.schedule.sends(self.steps), self.schedule.applies(self.steps) is not None
        if sent is not None or is_due:
            self._settle()
        if sent is not None:
            self._send(sent)
        if is_due:
            self._apply()

    @torch.no_grad()
    def finish(self) -> None:
        """Apply the fragment in flight, if there is one. Call it at the end of training."""
        self._settle()
        self._apply()

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Let the model hold the outer parameters inside the block, for evaluation and export."""
        with torch.no_grad():
            inner = [fragment.copy_inner() for fragment in self.fragments]
            for fragment in self.fragments:
                fragment.write_inner(fragment.flat)
        try:
            yield
        finally:
            with torch.no_grad():
                for fragment, values in zip(self.fragments, inner, strict=True):
                    fragment.write_inner(values)

    # -- the sync of one fragment --------------------------------------------------------------------------------------

    def _send(self, index: int) -> None:
        fragment = self.fragments[index]
        message = fragment.pseudo_gradient()
        if self.error_feedback:
            message = message + self.error_feedback * self._residuals[index]
        result = self._thread.submit(self._all_reduce.mean, message, fragment.divisor)
        self._in_flight = _InFlight(fragment=index, message=message, result=result)

    def _apply(self) -> None:
        sent, self._in_flight = self._in_flight, None
        if sent is None:  # the run ends, or has loaded a checkpoint that has no fragment in flight
            return
        began = time.perf_counter()
        mean = sent.result.result()
        exposed_s = time.perf_counter() - began
        if self.error_feedback:
            self._residuals[sent.fragment] = sent.message - mean.sent
        fragment = self.fragments[sent.fragment]
        with torch.enable_grad():
            fragment.step(mean.value)
        fragment.write_inner(fragment.flat, keep=self.mixing)
        if self._recovery is not None:
            self._recovery.save(self.steps, self.fragments, self.optimizer)
        self.reports.append(self._report(sent, mean, exposed_s))

    def _report(self, sent: _InFlight, mean: Mean, exposed_s: float) -> SyncReport:
        own, error = sent.message, sent.message - mean.sent
        products = [own @ own, mean.value @ mean.value, own @ mean.value, error @ error]
        sums = all_reduce(self.cluster, torch.stack(products).to(self.cluster.device))  # over the shards of the island
        own_square, mean_square, product, error_square = sums.tolist()
        return SyncReport(
            step=self.steps,
            fragment=sent.fragment,
            drift_norm=own_square**0.5,
            mean_norm=mean_square**0.5,
            cosine=product / max((own_square * mean_square) ** 0.5, 1e-30),  # a zero vector has the cosine 0
            codec_error=(error_square / own_square) ** 0.5 if own_square else 0.0,
            sent_bytes=mean.sent_bytes,
            hidden_s=max(0.0, mean.took_s - exposed_s),
            exposed_s=exposed_s,
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return outer parameters, outer optimizer state and the fragment in flight, by kind and parameter name.

        Waits for the fragment in flight. Tensors are views, sharded as the parameters are, for
        torch.distributed.checkpoint. Save the inner parameters and the inner optimizer of each island yourself.
        """
        state: dict[str, Any] = {"steps": self.steps}
        for index, fragment in enumerate(self.fragments):
            state |= _named("outer", fragment, fragment.flat)
            for key, name, value in fragment.optimizer_state():
                state[f"outer_optimizer.{name}.{key}" if name else f"outer_optimizer.{index}.{key}"] = value
            if self.error_feedback:
                state |= _named("lost", fragment, self._residuals[index])
        if self._in_flight is not None:
            for kind, vector in self._in_flight.vectors().items():
                state |= _named(kind, self.fragments[self._in_flight.fragment], vector)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state_dict` returned.

        Raises:
            ValueError: the state is of another model.
        """
        missing = [name for fragment in self.fragments for name in fragment.parameters if f"outer.{name}" not in state]
        if missing:
            raise ValueError(f"the state has no outer parameters for {', '.join(missing[:8])}; it is another model's")
        self.steps = int(state["steps"])
        self._in_flight = None
        for index, fragment in enumerate(self.fragments):
            fragment.create_state()
            if any(f"mean.{name}" in state for name in fragment.parameters):
                self._in_flight = _arrived(index, fragment)
        for key, value in self.state_dict().items():
            if isinstance(value, Tensor):
                value.copy_(state[key])
        for index, fragment in enumerate(self.fragments):
            for key in [key for key, name, _ in fragment.optimizer_state() if not name]:
                fragment.set_number(key, state[f"outer_optimizer.{index}.{key}"])


def _refuse_frozen_slices(model: nn.Module) -> None:
    """Refuse a sliced model on an island that trains no slice. Adapters, added after the slicing, freeze them all."""
    sliced = [module.get_parameter(name) for _, module, each in walk_sliced(model) for name in each.part_names]
    if sliced and not any(part.requires_grad for part in sliced):
        raise ValueError(
            "the model is sliced by partial_updates, but no slice is trainable, so the slices would never change. "
            "Adapters freeze them: with LoRA, leave partial_updates out"
        )


def _named(kind: str, fragment: OuterFragment, vector: Tensor) -> dict[str, Tensor]:
    return {f"{kind}.{name}": part for name, part in fragment.named(vector).items()}


def _arrived(index: int, fragment: OuterFragment) -> _InFlight:
    """Make a fragment in flight whose mean has arrived, all zero, to load a checkpoint into."""
    message, value, sent = (torch.zeros_like(fragment.flat) for _ in range(3))
    result: Future[Mean] = Future()
    result.set_result(Mean(value=value, sent=sent, sent_bytes=0))
    return _InFlight(fragment=index, message=message, result=result)
