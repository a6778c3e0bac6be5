"""The process that owns a lab's namespaces and processes, and takes them along when it ends.

A process of its own, because only one without threads may enter a user namespace, and because something must clean up
when the lab itself is killed. It lives as long as the lab's end of the socket is open: [Note: Leaving nothing behind].
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from laconic.lab import linux, processes, stale
from laconic.lab.channel import Channel
from laconic.lab.wire import node_address
from laconic.lab.worker import EVENTS_FILE, FAILURE_FILE, FOLDER_VARIABLE

if TYPE_CHECKING:
    from laconic.lab.network import Network

_PATIENCE_S = 2.0  # between one node's end in failure and the end of the others, so that each can say what it saw
_SETTLE_S = 1.0  # between the first failure of a rank and the SIGTERM to all ranks


class _LabGone(Exception):
    """The lab's end of the socket is closed."""


class _Run:
    """N agents, one per node, until all have ended or are to end."""

    def __init__(self, keeper: "Keeper", request: dict[str, Any], fds: list[int]) -> None:
        self._keeper = keeper
        self._grace_s: float = request["grace_s"]
        self._agents: dict[int, int] = {}  # pid -> node
        self._exit_codes: list[int | None] = [None] * len(request["commands"])
        self._workers: dict[int, dict[str, Any]] = {}  # pidfd -> rank, node, local_rank, pid
        self._failed_in_python: set[int] = set()  # pids of ranks that will explain their end themselves
        self._failure: dict[str, Any] | None = None
        self._give_up_at = float("inf")  # when the nodes that still run are ended
        self._started = time.monotonic()
        for node, command in enumerate(request["commands"]):
            self._start(node, command, request, fds[2 * node : 2 * node + 2])

    def _start(self, node: int, command: list[str], request: dict[str, Any], fds: list[int]) -> None:
        env = request["env"] | request["node_env"][node]
        env |= {stale.OWNER_VARIABLE: self._keeper.owner, FOLDER_VARIABLE: str(self._keeper.folder)}
        try:
            with self._keeper.inside(node):
                agent = subprocess.Popen(
                    command, env=env, cwd=request["cwd"], stdin=subprocess.DEVNULL, stdout=fds[0], stderr=fds[1],
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            os.write(fds[1], f"cannot start {command[0]}: {error}\n".encode())
            self._ended(node, 127)
            return
        agent.returncode = 0  # `_reap` waits for it; Popen must not
        self._agents[agent.pid] = node

    def _ended(self, node: int, exit_code: int) -> None:
        self._exit_codes[node] = exit_code
        if exit_code != 0:
            self._give_up_at = min(self._give_up_at, time.monotonic() + _PATIENCE_S)

    def wait(self) -> dict[str, Any]:
        """Serve the run to its end and describe it."""
        stopped = False
        while self._agents and not stopped and self._failure is None and time.monotonic() < self._give_up_at:
            stopped = self._wait_for_something()
            self._reap()
        if self._agents:
            self._end_agents(settle_s=_SETTLE_S if self._failure else 0.0)
        wall_s = time.monotonic() - self._started
        processes.kill_descendants()  # also what a script left in the background
        self._reap()
        self._note_failure()
        for pidfd in self._workers:
            os.close(pidfd)
        return {"exit_codes": self._exit_codes, "failure": self._failure, "wall_s": wall_s, "stopped": stopped}

    def _wait_for_something(self) -> bool:
        """Sleep until an event, and say whether the lab wants the run to end."""
        keeper = self._keeper
        sources = [keeper.channel.fileno(), keeper.wakeup, keeper.events, *self._workers]
        ready, _, _ = select.select(sources, [], [], 0.25)
        self._look_at_workers()
        self._note_failure()
        if keeper.wakeup in ready:
            os.read(keeper.wakeup, 4096)
        if keeper.channel.fileno() in ready:
            return keeper.next_request()[0]["command"] == "stop"
        return False

    def _look_at_workers(self) -> None:
        """Read what the ranks said, and see which have ended."""
        ended = select.select(list(self._workers), [], [], 0)[0]  # first: what a rank says, it says before it ends
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._keeper.events, 65536).splitlines():
                worker = json.loads(line)
                if worker["event"] == "failed":
                    self._failed_in_python.add(worker["pid"])
                else:
                    with contextlib.suppress(ProcessLookupError):
                        self._workers[os.pidfd_open(worker["pid"])] = worker
        for pidfd in ended:
            worker = self._workers.pop(pidfd)
            os.close(pidfd)
            status = processes.exit_status(worker["pid"])
            if status and worker["pid"] not in self._failed_in_python:
                self._note_death(worker, os.waitstatus_to_exitcode(status))

    def _note_death(self, worker: dict[str, Any], exit_code: int) -> None:
        """Take note of a rank that died without a word: see [Note: Whose traceback is shown]."""
        if exit_code == -signal.SIGTERM and self._note_failure():
            return  # sent by torchrun, because of that failure
        reason = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exited with code {exit_code}"
        self._failure = {key: worker[key] for key in ("rank", "node", "local_rank")} | {
            "exit_code": exit_code,
            "error": f"{reason}, without a Python exception",
        }
        with contextlib.suppress(FileExistsError), open(self._keeper.folder / FAILURE_FILE, "x") as file:
            json.dump(self._failure, file)  # so that the others, whose connections just broke, stay quiet

    def _note_failure(self) -> bool:
        """Read what the first failing rank wrote, if any did."""
        if self._failure is None:
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # not there, or not yet whole
                self._failure = json.loads((self._keeper.folder / FAILURE_FILE).read_text())
        return self._failure is not None

    def _reap(self) -> None:
        """Wait for everything that has ended: agents, and orphans, which are ours."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._agents:
                    self._ended(self._agents.pop(pid), os.waitstatus_to_exitcode(status))

    def _end_agents(self, settle_s: float) -> None:
        """End the run: SIGTERM to the ranks, SIGKILL to those that do not heed it, and the agents last.

        The agents are stopped meanwhile, or each would report at length that its ranks are ending.
        """
        processes.send(set(self._agents), signal.SIGSTOP)
        # Before any signal is sent: how a rank ends by itself may explain why others failed.
        for number, wait_s in ((None, settle_s), (signal.SIGTERM, self._grace_s)):
            if number is not None:
                processes.send(processes.descendants() - set(self._agents), number)
            deadline = time.monotonic() + wait_s
            while processes.descendants() - set(self._agents) and time.monotonic() < deadline:
                time.sleep(0.02)
                if number is None:
                    self._look_at_workers()
                if select.select([self._keeper.channel.fileno()], [], [], 0)[0]:
                    self._keeper.next_request()  # a second "stop" changes nothing, but a closed socket ends us now
        processes.kill_descendants()
        while self._agents:
            pid, _ = os.waitpid(-1, 0)
            self._agents.pop(pid, None)  # its exit code stays None: it was ended


class Keeper:
    """Serves one lab."""

    def __init__(self, channel: Channel, folder: Path, owner: str, network: "Network | None") -> None:
        self.channel = channel
        self.folder = folder
        self.owner = owner
        self._network = network
        os.mkfifo(folder / EVENTS_FILE)
        self.events = os.open(folder / EVENTS_FILE, os.O_RDWR | os.O_NONBLOCK)  # read-write: never at end of file
        self.wakeup, write_end = os.pipe()
        os.set_blocking(self.wakeup, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def inside(self, node: int) -> contextlib.AbstractContextManager[None]:
        return self._network.inside(node) if self._network else contextlib.nullcontext()

    def next_request(self) -> tuple[dict[str, Any], list[int]]:
        received = self.channel.receive()
        if received is None:
            raise _LabGone
        return received

    def serve(self) -> NoReturn:
        while True:
            request, fds = self.next_request()
            if request["command"] == "run":
                self.channel.send(self._run(request, fds))
            elif request["command"] == "rate":
                if self._network:
                    self._network.set_rate(request["bits_per_s"])
                self.channel.send({})
            else:
                assert request["command"] == "stop"  # crossed the answer to the run it was meant for

    def _run(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        (self.folder / FAILURE_FILE).unlink(missing_ok=True)
        nodes = range(len(request["commands"]))
        before = [self._network.counters(node) for node in nodes] if self._network else None
        try:
            run = _Run(self, request, fds)
        finally:
            for fd in fds:
                os.close(fd)
        answer = run.wait()
        if self._network and before:
            moved = [self._network.counters(node) - before[node] for node in nodes]
            answer["bytes"] = [{"sent_bytes": node.sent, "received_bytes": node.received} for node in moved]
        return answer


def _enter_namespaces(*, isolated: bool) -> None:
    """Leave the caller's network, by right or through a user namespace; `isolated` children get PIDs of their own.

    Raises: OSError if the kernel allows neither.
    """
    user, group = os.geteuid(), os.getegid()
    flags = linux.CLONE_NEWNET | linux.CLONE_NEWNS
    try:
        linux.unshare(flags)
    except PermissionError:
        linux.unshare(flags | linux.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    linux.keep_mounts_private()
    if isolated:
        linux.unshare(linux.CLONE_NEWPID)


def _name_nodes(folder: Path, nodes: int) -> None:
    """Let addresses resolve, to node0, node1, ..., without a name server, for which torch would wait, then complain."""
    addresses = {node_address(node): f"node{node}" for node in range(nodes)}
    hosts = "".join(f"{address} {name}\n::ffff:{address} {name}\n" for address, name in addresses.items())
    with contextlib.suppress(OSError):  # no /etc/hosts, or no right to mount over it: the names stay unknown
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
        linux.bind_mount(folder / "hosts", Path("/etc/hosts"))


def _serve(channel: Channel, folder: Path, owner: str, options: dict[str, Any]) -> None:
    """Make the network if there is to be one, say how it went, and serve the lab until it is gone."""
    network = None
    if options["wire"]:
        try:
            from pyroute2 import NetlinkError  # needed for a wire only

            from laconic.lab.network import Network
        except ImportError as error:
            channel.send({"missing": str(error)})
            return
        try:
            network = Network(options["nodes"])
            _name_nodes(folder, options["nodes"])
            network.set_rate(options["rate_bits_per_s"])
        except NetlinkError as error:
            channel.send({"refused": f"netlink: {os.strerror(error.code)}"})
            return
        except OSError as error:
            channel.send({"refused": error.strerror or str(error)})
            return
    with contextlib.suppress(_LabGone, BrokenPipeError):
        channel.send({"folder": str(folder)})
        Keeper(channel, folder, owner, network).serve()


def _serve_isolated(channel: Channel, folder: Path, owner: str, options: dict[str, Any]) -> None:
    """Serve from the first process of a new PID namespace: when it ends, the kernel ends all others in it."""
    first = os.fork()
    if first:
        channel.close()
        os.waitpid(first, 0)
        return
    try:
        linux.die_with_parent(signal.SIGKILL)
        try:
            linux.mount_own_proc()
        except OSError as error:
            channel.send({"refused_proc": error.strerror})
        else:
            _serve(channel, folder, owner, options)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    options = json.loads(sys.argv[2])
    # Handlers, not SIG_IGN, which the agents would inherit: this process lives exactly as long as its lab.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    stale.clean()
    owner = stale.identity()
    folder = stale.make_folder(owner)
    isolated = options["wire"] and options["isolated"]
    try:
        if options["wire"]:
            try:
                _enter_namespaces(isolated=isolated)
            except OSError as error:
                channel.send({"refused": error.strerror or str(error)})
                return
        if isolated:
            _serve_isolated(channel, folder, owner, options)
        else:
            linux.become_subreaper()
            _serve(channel, folder, owner, options)
    finally:
        if not isolated:
            processes.kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
