"""Runs a function on several ranks of this machine, in fresh processes that find torchrun's environment."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


def launch(
    function: Callable[..., Any], world: int, local: int, *args: Any, backend: str | None, timeout_s: float
) -> list[Any]:
    """Run `function(*args)` on `world` fresh processes, `local` per logical node, and return the results by rank.

    Args:
        backend: initialised before the call; None leaves it to the function.

    Raises:
        RuntimeError: a rank failed; the others are ended and its traceback is in the message.
        TimeoutError: there are ranks without a result after `timeout_s`.
    """
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: dict[Connection, tuple[int, Any]] = {}
    for rank in range(world):
        mine, theirs = context.Pipe()
        process = context.Process(target=_enter, args=(theirs, function, args, rank, world, local, port, backend))
        process.start()
        theirs.close()
        ranks[mine] = (rank, process)
    results: list[Any] = [None] * world
    deadline = time.monotonic() + timeout_s
    waiting = set(ranks)
    try:
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(ranks[c][0] for c in waiting)} took longer than {timeout_s:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank, process = ranks[connection]
                try:
                    ok, value = connection.recv()
                except EOFError:
                    process.join(5)
                    raise RuntimeError(f"rank {rank} died with exit code {process.exitcode}") from None
                if not ok:
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
                waiting.discard(connection)
        for _, process in ranks.values():
            process.join(20)
    finally:
        for _, process in ranks.values():
            if process.is_alive():
                process.kill()
                process.join()
    return results


def _enter(
    connection: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world: int,
    local: int,
    port: int,
    backend: str | None,
) -> None:
    os.environ.update(  # as torchrun would on `world // local` nodes
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank % local),
        LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local),
        GROUP_WORLD_SIZE=str(world // local),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    try:
        if backend is not None:
            dist.init_process_group(backend)
        answer = (True, function(*args))
        if backend is not None:
            dist.barrier()
    except BaseException:
        answer = (False, traceback.format_exc())
    connection.send(answer)
    connection.close()
    os._exit(0)
