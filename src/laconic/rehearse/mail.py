"""A process group and a store for ranks that are threads of one process: every message is a copy in a mailbox.

[Note: Mailboxes]
A rank that sends, or takes part in a collective, leaves a copy of its tensor, and goes on. A rank that waits hands on
its turn until what it needs is there, and takes it then; before, its outputs stay as they were. So a transfer costs a
copy, opens no socket, and ends in the same order each time. Sums are made in the order of ranks. Sizes that do not fit,
and collectives of two kinds under one number, are errors that name the ranks; Gloo ends the process, or waits.

A rank that has died, or has ended, sends nothing more: who waits for it gets the error of a lost connection. A group
whose receive has taken too long has lost its connections, as with Gloo.

Ranks are numbered through all jobs of a run. Each address has a store of its own, in which jobs meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from laconic.comm.journal import described, last_label
from laconic.rehearse.turns import Turns, player
from laconic.rehearse.world import PythonGroup

MAIL = "mail"
"""The name of the plug. To torch.distributed and to whoever asks a group, its backend is Gloo."""


@dataclass(frozen=True)
class Letter:
    """The part of one rank in a transfer."""

    group: str
    source: int
    """The rank that sends. Ranks are numbered through all jobs."""
    target: int | None
    """The rank that receives; None for a collective."""
    number: int
    """The number of messages, or collectives, of this rank in this group (to this target) before."""
    label: str
    """The transfer's name in laconic's journal, such as "gradients of layers.0", or ""."""
    tensors: Sequence[Tensor]
    """The copies that others will read; a fault may change them."""


@dataclass
class Post:
    """The messages of one run that are on their way."""

    turns: Turns
    job_size: int
    """The number of ranks of a job."""
    on_message: Callable[[Letter], None] | None = None
    letters: dict[Any, Tensor] = field(default_factory=dict)
    """Messages that nobody has taken yet, by group, source, target, tag and number."""
    gatherings: dict[tuple[str, int], _Gathering] = field(default_factory=dict)
    """Collectives that not all ranks have finished, by group and number."""
    broken: set[str] = field(default_factory=set)
    """Groups that have lost their connections."""
    store: MailStore = field(init=False)
    """It holds the keys of all jobs and addresses, each under a prefix."""
    _connected: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.store = MailStore(self.turns)

    def job(self) -> int:
        """The job of the rank whose turn it is."""
        me = player()
        assert me is not None
        return me.rank // self.job_size

    def group(self, options: Any) -> MailGroup:
        """A group of ranks of one job, with the options of `torch.distributed.Backend.register_backend`."""
        job, name = self.job(), options.group_id
        ranks = [job * self.job_size + rank for rank in options.global_ranks_in_group or range(options.group_size)]
        key = f"{name} of job {job}" if job else name
        return MailGroup(self, name, key, ranks, options.group_rank, getattr(options, "timeout", None))

    def store_at(self, host: str, port: int) -> dist.Store:
        """The store of an address. Every address has one."""
        return dist.PrefixStore(f"{host}:{port}", self.store)

    def connect(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> MailGroup:
        """A group of ranks that need not be of one job, as of `laconic._compat.gloo_group`.

        Raises:
            DistStoreError: they are not there in time.
        """
        me, keys = player(), [f"mail/{each}" for each in range(size)]
        assert me is not None
        store.set(keys[rank], str(me.rank))
        store.wait(keys, timedelta(seconds=timeout_s))
        ranks = [int(store.get(key)) for key in keys]
        key = store.compare_set("mail", "", f"connection {next(self._connected)}").decode()
        return MailGroup(self, key, key, ranks, rank, timedelta(seconds=timeout_s))


@dataclass
class _Gathering:
    """One collective."""

    op: str
    parts: dict[int, Any] = field(default_factory=dict)
    """The part of each rank of the group that has come."""
    num_finished: int = 0


class MailStore(dist.Store):
    """The rendezvous store of one run."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns, self._values = turns, dict[str, bytes]()
        self._timeout = default_pg_timeout

    def set(self, key: str, value: Any) -> None:
        """Set a key's value."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """The value of a key; waits until somebody has set it."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to a number, which begins at 0. Returns the sum."""
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def append(self, key: str, value: Any) -> None:
        """Put bytes at the end of a value, which begins empty."""
        self._values[key] = self._values.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set a key if its value is the expected one. Returns the value that it has then."""
        now = self._values.get(key, b"")
        if now == (expected.encode() if isinstance(expected, str) else bytes(expected)):
            self.set(key, desired)
        return self._values.get(key, b"")

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are set."""
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a key. Returns whether it was set."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """The number of keys that are set."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long waits may take, in seconds of the turns' clock."""
        self._timeout = timeout

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Hand on until all keys are set.

        Raises:
            DistStoreError: they are not set in time.
        """
        limit = timeout or self._timeout
        seconds = None if limit == default_pg_timeout else limit.total_seconds()
        if not self._turns.wait(lambda: self.check(keys), f"the keys {list(keys)} of the store", seconds):
            raise dist.DistStoreError(f"wait timeout after {limit}, keys: {list(keys)}")

    def clone(self) -> MailStore:
        """The same store: there is no connection of which each user needs one."""
        return self


class MailWork(dist.Work):
    """A transfer under way."""

    def __init__(self, group: MailGroup, is_there: Callable[[], Any], finish: Callable[[], None], name: str) -> None:
        super().__init__()
        self._group, self._is_there, self._name = group, is_there, name
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Hand on until the transfer has ended.

        Raises:
            RuntimeError: the other end is gone, or has not come in time.
        """
        if self._finish is None:
            return True
        limit = timeout if timeout else self._group.timeout
        seconds = None if limit == default_pg_timeout else limit.total_seconds()
        if not self._group.post.turns.wait(self._is_there, self._name, seconds):
            self._group.post.broken.add(self._group.key)
            raise RuntimeError(f"Timed out waiting {int(seconds * 1e3)}ms for {self._name}")  # type: ignore[operator]
        finish, self._finish = self._finish, None
        finish()
        return True

    def is_completed(self) -> bool:
        """True if the transfer has ended; gives the others a turn to end it."""
        if self._finish is not None and self._group.post.turns.wait(self._is_there, self._name, 1e-6):
            self.wait()
        return self._finish is None

    def get_future(self) -> torch.futures.Future[Any]:
        """A future that is complete: waits first, as nobody could wait in C++ without keeping the turn."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future

    def exception(self) -> None:
        """None: errors are raised where one waits."""

    def is_success(self) -> bool:
        """True if it has ended."""
        return self._finish is None


_UNITE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
}


def _reduced(terms: Sequence[Tensor], opts: Any) -> Tensor:
    """Unite the terms in the order of ranks."""
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    unite = next((function for known, function in _UNITE.items() if op == known), None)
    if unite is None:
        raise RuntimeError(f"ranks in one process do not reduce by {op}")
    total = terms[0].flatten()
    for term in terms[1:]:
        if (term.numel(), term.dtype) != (total.numel(), total.dtype):
            raise RuntimeError("the ranks give tensors that do not fit")
        total = unite(total, term.flatten())
    return total / len(terms) if op == dist.ReduceOp.AVG else total


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().clone() for each in tensors]


def _put(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for output, value in zip(outputs, values, strict=True):
        if (output.numel(), output.dtype) != (value.numel(), value.dtype):
            raise RuntimeError(f"an output is {_words(output)}, where {_words(value)} comes")
        output.detach().copy_(value.view_as(output))


class MailGroup(PythonGroup):
    """A process group of ranks that are threads of this process: [Note: Mailboxes]."""

    plug = "gloo"

    def __init__(
        self, post: Post, name: str, key: str, ranks: Sequence[int], rank: int, timeout: timedelta | None
    ) -> None:
        """Take the name that torch.distributed knows, the key in the mail, the ranks of the run, and the own place."""
        super().__init__(name, ranks, rank)
        self.post, self.key, self.timeout = post, key, timeout or default_pg_timeout
        self._collectives = itertools.count()
        self._letters: dict[Any, itertools.count[int]] = {}

    # -- what torch.distributed asks of a group --------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(
            name=lambda: "gloo",
            supports_tensor_alloc=lambda device: False,
            supports_splitting=False,
            options=SimpleNamespace(_timeout=self.timeout),
        )

    def _set_sequence_number_for_group(self) -> None:
        pass

    def shutdown(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Let nobody wait in this group any more."""
        self.post.broken.add(self.key)

    # -- collectives -----------------------------------------------------------------------------------------------

    def _collect(self, op: str, given: Any, finish: Callable[[list[Any]], None], opts: Any = None) -> MailWork | None:
        """Take part in a collective: `finish` gets what all ranks have given, in their order."""
        number, post = next(self._collectives), self.post
        gathering = post.gatherings.setdefault((self.key, number), _Gathering(op))
        name = self._described(f"{op} {number}")
        if gathering.op != op:
            others = ", ".join(str(self._ranks[rank]) for rank in gathering.parts)
            raise RuntimeError(f"rank {self._ranks[self._rank]} calls {name}, where rank {others} calls {gathering.op}")
        self._tell(given, None, number)
        gathering.parts[self._rank] = given
        missing = [rank for rank in range(self._size) if rank != self._rank]

        def is_there() -> bool:
            while missing and missing[-1] in gathering.parts:
                missing.pop()
            return not missing or self._is_lost(missing[-1])

        def end() -> None:
            if missing:
                self._raise_lost(missing[-1], name)
            parts = [gathering.parts[rank] for rank in range(self._size)]
            try:
                finish(parts)
            except (RuntimeError, ValueError) as error:  # of torch, or as ranks name other roots
                raise RuntimeError(f"{name}: {error}; {self._given(parts)}") from error
            gathering.num_finished += 1
            if gathering.num_finished == self._size:
                del post.gatherings[self.key, number]

        work = MailWork(self, is_there, end, name)
        if opts is None or getattr(opts, "asyncOp", True):
            return work
        work.wait()
        return None

    def barrier(self, opts: Any = None) -> MailWork | None:
        """All ranks are here."""
        return self._collect("barrier", (), lambda parts: None, opts)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> MailWork | None:
        """The tensors of all ranks, united in the order of ranks."""

        def finish(parts: list[Any]) -> None:
            _put(tensors, [_reduced(terms, opts) for terms in zip(*parts, strict=True)])

        return self._collect("all-reduce", _copies(tensors), finish, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> MailWork | None:
        """The tensors of the root."""
        root = 0 if opts is None else opts.rootRank

        def finish(parts: list[Any]) -> None:
            if self._rank != root:
                _put(tensors, parts[root])

        return self._collect("broadcast", _copies(tensors) if self._rank == root else (), finish, opts)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """The inputs of all ranks; they may have other sizes."""

        def finish(parts: list[Any]) -> None:
            for place, of_ranks in enumerate(outputs):
                _put(of_ranks, [part[place] for part in parts])

        return self._collect("all-gather", _copies(inputs), finish, opts)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """The inputs of all ranks, one after the other, for each output; DTensors call this from C++."""
        return self.allgather([output.view(self._size, -1).unbind() for output in outputs], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MailWork | None:
        """The inputs of all ranks, one after the other."""
        return self.allgather([output.view(self._size, -1).unbind()], [input.reshape(-1)], opts)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        """This rank's part of the sum, for each output."""
        rank, count = self._rank, len(outputs)

        def finish(parts: list[Any]) -> None:
            own = [[part[place * self._size + rank] for part in parts] for place in range(count)]
            _put(outputs, [_reduced(terms, opts) for terms in own])

        return self._collect("reduce-scatter", [each for given in inputs for each in _copies(given)], finish, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> MailWork | None:
        """This rank's part of the sum of each flat input; DTensors call this from C++."""
        return self.reduce_scatter(outputs, [each.reshape(self._size, -1).unbind() for each in inputs], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MailWork | None:
        """This rank's part of the sum of flat inputs."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> MailWork | None:
        """From each rank what it has for this one, in the order of ranks."""
        outputs = output.split(list(output_sizes)) if output_sizes else output.chunk(self._size)
        inputs = input.split(list(input_sizes)) if input_sizes else input.chunk(self._size)
        return self.alltoall(outputs, inputs, opts)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> MailWork | None:
        """From each rank what it has for this one."""

        def finish(parts: list[Any]) -> None:
            _put(outputs, [part[self._rank] for part in parts])

        return self._collect("all-to-all", _copies(inputs), finish, opts)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        """At the root, the inputs of all ranks."""

        def finish(parts: list[Any]) -> None:
            if self._rank == opts.rootRank:
                _put(outputs[0], [part[0] for part in parts])

        return self._collect("gather", _copies(inputs), finish, opts)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        """This rank's part of the root's tensors."""

        def finish(parts: list[Any]) -> None:
            _put(outputs, [parts[opts.rootRank][self._rank]])

        return self._collect("scatter", _copies(inputs[0]) if self._rank == opts.rootRank else (), finish, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> MailWork | None:
        """At the root, the tensors of all ranks, united."""

        def finish(parts: list[Any]) -> None:
            if self._rank == opts.rootRank:
                _put(tensors, [_reduced([part[0] for part in parts], opts)])

        return self._collect("reduce", _copies(tensors), finish, opts)

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced, allreduce_coalesced = all_gather_single_coalesced, allreduce
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- messages --------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> MailWork:
        """Leave a copy for another rank."""
        key = (self.key, self._rank, rank, tag)
        number, copies = next(self._letters.setdefault(key, itertools.count())), _copies(tensors)
        name = self._described(f"message {number} to rank {self._ranks[rank]}")
        if not self._is_lost(rank):
            self._tell(copies, rank, number)
            self.post.letters[(*key, number)] = copies[0]
        return MailWork(self, lambda: True, lambda: self._raise_lost(rank, name) if self._is_broken else None, name)

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> MailWork:
        """Take what another rank has left, or will leave, for this one."""
        key = (self.key, rank, self._rank, tag)
        number = next(self._letters.setdefault((key, "received"), itertools.count()))
        place, letters, landing = (*key, number), self.post.letters, tensors[0]
        name = self._described(f"message {number} from rank {self._ranks[rank]}")

        def finish() -> None:
            letter = letters.pop(place, None)
            if letter is None:
                self._raise_lost(rank, name)
            if letter.nbytes != landing.nbytes:
                raise RuntimeError(f"{name} has {letter.nbytes} bytes, where {landing.nbytes} are expected")
            if landing.nbytes:
                landing.detach().view(-1).view(torch.uint8).copy_(letter.contiguous().view(-1).view(torch.uint8))

        return MailWork(self, lambda: place in letters or self._is_lost(rank), finish, name)

    # -- words, and who is gone ------------------------------------------------------------------------------------

    def _described(self, transfer: str) -> str:
        label = last_label(self)
        return f"{transfer} of group {self.key}" + (f" ({described(*label)})" if label else "")

    def _given(self, parts: Sequence[Any]) -> str:
        """The parts of all ranks in a collective, in words."""
        words = (", ".join(map(_words, part)) or "nothing" for part in parts)
        return "; ".join(f"rank {rank} gives {each}" for rank, each in zip(self._ranks, words, strict=True))

    def _tell(self, given: Any, rank: int | None, number: int) -> None:
        if self.post.on_message is not None:
            target = None if rank is None else self._ranks[rank]
            label = last_label(self)
            words = described(*label) if label else ""
            self.post.on_message(Letter(self.key, self._ranks[self._rank], target, number, words, given))

    @property
    def _is_broken(self) -> bool:
        return self.key in self.post.broken

    def _is_lost(self, rank: int) -> bool:
        return self._is_broken or self.post.turns.is_gone(self._ranks[rank])

    def _raise_lost(self, rank: int, name: str) -> NoReturn:
        raise RuntimeError(f"Connection closed by peer: rank {self._ranks[rank]} is gone, and owes {name}")
