"""A mistake in a job or an option is told before torch is imported: code 2, in a fresh process."""

import subprocess
import sys
from pathlib import Path

import pytest

import laconic
from tests.faults.first_contact import COMMANDS, extras
from tests.faults.first_contact import problem_of as problem_of_first
from tests.faults.wrong_key import MISTAKES, Mistake, problem_of
from tests.support.published import published

pytestmark = pytest.mark.machine

_HEAVY = ("torch", "transformers", "datasets", "numpy")
_SCRIPT = f"""
import sys
from laconic.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stopped:
    code = stopped.code
heavy = sorted(set({_HEAVY}) & set(sys.modules))
sys.exit(code if not heavy else f"imported: {{heavy}}")
"""


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_nothing_heavy_is_imported_before_a_mistake_is_told(mistake: Mistake, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, *mistake.argv(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert problem_of(mistake, done.returncode, done.stderr) == ""


def test_module_for_torchrun_tells_the_same(tmp_path: Path) -> None:
    words = MISTAKES[0].argv(tmp_path)[1:]
    command = [sys.executable, "-X", "importtime", "-m", "laconic.train", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "pydantic" in imported
    assert imported.isdisjoint(_HEAVY)


def test_published_versions_are_read_with_torch_alone(tmp_path: Path) -> None:
    published(tmp_path / "versions", num_versions=2)
    for action in ("watch --once {}", "verify {}"):
        words = ["publish", *action.replace("{}", str(tmp_path / "versions")).split()]
        script = f"import sys; sys.modules.update(dict.fromkeys({extras()})); from laconic.cli import main"
        script += f"; sys.exit(main({words}))"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), action


def test_import_of_laconic_imports_nothing_and_has_every_name() -> None:
    script = "import sys, laconic; heavy = 'torch' in sys.modules; [getattr(laconic, name) for name in dir(laconic)]"
    command = [sys.executable, "-c", f"{script}; import laconic.shard.api; sys.exit(heavy)"]
    assert subprocess.run(command, check=False).returncode == 0
    assert sorted(laconic._HOMES) == sorted(laconic.__all__)
    assert set(laconic.__all__) <= set(dir(laconic))
    assert laconic.shard.__name__ == "laconic.shard"  # a room, which no import statement named
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        laconic.no_such_name  # noqa: B018


@pytest.mark.parametrize("command", COMMANDS)
def test_a_first_command_without_extras_works_or_says_why(command: str, tmp_path: Path) -> None:
    assert problem_of_first(command, tmp_path) == ""
