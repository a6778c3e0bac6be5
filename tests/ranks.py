"""Run a function on several ranks: real processes, real Gloo, forked from a server that has imported torch already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
# What ranks import; torch._dynamo is what any torch optimizer imports, seconds of it.
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "transformers.models.llama.modeling_llama",
        "laconic",
    ]
)


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, local: int | None = None, timeout_s: float = 90
) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks, `local` per node (default: all on one), and return their results by rank.

    `fn` is a top-level function; Gloo is initialised and torchrun's variables are set when it is called. The first rank
    that fails ends the others and its traceback is raised.
    """
    local = local or world_size
    port = free_port()
    ranks: dict[Connection, tuple[int, Any]] = {}
    for rank in range(world_size):
        mine, theirs = _context.Pipe()
        process = _context.Process(target=_run, args=(theirs, fn, args, rank, world_size, local, port), daemon=True)
        process.start()
        theirs.close()
        ranks[mine] = (rank, process)
    results: list[Any] = [None] * world_size
    try:
        waiting = set(ranks)
        while waiting:
            ready = wait(list(waiting), timeout=timeout_s)
            if not ready:
                raise TimeoutError(f"ranks {sorted(ranks[c][0] for c in waiting)} gave no result within {timeout_s} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank, process = ranks[connection]
                try:
                    kind, value = pickle.loads(connection.recv_bytes())
                except EOFError:
                    process.join(5)
                    raise RuntimeError(f"rank {rank} died with exit code {process.exitcode}") from None
                if kind == "error":
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
                waiting.discard(connection)
    finally:
        for _, process in ranks.values():
            process.join(2) if all(r is not None for r in results) else None
            if process.is_alive():
                process.kill()
                process.join()
    return results


def _run(
    connection: Connection, fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, local: int, port: int
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
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
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        result = ("ok", fn(*args))
        dist.barrier()
    except BaseException:
        result = ("error", traceback.format_exc())
    connection.send_bytes(pickle.dumps(result))
    connection.close()
    os._exit(0)
