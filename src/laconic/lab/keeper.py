"""The keeper: the process that owns the namespaces and processes of a lab, and ends them when the lab ends.

The keeper is a separate process for two reasons. Only a process without threads may enter a user namespace, and some
process must clean up after a killed lab. It lives while the lab's socket is open: [Note: Leaving nothing behind].
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

from laconic.extras import how_to_install
from laconic.lab import linux, processes
from laconic.lab.channel import Channel
from laconic.lab.wire import LabNetwork, node_address
from laconic.lab.worker import EVENTS_FILE, FAILURE_FILE, FOLDER_VARIABLE, claim_failure

_PATIENCE_S = 2.0  # from one node's failure to the end of the other nodes, so that each can print its own error
_TERM_DELAY_S = 1.0  # from the first failure of a rank to the SIGTERM of all ranks
_POLL_S, _END_POLL_S = 0.25, 0.02  # the longest sleeps while processes run, and while the keeper ends them
_PIPE_BYTES = 65536  # the capacity of a pipe, so that one read gets all events, and none in part
_CANNOT_START = 127  # the exit code of a shell for a command that it cannot start

_REFUSED = """\
this machine does not let you make an emulated wire ({reason}). Three ways out:
- run as root (in a container: docker run --privileged);
- allow user namespaces: sysctl -w user.max_user_namespaces=10000, and on Ubuntu also
  sysctl -w kernel.apparmor_restrict_unprivileged_userns=0;
- do without a wire: --no-wire (in Python, wire=False) runs the same ranks on loopback, without limit or counters."""


class _Run:
    """The commands of one run, one for each node, and the ranks that they start."""

    def __init__(self, keeper: "Keeper", request: dict[str, Any], fds: list[int]) -> None:
        self._keeper = keeper
        self._warm_ranks: dict[str, Any] | None = request["warm_ranks"]
        self._grace_s: float = request["grace_s"]
        self._agents: dict[int, tuple[int, int]] = {}  # PID of each command that still runs -> node, pidfd
        self._exit_codes: list[int | None] = [None] * len(request["commands"])
        self._ranks: dict[int, dict[str, Any]] = {}  # pidfd of each rank that still runs -> rank, node, local_rank, pid
        self._recorded: set[int] = set()  # PIDs of the ranks whose failure is recorded, by themselves or here
        self._failure: dict[str, Any] | None = None
        self._give_up_at = float("inf")  # the time.monotonic() at which to end the nodes that still run
        self._started = time.monotonic()
        for node, (command, env) in enumerate(zip(request["commands"], request["env"], strict=True)):
            self._start(node, command, env, request["cwd"], *fds[2 * node : 2 * node + 2])

    def _start(self, node: int, command: list[str], env: dict[str, str], cwd: str, stdout: int, stderr: int) -> None:
        env[FOLDER_VARIABLE] = str(self._keeper.folder)
        try:
            if self._warm_ranks is None:
                with self._keeper.inside(node):
                    pid = _start(command, env=env, cwd=cwd, stdout=stdout, stderr=stderr)
            else:
                request = {**self._warm_ranks, "node": node, "script": command, "env": env, "cwd": cwd}
                pid = self._keeper.start_warm(request, [stdout, stderr])
        except OSError as error:
            os.write(stderr, f"cannot start {command[0]}: {error}\n".encode())
            self._end_node(node, _CANNOT_START)
            return
        self._agents[pid] = node, os.pidfd_open(pid)

    def _end_node(self, node: int, exit_code: int) -> None:
        self._exit_codes[node] = exit_code
        if exit_code != 0:
            self._give_up_at = min(self._give_up_at, time.monotonic() + _PATIENCE_S)

    def wait(self) -> dict[str, Any]:
        """Wait for the end of the run, and return the outcome. End the run if a rank fails or the lab sends "stop"."""
        must_stop = False
        while self._agents and not must_stop and self._failure is None and time.monotonic() < self._give_up_at:
            must_stop = self._wait_for_event()
            self._reap()
        self._watch_ranks()  # before the first signal: the last agent may have told how a rank ended
        if self._agents:
            self._end_agents(delay_s=_TERM_DELAY_S if self._failure else 0.0)
        wall_s = time.monotonic() - self._started
        processes.kill_descendants(excluding=self._keeper.warm)  # a script may have left processes in the background
        self._reap()
        self._read_failure()
        for pidfd in self._ranks:
            os.close(pidfd)
        nodes = [{"exit_code": code, "sent_bytes": None, "received_bytes": None} for code in self._exit_codes]
        return {"nodes": nodes, "failure": self._failure, "wall_s": wall_s}

    def _wait_for_event(self) -> bool:
        """Sleep until an event, and return whether the lab wants the run to end."""
        channel, pidfds = self._keeper.channel, [pidfd for _, pidfd in self._agents.values()]
        sources: list[Any] = [channel, self._keeper.events, *self._ranks, *pidfds]
        ready = wait(sources, _POLL_S)  # not select.select, which takes no descriptor from 1,024 on
        self._watch_ranks()
        self._read_failure()
        return channel in ready and channel.receive()[0]["command"] == "stop"

    def _watch_ranks(self) -> None:
        """Read the events that the ranks have sent, and see which ranks have ended."""
        # Look for ends first: a rank sends its events before it ends, so the events of every ended rank are read below.
        ended: list[Any] = wait(list(self._ranks), 0)
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._keeper.events, _PIPE_BYTES).splitlines():
                rank = json.loads(line)
                match rank.pop("event"):
                    case "started":
                        with contextlib.suppress(ProcessLookupError):  # its agent will tell how it ended
                            self._ranks[os.pidfd_open(rank["pid"])] = rank
                    case "failed":
                        self._recorded.add(rank["pid"])
                    case "ended":
                        self._record_death(rank, rank.pop("exit_code"))
        for pidfd in ended:
            rank = self._ranks.pop(pidfd)
            os.close(pidfd)
            if status := processes.exit_status(rank["pid"]):
                self._record_death(rank, os.waitstatus_to_exitcode(status))

    def _record_death(self, rank: dict[str, int], exit_code: int) -> None:
        """Record the failure of a rank that ended without an event: see [Note: The first failing rank]."""
        pid = rank.pop("pid")
        if pid in self._recorded:
            return
        self._recorded.add(pid)
        self._read_failure()
        if exit_code == -signal.SIGTERM and self._failure:
            return  # torchrun sent the signal because of that failure
        reason = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exited with code {exit_code}"
        self._failure = {**rank, "exit_code": exit_code, "error": f"{reason}, without a Python exception"}
        claim_failure(self._keeper.folder, self._failure)  # the others, whose connections broke, then print one line

    def _read_failure(self) -> None:
        if self._failure is None:
            with contextlib.suppress(FileNotFoundError):
                self._failure = json.loads((self._keeper.folder / FAILURE_FILE).read_text())

    def _reap(self) -> None:
        """Wait for every child that has ended: agents, and orphans that this process has adopted."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._agents:
                    self._end_node(self._pop_agent(pid), os.waitstatus_to_exitcode(status))

    def _end_agents(self, delay_s: float) -> None:
        """End the run: SIGTERM to the ranks, SIGKILL to those that stay, and the agents last."""
        for pid in self._agents:  # a stopped torchrun cannot print a long report about the end of its ranks
            os.kill(pid, signal.SIGSTOP)
        kept = {*self._agents, *self._keeper.warm}
        # Before the first signal, a rank that ends may be the one whose end made the others fail: so watch the ranks.
        for number, wait_s in ((None, delay_s), (signal.SIGTERM, self._grace_s)):
            if number is not None:
                processes.send(processes.descendants(excluding=kept), number)
            deadline = time.monotonic() + wait_s
            while processes.descendants(excluding=kept) and time.monotonic() < deadline:
                time.sleep(_END_POLL_S)
                if number is None:
                    self._watch_ranks()
                if wait([self._keeper.channel.fileno()], 0):
                    self._keeper.channel.receive()  # a second "stop" changes nothing; this raises if the lab has ended
        processes.kill_descendants(excluding=self._keeper.warm)
        for pid in list(self._agents):
            os.waitpid(pid, 0)
            self._pop_agent(pid)  # the exit code of its node stays None, because the lab ended it

    def _pop_agent(self, pid: int) -> int:
        """Forget an agent that has ended, and return its node."""
        node, pidfd = self._agents.pop(pid)
        os.close(pidfd)
        return node


class Keeper:
    """The server of one lab: it runs commands on the nodes and sets the rate of the wire, one request at a time."""

    def __init__(self, channel: Channel, folder: Path, network: LabNetwork | None) -> None:
        self.channel = channel
        self.folder = folder
        self._network = network
        self.warm: set[int] = set()
        """The PID of the lab's warm process, if it has one: [Note: Warm ranks] in warm.py."""
        self._warm_channel: Channel | None = None
        os.mkfifo(folder / EVENTS_FILE)
        self.events = os.open(folder / EVENTS_FILE, os.O_RDWR | os.O_NONBLOCK)  # as a writer too: no end of file

    def inside(self, node: int) -> contextlib.AbstractContextManager[None]:
        """Run the body, and the processes it starts, on `node`."""
        return self._network.inside(node) if self._network else contextlib.nullcontext()

    def warm_up(self, request: dict[str, Any]) -> None:
        """Start the warm process, which begins to import the modules that `request` names."""
        own_end, its_end = socket.socketpair()
        with its_end:
            command = [sys.executable, "-m", "laconic.lab.warm", str(its_end.fileno()), *request["modules"]]
            env = {**request["env"], FOLDER_VARIABLE: str(self.folder)}
            self.warm = {_start(command, env=env, cwd=request["cwd"], pass_fds=[its_end.fileno()])}
        self._warm_channel = Channel(own_end)

    def start_warm(self, request: dict[str, Any], fds: list[int]) -> int:
        """Let the warm process start an agent for a node; return its PID. Raises: OSError if that process has ended."""
        assert self._warm_channel is not None
        namespaces = [self._network.namespace(request["node"])] if self._network else []
        try:
            self._warm_channel.send(request, [*fds, *namespaces])
            return int(self._warm_channel.receive()[0]["pid"])
        except EOFError:
            raise OSError("the lab's warm process has ended") from None

    def serve(self) -> NoReturn:
        """Answer requests until the lab ends. Raises: EOFError or BrokenPipeError when the lab has ended."""
        while True:
            request, fds = self.channel.receive()
            if request["command"] == "run":
                self.channel.send(self._run(request, fds))
            elif request["command"] == "warm":
                self.warm_up(request)
                self.channel.send({})
            elif request["command"] == "rate":
                assert self._network is not None
                self._network.set_rate(request["bits_per_s"])
                self.channel.send({})
            else:
                assert request["command"] == "stop"  # the run ended before this arrived

    def _run(self, request: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        (self.folder / FAILURE_FILE).unlink(missing_ok=True)
        nodes = range(len(request["commands"]))
        before = [self._network.counters(node) for node in nodes] if self._network else []
        try:
            run = _Run(self, request, fds)
        finally:
            for fd in fds:
                os.close(fd)
        answer = run.wait()
        if self._network:
            for node in nodes:
                moved = self._network.counters(node) - before[node]
                answer["nodes"][node] |= {"sent_bytes": moved.sent, "received_bytes": moved.received}
        return answer


def _start(command: list[str], **options: Any) -> int:
    """Start a process in a session of its own, which ends with this one; return its PID.

    Raises: OSError if it cannot start.
    """
    process = subprocess.Popen(  # this process has no threads, so it may run Python between fork and exec
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=linux.die_with_parent, **options
    )
    process.returncode = 0  # so that Popen does not wait for the process: `_reap` does
    return process.pid


def _enter_namespaces() -> None:
    """Move this process into new network and mount namespaces.

    Without the right to do so, use a user namespace, in which this process is root. Raises: OSError if that fails too.
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
    linux.mount("none", "/", linux.MS_REC | linux.MS_SLAVE)  # hide later mounts from other processes


def _make_network(folder: Path, options: dict[str, Any]) -> LabNetwork:
    """Make the wire, and give its nodes names: without names torch waits for a name server, and then warns.

    Raises: OSError if the kernel refuses, ImportError without pyroute2.
    """
    from pyroute2 import NetlinkError  # only a wire needs it

    try:
        network = LabNetwork(options["nodes"])
        network.set_rate(options["rate_bits_per_s"])
    except NetlinkError as error:
        raise OSError(error.code, f"netlink: {os.strerror(error.code)}") from error
    addresses = [(node_address(node), f"node{node}") for node in range(options["nodes"])]
    hosts = "".join(f"{address} {name}\n::ffff:{address} {name}\n" for address, name in addresses)
    with contextlib.suppress(OSError):  # no /etc/hosts, or no right to mount over it: the nodes stay without names
        (folder / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
        linux.mount(str(folder / "hosts"), "/etc/hosts", linux.MS_BIND)
    return network


def _set_up(folder: Path, options: dict[str, Any]) -> tuple[LabNetwork | None, str]:
    """Make the network, if the lab has a wire. Returns it, and why the machine refuses it, or ""."""
    try:
        if not options["wire"]:
            return None, ""
        _enter_namespaces()
        return _make_network(folder, options), ""
    except ImportError as error:
        return None, f"the wire needs pyroute2 ({error}); {how_to_install('train')}"
    except OSError as error:
        return None, _REFUSED.format(reason=error.strerror or error)


def main() -> None:
    """Serve a lab. Argument 1 is the descriptor of the keeper's end of the socket, argument 2 the options as JSON."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    # This process lives as long as its lab, so it handles signals by doing nothing. Its children would inherit SIG_IGN.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    processes.clean()
    folder = processes.make_keepers_folder()
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)  # orphans stay below this process
    try:
        network, refused = _set_up(folder, json.loads(sys.argv[2]))
        with contextlib.suppress(EOFError, BrokenPipeError):
            channel.send({"folder": str(folder), "refused": refused})
            if not refused:
                Keeper(channel, folder, network).serve()
    finally:
        processes.kill_descendants()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
