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

[Note: Communicators]
On an accelerator a process group is a communicator of NCCL, with device memory of its own: buffers for each peer and
channel. So there are as few as transfers need:

- The default group is bound to this rank's device when laconic starts it. So its communicator begins there and then,
  not in the first forward, and others are split from it, by one call for all ranks along an axis. Where the script has
  started the default group without `device_id`, or on Gloo, groups are made one by one, and NCCL's begin when used.
- No axis of one rank has one.
- The mesh, gathers, small messages of setup and moves of optimizers share one for each set of ranks, and the sums
  inside an island have another: a prefetched gather shall not queue behind a sum. So with one level there are two, that
  of all ranks and that of sums; with two levels there are five.

One communicator runs its collectives in the order in which the host issues them, whatever their streams. Those that
share one are issued by one thread at fixed points of the program, so they have one order on all ranks. On Gloo nothing
is shared: there a group has no device memory, and what a dropped exchange leaves behind would be in the user's way.

A group that begins at once carries all its messages between two ranks through its one communicator, in order. One that
begins when it is used has a communicator for each pair. The cyclic schedule posts receives long before their messages
come, so its groups are not bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
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


def new_group(
    ranks: Sequence[int],
    timeout: timedelta | None,
    backend: str | None = None,
    device: torch.device | None = None,
    *,
    sorts: bool = True,
) -> dist.ProcessGroup:
    """Make a process group of `ranks`. Only they call this, in one order: [Note: Names that do not come back].

    The order of the ranks within the group is ascending, as that of `dist.new_group`, or with `sorts=False` as given.
    None stands for the backend, or the time-out, that the default group has. With `device` it begins at once:
    [Note: Communicators].
    """
    members, world = tuple(sorted(ranks) if sorts else ranks), dist.group.WORLD
    assert world is not None
    made = _numbers_made.setdefault(world, Counter())
    made[members] += 1
    digest = hashlib.sha1(repr((world.group_name, members)).encode(), usedforsecurity=False).hexdigest()
    return _compat.named_group(f"laconic-{digest}-{made[members]}", list(members), timeout, backend, device)


def device_to_bind(backend: str, device: torch.device | None) -> torch.device | None:
    """The device to which a default group of `backend` is bound: [Note: Communicators]. None: none.

    torch's `DeviceMesh` splits from a bound group without asking whether its backend can; NCCL can.
    """
    return device if backend == "nccl" and device is not None and device.type != "cpu" else None


_started_bytes = 0


@contextlib.contextmanager
def counting_started(device: torch.device | None) -> Iterator[None]:
    """Count the memory of `device` that is in use after the body and was not before; see `started_bytes`."""
    global _started_bytes
    before = 0 if device is None else torch.accelerator.get_memory_info(device)[0]
    yield
    if device is not None:
        _started_bytes += max(0, before - torch.accelerator.get_memory_info(device)[0])


def started_bytes() -> int:
    """The device memory that communicators took when laconic let them begin: [Note: Communicators].

    torch's allocator does not count this memory. Memory that other processes took in the meantime is in the figure. A
    communicator that begins when it is first used adds nothing.
    """
    return _started_bytes


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
