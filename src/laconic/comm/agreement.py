"""Agreement across ranks: small values that every rank learns, and errors that every rank raises.

A foreseeable error of one rank (no corpus, a full disk) must end all ranks with one message. So ranks exchange the
outcome of an action before any of them goes on. `comm/failure.py` handles unforeseen errors.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from laconic.comm.watch import waiting_for
from laconic.errors import JobError

_T = TypeVar("_T")


class RankGroup:
    """The ranks of a process group, or this process alone if torch.distributed is not initialised.

    Every method is collective: all ranks of the group call it. Values are pickled, so they must be small.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, error: type[ValueError] = JobError) -> None:
        """Use `group`, which carries CPU tensors (default: all ranks). All ranks raise `error` if one of them fails."""
        self.group, self._error = group, error
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with waiting_for("an agreement of the ranks"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: _T) -> _T:
        """Return the value of rank 0 on every rank."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        with waiting_for("a value of rank 0"):
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def agree(self, action: Callable[[], _T], *, only: bool = True) -> _T | None:
        """Run `action` on the ranks where `only` is true, and fail on all ranks if it fails on one.

        `action` must not be collective. Returns the result of this rank; None where `only` is false.

        Raises:
            ValueError: `action` raised ValueError on some rank. The class is the `error` of this group. The message
                comes from the lowest rank that failed. It names this rank unless `action` failed on all that ran it.
        """
        result, error = _attempt(action, ValueError) if only else (None, None)
        outcomes = self.gather((only, _message(error)))
        failed = [(rank, message) for rank, (_, message) in enumerate(outcomes) if message]
        if failed:
            rank, message = failed[0]
            is_everywhere = len(failed) == sum(has_run for has_run, _ in outcomes)
            raise self._error(message if is_everywhere else f"{message} (on rank {rank})") from error
        return result

    def on_all(self, action: Callable[[], _T], failure: str) -> list[_T]:
        """Run `action` on every rank; return the results of all ranks, in rank order, on every rank.

        Raises:
            ValueError: `action` raised OSError or ValueError on some rank. The class is the `error` of this group. The
                message is `failure` with the messages of all failed ranks.
        """
        result, error = _attempt(action, OSError, ValueError)
        outcomes = self.gather((result, _message(error)))
        reasons = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(outcomes) if message]
        if reasons:
            raise self._error(f"{failure} ({'; '.join(reasons)})")
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def on_rank_0(self, action: Callable[[], _T], failure: str) -> _T:
        """Run `action` on rank 0; return its result on every rank.

        Raises:
            ValueError: see `on_all`.
        """
        results: list[Any] = self.on_all(action if self.rank == 0 else lambda: None, failure)
        return results[0]


def _attempt(action: Callable[[], _T], *errors: type[Exception]) -> tuple[_T | None, Exception | None]:
    try:
        return action(), None
    except errors as error:
        return None, error


def _message(error: Exception | None) -> str:
    """The message of an error, never empty; empty if there is no error."""
    return "" if error is None else str(error) or type(error).__name__
