"""Where this process stands among the ranks, how it joins them and how it leaves.

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
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from laconic.errors import JobError


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Positions from torchrun's environment; without torchrun, one rank on one node."""

    rank: int
    world_size: int
    local_rank: int
    num_local: int
    num_nodes: int

    @classmethod
    def from_environment(cls) -> RankInfo:
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


def pick_device(name: str, ranks: RankInfo) -> torch.device:
    """The device of this rank; `auto` prefers a GPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise JobError("train.device = 'cuda', but torch finds no GPU here; set train.device to 'cpu' or 'auto'")
    device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def process_group(ranks: RankInfo, device: torch.device, timeout_s: float) -> Iterator[dist.ProcessGroup]:
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
