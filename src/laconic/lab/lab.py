"""A lab: N emulated nodes that torchrun believes in."""

import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from laconic.lab.channel import Channel
from laconic.lab.counters import INTERFACE_VARIABLE
from laconic.lab.rate import check_rate
from laconic.lab.wire import INTERFACE, node_address

_MAX_NODES = 100  # two descriptors of each travel in one message
_PORT = 29500  # any will do: a node's ports are its own
_KEPT_LINES = 10_000

# The keeper must not import torch, whose libraries start threads, for only a process without threads may enter a user
# namespace (and the import takes seconds). So it sees a package `laconic` whose __init__ is not run.
_START_KEEPER = """
import sys, types
package = types.ModuleType("laconic")
package.__path__ = [sys.argv.pop(1)]
sys.modules["laconic"] = package
from laconic.lab.keeper import main
main()
"""

_REFUSED = """\
this machine does not let you make an emulated wire ({reason}). Three ways out:
- run as root (in a container: docker run --privileged);
- allow user namespaces: sysctl -w user.max_user_namespaces=10000, and on Ubuntu also
  sysctl -w kernel.apparmor_restrict_unprivileged_userns=0;
- do without: --no-wire (in Python, wire=False) runs the same ranks on loopback, as logical nodes without a limit."""


class LabUnavailable(RuntimeError):
    """This machine cannot make the lab that was asked for; the message says what can be done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeResult:
    """What became of one node in a run."""

    exit_code: int | None
    """Of the node's torchrun, negative for a signal; None if the lab ended it."""
    sent_bytes: int | None
    """Bytes that left the node's interface during the run, headers included; None without a wire."""
    received_bytes: int | None
    """Bytes that entered it."""
    output: str
    """The last lines of its stdout and stderr together, if the run kept them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The rank that failed first; the others are its victims."""

    rank: int
    """Global rank."""
    node: int
    """Its node."""
    local_rank: int
    """Its rank in the node."""
    exit_code: int
    """Of its process; negative for a signal."""
    error: str
    """Its traceback, or in words how it ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What became of a run."""

    nodes: tuple[NodeResult, ...]
    """One per node, in order."""
    failure: Failure | None
    """The first rank to fail, if a rank failed."""
    wall_s: float
    """From the start of the first torchrun to the end of the last."""
    timed_out: bool
    """Whether it was ended for running longer than its timeout."""

    @property
    def exit_code(self) -> int:
        """As a shell has it: 0 if all went well, 124 after a timeout, 128 + n for signal n, or the first failure's."""
        if self.timed_out:
            return 124
        codes = [self.failure.exit_code] if self.failure else [node.exit_code or 0 for node in self.nodes]
        first = next((code for code in codes if code != 0), 0)
        return 128 - first if first < 0 else first


class Lab:
    """N nodes on one machine, joined by a wire of a given rate, for as long as the `with` block lasts.

        with Lab(nodes=2, rate_bits_per_s=200e6) as lab:
            result = lab.run(["train.py", "--steps", "10"], local=2)

    Every node is a network namespace of its own (see [Note: The wire]); devices and files are shared. Nothing is left
    behind, however the block or this process ends (see [Note: Leaving nothing behind]). Use it from one thread.
    Raises: ValueError for a bad argument; on entry, LabUnavailable if the machine cannot make a wire.
    """

    def __init__(self, *, nodes: int = 2, rate_bits_per_s: float | None = None, wire: bool = True) -> None:
        """Without a rate the wire is as fast as the machine; with `wire=False` all nodes share loopback."""
        if not 1 <= nodes <= _MAX_NODES:
            raise ValueError(f"nodes={nodes} is not possible; a lab has 1 to {_MAX_NODES} nodes")
        if rate_bits_per_s is not None and not wire:
            raise ValueError("a rate needs a wire; drop the rate, or wire=False (--no-wire)")
        self.nodes = nodes
        self.wire = wire
        self._rate_bits_per_s = check_rate(rate_bits_per_s)
        self._keeper: subprocess.Popen[bytes] | None = None
        self._folder = Path()  # the keeper's, which it removes at the end

    @property
    def rate_bits_per_s(self) -> float | None:
        """Of every node's link, in each direction; None if it is not limited."""
        return self._rate_bits_per_s

    def __enter__(self) -> Self:
        if sys.platform != "linux":
            raise LabUnavailable(f"the lab needs Linux, this is {sys.platform}")
        try:
            answer = self._start_keeper(isolated=True)
            if "refused_proc" in answer:  # usual in containers; processes are then found and ended one by one
                answer = self._start_keeper(isolated=False)
        except BaseException:
            self.close()
            raise
        if "missing" in answer:
            raise LabUnavailable(f"the wire needs pyroute2 ({answer['missing']}); pip install 'laconic[train]'")
        if "refused" in answer:
            raise LabUnavailable(_REFUSED.format(reason=answer["refused"]))
        return self

    def _start_keeper(self, *, isolated: bool) -> dict[str, Any]:
        """Start a keeper and return its first word: its folder, or why it has ended again."""
        options = {
            "nodes": self.nodes, "rate_bits_per_s": self._rate_bits_per_s, "wire": self.wire, "isolated": isolated,
        }  # fmt: skip
        ours, theirs = socket.socketpair()
        with theirs:
            package = str(Path(__file__).parent.parent)
            command = [sys.executable, "-c", _START_KEEPER, package, str(theirs.fileno()), json.dumps(options)]
            # In a session of its own, so that Ctrl-C reaches this process alone, which then ends the run in order.
            self._keeper = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._channel = Channel(ours)
        received = self._channel.receive()
        answer = received[0] if received else {}
        if "folder" in answer:
            self._folder = Path(answer["folder"])
            return answer
        self.close()
        if not answer:
            raise LabUnavailable("the lab's keeper ended while it set up; its error is above")
        return answer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything in the lab, and return when it has ended."""
        if self._keeper is not None:
            self._channel.close()
            self._keeper.wait()
            self._keeper = None

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        if self._keeper is None:
            raise ValueError("this lab is not open; use it in a `with` block")
        self._channel.send(request, fds)

    def _answer(self) -> dict[str, Any]:
        received = self._channel.receive()
        if received is None:
            raise LabUnavailable("the lab's keeper was killed, and everything in the lab with it")
        return received[0]

    def set_rate(self, bits_per_s: float | None) -> None:
        """Limit every link, between runs, to another rate; None takes the limit away.

        Raises: ValueError if the rate is out of range or the lab has no wire.
        """
        if not self.wire:
            raise ValueError("a lab without a wire has no rate; make it with wire=True")
        check_rate(bits_per_s)
        self._ask({"command": "rate", "bits_per_s": bits_per_s})
        self._answer()
        self._rate_bits_per_s = bits_per_s

    def run(
        self, script: Sequence[str], *, local: int = 1, env: Mapping[str, str] | None = None,
        timeout_s: float | None = None, show: bool = True, grace_s: float = 5.0,
    ) -> RunResult:  # fmt: skip
        """Run `SCRIPT ARGS...` or `-m MODULE ARGS...` under one torchrun per node, `local` ranks each.

        When a rank fails, all are ended: SIGTERM, and SIGKILL after `grace_s`. For the rest see `execute`.
        """
        if local < 1:
            raise ValueError(f"local={local} is not possible; a node has at least one rank")
        if not script or (script[0] == "-m" and len(script) < 2):
            raise ValueError(f"script={list(script)!r} names none; give [SCRIPT, ARGS...] or ['-m', MODULE, ARGS...]")
        worker = str(Path(__file__).with_name("worker.py"))
        address, port = (node_address(0), _PORT) if self.wire else ("127.0.0.1", _free_port())
        commands = [
            [
                sys.executable, "-m", "torch.distributed.run",
                f"--nnodes={self.nodes}", f"--node-rank={node}", f"--nproc-per-node={local}",
                f"--master-addr={address}", f"--master-port={port}", f"--log-dir={self._folder / 'logs'}",
                worker, *script,
            ]
            for node in range(self.nodes)
        ]  # fmt: skip
        threads = max(1, (os.cpu_count() or 1) // (self.nodes * local))
        env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), **(env or {})}
        return self.execute(commands, env=env, timeout_s=timeout_s, show=show, grace_s=grace_s)

    def execute(
        self, commands: Sequence[Sequence[str]], *, env: Mapping[str, str] | None = None,
        timeout_s: float | None = None, show: bool = True, grace_s: float = 5.0,
    ) -> RunResult:  # fmt: skip
        """Run one command per node, at once, and wait for all; the failure of one soon ends the others.

        `env` is added to this process's environment. With `show`, node 0 writes straight to our stdout and stderr, so
        that it sees a terminal where there is one, and lines of the others are printed with a prefix. What is not
        written straight through is kept in the result (of each node, the last 10,000 lines). When the run must end
        early, what the commands started gets SIGTERM, and everything is killed after `grace_s`. A KeyboardInterrupt
        ends the run before it leaves here.
        """
        if len(commands) != self.nodes:
            raise ValueError(f"{len(commands)} commands were given for {self.nodes} nodes; give one per node")
        request = {
            "command": "run",
            "commands": [list(command) for command in commands],
            "env": {**os.environ, **(env or {})},
            "node_env": [self._node_env(node) for node in range(self.nodes)],
            "cwd": os.getcwd(),
            "grace_s": grace_s,
        }
        sys.stdout.flush()
        sys.stderr.flush()
        outputs = [_Output(node, show=show) for node in range(self.nodes)]
        try:
            self._ask(request, [fd for output in outputs for fd in output.fds])
        finally:
            for output in outputs:
                output.start()
        answer, timed_out = self._wait(timeout_s)
        kept = [output.finish() for output in outputs]
        moved = answer.get("bytes", [{"sent_bytes": None, "received_bytes": None}] * self.nodes)
        nodes = [
            NodeResult(exit_code=code, output=output, **count)
            for code, output, count in zip(answer["exit_codes"], kept, moved, strict=True)
        ]
        failure = Failure(**answer["failure"]) if answer["failure"] else None
        return RunResult(nodes=tuple(nodes), failure=failure, wall_s=answer["wall_s"], timed_out=timed_out)

    def _node_env(self, node: int) -> dict[str, str]:
        interface = INTERFACE if self.wire else "lo"
        env = {"LACONIC_LAB_NODE": str(node), "GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        if self.wire:
            # NCCL would otherwise recognise its own machine, and go round the wire through shared memory.
            env |= {INTERFACE_VARIABLE: INTERFACE, "NCCL_HOSTID": f"laconic-node-{node}", "NCCL_IB_DISABLE": "1"}
        else:
            env[INTERFACE_VARIABLE] = ""
        return env

    def _wait(self, timeout_s: float | None) -> tuple[dict[str, Any], bool]:
        """The keeper's account of the run, and whether it took too long."""
        timed_out = False
        try:
            if not select.select([self._channel], [], [], timeout_s)[0]:
                timed_out = True
                self._ask({"command": "stop"})
            return self._answer(), timed_out
        except BaseException:  # also what a signal handler raises; a second one, raised below, ends the run at once
            self._ask({"command": "stop"})
            self._answer()
            raise


class _Output:
    """Where one node's stdout and stderr go."""

    def __init__(self, node: int, *, show: bool) -> None:
        self._prefix = f"[node {node}] "
        self._show = show
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._threads: list[threading.Thread] = []
        self._write_ends: list[int] = []
        if show and node == 0:
            self.fds = [1, 2]
            return
        for stream in (sys.stdout, sys.stderr):
            read_end, write_end = os.pipe()
            self._write_ends.append(write_end)
            self._threads.append(threading.Thread(target=self._pump, args=(read_end, stream), daemon=True))
        self.fds = self._write_ends

    def _pump(self, read_end: int, stream: IO[str]) -> None:
        with open(read_end, encoding="utf-8", errors="replace") as pipe:
            for line in pipe:
                self._lines.append(line)
                if self._show:
                    stream.write(f"{self._prefix}{line}")
                    stream.flush()

    def start(self) -> None:
        """Begin to read. Our copies of the write ends are closed, so that the pipes end with their last writer."""
        for write_end in self._write_ends:
            os.close(write_end)
        for thread in self._threads:
            thread.start()

    def finish(self) -> str:
        for thread in self._threads:
            thread.join()
        return "".join(self._lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
