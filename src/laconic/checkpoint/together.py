"""What the ranks of a save or a load tell each other: names, sizes, hashes and verdicts, never state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from laconic.checkpoint.commit import CheckpointError

_T = TypeVar("_T")


class Ranks:
    """All ranks of the job, over the default group or one of their own; one rank if there is no process group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1

    def gather(self, value: _T) -> list[_T]:
        """Every rank's value on every rank."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def on_all(self, action: Callable[[], _T], failure: str) -> list[_T]:
        """Every rank's result on every rank; if any rank fails, every rank raises with that rank's reason."""
        result, error = None, ""
        try:
            result = action()
        except (OSError, ValueError) as caught:
            error = str(caught)
        outcomes = self.gather((result, error))
        errors = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(outcomes) if text]
        if errors:
            raise CheckpointError(f"{failure} ({'; '.join(errors)})")
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def on_rank_0(self, action: Callable[[], _T], failure: str) -> _T:
        """Rank 0's result on every rank."""
        results: list[Any] = self.on_all(action if self.rank == 0 else lambda: None, failure)
        return results[0]
