"""All ranks of a job, or of some jobs, in this process, as threads that take turns: multi-node logic in a plain test.

`ranks` calls a function as torchrun would start a script, once for each rank. The function may start the process group
itself, or let `laconic.init_mesh` do so. Values are real; nothing opens a socket, and nothing waits for a clock.
[Note: Turns] in turns.py and [Note: Mailboxes] in mail.py say how.

[Note: State of a process]
A rank believes that it has a process of its own. What belongs to a process is swapped when the turn goes to another
rank: the environment, the states of random numbers, torch.distributed's groups, the streams and filters of `sys` and
`warnings`, and what laconic keeps by process. Modules, their functions and classes, and caches of values are shared:
a rank that replaces a function replaces it for all.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from laconic import _compat
from laconic.comm.groups import REHEARSED
from laconic.rehearse.blocking import cooperating
from laconic.rehearse.mail import MAIL, Letter, MailGroup, Post
from laconic.rehearse.turns import DeadlockError, Stopped, Turns, player
from laconic.rehearse.world import no_groups

__all__ = ["DeadlockError", "Kill", "Letter", "RankError", "ranks"]


class RankError(RuntimeError):
    """A rank has failed; the message has its traceback, and `__cause__` is its error."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A rank dies as if its process were killed: it gets no turn any more."""

    rank: int
    turn: int
    """The turn at the beginning of which it dies, counted from 0; a rank gets the next one when it has had to wait."""


_PER_PROCESS: list[tuple[str, str]] = [
    ("sys", "stdout"), ("sys", "stderr"), ("sys", "argv"),
    ("warnings", "filters"), ("warnings", "showwarning"), ("warnings", "_showwarnmsg_impl"),
    ("laconic.comm.pacing", "_pump"), ("laconic.comm.groups", "_started_bytes"),
    ("laconic.comm.failure", "_peer_timeout_s"), ("laconic.comm.watch", "_after_s"),
    ("laconic.comm.watch", "_watch"), ("laconic.comm.journal", "_journals"),
    ("laconic.islands.elastic", "_entered"), ("laconic.train.lock", "_held"), ("laconic.shard.crossing", "_lagging"),
    ("laconic.guard.comparison", "_unsettled"), ("laconic.store.folder", "on_crash_point"),
    ("torch.distributed.tensor._random", "_rng_tracker"),
]  # fmt: skip
"""Variables of modules that belong to a process: [Note: State of a process]. A new rank has copies of what is there."""
_PER_PROCESS_OBJECTS = [("laconic.comm.journal", "here")]
"""Objects that other modules import by name; their attributes are swapped."""


@dataclass
class _State:
    """The state of one rank's process: [Note: State of a process]."""

    world: Any = field(default_factory=no_groups)
    environment: dict[Any, Any] = field(default_factory=dict)
    variables: list[Any] = field(default_factory=list)
    objects: list[dict[str, Any]] = field(default_factory=list)
    torch_random: Any = None
    random: Any = None
    bit_generator: Any = None
    """numpy's own; a copy for each rank."""


class _Processes:
    """The states of all ranks, of which one is in place."""

    def __init__(self, environments: Sequence[dict[str, str]]) -> None:
        # a rank may be the first to need a module: all of them are imported before
        self._modules = [(importlib.import_module(module), name) for module, name in _PER_PROCESS]
        self._objects = [getattr(importlib.import_module(module), name) for module, name in _PER_PROCESS_OBJECTS]
        self.are_over = False
        self._states, self._in_place = {-1: self._now()}, -1
        for rank, environment in enumerate(environments):
            state = self._now()
            encoded = {os.environ.encodekey(name): os.environ.encodevalue(value) for name, value in environment.items()}
            state.environment = state.environment | encoded
            state.variables = [_fresh(value) for value in state.variables]
            state.objects = [vars(type(each)()) for each in self._objects]
            state.world, state.bit_generator = no_groups(), copy.deepcopy(state.bit_generator)
            self._states[rank] = state

    def change(self, before: int, after: int) -> None:
        """Put the state of the rank `before` aside, and that of the rank `after` in place."""
        if self.are_over:  # a rank that did not wait until now ends
            return
        self._states[before] = self._now()
        self._put(self._states[after])
        self._in_place = after

    def leave(self) -> None:
        """Put the state in place that was there before the first rank came."""
        self.change(self._in_place, -1)
        self.are_over = True

    def world_of(self, rank: int) -> Any:
        """The groups of the rank whose state is in place, or of another one."""
        return c10d._world if (me := player()) is not None and me.rank == rank else self._states[rank].world

    def _now(self) -> _State:
        numpy = sys.modules.get("numpy.random")
        return _State(
            world=c10d._world,
            environment=dict(os.environ._data),  # type: ignore[attr-defined]
            variables=[getattr(module, name) for module, name in self._modules],
            objects=[dict(vars(each)) for each in self._objects],
            torch_random=torch.default_generator.get_state(),
            random=random.getstate(),
            bit_generator=None if numpy is None else numpy.get_bit_generator(),
        )

    def _put(self, state: _State) -> None:
        c10d._world = state.world
        now: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]
        if now != state.environment:
            for key in now.keys() - state.environment.keys():
                os.unsetenv(key)
            for key, text in state.environment.items() - now.items():
                os.putenv(key, text)
            now.clear()
            now.update(state.environment)
        for (module, name), value in zip(self._modules, state.variables, strict=True):
            setattr(module, name, value)
        for each, attributes in zip(self._objects, state.objects, strict=True):
            vars(each).clear()
            vars(each).update(attributes)
        torch.default_generator.set_state(state.torch_random)
        random.setstate(state.random)
        if state.bit_generator is not None:
            sys.modules["numpy.random"].set_bit_generator(state.bit_generator)


def _fresh(value: Any) -> Any:
    """The value of a new process: a container of its own, and no thread of another rank."""
    if isinstance(value, list):
        return list(value)
    if type(value).__name__ in ("WeakSet", "WeakKeyDictionary"):
        return type(value)()
    return None if type(value).__module__.startswith(("laconic.", "torch.")) else value


def ranks(
    function: Callable[..., Any],
    *arguments: Any,
    jobs: int = 1,
    nodes: int = 1,
    local: int = 1,
    seed: int | None = None,
    faults: Sequence[Kill] = (),
    on_message: Callable[[Letter], None] | None = None,
    goes_on: bool = False,
    timeout_s: float = 120.0,
) -> list[Any]:
    """Call `function(*arguments)` on all ranks of jobs, in this process, and return the results by rank.

    Every rank is a thread with torchrun's environment, and thinks that it is a process: [Note: State of a process].
    The backend is Gloo to whoever asks; tensors are on the CPU. Ranks take turns, in one order, so each run has the
    same result: [Note: Turns] in turns.py.

    Args:
        function: what each rank runs, as the main function of a script.
        arguments: the same objects for all ranks, so what a rank changes is made in the function.
        jobs: the number of jobs, such as islands that come and go. Each has a default group of its own, and the
            number of its job as LACONIC_JOB. Jobs meet in a `dist.TCPStore` of any address. Faults and results
            number the ranks through all jobs.
        nodes: the number of nodes of a job.
        local: the number of ranks on each node.
        seed: of another order of turns, in which nothing should come out differently.
        faults: which ranks die, and when. Then, too, the others go on.
        on_message: called with each message and each part of a collective before others can read it. It may change the
            tensors, or raise, on the rank that sends.
        goes_on: True if the others go on where a rank fails. They lose their connections to it. The result of a rank
            that failed is its error; of one that died, None.
        timeout_s: the seconds of a processor that the whole may take, or that it may stand still.

    Raises:
        RankError: a rank failed, and `goes_on` is False.
        DeadlockError: no rank can go on. The message says which transfer each one waits for.
        TimeoutError: the ranks have not ended in time: one of them runs without a wait.
        RuntimeError: this process is a rank already.
        ValueError: the cluster has no ranks, or a fault names a rank that it has not.
    """
    if dist.is_initialized() or _posts:
        raise RuntimeError("this process is a rank already: call `ranks` outside of ranks and of process groups")
    if jobs < 1 or nodes < 1 or local < 1:
        raise ValueError(f"at least one job has one node of one rank, got jobs={jobs}, nodes={nodes}, local={local}")
    job_size = nodes * local
    size = jobs * job_size
    for fault in faults:
        if not 0 <= fault.rank < size or fault.turn < 0:
            raise ValueError(f"{fault} never happens: ranks are 0 to {size - 1}, and turns begin with 0")
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}
    num_turns = [0] * size
    deaths = {(fault.rank, fault.turn) for fault in faults}
    goes_on = goes_on or bool(deaths)
    processes = _Processes([_environment(*divmod(rank, job_size), job_size, local) for rank in range(size)])

    def at_turn(rank: int) -> None:
        number, num_turns[rank] = num_turns[rank], num_turns[rank] + 1
        if (rank, number) in deaths:
            turns.die(rank)

    def begin_thread(rank: int) -> None:
        for group, name in processes.world_of(rank).pg_names.items():
            torch._C._distributed_c10d._register_process_group(name, group)

    turns = Turns(change=processes.change, begin_thread=begin_thread, at_turn=at_turn, seed=seed)
    post = Post(turns, job_size, on_message)

    def body(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = function(*arguments)
        except Stopped:
            raise
        except BaseException as error:  # SystemExit, too: the process would end
            errors[rank] = error
            if not goes_on:
                turns.fail(error)
        finally:
            if dist.is_initialized() and not processes.are_over:
                dist.destroy_process_group()

    with _groups_of(post), cooperating():
        try:
            turns.run([partial(body, rank) for rank in range(size)], timeout_s=timeout_s)
        finally:
            processes.leave()
    first = next(iter(errors.items()), None)
    if first is not None and not goes_on:
        rank, error = first
        if isinstance(error, DeadlockError):
            raise DeadlockError(str(error)) from None
        trace = "".join(traceback.format_exception(error))
        raise RankError(f"rank {rank} failed:\n{trace}") from error
    return [errors.get(rank, result) for rank, result in enumerate(results)]


def _environment(job: int, rank: int, size: int, local: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank."""
    numbers = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": rank // local, "GROUP_WORLD_SIZE": size // local, "MASTER_PORT": 1, "LACONIC_JOB": job,
    }  # fmt: skip
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


@contextmanager
def _groups_of(post: Post) -> Iterator[None]:
    """Let torch.distributed make groups of mailboxes where it would make groups of Gloo."""
    if MAIL.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(MAIL, _make_group, extended_api=True, devices=["cpu"])
    make, hook = c10d._new_process_group_helper, sys.excepthook
    real_store, real_connect = dist.TCPStore, _compat.gloo_group

    def make_group(size: int, rank: int, members: Any, backend: Any, *rest: Any, **options: Any) -> Any:
        if player() is None or str(backend) in ("fake", REHEARSED):  # one rank of a cluster that is not there
            return make(size, rank, members, backend, *rest, **options)
        names = {entry.rpartition(":")[2] for entry in str(backend).split(",")}
        if not names & {"gloo", "undefined"}:
            raise ValueError(f"ranks in one process have no backend {str(backend)!r}: their tensors are on the CPU")
        group, store = make(size, rank, members, MAIL, *rest, **options)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            c10d._world.pg_map[group] = (dist.Backend.GLOO, store)
            c10d._world.pg_backend_config[group] = "cpu:gloo"
        return group, store

    def meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        store = dist.PrefixStore(f"job {post.job()}", post.store)
        yield store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    class StoreAt(dist.TCPStore):  # a class, since others ask for instances of it
        def __new__(cls, host: str, port: int, *rest: Any, **options: Any) -> Any:
            return real_store(host, port, *rest, **options) if player() is None else post.store_at(host, port)

    def connect(*arguments: Any) -> dist.ProcessGroup:
        return real_connect(*arguments) if player() is None else post.connect(*arguments)

    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    _posts.append(post)
    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    try:
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(c10d, "_new_process_group_helper", make_group))
            patches.enter_context(mock.patch.object(dist, "TCPStore", StoreAt))
            patches.enter_context(mock.patch.object(_compat, "gloo_group", connect))
            patches.enter_context(mock.patch.object(DeviceMesh, "__init__", _of_rank(DeviceMesh.__init__, next(_runs))))
            patches.enter_context(mock.patch.dict(handlers, {"env": meet}))
            yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
        _posts.pop()
        sys.excepthook = hook


def _of_rank(begin: Callable[..., None], run: int) -> Callable[..., None]:
    """The `__init__` of torch's meshes, which are not equal on two ranks, nor in two runs.

    torch caches by mesh what depends on the place of a rank, such as the steps of an uneven redistribution. It tells
    ranks in one process by the number of their thread, but for a backend of its own tests alone.
    """

    def init(mesh: DeviceMesh, *arguments: Any, **options: Any) -> None:
        begin(mesh, *arguments, **options)
        me = player()
        if me is not None:
            mesh._thread_id = -1 - me.rank - (run << 20)

    return init


_runs = itertools.count()
_posts: list[Post] = []


def _make_group(options: Any, backend_options: Any) -> MailGroup:
    return _posts[-1].group(options)
