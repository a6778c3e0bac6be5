"""Agreement across ranks: small values that every rank learns, and errors that every rank raises.

A foreseeable error of one rank (no corpus, a full disk) must end all ranks with one message. So ranks exchange the
outcome of an action before any of them goes on. `comm/failure.py` handles unforeseen errors.

[Note: Plain values between ranks]
Values cross as JSON. torch's own object collectives pickle them, so a rank that was taken over could run code on all
others. A message is a header of twelve bytes (length, CRC-32, and the CRC-32 of both) and the JSON. The first trip has
room for a short message: an agreement that all is well takes one trip. The rest of a longer message takes a second one.
"""

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.comm.entries import EntryError, parse
from laconic.comm.journal import Ticket, issue
from laconic.comm.messages import start_broadcast, start_to_all, uses_sends
from laconic.comm.watch import waiting_for
from laconic.errors import JobError

_T = TypeVar("_T")

_CHECKED, _CHECKSUM = struct.Struct("<II"), struct.Struct("<I")
_HEADER = struct.Struct("<III")  # the length of the JSON in bytes, its checksum, and that of the two numbers
_FIRST_TRIP_BYTES = 64  # a pickled `None` and its length took two trips and 24 bytes
_MOST_SHOWN = 80  # characters of a value in an error


class RankGroup:
    """The ranks of a process group, or this process alone if torch.distributed is not initialised.

    Every method is collective: all ranks of the group call it. Values are JSON: None, bool, int, float (NaN and the
    infinities too), str, and lists and dicts of them, with str as keys. All ranks get equal values, as copies.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, error: type[ValueError] = JobError) -> None:
        """Talk over `group` (default: all ranks). All ranks raise `error` if one of them fails."""
        self.group, self._error = group, error
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in rank order, on every rank.

        Cost: one trip of 64 bytes from each rank to each other; a second one of the longest message's rest, if a
        value has more than 52 bytes of JSON.

        Raises:
            TypeError: `value` is not JSON.
            RuntimeError: what came from a rank is no such message.
        """
        return self._in_two_trips(_encoded(value, "gather"), self._all_gather, "an agreement of the ranks")

    def broadcast(self, value: _T) -> _T:
        """Return the value of rank 0 on every rank; the values of other ranks are not used.

        Cost: one trip of 64 bytes from rank 0, and a second one for the rest of a longer message.

        Raises:
            TypeError: `value` is not JSON; on rank 0.
            RuntimeError: what came from rank 0 is no such message.
        """
        message = _encoded(value, "broadcast") if self.rank == 0 else b""
        return self._in_two_trips(message, self._broadcast, "a value of rank 0", senders=[0])[0]

    def agree(self, action: Callable[[], _T], *, only: bool = True) -> _T | None:
        """Run `action` on the ranks where `only` is true, and fail on all ranks if it fails on one.

        `action` must not be collective. Returns the result of this rank; None where `only` is false.

        Raises:
            ValueError: `action` raised OSError or ValueError on some rank. The class is the `error` of this group. The
                message comes from the lowest rank that failed. It names this rank unless `action` failed on all that
                ran it.
        """
        return self.agree_and_ask(action, lambda result: True, only=only)[0]

    def agree_and_ask(
        self, action: Callable[[], _T], question: Callable[[_T], bool], *, only: bool = True
    ) -> tuple[_T, bool]:
        """Run `action` as `agree` does, and ask each rank that runs it a question about its result.

        Returns the result of this rank, and whether all ranks said yes. Neither may be collective.

        Raises:
            ValueError: see `agree`.
        """

        def run() -> tuple[_T, bool]:
            result = action()
            return result, question(result)

        found, error = _attempt(run) if only else (None, None)
        result, says_yes = (None, True) if found is None else found
        outcomes: list[Any] = self.gather([only, says_yes, _message(error)])
        failed = [(rank, message) for rank, (*_, message) in enumerate(outcomes) if message]
        if failed:
            rank, message = failed[0]
            is_everywhere = len(failed) == sum(has_run for has_run, *_ in outcomes)
            raise self._error(message if is_everywhere else f"{message} (on rank {rank})") from error
        return cast(_T, result), all(is_yes for _, is_yes, _ in outcomes)

    def on_all(self, action: Callable[[], _T], failure: str) -> list[_T]:
        """Run `action` on every rank; return the results of all ranks, in rank order, on every rank.

        `action` must not be collective. Its result is JSON.

        Raises:
            ValueError: `action` raised OSError or ValueError on some rank. The class is the `error` of this group. The
                message is `failure` with the messages of all failed ranks.
        """
        result, error = _attempt(action)
        outcomes: list[Any] = self.gather([result, _message(error)])
        reasons = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(outcomes) if message]
        if reasons:
            raise self._error(f"{failure} ({'; '.join(reasons)})")
        return [result for result, _ in outcomes]

    def on_rank_0(self, action: Callable[[], _T], failure: str) -> _T:
        """Run `action` on rank 0; return its result, which is JSON, on every rank. Other ranks wait for it.

        Raises:
            ValueError: see `on_all`.
        """
        result, error = _attempt(action) if self.rank == 0 else (None, None)
        outcome: list[Any] = self.broadcast([result, _message(error)])
        if outcome[1]:
            raise self._error(f"{failure} (rank 0: {outcome[1]})")
        return outcome[0]

    def _in_two_trips(
        self,
        message: bytes,
        carry: Callable[[bytes, Ticket], list[bytes]],
        purpose: str,
        senders: list[int] | None = None,
    ) -> list[Any]:
        """Return the values of all who send, in rank order: [Note: Plain values between ranks]."""
        if self.size == 1:
            return [_decoded(message, 0)]
        ticket = issue(self._process_group(), purpose, senders=senders)
        with waiting_for(purpose, ticket):
            firsts = carry(message[:_FIRST_TRIP_BYTES].ljust(_FIRST_TRIP_BYTES, b"\0"), ticket)
            rest_bytes = max(_rest_bytes(first, rank) for rank, first in enumerate(firsts))
            rests = [b""] * len(firsts)
            if rest_bytes:
                rests = carry(message[_FIRST_TRIP_BYTES:].ljust(rest_bytes, b"\0"), ticket)
        return [_decoded(first + rest, rank) for rank, (first, rest) in enumerate(zip(firsts, rests, strict=True))]

    def _all_gather(self, message: bytes, ticket: Ticket) -> list[bytes]:
        received, group = bytearray(self.size * len(message)), self._process_group()
        own, landing = self._on_device(message), self._on_device(received)
        if uses_sends(group):  # [Note: Messages that meet their like]
            start_to_all(group, ticket, landing.view(self.size, -1), own.expand(self.size, -1)).wait()
        else:
            _compat.all_gather_flat(landing, own, group=group, async_op=False)
        torch.frombuffer(received, dtype=torch.uint8).copy_(landing)
        return [bytes(received[begin : begin + len(message)]) for begin in range(0, len(received), len(message))]

    def _broadcast(self, message: bytes, ticket: Ticket) -> list[bytes]:
        received, group = bytearray(message), self._process_group()
        landing = self._on_device(received)
        if uses_sends(group):
            start_broadcast(group, ticket, landing).wait()
        else:
            dist.broadcast(landing, group=group, group_src=0)
        torch.frombuffer(received, dtype=torch.uint8).copy_(landing)
        return [bytes(received)]

    def _on_device(self, message: bytes | bytearray) -> Tensor:
        """Return bytes as a tensor that the group's backend carries."""
        device = _compat.device_of_messages(self._process_group())
        return torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)

    def _process_group(self) -> dist.ProcessGroup:
        group = self.group or dist.group.WORLD
        assert group is not None
        return group


def ranks_or_self(group: dist.ProcessGroup | None) -> RankGroup:
    """The ranks of a group that a cluster has made; this rank alone where the cluster has None."""
    ranks = RankGroup(group)
    if group is None:
        ranks.rank, ranks.size = 0, 1
    return ranks


def _attempt(action: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return action(), None
    except (OSError, ValueError) as error:
        return None, error


def _message(error: Exception | None) -> str:
    """The message of an error, never empty; empty if there is no error."""
    return "" if error is None else str(error) or type(error).__name__


def _encoded(value: Any, call: str) -> bytes:
    """Return a value as a message: [Note: Plain values between ranks]."""
    _refuse_other_types(value, call, "the value")
    text = json.dumps(value, separators=(",", ":")).encode()
    checked = _CHECKED.pack(len(text), zlib.crc32(text))
    return checked + _CHECKSUM.pack(zlib.crc32(checked)) + text


def _refuse_other_types(value: Any, call: str, place: str) -> None:
    """Raise TypeError if `json` would not give back an equal value of the same type. It makes lists of tuples."""
    kind = type(value)
    if kind is list:
        for index, item in enumerate(value):
            _refuse_other_types(item, call, f"{place}[{index}]")
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"RankGroup.{call} sends JSON, whose keys are strings, but {place} has the key {key!r}")
            _refuse_other_types(item, call, f"{place}[{key!r}]")
    elif value is not None and kind not in (bool, int, float, str):
        raise TypeError(
            f"RankGroup.{call} sends JSON (None, bool, int, float, str, lists and dicts of them), but {place} is a "
            f"{kind.__name__}: {repr(value)[:_MOST_SHOWN]}; convert it before, and back after"
        )


def _rest_bytes(first: bytes, rank: int) -> int:
    """Return the bytes of a message that the first trip had no room for. Raises RuntimeError for anything else."""
    length, _, own_checksum = _HEADER.unpack_from(first)
    if own_checksum != zlib.crc32(first[: _CHECKED.size]):
        raise _unreadable(first, rank)
    return max(0, _HEADER.size + length - _FIRST_TRIP_BYTES)


def _decoded(message: bytes, rank: int) -> Any:
    """Return the value of a message of `rank`, which may have padding at its end."""
    length, checksum, _ = _HEADER.unpack_from(message)
    text = message[_HEADER.size : _HEADER.size + length]
    if len(text) != length or zlib.crc32(text) != checksum:
        raise _unreadable(message, rank)
    try:
        return parse(text, most_bytes=len(text))
    except EntryError:
        raise _unreadable(message, rank) from None


def _unreadable(message: bytes, rank: int) -> RuntimeError:
    return RuntimeError(
        f"rank {rank} of the group sent {len(message)} bytes that are no value: {message[:16].hex(' ')} ... It makes "
        "another call than this rank, or runs another version of laconic, or a bit has flipped on the way; all ranks "
        "must make the same calls, with one version of laconic"
    )
