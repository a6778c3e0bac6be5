"""The state of the last sync, which every rank keeps on its own machine to survive the loss of an island.

[Note: Re-forming]
When a machine is lost, torchelastic (`torchrun --nnodes MIN:MAX`) ends all workers and starts them again on the
remaining machines; it does so again when a machine joins. The program starts from its first line, with another number
of islands and empty memory. So after each sync every rank writes the state to its machine. At the start the ranks agree
on the newest sync of which every shard is on some machine: [Note: A sync that counts] in saved_state.py. A rank whose
shard is on another machine gets it from there. One island sends the outer state to all others. Islands restore their
own inner optimizers; an island that joins starts without inner optimizer state. All islands lose the steps since that
sync.

[Note: Two phases]
A thread writes the state while training goes on, one state at a time. At the next sync the ranks of an island learn
whether all of them have written it, in a sum that they exchange anyway. Only then do they remove the state before it.
So a kill at any moment leaves each island with one sync that all of its ranks have. A rank cannot be a sync ahead of
another rank that has not finished the write before, because it waits in this sum.

The thread reads the outer parameters where they are, without a copy. They change at a sync and when a checkpoint is
loaded, and both wait for the thread first. The inner optimizer's state changes in every step, so the thread gets a copy
of the synced fragment's part.
"""

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codec import Codec
from laconic.comm.agreement import ranks_or_self
from laconic.comm.cluster import Cluster
from laconic.islands.exchange import Exchange
from laconic.islands.outer_optimizer import OuterFragment, flat_local, layout_digest
from laconic.islands.saved_state import Fetch, Place, Plan, SavedState, Sync, make_plan
from laconic.islands.state_folder import StateFolder
from laconic.ragged.tensor import RaggedTensor
from laconic.store.folder import DamagedError


class RecoveringExchange(Exchange):
    """Means over islands that stay, and one rank's states of the last syncs, in a folder of its machine.

    A folder in memory, such as /dev/shm, is best.

    Args:
        folder: the folder. Every run has a folder of its own in it.
        run: the name of the run. Only states of the same run are restored.
        cluster: the islands.
        codec: the format of values on the wire.
        fragments: the fragments of the model.
        residuals: what encoding has lost so far of each fragment, each (numel,); none without error feedback.
        optimizer: the inner optimizer.
        slices: the slices that this island trains, in ascending order.

    Raises:
        ValueError: on all ranks, if a rank cannot write into its folder.
    """

    def __init__(
        self,
        folder: str | Path,
        run: str,
        cluster: Cluster,
        codec: Codec,
        fragments: Sequence[OuterFragment],
        residuals: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        slices: Sequence[int],
    ) -> None:
        super().__init__(cluster, codec, fragments)
        self._optimizer, self._residuals, self._slices = optimizer, residuals, tuple(slices)
        self._ranks = ranks_or_self(cluster.all_flag_group)
        layout = layout_digest(fragments, type(optimizer).__qualname__, type(fragments[0].optimizer).__qualname__)
        self._folder = StateFolder(folder=Path(folder), run=run, layout=layout)
        self._ranks.on_all(self._folder.create, "recovery= needs a folder that can be written, on every machine")
        names = self._ranks.gather(run)
        if len(set(names)) > 1:
            raise ValueError(f"the ranks have different names of the run, {names}; give all of them the same run_id")
        self._sync = Sync(start=1, steps=0, token="")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="laconic-recovery")
        self._writing: tuple[int, Future[None]] | None = None
        self._whole = 0
        """The step of the newest state that all ranks of the island are known to have; 0 before the first."""
        self._failed = False
        """Whether the last write has failed."""

    # -- writing: [Note: Two phases] -----------------------------------------------------------------------------------

    def settle(self) -> bool:
        """See `Exchange.settle`: wait for the write under way.

        If a state could not be written, training goes on, and a warning says so.
        """
        if self._writing is not None:
            (steps, writing), self._writing = self._writing, None
            try:
                writing.result()
                self._failed = False
            except OSError as error:
                if not self._failed:  # one line, until a write succeeds
                    warnings.warn(
                        f"recovery: the state after step {steps} could not be written ({error}); after a crash this "
                        f"island goes on from step {self._whole or self._folder.newest_steps}",
                        stacklevel=2,
                    )
                self._failed = True
        return not self._failed

    def keep(self, steps: int, fragment: int, *, is_whole: bool) -> None:
        """See `Exchange.keep`: begin to write the state. Call `settle` before the fragment changes.

        Cost: a copy of the inner optimizer's state of the fragment, in host memory, until it is written.
        Raises: ValueError if the optimizer's state has a value of another kind than tensors, numbers and strings.
        """
        if is_whole:
            self._whole = self._folder.newest_steps
        self._sync = replace(self._sync, steps=steps)
        island, shard, num_shards = self._cluster.island_rank, self._cluster.shard_index, self._cluster.size
        state = SavedState(sync=self._sync, island=island, shard=shard, num_shards=num_shards, slices=self._slices)
        parts = {index: self._part(index) for index in self._folder.missing(fragment, len(self._fragments))}
        self._writing = steps, self._thread.submit(self._folder.write, state, parts, self._whole)

    def forget(self) -> None:
        """See `Exchange.forget`. Waits for the write under way.

        The next steps count as a new start, because they may take the steps that are on disk once more.
        """
        self.settle()
        self._folder.forget()
        self._sync = replace(self._sync, start=self._sync.start + 1)
        self._whole = 0

    def _part(self, index: int) -> dict[str, Any]:
        fragment = self._fragments[index]
        states = {name: self._optimizer.state.get(parameter) for name, parameter in fragment.parameters.items()}
        inner = {name: {key: _copy(value) for key, value in state.items()} for name, state in states.items() if state}
        lost = self._residuals[index] if self._residuals else None
        return {"outer": fragment.vectors(), "lost": lost, "inner": inner}

    # -- restoring: [Note: Re-forming] ---------------------------------------------------------------------------------

    def enter(self, steps: int) -> tuple[int, bool]:
        """See `Exchange.enter`: go on from the newest sync that counts or, without one, as islands that stay do.

        Files that are not used are named in warnings on the first rank, one line each.

        Cost: reads this rank's state once. A shard on another machine crosses the wire whole; the outer state goes from
            one island to all others.
        """
        plan = self._restore()
        if plan is None:
            return super().enter(steps)
        self._share(self._vectors(), lead=plan.lead)
        return plan.sync.steps, True

    def _restore(self) -> Plan | None:
        """Restore this island's states of the newest sync that counts; None without one. Collective over all ranks."""
        self._create_state()
        places, problems = self._look()
        while (plan := make_plan(places)) is not None:
            values, problem = self._fetch(plan.fetches)
            by_rank = self._ranks.gather(problem)
            failed = [fetch for fetch in plan.fetches if by_rank[fetch.rank]]
            if not failed:
                break
            problems += [by_rank[fetch.rank] for fetch in failed]
            gone = {(fetch.holder, fetch.state) for fetch in failed}
            places = [
                replace(place, offers=tuple(state for state in place.offers if (rank, state) not in gone))
                for rank, place in enumerate(places)
            ]
        if self._ranks.rank == 0:
            for line in dict.fromkeys([*problems, *(plan.notes if plan else ())]):
                warnings.warn(f"recovery: {line}", stacklevel=3)
        own = [fetch for fetch in (plan.fetches if plan else ()) if fetch.rank == self._ranks.rank]
        if own:
            self._load(values, has_inner=own[0].has_inner)
        return plan

    def _look(self) -> tuple[list[Place], list[str]]:
        """Tell all ranks what this machine has; return every rank's place, and all problems. Begins a new start."""
        states, problems = self._folder.find(self._cluster.size)
        gathered: list[list[Any]] = self._ranks.gather(
            [
                [self._cluster.island_rank, self._cluster.shard_index, list(self._slices)],
                [state.to_json() for state in states],
                problems,
                self._folder.last_start(),
                uuid4().hex,
            ]
        )
        self._sync = Sync(start=1 + max(last for *_, last, _ in gathered), steps=0, token=gathered[0][-1])
        places = []
        for (island, shard, slices), offers, *_ in gathered:
            own = tuple(map(SavedState.from_json, offers))
            places.append(Place(island=island, shard=shard, slices=tuple(slices), offers=own))
        return places, [problem for _, _, told, *_ in gathered for problem in told]

    def _fetch(self, fetches: Sequence[Fetch]) -> tuple[list[Any], str]:
        """Get this rank's state, and send others theirs. Return its values by fragment, or the problem with it."""
        problem, group, own = "", self._ranks.group, None
        works: list[tuple[dist.Work | None, Tensor]] = []
        for fetch in fetches:
            is_own, is_here = self._ranks.rank == fetch.rank, self._ranks.rank == fetch.holder
            if not is_own and not is_here:
                continue
            data = bytearray(sum(fetch.state.sizes))
            if is_here:
                try:
                    data = self._folder.read(fetch.state)
                except DamagedError as error:  # it is all zero, and a receiver reports it
                    problem = str(error) if is_own else problem
            own = (fetch, data) if is_own else own
            if is_own != is_here:
                message = torch.frombuffer(data, dtype=torch.uint8)
                send, receive = partial(dist.isend, group_dst=fetch.rank), partial(dist.irecv, group_src=fetch.holder)
                works.append(((send if is_here else receive)(message, group=group), message))
        for work, _ in works:
            assert work is not None
            work.wait()
        if own is None or problem:
            return [], problem
        fetch, data = own
        try:
            values = self._folder.parse(data, fetch.state)
            self._check(values, has_inner=fetch.has_inner)
        except DamagedError as error:
            return [], f"{fetch.state.name} on the machine of rank {fetch.holder} is not used: {error}"
        return values, ""

    def _check(self, values: list[Any], *, has_inner: bool) -> None:
        """Refuse values of another sharding, which the layout does not tell. Raises: DamagedError."""
        for index, (part, fragment) in enumerate(zip(values, self._fragments, strict=True)):
            found, wanted = ([(each.dtype, each.shape) for each in vs] for vs in (part["outer"], fragment.vectors()))
            if found != wanted:
                raise DamagedError(f"the vectors of its fragment {index} have other sizes: it is sharded otherwise")
            for name, state in part["inner"].items() if has_inner else ():
                _check_inner(self._optimizer, fragment.parameters[name], name, state)

    def _load(self, values: list[Any], *, has_inner: bool) -> None:
        with torch.no_grad():
            for index, (part, fragment) in enumerate(zip(values, self._fragments, strict=True)):
                for vector, value in zip(fragment.vectors(), part["outer"], strict=True):
                    vector.copy_(value)
                if not has_inner:
                    continue
                if self._residuals and part["lost"] is not None:
                    self._residuals[index].copy_(part["lost"])
                for name, state in part["inner"].items():
                    _restore_inner(self._optimizer, fragment.parameters[name], state)


def trained_slices(folder: str | Path, run: str) -> tuple[int, ...] | None:
    """Return the slices that this machine trained at the run's last sync; None if it has kept no sync."""
    found, _ = StateFolder(folder=Path(folder), run=run, layout=None).find()
    return max(found, key=lambda state: (state.sync, -state.island, -state.shard)).slices if found else None


# -- the inner optimizer's state ---------------------------------------------------------------------------------------


def _copy(value: Any) -> Any:
    """Copy a value of an optimizer's state to the host; of a sharded tensor, this rank's elements."""
    if isinstance(value, Tensor):
        local = flat_local(value) if isinstance(value, RaggedTensor) else value.detach()
        return local.to("cpu", copy=True)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(
        "recovery= keeps tensors, numbers and strings of the inner optimizer's state, and found a value of type "
        f"{type(value).__name__}; leave recovery out, or use another optimizer"
    )


def _check_inner(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str, state: Mapping[str, Any]) -> None:
    """Refuse a state that does not fit the parameter. Raises: DamagedError."""
    init_state = getattr(optimizer, "init_state", None)
    if init_state is None:
        return
    init_state(parameter)
    for key, value in state.items():
        held = optimizer.state[parameter].get(key)
        if not isinstance(held, Tensor) or flat_local(held).numel() != value.numel():
            raise DamagedError(f"the state {key!r} of {name} has another size: it is sharded otherwise")


def _restore_inner(optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Any]) -> None:
    if hasattr(optimizer, "init_state"):  # an optimizer of laconic.optim may shard state unlike its parameter
        for key, value in state.items():
            flat_local(optimizer.state[parameter][key]).copy_(value.view(-1))
        return
    counts_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    device = flat_local(parameter).device

    def like(value: Any) -> Any:
        """Place and shard a tensor as its parameter; a count of steps stays on the host unless the kernels want it."""
        if not isinstance(value, Tensor) or (value.ndim == 0 and not counts_on_device):
            return value
        is_sharded = isinstance(parameter, RaggedTensor) and value.ndim == 1
        return parameter.like(value.to(device)) if is_sharded else value.to(device)  # type: ignore[attr-defined]

    optimizer.state[parameter] = {key: like(value) for key, value in state.items()}
