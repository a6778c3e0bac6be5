"""Ranks that are forks of a process which has imported their modules."""

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic.lab import Lab, LabUnavailable, RunResult
from tests.lab import traces
from tests.support.launch import PATIENCE_S

pytestmark = pytest.mark.machine

_MODULE = "fractions"  # some module that Python itself does not import at its start


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(nodes=2) as lab:
        lab.warm_up([_MODULE, "there_is_no_such_module"])
        yield lab


def run(lab: Lab, tmp_path: Path, code: str, *arguments: str, **options: object) -> RunResult:
    script = tmp_path / "script.py"
    script.write_text(code)
    return lab.run([str(script), *arguments], local=2, timeout_s=PATIENCE_S, show=False, **options)  # type: ignore[arg-type]


def test_ranks_begin_with_the_modules_and_with_torchruns_variables(lab: Lab, tmp_path: Path) -> None:
    code = f"""
import os, sys
was_there = {_MODULE!r} in sys.modules
names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OWN"]
open(os.path.join({str(tmp_path)!r}, "rank" + os.environ["RANK"]), "w").write(
    repr((was_there, __name__, sys.argv[1:], [os.environ[name] for name in names]))
)
"""
    for number in range(2):
        result = run(lab, tmp_path, code, "argument", env={"OWN": str(number)})
        assert (result.exit_code, result.failure) == (0, None), result
        for rank in range(4):
            found = eval((tmp_path / f"rank{rank}").read_text())  # our own text
            numbers = [str(each) for each in (rank, rank % 2, rank // 2, 4, 2, number)]
            assert found == (True, "__main__", ["argument"], numbers)
    assert "OWN" not in os.environ


def test_ranks_meet_over_the_wire_under_its_rate(lab: Lab, tmp_path: Path) -> None:
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
    result = run(lab, tmp_path, code)
    assert result.exit_code == 0, result
    assert result.nodes[0].sent_bytes == pytest.approx(1e6, rel=0.05)


@pytest.mark.parametrize("is_warm", [False, True])
def test_ranks_end_with_a_killed_keeper(is_warm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their agent is a child of the keeper, and they are children of their agent."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed keeper leaves its folder
    code = "import os, psutil, time\npsutil.Process(psutil.Process(os.getppid()).ppid()).kill()\ntime.sleep(600)"
    marker = uuid.uuid4().hex
    with Lab(nodes=2) as lab:
        if is_warm:
            lab.warm_up([])
        with pytest.raises(LabUnavailable, match="keeper was killed"):
            run(lab, tmp_path, code, env={traces.MARKER: marker})
    assert traces.wait_until(lambda: not traces.processes_with_marker(marker))


def test_commands_that_are_no_ranks_start_as_ever(lab: Lab) -> None:
    code = f"import sys; print({_MODULE!r} in sys.modules)"
    result = lab.execute([[sys.executable, "-c", code]] * 2, timeout_s=PATIENCE_S, show=False)
    assert [node.output.strip() for node in result.nodes] == ["False", "False"]


def test_without_a_wire(tmp_path: Path) -> None:
    with Lab(nodes=1, wire=False) as lab:
        lab.warm_up([_MODULE])
        assert run(lab, tmp_path, "import os; print('rank', os.environ['RANK'])").nodes[0].output.count("rank") == 2
