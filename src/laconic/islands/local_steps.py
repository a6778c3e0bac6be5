"""Islands that train on their own and sync rarely: DiLoCo (arXiv 2311.08105), streamed (arXiv 2501.18512).

[Note: One thread, one order]
An all-reduce over islands has two trips with a sum between them, and runs while the next inner steps compute. Each rank
has one background thread, which makes both trips and the sum. Only this thread uses the group of islands, for one
all-reduce after the other, so messages have the same order on all islands. The training thread submits an all-reduce
after one step and waits for it after a later step. The step counter alone determines both steps.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from laconic.codec import Codec, codec_named
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import all_reduce
from laconic.islands.all_reduce import Mean
from laconic.islands.elastic import ElasticExchange
from laconic.islands.exchange import Contribution, Exchange, SyncReport
from laconic.islands.fragments import fragment_of
from laconic.islands.outer_optimizer import Holders, MakeOuter, OuterFragment
from laconic.islands.policies import Membership, SyncPolicy
from laconic.islands.recovery import RecoveringExchange
from laconic.policy import with_keys
from laconic.ragged.parts import walk_sliced
from laconic.shard.unit import unit_of


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

    Islands stay until the job ends. With a rendezvous (`membership`) each island is a job of its own instead, and
    islands come and go while the others train on. Call `enter()` after loading checkpoints and before the first
    forward.

    Args:
        model: the model. Its trainable parameters sync, and with `partial_updates` all slices, each averaged over the
            islands that train it. All other parameters must be equal on all islands.
        optimizer: the inner optimizer of the model's parameters.
        mesh: a mesh with an island axis: `laconic.init_mesh(device, islands=...)`.
        policy: when fragments sync (`SyncSchedule`), in which format (`Coding`), and along which step (`OuterSGD`).
        outer: makes the outer optimizer of a fragment, in place of the policy's, from a list of parameter groups, one
            for each number of islands that train them: [Note: Outer parameter groups] in islands/outer_optimizer.py.
            `functools.partial(torch.optim.SGD, lr=1.0)` is such a function.
        total_steps: the inner steps of the whole run, those before a resume included, for `last_codec`: a fragment's
            exchange is its last if the next one would come after them. The same on all islands.
        membership: what follows if an island is lost or joins, in place of the policy's. With its `recovery` `steps` is
            then the step after which training goes on; with its `rendezvous` the mesh has one island, this one.
        keys: other values of fields of these policies, such as `every=100, fragments=4, codec="int8"`.

    Raises:
        ValueError: the schedule is not valid, the codec is unknown, no parameter is trainable, no slice of a sliced
            model is trainable, no island trains a slice and `recovery` is not given, or `mixing` or `error_feedback` is
            out of its range; `last_codec` is given without `total_steps`, or with a rendezvous; `recovery` cannot be
            written or the run has no name; the optimizer belongs to a cyclic run, and its workers do not hold all
            parameters or `recovery` is given; or `membership` is given with several islands in the mesh, `recovery`, or
            slices.
        JobError: `step`, on all ranks of all islands: an island's pseudo-gradient is NaN or infinite. With `membership`
            on that island alone, and see `laconic.islands.elastic`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        mesh: DeviceMesh,
        policy: SyncPolicy | None = None,
        outer: MakeOuter | None = None,
        total_steps: int | None = None,
        membership: Membership | None = None,
        **keys: Any,
    ) -> None:
        policy = policy or SyncPolicy()
        policy = with_keys(replace(policy, membership=membership or policy.membership), **keys)
        membership = policy.membership
        codec, error_feedback = codec_named(policy.coding.codec), policy.coding.error_feedback
        self._total_steps, self._last_codec = total_steps, _last_codec(policy, total_steps)
        if membership.recovery is not None and hasattr(optimizer, "settle"):
            raise ValueError(
                "recovery= and the optimizer of a cyclic run, whose states are with the owners of its stages: a "
                "machine's folder would lack them; leave recovery out, and save checkpoints of the run"
            )
        self.optimizer = optimizer
        self._settle()
        self.schedule, self.error_feedback = policy.schedule, error_feedback
        self.steps = 0
        """The inner steps so far."""
        self._tokens = [0] * self.schedule.fragments  # that each fragment's pseudo-gradient comes from
        self.reports: list[SyncReport] = []
        """The reports of the syncs in the last step."""
        self.cluster = Cluster.of(mesh)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="laconic-islands")
        self._in_flight: _InFlight | None = None
        holders = Holders(model, self.cluster)
        synced = {name: p for name, p in model.named_parameters() if holders.is_synced(name, p)}
        if not synced:
            raise ValueError("no parameter of the model is trainable, so islands would have nothing to sync")
        _refuse_frozen_slices(model)
        assigned = fragment_of(synced, self.schedule.fragments, self.schedule.pattern)
        self.fragments: list[OuterFragment] = []
        for index in range(self.schedule.fragments):
            own = {name: parameter for name, parameter in synced.items() if assigned[name] == index}
            self.fragments.append(OuterFragment(own, outer or policy.outer, holders))
        self._residuals = [torch.zeros_like(fragment.flat) for fragment in self.fragments] if error_feedback else []
        holders.check(may_join=membership.recovery is not None)
        _refuse_misfits(membership, self.cluster.num_islands, any(holders.order(name) >= 0 for name in synced))
        of = self.cluster, codec, self.fragments
        self._exchange: Exchange = Exchange(*of)
        if membership.rendezvous is not None:
            run = _run_name(membership.run_id, "membership=")
            self._exchange = ElasticExchange(membership, run, *of, self.schedule)
        elif membership.folder is not None:
            slices = sorted({holders.order(name) for name, p in synced.items() if p.requires_grad} - {-1})
            run = _run_name(membership.run_id, "recovery=")
            self._exchange = RecoveringExchange(membership.folder, run, *of, self._residuals, optimizer, slices)
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
        if not self._exchange.comes_and_goes:
            self.enter()

    def _settle(self) -> None:
        """Complete updates of the inner optimizer that are still under way, if it is of a kind that has such."""
        if hasattr(self.optimizer, "settle"):
            self.optimizer.settle()

    @property
    def rounds(self) -> int:
        """The fragments sent so far."""
        return self.schedule.rounds(self.steps)

    @torch.no_grad()
    def enter(self) -> int:
        """Enter the islands of `membership`, and take over their state. Returns the step after which training goes on.

        Collective over the ranks of this island. Blocks until the founding islands have come, or, if they train
        already, until the end of a sync. Without `membership` there is nothing to do.

        Raises:
            JobError: see `ElasticExchange.enter`.
        """
        if not self._exchange.is_inside:
            self.finish()
            self.steps, is_news = self._exchange.enter(self.steps)
            for fragment in self.fragments if is_news else ():
                fragment.write_inner(fragment.flat)
            self._tokens = [0] * len(self._tokens)
        return self.steps

    @property
    def slot(self) -> int:
        """This island's place among the islands, from 0, which no other island has. Divide data by it.

        With `membership` it may exceed the number of islands with which training starts; -1 before `enter`.
        """
        return self._exchange.slot

    @property
    def number(self) -> int:
        """This island's number: the islands of `membership` are counted as they come, without it by their place."""
        return self._exchange.number

    def leave(self) -> None:
        """Leave the islands of `membership` in order: the others do not wait for this one. Call it at the end."""
        if self._exchange.comes_and_goes:
            self.finish()
            self._exchange.leave()

    def step(self, closure: Callable[[], float] | None = None, *, tokens: int = 1) -> Any:
        """Take an inner step, and sync (collective over islands) if it is due. Return the closure's loss.

        `tokens` is the number of tokens that all ranks of this island have trained on in this step, the same on each of
        them: [Note: Weights by tokens] in islands/exchange.py.
        """
        loss = self.optimizer.step(closure)
        self.advance(tokens=tokens)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.optim.Optimizer.zero_grad`."""
        self.optimizer.zero_grad(set_to_none)

    def kept_tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that rest in host memory between syncs: of fragments, and what a codec has lost of them."""
        for fragment in self.fragments:
            yield from fragment.kept_tensors()
        yield from self._residuals

    @torch.no_grad()
    def advance(self, *, tokens: int = 1) -> None:
        """Count an inner step that other code took or skipped, such as a gradient scaler, and sync if it is due."""
        if not self._exchange.is_inside:
            raise RuntimeError(
                "this island has not entered: call LocalSteps.enter() before the first forward, after loading a "
                "checkpoint, and go on from the step that it returns"
            )
        self.steps += 1
        self._tokens = [count + tokens for count in self._tokens]
        self.reports = []
        self._exchange.look()
        since = self.steps % self.schedule.interval
        if since == 0:
            self._settle()
            self._apply()  # what a checkpoint of another schedule had in flight
            self._send(self.rounds % len(self.fragments))
        if self._in_flight is not None and since >= self.schedule.overlap:
            self._settle()
            self._apply()

    @torch.no_grad()
    def finish(self) -> None:
        """Apply the fragment in flight, if there is one. Call it at the end of training."""
        self._settle()
        self._apply()
        self._exchange.settle()

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
        limit = torch.finfo(torch.float32).max / (2 * self.cluster.num_islands)  # so that their sum is finite, too
        can_send = not message.numel() or bool(message.abs().max() <= limit)  # false for NaN
        unsound = all_reduce(self.cluster, torch.tensor(float(not can_send), device=self.cluster.device))
        is_last = self._total_steps is not None and self.steps + self.schedule.every > self._total_steps
        own = Contribution(
            fragment=index,
            step=self.steps,
            values=message,
            tokens=self._tokens[index],
            is_sound=float(unsound) == 0,  # on every rank of the island
            divisor=fragment.divisor,
            codec=self._last_codec if is_last else None,
        )
        self._tokens[index] = 0
        self._in_flight = _InFlight(
            fragment=index, message=message, result=self._thread.submit(self._exchange.mean, own)
        )

    def _apply(self) -> None:
        sent, self._in_flight = self._in_flight, None
        if sent is None:  # the run ends, or has loaded a checkpoint that has no fragment in flight
            return
        began = time.perf_counter()
        mean = sent.result.result()
        exposed_s = time.perf_counter() - began
        is_kept = self._exchange.settle()  # a thread may read what changes below
        own, error = sent.message, sent.message - mean.sent
        if self.error_feedback:
            self._residuals[sent.fragment] = error
        fragment = self.fragments[sent.fragment]
        with torch.enable_grad():
            fragment.step(mean.value)
        fragment.write_inner(fragment.flat, keep=self.schedule.mixing)
        products = [own @ own, mean.value @ mean.value, own @ mean.value, error @ error, torch.tensor(float(is_kept))]
        sums = all_reduce(self.cluster, torch.stack(products).to(self.cluster.device))  # over the shards of the island
        own_square, mean_square, product, error_square, num_kept = sums.tolist()
        self._exchange.keep(self.steps, sent.fragment, is_whole=num_kept == self.cluster.size)
        report = SyncReport(
            step=self.steps,
            fragment=sent.fragment,
            drift_norm=own_square**0.5,
            mean_norm=mean_square**0.5,
            cosine=product / max((own_square * mean_square) ** 0.5, 1e-30),  # a zero vector has the cosine 0
            codec_error=(error_square / own_square) ** 0.5 if own_square else 0.0,
            sent_bytes=mean.sent_bytes,
            num_islands=mean.num_islands,
            hidden_s=max(0.0, mean.took_s - exposed_s),
            exposed_s=exposed_s,
        )
        self.reports.append(report)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return outer parameters, outer optimizer state and the fragment in flight, by kind and parameter name.

        Waits for the fragment in flight. Tensors are views, sharded as the parameters are, for
        torch.distributed.checkpoint. `tokens` has, for each fragment, the tokens of this island that its next
        pseudo-gradient comes from. Save the inner parameters and the inner optimizer of each island yourself.
        """
        self._exchange.settle()  # the caller may write into the views
        state: dict[str, Any] = {"steps": self.steps, "tokens": list(self._tokens)}
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
        self._exchange.forget()
        self.steps = int(state["steps"])
        tokens = state.get("tokens", ())  # a state of an earlier release has none
        self._tokens = list(tokens) if len(tokens) == len(self.fragments) else [0] * len(self.fragments)
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


def _last_codec(policy: SyncPolicy, total_steps: int | None) -> Codec | None:
    """The codec of last exchanges; None if it is that of all others."""
    if policy.coding.last_codec is None:
        return None
    if total_steps is None:
        raise ValueError(
            f"last_codec={policy.coding.last_codec!r} needs total_steps, the inner steps of the whole run, by which "
            "islands know which exchange is the last; give it, or leave last_codec out"
        )
    if policy.membership.rendezvous is not None:
        raise ValueError(
            f"last_codec={policy.coding.last_codec!r} does not go with a rendezvous: islands that come and go do not "
            "take the same last step; leave last_codec out"
        )
    return codec_named(policy.coding.last_codec)


def _run_name(given: str | None, whose: str) -> str:
    """The name of the run: the given one, or torchrun's. Raises: ValueError if there is none."""
    name = given or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name == "none":  # as torchrun calls a rendezvous without a name
        raise ValueError(
            f"{whose} restores states of, and meets islands of, the same run only, and this run has no name; start "
            "torchrun with --rdzv-id=NAME, or give LocalSteps(run_id=...), a name that no other run has"
        )
    return name


def _refuse_misfits(membership: Membership, num_islands: int, is_sliced: bool) -> None:
    """Refuse a mesh and a model that do not go with the policy of islands. Raises: ValueError."""
    if membership.rendezvous is None:
        if membership.islands not in (None, num_islands):
            raise ValueError(
                f"islands={membership.islands} and a mesh of {num_islands} islands; give init_mesh the same number, or "
                "leave it out here"
            )
        return
    if num_islands > 1:
        raise ValueError(
            f"membership= and a mesh of {num_islands} islands: with membership each island is a job of its own; start "
            "one torchrun for each, and leave islands= out of init_mesh"
        )
    if is_sliced:
        raise ValueError(
            "membership= and partial_updates: a slice whose islands have gone would never change again; leave one of "
            "them out"
        )


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
