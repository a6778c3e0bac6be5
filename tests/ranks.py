"""The launcher of ranks, as the tests call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.launch import free_port, launch

__all__ = ["free_port", "run_ranks"]


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, local: int | None = None, timeout_s: float = 90
) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks with Gloo, `local` on each node; see `benchmarks.launch.launch`."""
    return launch(fn, *args, num_ranks=world_size, num_local=local, timeout_s=timeout_s)
