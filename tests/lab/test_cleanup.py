"""A lab leaves nothing behind, however it ends: no process, no namespace, no interface, no file."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab import traces

pytestmark = pytest.mark.machine

# One process dies by SIGTERM. The other ignores it and has left its session, as a daemon does.
_NODE = """
import os, signal, subprocess, sys, time
daemon = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", daemon], start_new_session=True)
print("ready", os.stat("/proc/self/ns/net").st_ino, flush=True)
while not os.path.exists(os.environ["LACONIC_TEST_GO"]):
    time.sleep(0.01)
time.sleep(600 if sys.argv[1] == "wait" else 0)
sys.exit(int(sys.argv[1]) if sys.argv[1] != "wait" else 0)
"""

# Without torch, whose import takes seconds: the command line is tested with torchrun in test_torchrun.py.
_LAB = """
import signal, sys, types
import psutil
package = types.ModuleType("laconic")
package.__path__ = [sys.argv[1]]
sys.modules["laconic"] = package
from laconic.lab import Lab
with Lab(nodes=2, wire=sys.argv[3] == "wire") as lab:
    print("keeper", psutil.Process().children()[0].pid, flush=True)
    try:
        result = lab.execute([[sys.executable, "-c", sys.argv[2], sys.argv[4]]] * 2, grace_s=0.3)
    finally:
        print("left", flush=True)
sys.exit(result.exit_code)
"""


@dataclass
class RunningLab:
    """A lab in a process of its own."""

    process: subprocess.Popen[str]
    marker: str
    folder: Path
    keeper: int
    namespaces: list[int]

    def wait(self) -> int:
        """Return the exit code. Do not read to the end, since processes that stay behind may hold the pipe."""
        returncode = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return returncode

    def remains(self) -> dict[str, object]:
        """Return the processes, namespaces and files of the lab that still exist; empty if none does."""
        found = {
            "processes": traces.processes_with_marker(self.marker),
            "namespaces": [inode for inode in self.namespaces if traces.network_namespace_is_held(inode)],
            "files": list(self.folder.iterdir()),
        }
        return {kind: things for kind, things in found.items() if things}


class Starter:
    """A starter of labs. Their files are in one folder, and a marker in the environment marks their processes.

    It holds the namespaces of their nodes, or the kernel would give the number of one that is gone to another lab's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "of labs"
        self.folder.mkdir()
        self.marker = uuid.uuid4().hex
        self.held: list[int] = []
        self._go = folder / "go"

    def __call__(self, mode: str, wire: str = "wire") -> RunningLab:
        self._go.unlink(missing_ok=True)
        env = os.environ | {"TMPDIR": str(self.folder), traces.MARKER: self.marker, "LACONIC_TEST_GO": str(self._go)}
        package = str(Path(__file__).parents[2] / "src/laconic")
        command = [sys.executable, "-c", _LAB, package, _NODE, wire, mode]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        keeper = int(process.stdout.readline().split()[1])
        namespaces = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        for pid in traces.processes_with_marker(self.marker):
            with suppress(FileNotFoundError):  # it has ended since
                self.held.append(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
        assert {os.fstat(each).st_ino for each in self.held} >= {*namespaces}
        self._go.touch()
        lab = RunningLab(process, self.marker, self.folder, keeper, namespaces if wire == "wire" else [])
        if mode == "wait":  # until the lab, its keeper and two processes on each of two nodes run
            assert traces.wait_until(lambda: len(traces.processes_with_marker(self.marker)) >= 6), lab.remains()
        return lab


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    for pid in traces.processes_with_marker(starter.marker):  # a test that failed may leave some
        os.kill(pid, signal.SIGKILL)
    for descriptor in starter.held:
        os.close(descriptor)


@pytest.mark.parametrize("wire", ["wire", "no-wire"])
@pytest.mark.parametrize("exit_code", [0, 3])
def test_after_success_and_failure(start: Starter, exit_code: int, wire: str) -> None:
    before = traces.interfaces()
    lab = start(str(exit_code), wire)
    assert lab.wait() == exit_code
    assert lab.remains() == {}
    assert traces.interfaces() == before


@pytest.mark.parametrize("wire", ["wire", "no-wire"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_after_ctrl_c_and_after_the_lab_is_killed(start: Starter, wire: str, number: signal.Signals) -> None:
    """Nobody waits for the keeper of a killed lab, so its end may take a moment."""
    lab = start("wait", wire)
    assert lab.remains().keys() >= {"processes", "files"}, "this test would not notice leftovers"
    lab.process.send_signal(number)
    code = lab.wait()
    assert code != 0 if number == signal.SIGINT else code == -number
    assert traces.wait_until(lambda: lab.remains() == {}, at_most_s=0 if number == signal.SIGINT else 60), lab.remains()


@pytest.mark.parametrize("wire", ["wire", "no-wire"])
def test_after_the_keeper_is_killed_its_commands_end_and_the_next_lab_ends_the_rest(start: Starter, wire: str) -> None:
    lab = start("wait", wire)
    os.kill(lab.keeper, signal.SIGKILL)
    assert lab.wait() != 0, "the lab notices"
    assert traces.wait_until(lambda: len(traces.processes_with_marker(lab.marker)) == 2), "what was in the background"
    assert start("0", wire).wait() == 0
    assert traces.wait_until(lambda: lab.remains() == {}), lab.remains()


def test_the_next_lab_leaves_a_living_one_alone(start: Starter) -> None:
    lab = start("wait", "no-wire")
    before = lab.remains()
    assert start("0", "no-wire").wait() == 0
    assert lab.remains() == before
    assert lab.process.poll() is None
    lab.process.send_signal(signal.SIGINT)
    assert lab.wait() != 0
