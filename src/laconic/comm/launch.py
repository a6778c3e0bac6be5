"""The place of this process among the ranks of the job; how it joins the job, exits, and ends with its launcher.

[Note: Exit without teardown]
A thread of Gloo releases the tensors of a collective a moment after the collective has finished. If Python has dropped
them before, the thread needs the interpreter to free them. An interpreter that shuts down ends such a thread in a way
that aborts the process (pytorch/pytorch#190489). So on a busy machine a run sometimes dies of SIGABRT after all its
work is done. Destroying the process groups does not help, since every reference to a group keeps its threads alive.
Therefore a command of laconic exits without the shutdown of the interpreter, after its exit handlers have run.

[Note: Orphans]
torchrun's agent starts the ranks of a machine, and ends them when the job fails. If the agent itself is killed, its
ranks would train on, write into the output folder and hold their devices, while the scheduler starts the job anew. So
a thread of each rank looks at its parent process every half second: the kernel gives an orphan another parent. Linux
could send a signal instead (PR_SET_PDEATHSIG), but SIGKILL says nothing, and a rank that waits in a collective would
not answer SIGTERM. The process ends at once, in whatever it does: files appear whole or not at all. Ranks that were
started without torchrun are no orphans when their parent ends, as under `nohup`.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from laconic.comm.failure import ending_after, leave, watch_peers, watch_peers_early
from laconic.comm.groups import counting_started, device_to_bind, new_group
from laconic.comm.watch import waiting_for
from laconic.errors import JobError


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The place of this process among the ranks of the job. Without torchrun there is one rank on one node."""

    rank: int
    world_size: int
    local_rank: int
    num_local: int
    """The number of ranks on each node."""
    num_nodes: int

    @classmethod
    def from_environment(cls) -> RankInfo:
        """Read torchrun's environment variables.

        Raises:
            JobError: the nodes have unequal numbers of ranks: WORLD_SIZE is no multiple of LOCAL_WORLD_SIZE.
        """
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
        """True on the rank that prints and writes logs."""
        return self.rank == 0

    @property
    def is_first_on_node(self) -> bool:
        """True on the rank that prepares files which its node shares."""
        return self.local_rank == 0


def node_of_rank(rank: int) -> int:
    """Return the node on which a rank of the whole job runs; 0 without torchrun, which means one machine.

    torchrun numbers the ranks node by node, LOCAL_WORLD_SIZE on each. `init_mesh` refuses nodes of unequal size.
    """
    num_local = os.environ.get("LOCAL_WORLD_SIZE")
    return rank // int(num_local) if num_local else 0


def pick_device(name: str, ranks: RankInfo) -> torch.device:
    """Choose the device of this rank, and make an accelerator's device the current one.

    The name is "cpu", the type of an accelerator such as "cuda", or "auto", which prefers an accelerator.

    Raises:
        JobError: `name` is the type of an accelerator that is not here.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or (name == "auto" and accelerator is None):
        return torch.device("cpu")
    if accelerator is None or name not in ("auto", accelerator.type):
        here = "no accelerator" if accelerator is None else f"the accelerator {accelerator.type!r}"
        raise JobError(f"train.device = {name!r}, but torch finds {here} here; set train.device to 'cpu' or 'auto'")
    device = torch.device(accelerator.type, ranks.local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def initialized_accelerator() -> torch.device | None:
    """Return the current device of the accelerator; None if there is none, or if this process has not used it yet."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    is_initialized = getattr(module, "is_initialized", module.is_available)  # torch.mps has no `is_initialized`
    return torch.device(accelerator.type, torch.accelerator.current_device_index()) if is_initialized() else None


def start_process_group(backend: str, timeout: datetime.timedelta | None, device: torch.device | None = None) -> None:
    """Call torch.distributed.init_process_group in torchrun's environment; the ranks watch each other from then on.

    With NCCL the communicator of `device`, this rank's, begins at once: [Note: Communicators] in groups.py.

    If a rank dies before all have met, the others end within 10 seconds. If it dies before it has reached the
    rendezvous, only its launcher can know; without one the others end 5 seconds after `timeout` (None: torch's).
    """
    limit = timeout or default_pg_timeout
    store, rank, num_ranks = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    awaited = "the process group of all ranks"
    with ending_after(limit.total_seconds(), awaited), waiting_for(awaited):
        watch_peers_early(store, rank, num_ranks)
        _init(backend, device, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    watch_peers()


def _init(backend: str, device: torch.device | None, **place: Any) -> None:
    bound = device_to_bind(backend, device)
    with counting_started(bound):
        dist.init_process_group(backend, device_id=bound, **place)


@contextlib.contextmanager
def process_group(ranks: RankInfo, device: torch.device, timeout_s: float) -> Iterator[dist.ProcessGroup]:
    """Yield a group that carries CPU tensors. Start the default group if there is none, and destroy it at the end."""
    is_owned = not dist.is_initialized()
    timeout = datetime.timedelta(seconds=timeout_s)
    if is_owned:
        # NCCL refuses two ranks on one GPU; Gloo carries CUDA tensors too, slowly
        is_gpu_shared = device.type != "cpu" and ranks.num_local > torch.accelerator.device_count()
        backend = "gloo" if is_gpu_shared else dist.get_default_backend_for_device(device)
        if "MASTER_ADDR" in os.environ:
            start_process_group(backend, timeout, device)
        else:
            _init(backend, device, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    is_gloo, everyone = dist.get_backend() == "gloo", range(dist.get_world_size())
    group = dist.group.WORLD if is_gloo else new_group(everyone, timeout, "gloo")
    assert group is not None
    try:
        yield group
    except JobError:  # all ranks raise it; after any other error peers may be dying, and a teardown could hang
        if is_owned:
            _end_process_group()
        raise
    if is_owned:
        _end_process_group()


def _end_process_group() -> None:
    leave()
    dist.destroy_process_group()


class ExitWithoutTeardown:
    """Makes the process exit without the shutdown of the interpreter: [Note: Exit without teardown].

    Make one at the start of a command, and set `code` at its end. Exit handlers that are registered in between run;
    handlers that imports registered before do not run. If an exception ends the process first, `code` stays None and
    the process ends as usual.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._exit)

    def _exit(self) -> None:
        if self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


_INTERVAL_S = 0.5


@contextlib.contextmanager
def ending_with_launcher() -> Iterator[None]:
    """End this process, with one line and exit code 1, within a second after its launcher: [Note: Orphans]."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    launcher, done = os.getppid(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(launcher, done), daemon=True)
    watcher.start()
    try:
        yield
    except Exception:
        _end_if_orphan(launcher)  # the other orphans have ended, and connections to them failed first
        raise
    finally:
        done.set()
        watcher.join()


def _watch(launcher: int, done: threading.Event) -> None:
    while not done.wait(_INTERVAL_S):
        _end_if_orphan(launcher)


def _end_if_orphan(launcher: int) -> None:
    if os.getppid() != launcher:
        with contextlib.suppress(OSError):  # the terminal may have ended too
            print(
                f"rank {os.environ.get('RANK')} ends, because its launcher (torchrun, process {launcher}) has died; "
                "start the job again with --train.resume auto",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)
