"""Scripts under torchrun in the lab: their environment, their output and their failures.

Scripts whose output is compared write whole lines. torchrun starts Python with -u, so `print` would write the end of a
line separately, and lines of nodes that write to one pipe could mix.
"""

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laconic.lab import Lab, LabUnavailable, RunResult
from laconic.lab import cli as lab_cli
from tests.lab import traces
from tests.support.launch import PATIENCE_S

pytestmark = pytest.mark.machine

LABORATORY = [sys.executable, "-m", "laconic.cli", "lab"]


_MODULE = "fractions"  # some module that Python itself does not import at its start


@pytest.fixture(scope="module", params=["torchrun", "warm"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Its ranks are torchrun's, or forks of a process that has imported their modules."""
    with Lab(nodes=2) as lab:
        if request.param == "warm":
            lab.warm_up([_MODULE, "there_is_no_such_module"])
        yield lab


def write(script: Path, text: str) -> None:
    script.write_text(textwrap.dedent(text))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def run(lab: Lab, script: Path, code: str, *arguments: str, local: int = 2, **options: Any) -> RunResult:
    """Run a script on the ranks of a lab, quietly."""
    script.write_text(code)
    return lab.run([str(script), *arguments], local=local, timeout_s=PATIENCE_S, show=False, **options)


def test_ranks_of_two_nodes_talk_over_the_wire(script: Path, tmp_path: Path) -> None:
    write(
        script,
        """
        import os, sys, torch, torch.distributed as dist
        from laconic.lab import interface_bytes
        dist.init_process_group("gloo")
        rank, payload = dist.get_rank(), torch.zeros(5_000_000)
        before = interface_bytes()
        dist.barrier()
        if rank == 0:
            dist.send(payload, 2)
        if rank == 2:
            dist.recv(payload, 0)
        dist.barrier()
        moved = interface_bytes() - before
        sizes = [int(os.environ[name]) for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")]
        sys.stdout.write(f"report;{rank};{os.environ['GROUP_RANK']};{sizes};{moved.sent};{moved.received}\\n")
        dist.destroy_process_group()
    """,
    )
    report = tmp_path / "report.json"
    options = f"--nodes 2 --local 2 --rate 500mbit --json {report}".split()
    command = [*LABORATORY, *options, "--", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split(";")[0:4] for line in lines] == [
        ["[node 1] report", "2", "1", "[2, 2, 4]"],
        ["[node 1] report", "3", "1", "[2, 2, 4]"],
        ["report", "0", "0", "[2, 2, 4]"],
        ["report", "1", "0", "[2, 2, 4]"],
    ]
    num_bytes = 4 * 5_000_000
    sent = [int(line.split(";")[4]) for line in lines]
    received = [int(line.split(";")[5]) for line in lines]
    assert sent[2:] == pytest.approx([num_bytes] * 2, rel=0.02)
    assert received[:2] == pytest.approx([num_bytes] * 2, rel=0.02)
    found = json.loads(report.read_text())
    assert found["rate_bits_per_s"] == 500e6
    assert found["exit_code"] == 0
    assert found["failure"] is None
    assert found["per_node"][0]["sent_bytes"] == pytest.approx(num_bytes, rel=0.02), "torchrun itself says little"
    assert found["per_node"][1]["received_bytes"] == pytest.approx(num_bytes, rel=0.02)
    assert "laconic lab: node 0 sent 20." in done.stderr
    assert "hostname" not in done.stderr, "torch found no names for the nodes"


def test_the_traceback_of_the_first_failing_rank_is_the_one_shown(script: Path, tmp_path: Path) -> None:
    write(
        script,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            raise RuntimeError("the cause of it all")
        dist.all_reduce(torch.ones(1))
    """,
    )
    report = tmp_path / "report.json"
    command = [*LABORATORY, "--local", "1", "--json", str(report), "--", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ChildFailedError" not in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 2, "when it happened, and at the end"
    last = done.stderr[done.stderr.index("laconic lab: rank 1 (node 1) failed first:") :].splitlines()
    assert last[1] == "Traceback (most recent call last):"
    assert last[2] == f'  File "{script}", line 6, in <module>', "without the frames that started the script"
    assert last[-1] == "RuntimeError: the cause of it all"
    failure = json.loads(report.read_text())["failure"]
    assert (failure["rank"], failure["node"], failure["local_rank"], failure["exit_code"]) == (1, 1, 0, 1)


# the keeper, which is torchrun's parent, sleeps until torchrun has forgotten the rank
BLIND_KEEPER = (
    "keeper = psutil.Process(os.getppid()).ppid(); "
    "subprocess.Popen(f'sleep 5; kill -CONT {keeper}', shell=True, start_new_session=True); "
    "os.kill(keeper, signal.SIGSTOP)"
)


@pytest.mark.parametrize(
    ("end", "exit_code", "error"),
    [
        ("sys.exit(7)", 7, "exited with code 7"),
        ("raise ValueError('this one')", 1, "ValueError: this one"),
        (f"{BLIND_KEEPER}; os._exit(9)", 9, "exited with code 9, without a Python exception"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL, without a Python exception"),
        pytest.param("threading.Thread(target=time.sleep, args=(600,)).start(); raise OSError('stuck')", 1,
                     "OSError: stuck", marks=pytest.mark.campaign),
    ],
)  # fmt: skip
def test_a_rank_that_fails_ends_all(lab: Lab, script: Path, end: str, exit_code: int, error: str) -> None:
    """Without the lab the other ranks would sleep on, because nothing wakes them."""
    imports = "import os, psutil, signal, subprocess, sys, threading, time\n"
    result = run(lab, script, f"{imports}if os.environ['RANK'] == '3':\n    {end}\ntime.sleep(600)\n")
    assert not result.timed_out
    assert result.exit_code == exit_code
    assert result.failure is not None
    assert (result.failure.rank, result.failure.node, result.failure.local_rank) == (3, 1, 1)
    assert result.failure.error.rstrip().endswith(error)
    assert "laconic/lab" not in result.failure.error, "no frame of ours"


def test_ranks_have_torchruns_variables_and_begin_with_the_modules_of_a_warm_lab(
    lab: Lab, script: Path, tmp_path: Path
) -> None:
    code = f"""
import os, sys
was_there = {_MODULE!r} in sys.modules
names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OWN"]
open(os.path.join({str(tmp_path)!r}, "rank" + os.environ["RANK"]), "w").write(
    repr((was_there, __name__, sys.argv[1:], [os.environ[name] for name in names]))
)
"""
    for number in range(2):
        result = run(lab, script, code, "argument", env={"OWN": str(number)})
        assert (result.exit_code, result.failure) == (0, None), result
        for rank in range(4):
            found = eval((tmp_path / f"rank{rank}").read_text())  # our own text
            numbers = [str(each) for each in (rank, rank % 2, rank // 2, 4, 2, number)]
            assert found == (lab._is_warm, "__main__", ["argument"], numbers)
    assert "OWN" not in os.environ


def test_ranks_meet_over_the_wire_under_its_rate(lab: Lab, script: Path) -> None:
    lab.set_rate(50e6)
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.send(torch.zeros(250_000), 3)
elif dist.get_rank() == 3:
    dist.recv(torch.zeros(250_000), 0)
dist.barrier()  # a rank that goes at once may be one that another still connects to
"""
    result = run(lab, script, code)
    assert result.exit_code == 0, result
    assert result.nodes[0].sent_bytes == pytest.approx(1e6, rel=0.05)


@pytest.mark.parametrize("is_warm", [False, True])
def test_ranks_end_with_a_killed_keeper(
    is_warm: bool, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their agent is a child of the keeper, and they are children of their agent."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed keeper leaves its folder
    code = "import os, psutil, time\npsutil.Process(psutil.Process(os.getppid()).ppid()).kill()\ntime.sleep(600)"
    marker = uuid.uuid4().hex
    with Lab(nodes=2) as lab:
        if is_warm:
            lab.warm_up([])
        with pytest.raises(LabUnavailable, match="keeper was killed"):
            run(lab, script, code, env={traces.MARKER: marker})
    assert traces.wait_until(lambda: not traces.processes_with_marker(marker))


def test_commands_that_are_no_ranks_start_as_ever(lab: Lab) -> None:
    code = f"import sys; print({_MODULE!r} in sys.modules)"
    result = lab.execute([[sys.executable, "-c", code]] * 2, timeout_s=PATIENCE_S, show=False)
    assert [node.output.strip() for node in result.nodes] == ["False", "False"]


def test_warm_ranks_without_a_wire(script: Path) -> None:
    with Lab(nodes=1, wire=False) as lab:
        lab.warm_up([_MODULE])
        assert run(lab, script, "import os; print('rank', os.environ['RANK'])").nodes[0].output.count("rank") == 2


def test_a_script_runs_as_it_would_alone(script: Path) -> None:
    """The script has its own name, arguments, path and module, which `multiprocessing` needs."""
    write(
        script,
        """
        import multiprocessing, os, sys
        from pathlib import Path
        import neighbour

        def square(x):
            return x * x

        if __name__ == "__main__":
            print(Path(__file__).name, Path(sys.argv[0]).name, sys.argv[1:], Path(sys.path[0]) == Path(__file__).parent)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [2, 3]), neighbour.NAME, os.environ["OMP_NUM_THREADS"])
    """,
    )
    script.with_name("neighbour.py").write_text("NAME = 'found'")
    with Lab(nodes=1, wire=False) as lab:
        result = lab.run(
            [str(script), "--rate", "--", "-m"], show=False, timeout_s=PATIENCE_S, env={"OMP_NUM_THREADS": "3"}
        )
        assert result.exit_code == 0, result
        assert result.nodes[0].output == "script.py script.py ['--rate', '--', '-m'] True\n[4, 9] found 3\n"
        module = lab.run(["-m", "json.tool", "--help"], show=False, timeout_s=PATIENCE_S)
    assert module.exit_code == 0
    assert module.nodes[0].output.startswith("usage: ")


def test_node_0_keeps_its_terminal(script: Path) -> None:
    script.write_text("import sys; sys.stdout.write(f'{sys.stdout.isatty()} {sys.stderr.isatty()}\\n')")
    own_end, terminal = pty.openpty()
    command = [*LABORATORY, "--nodes", "2", "--local", "1", "--no-wire", "--", str(script)]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                part = os.read(own_end, 4096)
            except OSError:  # the end of a terminal, on Linux
                break
            shown += part
    os.close(own_end)
    assert process.returncode == 0, shown
    assert {"True True", "[node 1] False False"} <= set(shown.decode().splitlines())


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.campaign)]
)
def test_signals_end_everything_quietly(script: Path, tmp_path: Path, number: signal.Signals, exit_code: int) -> None:
    script.write_text("import sys, time; sys.stdout.write('ready\\n'); time.sleep(600)")
    marker, temporary = uuid.uuid4().hex, tmp_path / "temporary"
    temporary.mkdir()
    env = os.environ | {"TMPDIR": str(temporary), traces.MARKER: marker}
    command = [*LABORATORY, "--local", "1", "--", str(script)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, text=True, start_new_session=True, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None
            assert sorted(process.stdout.readline() for _ in range(2)) == ["[node 1] ready\n", "ready\n"]
            os.killpg(process.pid, number)  # to the whole group, as a terminal does
            _, errors = process.communicate()
        finally:
            process.kill()  # after a failed assertion
    assert process.returncode == exit_code
    assert "Traceback" not in errors
    assert traces.processes_with_marker(marker) == set()
    assert list(temporary.iterdir()) == [], "torchrun's folders go too"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script was given"),
        (["--", "no_such_script.py"], "there is no file no_such_script.py"),
        (["--rate", "fast", "--", __file__], "write a number and a unit"),
        (["--json", "/no/such/folder/report.json", "--", __file__], "its folder does not exist"),
        (["--no-wire", "--rate", "1gbit", "--", __file__], "a rate needs a wire"),
        (["--nodes", "0", "--", __file__], "nodes=0"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = lab_cli.main(arguments)
    except SystemExit as error:  # argparse
        code = int(error.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err
