"""Process groups that their members make alone, and groups that go with the object that made them.

The groups of a mesh are shared: [Note: What is made once] in cluster.py. An object whose messages would mix with those
of another, as the cyclic schedule, has groups of its own, which nobody else finds again.

[Note: Names that do not come back]
The ranks of a new group find each other's addresses in the rendezvous store, under the name of the group.
`dist.new_group(use_local_synchronization=True)` makes this name of the ranks and of the number of groups that this rank
has now. That fails where groups are destroyed. A name comes back, and a rank reads the address of a group that is gone.
Or one rank has destroyed a group already and another has not, as nobody knows when Python collects a cycle: their names
differ, and they wait for ever. So `new_group` counts what it has made on the same ranks since the default group began.
All of them call it in the same order, so they count alike, and no name comes back.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from laconic import _compat

REHEARSED = "rehearsed"
"""The backend of a process group whose other ranks are not there: laconic.rehearse has it."""

_numbers_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def has_peers(group: dist.ProcessGroup | None = None) -> bool:
    """True if a process group, which exists, has other ranks, and they are there."""
    return dist.get_world_size(group) > 1 and not is_rehearsed(group)


def is_rehearsed(group: dist.ProcessGroup | None = None) -> bool:
    """True if the other ranks of a process group, which exists, are not there."""
    return dist.get_backend(group) in ("fake", REHEARSED)


def new_group(ranks: Sequence[int], timeout: timedelta | None, backend: str | None = None) -> dist.ProcessGroup:
    """Make a process group of `ranks`. Only they call this, in one order: [Note: Names that do not come back].

    The order of the ranks within the group is ascending, as that of `dist.new_group`. None stands for the backend, or
    the time-out, that the default group has.
    """
    members, world = tuple(sorted(ranks)), dist.group.WORLD
    assert world is not None
    made = _numbers_made.setdefault(world, Counter())
    made[members] += 1
    digest = hashlib.sha1(repr((world.group_name, members)).encode(), usedforsecurity=False).hexdigest()
    return _compat.named_group(f"laconic-{digest}-{made[members]}", list(members), timeout, backend)


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
