"""A lab: N emulated nodes, which look like N machines to torchrun."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, Self

from laconic.lab.channel import Channel
from laconic.lab.counters import INTERFACE_VARIABLE
from laconic.lab.rate import check_rate
from laconic.lab.wire import INTERFACE, node_address
from laconic.lab.worker import NODE_VARIABLE

_MAX_NODES = 100  # one message carries two descriptors of every node, and at most 253 descriptors
_PORT = 29500  # every node has all ports to itself, so any port is free
_KEPT_LINES = 10_000  # of the output of each node
_KILLED = "the lab's keeper was killed, and everything in the lab with it"

# The keeper must not import torch: the import takes seconds, and torch's libraries start threads, but only a process
# without threads may enter a user namespace. So the keeper makes a package `laconic` without running its __init__.
_START_KEEPER = """
import sys, types
package = types.ModuleType("laconic")
package.__path__ = [sys.argv.pop(1)]
sys.modules["laconic"] = package
from laconic.lab.keeper import main
main()
"""


class LabUnavailable(RuntimeError):
    """The machine cannot make this lab, or its keeper was killed; the message says what the user can do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeResult:
    """The outcome of a run on one node."""

    exit_code: int | None
    """The exit code of the node's command, negative for a signal; None if the lab ended the command."""
    sent_bytes: int | None
    """The bytes that left the node's interface during the run, headers included; None without a wire."""
    received_bytes: int | None
    """The bytes that entered the node's interface during the run, headers included; None without a wire."""
    output: str
    """The last lines of the node's stdout and stderr together; empty if the node wrote to the terminal itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The first rank that failed. Its failure made the other ranks fail."""

    rank: int
    """The rank among all ranks of the lab."""
    node: int
    local_rank: int
    exit_code: int
    """The exit code of the rank's process, negative for a signal."""
    error: str
    """The traceback, or a phrase that says how the process ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The outcome of a run."""

    nodes: tuple[NodeResult, ...]
    failure: Failure | None
    """None if no rank failed, or if `Lab.execute` ran commands without ranks."""
    wall_s: float
    """The seconds from the start of the first command to the end of the last."""
    timed_out: bool
    """Whether the lab ended the run because it took longer than `timeout_s`."""

    @property
    def exit_code(self) -> int:
        """The exit code for a shell: 0, 124 after a timeout, 128 + n after signal n, or that of the first failure."""
        if self.timed_out:
            return 124
        codes = [self.failure.exit_code] if self.failure else [node.exit_code or 0 for node in self.nodes]
        first = next((code for code in codes if code != 0), 0)
        return 128 - first if first < 0 else first


class Lab:
    """N emulated nodes on one machine, joined by a wire of a given rate. They exist inside a `with` block.

        with Lab(nodes=2, rate_bits_per_s=200e6) as lab:
            result = lab.run(["train.py", "--steps", "10"], local=2)

    Every node is a network namespace (see [Note: The wire]); the nodes share devices and files. The lab leaves nothing
    behind, however the block or this process ends (see [Note: Leaving nothing behind]). Use a lab from one thread.

    Args:
        nodes: the number of nodes, 1 to 100.
        rate_bits_per_s: the rate of every link in each direction; None does not limit it.
        wire: if False, all nodes share the loopback interface and nothing is limited or measured.

    Raises:
        ValueError: an argument is out of range, or there is a rate without a wire.
        LabUnavailable: on entry, if the machine cannot make a wire.
    """

    def __init__(self, *, nodes: int = 2, rate_bits_per_s: float | None = None, wire: bool = True) -> None:
        if not 1 <= nodes <= _MAX_NODES:
            raise ValueError(f"nodes={nodes} is not possible; a lab has 1 to {_MAX_NODES} nodes")
        if rate_bits_per_s is not None and not wire:
            raise ValueError("a rate needs a wire; drop the rate, or wire=False (--no-wire)")
        self.nodes = nodes
        self.wire = wire
        self.rate_bits_per_s = check_rate(rate_bits_per_s)
        self._is_warm = False
        self._keeper: subprocess.Popen[bytes] | None = None
        self._folder = Path()  # the keeper's folder, which it removes when the lab ends

    def __enter__(self) -> Self:
        if sys.platform != "linux":
            raise LabUnavailable(f"the lab needs Linux, this is {sys.platform}")
        try:
            answer = self._start_keeper()
            if answer["refused"]:
                raise LabUnavailable(answer["refused"])
        except BaseException:
            self.close()
            raise
        self._folder = Path(answer["folder"])
        return self

    def _start_keeper(self) -> dict[str, Any]:
        """Start a keeper, and return its first message: its folder, or the reason why it has ended."""
        options = {"nodes": self.nodes, "rate_bits_per_s": self.rate_bits_per_s, "wire": self.wire}
        own_end, keeper_end = socket.socketpair()
        with keeper_end:
            package = str(Path(__file__).parent.parent)
            command = [sys.executable, "-c", _START_KEEPER, package, str(keeper_end.fileno()), json.dumps(options)]
            # The keeper gets its own session, so Ctrl-C reaches this process alone, which then ends the run in order.
            self._keeper = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[keeper_end.fileno()], start_new_session=True
            )
        self._channel = Channel(own_end)
        return self._receive("the lab's keeper ended while it set up; its error is above")

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything in the lab, and wait until it has ended. A closed lab may be closed again."""
        if self._keeper is not None:
            self._channel.close()
            self._keeper.wait()
            self._keeper = None

    def _send(self, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self._keeper is None:
            raise ValueError("this lab is not open; use it in a `with` block")
        try:
            self._channel.send(request, fds)
        except ConnectionError:
            raise LabUnavailable(_KILLED) from None

    def _receive(self, failure: str = _KILLED) -> dict[str, Any]:
        try:
            return self._channel.receive()[0]
        except EOFError:
            raise LabUnavailable(failure) from None

    def set_rate(self, bits_per_s: float | None) -> None:
        """Limit every link to another rate, in bits per second, between two runs; None removes the limit.

        Raises: ValueError if the rate is out of range, or if the lab has no wire or is not open; LabUnavailable if the
            keeper was killed.
        """
        if not self.wire:
            raise ValueError("a lab without a wire has no rate; make it with wire=True")
        self.rate_bits_per_s = check_rate(bits_per_s)
        self._send({"command": "rate", "bits_per_s": bits_per_s})
        self._receive()

    def warm_up(self, modules: Sequence[str]) -> None:
        """Begin to import `modules` in one process, whose forks the ranks of `run` are from now on: [Note: Warm ranks].

        Ranks then have no torchrun, but its variables. Call this once.
        """
        self._send({"command": "warm", "modules": list(modules), "env": dict(os.environ), "cwd": os.getcwd()})
        self._receive()
        self._is_warm = True

    def run(
        self, script: Sequence[str], *, local: int = 1, env: Mapping[str, str] | None = None,
        timeout_s: float | None = None, show: bool = True, grace_s: float = 5.0,
    ) -> RunResult:  # fmt: skip
        """Run `SCRIPT ARGS...` or `-m MODULE ARGS...` under one torchrun per node, with `local` ranks each.

        When a rank fails, the lab ends all ranks. For the other arguments see `execute`.

        Raises: ValueError if `local` is less than 1 or `script` names no script or module; otherwise as `execute`.
        """
        if local < 1:
            raise ValueError(f"local={local} is not possible; a node has at least one rank")
        if not script or (script[0] == "-m" and len(script) < 2):
            raise ValueError(f"script={list(script)!r} names none; give [SCRIPT, ARGS...] or ['-m', MODULE, ARGS...]")
        worker = str(Path(__file__).with_name("worker.py"))
        address, port = (node_address(0), _PORT) if self.wire else ("127.0.0.1", _free_port())
        threads = max(1, (os.cpu_count() or 1) // (self.nodes * local))
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), **(env or {})}
        options: dict[str, Any] = {"env": env, "timeout_s": timeout_s, "show": show, "grace_s": grace_s}
        if self._is_warm:
            ranks = {"local": local, "nodes": self.nodes, "address": address, "port": port}
            return self._run([list(script)] * self.nodes, warm_ranks=ranks, **options)
        commands = [
            [
                sys.executable, "-m", "laconic.lab.agent",
                f"--nnodes={self.nodes}", f"--node-rank={node}", f"--nproc-per-node={local}",
                f"--master-addr={address}", f"--master-port={port}", f"--log-dir={self._folder / 'logs'}",
                worker, *script,
            ]
            for node in range(self.nodes)
        ]  # fmt: skip
        return self._run(commands, **options)

    def execute(
        self, commands: Sequence[Sequence[str]], *, env: Mapping[str, str] | None = None,
        timeout_s: float | None = None, show: bool = True, grace_s: float = 5.0,
    ) -> RunResult:  # fmt: skip
        """Run one command per node, all at once, and wait for them; soon after one fails, end the others.

        A KeyboardInterrupt ends the run before it leaves this method.

        Args:
            commands: a command and its arguments for each node.
            env: variables to add to this process's environment.
            timeout_s: the seconds after which the lab ends the run.
            show: if True, node 0 writes directly to this process's stdout and stderr, and lines of other nodes appear
                there with a prefix. The result keeps the last 10,000 lines of each node that does not write directly.
            grace_s: the seconds from SIGTERM to SIGKILL when a run must end early.

        Raises:
            ValueError: there is not one command per node, or the lab is not open.
            LabUnavailable: the keeper was killed.
        """
        if len(commands) != self.nodes:
            raise ValueError(f"{len(commands)} commands were given for {self.nodes} nodes; give one per node")
        return self._run(commands, env=env, timeout_s=timeout_s, show=show, grace_s=grace_s)

    def _run(
        self, commands: Sequence[Sequence[str]], *, env: Mapping[str, str] | None, timeout_s: float | None,
        show: bool, grace_s: float, warm_ranks: dict[str, Any] | None = None,
    ) -> RunResult:  # fmt: skip
        """See `execute`. With `warm_ranks` the commands are scripts for forks of the warm process."""
        request = {
            "command": "run",
            "warm_ranks": warm_ranks,
            "commands": [list(command) for command in commands],
            "env": [{**os.environ, **(env or {}), **self._node_env(node)} for node in range(self.nodes)],
            "cwd": os.getcwd(),
            "grace_s": grace_s,
        }
        sys.stdout.flush()
        sys.stderr.flush()
        outputs = [_Output(node, show=show) for node in range(self.nodes)]
        try:
            self._send(request, [fd for output in outputs for fd in output.fds])
        finally:
            for output in outputs:
                output.start()
        answer, timed_out = self._wait(timeout_s)
        kept = [output.finish() for output in outputs]
        nodes = tuple(NodeResult(**node, output=output) for node, output in zip(answer["nodes"], kept, strict=True))
        failure = Failure(**answer["failure"]) if answer["failure"] else None
        return RunResult(nodes=nodes, failure=failure, wall_s=answer["wall_s"], timed_out=timed_out)

    def _node_env(self, node: int) -> dict[str, str]:
        interface = INTERFACE if self.wire else "lo"
        env = {NODE_VARIABLE: str(node), "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        if not self.wire:
            return env | {INTERFACE_VARIABLE: ""}
        # Otherwise NCCL would see that all nodes are one machine, and use shared memory instead of the wire.
        return env | {INTERFACE_VARIABLE: INTERFACE, "NCCL_HOSTID": f"laconic-node-{node}", "NCCL_IB_DISABLE": "1"}

    def _wait(self, timeout_s: float | None) -> tuple[dict[str, Any], bool]:
        """Return the keeper's report about the run, and whether the run took longer than `timeout_s`."""
        try:
            in_time = bool(wait([self._channel.fileno()], timeout_s))
            if not in_time:
                self._send({"command": "stop"})
            return self._receive(), not in_time
        except LabUnavailable:
            raise
        except BaseException:  # a KeyboardInterrupt, or the exception of another signal handler: end the run first
            self._send({"command": "stop"})
            self._receive()
            raise


class _Output:
    """The stdout and stderr of one node: pipes that threads read, or this process's own stdout and stderr."""

    def __init__(self, node: int, *, show: bool) -> None:
        self._prefix = f"[node {node}] " if show else None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._threads: list[threading.Thread] = []
        self.fds = [1, 2]
        if show and node == 0:
            return
        for index, stream in enumerate((sys.stdout, sys.stderr)):
            read_end, self.fds[index] = os.pipe()
            self._threads.append(threading.Thread(target=self._pump, args=(read_end, stream), daemon=True))

    def _pump(self, read_end: int, stream: IO[str]) -> None:
        with open(read_end, encoding="utf-8", errors="replace") as pipe:
            for line in pipe:
                self._lines.append(line)
                if self._prefix:
                    stream.write(f"{self._prefix}{line}")
                    stream.flush()

    def start(self) -> None:
        """Begin to read. Close this process's write ends first, so that a pipe ends when its last writer ends."""
        # Without threads the descriptors are this process's own stdout and stderr, which stay open.
        for thread, write_end in zip(self._threads, self.fds, strict=False):
            os.close(write_end)
            thread.start()

    def finish(self) -> str:
        """Wait for the end of the output, and return its last lines."""
        for thread in self._threads:
            thread.join()
        return "".join(self._lines)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
