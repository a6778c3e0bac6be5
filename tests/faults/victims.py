"""Training runs that a campaign kills: ranks in torchrun's environment, without torchrun's agent beside them.

[Note: No agent]
torchrun's agent ends the other ranks when one has died. That would hide a rank that hangs. So a campaign starts ranks
itself: forks of a fork server ([Note: Fork server] in launch.py), which meet in a store that the campaign hosts, as
they would meet in the agent's. A run whose rank was killed must come to its end by itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from tests.support.launch import free_port, started

_GRACE_S = 2.0  # of laconic.comm.failure
_STACKS_S = 1.0  # for a rank that hangs to write its stacks


@dataclass(frozen=True, kw_only=True)
class Place:
    """The number of ranks of a run, and of each of its nodes."""

    num_ranks: int
    num_local: int

    def node(self, rank: int) -> list[int]:
        """The ranks on the node of `rank`."""
        first = rank - rank % self.num_local
        return list(range(first, first + self.num_local))


@dataclass(kw_only=True)
class Victim:
    """One start of a run: its processes, by rank."""

    processes: list[Any]
    log: Path
    """The file into which all ranks print."""
    killed: set[int] = field(default_factory=set)
    """The ranks that the campaign has killed."""
    store: dist.TCPStore | None = None
    port: int = 0
    """The port of the store in which the ranks meet."""

    @staticmethod
    def start(
        arguments: Sequence[str],
        place: Place,
        log: Path,
        *,
        grace_s: float | None = _GRACE_S,
        rank_0_hosts: bool = False,
    ) -> Victim:
        """Start `laconic train` with these arguments on every rank; all print into the file `log`.

        Args:
            arguments: the arguments of the command.
            place: the number of ranks.
            log: the file.
            grace_s: the grace of `laconic.comm.failure`; None: its own.
            rank_0_hosts: rank 0 hosts the store in which ranks meet, as without torchrun; else the campaign does.
        """
        port = free_port()
        store = None
        if not rank_0_hosts:
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        processes = [
            started(_be_rank, list(arguments), place, rank, port, str(log), grace_s, rank_0_hosts)
            for rank in range(place.num_ranks)
        ]
        return Victim(processes=processes, log=log, store=store, port=port)

    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, process in enumerate(self.processes) if process.exitcode is None]

    def send(self, number: signal.Signals, ranks: Sequence[int]) -> None:
        """Send a signal to those of `ranks` that are alive."""
        for rank in ranks:
            if self.processes[rank].exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.processes[rank].pid, number)
                    if number == signal.SIGKILL:
                        self.killed.add(rank)

    def wait(self, limit_s: float) -> list[int]:
        """Wait until all ranks have ended, for `limit_s` seconds at most, and end the rest; return that rest.

        The stacks of the rest stand in the log.
        """
        deadline_s = time.monotonic() + limit_s
        for process in self.processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        left = self.alive()
        if left:
            self.send(signal.SIGUSR1, left)
            time.sleep(_STACKS_S)
        for process in self.processes:
            process.kill()
            process.join()
        self.store = None
        return left

    @property
    def exit_codes(self) -> list[int]:
        """The exit code of every rank, after `wait`."""
        return [process.exitcode for process in self.processes]


def _be_rank(
    arguments: list[str], place: Place, rank: int, port: int, log: str, grace_s: float | None, rank_0_hosts: bool
) -> NoReturn:
    import torch

    from laconic.comm import failure
    from laconic.train import cli

    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if grace_s is not None:
        failure._GRACE_S = grace_s
    numbers = {
        "RANK": rank, "WORLD_SIZE": place.num_ranks, "LOCAL_RANK": rank % place.num_local,
        "LOCAL_WORLD_SIZE": place.num_local, "GROUP_RANK": rank // place.num_local, "MASTER_PORT": port,
    }  # fmt: skip
    os.environ.update({name: str(number) for name, number in numbers.items()})
    # Else a rank is a client of the store that the campaign hosts, as it would be of the agent's.
    os.environ.update(
        MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_USE_AGENT_STORE=str(not rank_0_hosts)
    )
    torch.set_num_threads(1)
    code = 1
    try:
        code = cli.main(arguments)
    except BaseException:  # of any kind: the log needs its traceback
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
