"""The launcher of ranks for benchmarks and tests: processes on this machine in the environment that torchrun gives.

[Note: Fork server]
To import torch and transformers takes longer than most jobs, and to import laconic as long as many. So every rank is a
fork of a server that has imported them already. The first launch of a process starts this server. The server never uses
CUDA, so its forks may use CUDA. Last, it freezes its objects (fork_server.py): a rank's garbage collector would write
into all of them, and so copy them.

[Note: A file to meet in]
Ranks meet in a file. In torch's TCPStore they would ask the resolver for each other's names, also on this machine. A
lost answer costs seconds, and a suite launches thousands of ranks. Tests of torchrun's own store start torchrun.

This module does not import laconic: `unchanged.py` launches ranks that import it from other source trees.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

context = multiprocessing.get_context("forkserver")


def _modules_of(package: str, *, without: Sequence[str]) -> tuple[str, ...]:
    """The names of all modules of a package, which this does not import."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    root = Path(str(spec.origin)).parent
    names = (".".join((package, *file.relative_to(root).with_suffix("").parts)) for file in sorted(root.rglob("*.py")))
    found = (name.removesuffix(".__init__") for name in names if not name.endswith("__main__"))
    return tuple(name for name in found if name not in without)


PRELOADED = (
    "torch",
    "torch._dynamo",  # every torch optimizer imports it, which takes seconds
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "trl.trainer.sft_trainer",  # with transformers' Trainer, peft and datasets
    "trl.trainer.dpo_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.grpo_trainer",
    "pytest",  # the functions of tests lie in modules that import it
    "hypothesis",
    *_modules_of("laconic", without=["laconic.integrations.lightning"]),  # Lightning takes longer than all of laconic
)
"""The modules that the fork server imports; it passes over those that are not installed."""
PATIENCE_S = 600.0
"""The limit of what hangs. It measures nothing: others may have the machine, for however long."""
_NOT_CONNECTED = "connectFullMesh failed"
"""What Gloo says of ranks that could not connect to each other."""
_EXIT_S = 5.0  # the time for a rank to end after it has sent its result
_STACKS_S = 1.0  # the time for ranks to write where they stand


def free_port() -> int:
    """Return a TCP port that nobody uses now, below those that the kernel gives to connections as it likes."""
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def started(function: Callable[..., Any], *args: Any, preloaded: Sequence[str] = PRELOADED) -> Any:
    """Start a process that calls `function(*args)`, a fork of the server: [Note: Fork server]."""
    context.set_forkserver_preload([*preloaded, __name__, "tests.support.fork_server"])
    process = context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def launch(
    function: Callable[..., Any],
    *args: Any,
    num_ranks: int,
    num_local: int | None = None,
    timeout_s: float = PATIENCE_S,
    backend: str | None = "gloo",
    preloaded: Sequence[str] = PRELOADED,
) -> list[Any]:
    """Run `function(*args)` on `num_ranks` processes with one thread each, and return their results by rank.

    A launch whose ranks could not connect to each other is tried once more.

    Args:
        function: a function at the top level of a module; its arguments and its result can be pickled.
        args: the arguments, the same on all ranks.
        num_ranks: the number of processes.
        num_local: the number of ranks on each emulated node. Default: all ranks are on one node.
        timeout_s: the seconds after which the launch has failed.
        backend: the backend of the default process group, or None if `function` makes its own.
        preloaded: the modules that the fork server imports; only the first launch of a process decides.

    Raises:
        RuntimeError: a rank failed. The message has its traceback; the other ranks are killed.
        TimeoutError: some ranks have no result after `timeout_s`; all ranks are killed.
    """
    options: Any = {"num_ranks": num_ranks, "num_local": num_local or num_ranks, "timeout_s": timeout_s}
    try:
        return _launch(function, args, backend, preloaded, **options)
    except RuntimeError as error:
        if _NOT_CONNECTED not in str(error):
            raise
        return _launch(function, args, backend, preloaded, **options)


def _launch(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str | None,
    preloaded: Sequence[str],
    *,
    num_ranks: int,
    num_local: int,
    timeout_s: float,
) -> list[Any]:
    port = free_port()
    processes: list[Any] = []
    connections: dict[Any, int] = {}
    folder = tempfile.TemporaryDirectory(prefix="laconic-launch-")
    store = f"file://{folder.name}/store"  # [Note: A file to meet in]
    try:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            environment = torchrun_environment(rank, num_ranks, num_local, port)
            job = (sender, environment, store, backend, function, args)
            process = started(_run_rank, *job, preloaded=preloaded)
            processes.append(process)
            sender.close()
            connections[receiver] = rank
        results = _collect(connections, processes, time.monotonic() + timeout_s)
        for process in processes:
            process.join(_EXIT_S)
    except TimeoutError as error:
        stacks = _stacks(processes, Path(folder.name))
        raise TimeoutError(f"{error} within {timeout_s:g} s\n{stacks}") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
        folder.cleanup()
    return [results[rank] for rank in range(num_ranks)]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, local: int | None = None, timeout_s: float = PATIENCE_S
) -> list[Any]:
    """Run `function(*args)` on `world_size` ranks with Gloo, `local` on each node.

    In a test of `make test` they are threads that take turns; elsewhere they are processes, see `launch`.
    """
    from tests.support import tiers

    if not tiers.is_inside():
        return launch(function, *args, num_ranks=world_size, num_local=local, timeout_s=timeout_s)
    return tiers.run_threads(function, args, nodes=world_size // (local or world_size), local=local or world_size)


def on_ranks(
    world_size: int | str, *, local: int | str | None = None, timeout_s: float = PATIENCE_S
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test as `run_ranks` does: its body is what each rank does, with the test's arguments.

    A number may be the name of an argument that has it, from `pytest.mark.parametrize`; the body may do without it.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(test)
        named = {name for name in (world_size, local) if isinstance(name, str)} - own.parameters.keys()

        @functools.wraps(test)
        def start(**arguments: Any) -> None:
            size, on_node = (arguments[it] if isinstance(it, str) else it for it in (world_size, local))
            given = {name: argument for name, argument in arguments.items() if name not in named}
            run_ranks(_run_body, size, test.__module__, test.__name__, given, local=on_node, timeout_s=timeout_s)

        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(named)]
        start.__signature__ = own.replace(parameters=[*own.parameters.values(), *more])  # type: ignore[attr-defined]
        return start

    return decorate


def _run_body(module: str, test: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), test).__wrapped__(**arguments)


def torchrun_environment(rank: int, num_ranks: int, num_local: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank, with addresses of this machine."""
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank % num_local,
        "LOCAL_WORLD_SIZE": num_local,
        "GROUP_RANK": rank // num_local,
        "GROUP_WORLD_SIZE": num_ranks // num_local,
        "MASTER_PORT": port,
    }
    addresses = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return {name: str(number) for name, number in numbers.items()} | addresses


def _collect(connections: dict[Any, int], processes: Sequence[Any], deadline: float) -> dict[int, Any]:
    """Receive the result of every rank. The first failure or the deadline ends this with an error."""
    results: dict[int, Any] = {}
    while connections:
        ready = wait(list(connections), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(connections.values())} gave no result")
        for connection in ready:
            rank = connections.pop(connection)
            try:
                has_failed, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                processes[rank].join(_EXIT_S)
                raise RuntimeError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if has_failed:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return results


def _stacks(processes: Sequence[Any], folder: Path) -> str:
    """Where the ranks that live stand, in words. They write it themselves, on a signal."""
    living = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in living:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(_STACKS_S)
    texts = [(rank, folder / f"stack-{rank}") for rank in living]
    return "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in texts if file.exists())


def _run_rank(
    connection: Connection,
    environment: dict[str, str],
    store: str,
    backend: str | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(environment)
    torch.set_num_threads(1)
    folder = Path(store.removeprefix("file://")).parent
    faulthandler.register(signal.SIGUSR1, (folder / f"stack-{environment['RANK']}").open("w"))
    try:
        if backend is not None:
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size)
        answer = pickle.dumps((False, function(*args)))
        if backend is not None:
            dist.barrier()
    except BaseException:  # of any kind, SystemExit too: the launcher raises it again
        answer = pickle.dumps((True, traceback.format_exc()))
    # Plain bytes: torch would send a tensor as shared memory, which ends with this process.
    connection.send_bytes(answer)
    connection.close()
    os._exit(0)
