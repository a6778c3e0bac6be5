"""An island that comes through a rendezvous: it waits until it is a member, and receives the outer state."""

import threading
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.comm.entries import EntryError, decode, encode
from laconic.errors import JobError
from laconic.islands.agreements import SILENCE_S, Agreements
from laconic.islands.policies import Membership

_T = TypeVar("_T")

_POLL_S = 0.2
_NOTICE_S = 15.0  # until a line says that this island waits for others


class Entrance:
    """Queues up for an island. For its first rank."""

    def __init__(self, agreements: Agreements, policy: Membership, terms: dict[str, Any], rounds: int) -> None:
        """Take the terms that all islands must share, and the rounds that this island's state has."""
        self._agreements, self._policy, self._terms, self._rounds = agreements, policy, terms, rounds
        self._begun, self._has_warned = time.monotonic(), False
        self._number: int | None = None
        self._beats, self._heard_at = -1, 0.0

    def wait(self, patience_s: float) -> list[int] | None:
        """Wait for `patience_s`. Returns the generation and the number of this island once it is a member, else None.

        Raises:
            JobError: the other islands have other terms, or none of them has come within `start_timeout_s`.
        """
        if self._number is None:
            if self._is_founded() and self._agreements.has_ended():
                self._agreements.begin_generation()
            self._queue_up()
        assert self._number is not None
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if self._agreements.welcome(self._number) is not None:
                return [self._agreements.generation, self._number]
            self._look_around()
            time.sleep(_POLL_S)
        return None

    def _queue_up(self) -> None:
        self._agreements.agree_on(self._terms)
        self._number = self._agreements.come(self._rounds)
        self._beats, self._heard_at = -1, time.monotonic()
        if self._number == self._policy.num_founders - 1:
            self._agreements.found(self._policy.num_founders)

    def _look_around(self) -> None:
        """Answer calls; leave a generation that has died out; say that this island waits, or give up."""
        assert self._number is not None
        self._agreements.look_for_end()
        self._agreements.answer(self._number)
        beats, now = self._agreements.num_beats(), time.monotonic()
        if beats != self._beats or not self._is_founded():
            self._beats, self._heard_at = beats, now
        if now - self._heard_at > SILENCE_S:  # [Note: A run that has ended]
            self._agreements.begin_generation()
            self._queue_up()
        waited_s = now - self._begun
        if waited_s > self._policy.start_timeout_s:
            raise JobError(f"{self._missing()} after {waited_s:.0f} s; start the others, or set `islands` lower")
        if waited_s > _NOTICE_S and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{self._missing()}; this island waits", stacklevel=2)

    def _is_founded(self) -> bool:
        return self._agreements.num_come() >= self._policy.num_founders

    def _missing(self) -> str:
        come, islands = self._agreements.num_come(), self._policy.num_founders
        if come < islands:
            return f"{come} of {islands} islands have come to {self._policy.rendezvous}"
        return f"the islands at {self._policy.rendezvous} have not ended a round since this one came"


_TEXT_BYTES = 64


def pair(store: dist.Store, key: str, rank: int, timeout_s: float) -> dist.ProcessGroup:
    """Connect two ranks, 0 tells and 1 listens. Blocks until both are there."""
    return _compat.gloo_group(dist.PrefixStore(key, store), rank, 2, timeout_s)


def tell(link: dist.ProcessGroup, steps: int, vectors: Sequence[Tensor]) -> None:
    """Send a number of steps and vectors to the rank that listens.

    Cost: the vectors' bytes, and 8 for a checksum of each.
    """
    text = encode(steps).encode().ljust(_TEXT_BYTES)
    _send(link, torch.frombuffer(bytearray(text), dtype=torch.uint8))
    for vector in vectors:
        _send(link, vector)
        _send(link, torch.tensor([_checksum(vector)]))


def listen(link: dist.ProcessGroup, vectors: Sequence[Tensor]) -> int:
    """Receive the vectors of `tell` into `vectors`, which have the same shapes, and return the steps.

    Raises:
        JobError: a bit has flipped on the way.
        RuntimeError: the rank that tells is lost.
    """
    text = torch.empty(_TEXT_BYTES, dtype=torch.uint8)
    _receive(link, text)
    for vector in vectors:
        _receive(link, vector)
        checksum = torch.empty(1, dtype=torch.int64)
        _receive(link, checksum)
        if int(checksum) != _checksum(vector):
            raise JobError("the state that another island told has changed on the way; start this island again")
    try:
        return decode(int, bytes(text.tolist()).rstrip(b" "))
    except EntryError as error:
        raise JobError(f"the steps that another island told are damaged ({error}); start this island again") from error


class Listening:
    """The state that another island tells this rank, in a thread."""

    def __init__(self, agreements: Agreements, link: str, vectors: Sequence[Tensor], patience_s: float) -> None:
        def run() -> int:
            try:
                return listen(pair(agreements.store, link, 1, patience_s), vectors)
            except (JobError, RuntimeError):
                agreements.note_untold(link)
                raise

        self._steps = in_thread(run, "laconic-listens")

    @property
    def has_arrived(self) -> bool:
        """Whether the state is here, or never will be."""
        return self._steps.done()

    @property
    def steps(self) -> int:
        """The steps after which it is the state. Raises: JobError if the island that told it has died."""
        try:
            return self._steps.result()
        except RuntimeError as error:
            raise JobError(
                f"the state of the other islands did not arrive ({error}): the island that told it has died; start "
                "this island again"
            ) from error


def in_thread(action: Callable[[], _T], name: str) -> "Future[_T]":
    """Run an action in a daemon thread, which may be left behind, and return its result to come."""
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(action())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result


def vector_checksums(vectors: Sequence[Tensor]) -> list[int]:
    """The CRC-32 of each vector."""
    return [_checksum(vector) for vector in vectors]


def _send(link: dist.ProcessGroup, vector: Tensor) -> None:
    if vector.numel():
        _compat.isend(vector, link, 1).wait()


def _receive(link: dist.ProcessGroup, vector: Tensor) -> None:
    if vector.numel():
        _compat.irecv(vector, link, 0).wait()


def _checksum(vector: Tensor) -> int:
    return zlib.crc32(vector.contiguous().view(-1).view(torch.uint8).numpy()) if vector.numel() else 0  # type: ignore[arg-type]
