"""Where this process stands among the ranks, and how ranks agree and fail together.

[Note: Failing together]
An error that all ranks can foresee (no corpus, a full disk) is found by one of them and must be told by all:
`agree` exchanges it before anybody goes on. An error nobody foresaw kills one rank in the middle of a step; the others
then hang in a collective or die of a closed connection, and whoever prints last buries the cause. So the first rank to
fail leaves its traceback in the rendezvous store, and the others, on their own error or by a watcher that looks
every few seconds, find it there, show it instead of their own, and exit.

[Note: Leaving]
A thread of Gloo lets go of a collective's tensors a moment after the collective is done. If Python has let go of them
already, the thread needs the interpreter, and one that is being torn down ends the thread in a way that aborts the
whole process (pytorch/pytorch#190489): on a busy machine a run now and then dies of SIGABRT after all its work is done.
Destroying the process groups is no cure, as whatever still refers to one keeps its threads. So a process of its own
leaves without the teardown, once what was registered at exit has run.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from laconic.train.config import JobError

_T = TypeVar("_T")
_FAILURE_KEY = "laconic/first-failure"
_WATCH_INTERVAL_s = 3.0
_GRACE_s = 10.0
_JOIN_s = 5.0


class PeerFailedError(RuntimeError):
    """Another rank failed first; the message is its traceback."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Positions from torchrun's environment; without torchrun, one rank on one node."""

    rank: int
    world_size: int
    local_rank: int
    num_local: int
    num_nodes: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """Raises `JobError` for nodes of unequal size as far as one rank can see it."""
        world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if world % local:
            raise JobError(
                f"{world} ranks do not make nodes of {local}: start every node with the same --nproc-per-node"
            )
        return cls(
            rank=int(os.environ.get("RANK", 0)),
            world_size=world,
            local_rank=int(os.environ.get("LOCAL_RANK", 0)),
            num_local=local,
            num_nodes=world // local,
        )

    @property
    def is_main(self) -> bool:
        """Rank 0 talks to people and writes the logs."""
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        """One rank per node prepares what the node shares."""
        return self.local_rank == 0


def pick_device(name: str, ranks: Ranks) -> torch.device:
    """The device of this rank; `auto` prefers a GPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise JobError("train.device = 'cuda', but torch finds no GPU here; set train.device to 'cpu' or 'auto'")
    device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def process_group(ranks: Ranks, device: torch.device, timeout_s: float) -> Iterator[dist.ProcessGroup]:
    """Start the default process group (unless there is one) and yield a group that can carry CPU tensors."""
    owned = not dist.is_initialized()
    timeout = datetime.timedelta(seconds=timeout_s)
    if owned:
        # NCCL refuses two ranks on one GPU; Gloo carries CUDA tensors too, slowly
        shared_gpu = device.type == "cuda" and ranks.num_local > torch.cuda.device_count()
        backend = "nccl" if device.type == "cuda" and not shared_gpu else "gloo"
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
        assert group is not None
        yield group
    except JobError:  # on all ranks alike
        _destroy(owned)
        raise
    else:  # after any other error peers may be dying, and tearing down could hang; the process is about to end anyway
        _destroy(owned)


def _destroy(owned: bool) -> None:
    if owned:
        dist.destroy_process_group()


def agree(action: Callable[[], _T], group: dist.ProcessGroup, *, only: bool = True) -> _T | None:
    """Run `action` on the ranks with `only`; a ValueError on any of them is raised as a `JobError` on all.

    Collective, so `action` must not be.
    """
    result: _T | None = None
    message: str | None = None
    try:
        if only:
            result = action()
    except ValueError as error:
        message = str(error) or type(error).__name__
        cause: ValueError | None = error
    else:
        cause = None
    outcomes: list[tuple[bool, str | None]] = [(False, None)] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, (only, message), group=group)
    failed = [(rank, text) for rank, (_, text) in enumerate(outcomes) if text is not None]
    if failed:
        rank, text = failed[0]
        everywhere = len(failed) == sum(asked for asked, _ in outcomes)
        raise JobError(text if everywhere else f"{text} (on rank {rank})") from cause
    return result


@contextlib.contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """Show the first failing rank's traceback on every rank, and end ranks that hang because of it."""
    store = dist.distributed_c10d._get_default_store()
    if ranks.world_size == 1:
        yield
        return
    done = threading.Event()
    # a clone has its own connection: the watcher never waits behind a blocking call of the main thread
    own = store.clone()  # type: ignore[attr-defined]
    watcher = threading.Thread(target=_watch, args=(own, ranks.rank, done), daemon=True)
    watcher.start()
    try:
        yield
    except Exception as error:
        first = _record(store, ranks.rank, "".join(traceback.format_exception(error)))
        if first is not None and not isinstance(error, JobError):
            raise PeerFailedError(first) from None
        raise
    finally:
        done.set()
        watcher.join(_JOIN_s)  # a thread that leaves C++ while the interpreter ends aborts the process


def _record(store: dist.Store, rank: int, trace: str) -> str | None:
    """Leave `trace` as the first failure, or return the one that is already there."""
    mine = f"rank {rank} failed first:\n{trace}"
    try:
        first = store.compare_set(_FAILURE_KEY, "", mine).decode()
    except Exception:  # the store died with its host, which is then what failed
        return None
    return None if first == mine else first


def _watch(store: dist.Store, rank: int, done: threading.Event) -> None:
    while not done.wait(_WATCH_INTERVAL_s):
        try:
            if not store.check([_FAILURE_KEY]):
                continue
            first = store.get(_FAILURE_KEY).decode()
        except Exception:
            return
        if not first.startswith(f"rank {rank} ") and not done.wait(_GRACE_s):
            print(f"rank {rank} is stuck because {first}", file=sys.stderr, flush=True)
            os._exit(1)
        return


class Leaving:
    """Made at the start of a process, ends it with `code` and without a teardown: [Note: Leaving].

    What is registered at exit later runs before it; what was registered earlier, by imports, does not run. As long as
    `code` is None, after an exception for example, the process ends as any other.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)
