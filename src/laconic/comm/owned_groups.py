"""Process groups that one object makes for itself, and that go with it.

The groups of a mesh are shared: [Note: What is made once] in cluster.py. An object whose messages would mix with those
of another, as the cyclic schedule, has groups of its own, which nobody else finds again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


def destroy_with(owner: object, groups: Sequence[dist.ProcessGroup]) -> weakref.finalize[Any, Any]:
    """Destroy `groups` when `owner` is freed, or when the returned object is called before.

    Each rank does so on its own, at any time: to destroy a group sends nothing.
    """
    finalizer = weakref.finalize(owner, _destroy, list(groups))
    finalizer.atexit = False
    return finalizer


def _destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    for group in groups:
        with contextlib.suppress(ValueError, AssertionError):  # the default group went before, and took all others
            dist.destroy_process_group(group)
