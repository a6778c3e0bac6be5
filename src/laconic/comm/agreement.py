"""Agreement across ranks: small values that every rank learns, and errors that every rank raises.

An error that a rank can foresee (no corpus, a full disk) must end all ranks with one message. So ranks exchange the
outcome of an action before any of them goes on. `comm/failure.py` handles the errors that nobody foresees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from laconic.errors import JobError

_T = TypeVar("_T")


class RankGroup:
    """The ranks of a process group, or this process alone if torch.distributed is not initialised.

    Every method is collective: all ranks of the group call it. Values travel pickled, so they must be small.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, error: type[ValueError] = JobError) -> None:
        """Args:
        group: a group that carries CPU tensors; None is the default group.
        error: what the methods raise on all ranks when an action fails on some.
        """
        self.group, self._error = group, error
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: _T) -> _T:
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def agree(self, action: Callable[[], _T], *, only: bool = True) -> _T | None:
        """Run `action` on the ranks with `only`; return this rank's result, or None on the others.

        `action` must not be collective.

        Raises: the group's error class, on all ranks, if `action` raised ValueError on any. The message is that of the
            first failed rank, and names the rank unless all failed.
        """
        result, error = _attempt(action, ValueError) if only else (None, None)
        outcomes = self.gather((only, _message(error)))
        failed = [(rank, message) for rank, (_, message) in enumerate(outcomes) if message]
        if failed:
            rank, message = failed[0]
            everywhere = len(failed) == sum(ran for ran, _ in outcomes)
            raise self._error(message if everywhere else f"{message} (on rank {rank})") from error
        return result

    def on_all(self, action: Callable[[], _T], failure: str) -> list[_T]:
        """Run `action` on every rank; return every rank's result on every rank.

        Raises: the group's error class, on all ranks, if `action` raised OSError or ValueError on any. The message is
            `failure` with the reasons of all failed ranks.
        """
        result, error = _attempt(action, OSError, ValueError)
        outcomes = self.gather((result, _message(error)))
        reasons = [f"rank {rank}: {message}" for rank, (_, message) in enumerate(outcomes) if message]
        if reasons:
            raise self._error(f"{failure} ({'; '.join(reasons)})")
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def on_rank_0(self, action: Callable[[], _T], failure: str) -> _T:
        """Run `action` on rank 0; return its result on every rank. Raises: as `on_all`."""
        results: list[Any] = self.on_all(action if self.rank == 0 else lambda: None, failure)
        return results[0]


def _attempt(action: Callable[[], _T], *errors: type[Exception]) -> tuple[_T | None, Exception | None]:
    try:
        return action(), None
    except errors as error:
        return None, error


def _message(error: Exception | None) -> str:
    """Empty if there is no error."""
    return "" if error is None else str(error) or type(error).__name__
