"""First commands of a newcomer, who forgets torchrun and the extras, and mistakes, told before torch is imported."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import laconic
from tests.support.published import published

pytestmark = pytest.mark.machine

_ROOT = Path(__file__).parents[1]
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
_KEY = b"[train]\nstepz = 3\n"
MISTAKES: dict[str, tuple[str, bytes, str]] = {
    "wrong key": ("train {job}", _KEY, "train.steps"),
    "wrong type": ("train {job}", b"[train]\nsteps = 'x'\n", "an integer"),
    "wrong value": ("train {job}", b"[shard]\nwire = '5bit'\n", "4bit"),
    "wrong block": ("train {job}", b"[shard]\ngranularity = '0 rows'\n", "32 rows"),
    "no TOML": ("train {job}", b"[train\n", "not valid TOML"),
    "no file": ("train /no/such/job.toml", b"", "/no/such/job.toml"),
    "wrong option": ("train {job} --train.stepz 3", b"", "--train.steps"),
    "plan": ("plan {job} --cluster c.toml", _KEY, "train.steps"),
    "compare": ("compare {job}", _KEY, "train.steps"),
    "export": ("export run out --dtype int4", b"", "int4"),
}
"""One mistake of each kind: the arguments of `laconic`, the job, and a part of the line about it."""
COMMANDS = (
    "laconic", "laconic --help", "laconic --version", "laconic convert", "laconic train",
    "laconic train examples/lora.toml", "laconic train no-such-file.toml", "laconic plan examples/lora.toml",
    "laconic compare --demo", "laconic doctor", "laconic lab examples/minimal.py", "laconic export", "laconic publish",
    "laconic publish watch --once no-such-folder", "laconic publish verify no-such-folder",
    "laconic rendezvous --port none", "-m laconic.train examples/lora.toml", "examples/minimal.py",
    "examples/come_and_go.py", "examples/train_gpt.py", "examples/train_gpt_ddp.py",
)  # fmt: skip


def words_of(mistake: str, folder: Path) -> list[str]:
    """Write the job into `folder`; return the arguments of `laconic`."""
    path = folder / "job.toml"
    path.write_bytes(MISTAKES[mistake][1])
    return MISTAKES[mistake][0].format(job=path).split()


def extras() -> list[str]:
    """The packages that the library must not need."""
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    named = next(each for each in contracts if each["name"] == "The library depends on torch alone")
    return [*named["forbidden_modules"], "accelerate", "lightning", "matplotlib", "trl"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_nothing_heavy_is_imported_before_a_mistake_is_told(mistake: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SCRIPT, *words_of(mistake, tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert MISTAKES[mistake][2] in done.stderr
    assert len(done.stderr.splitlines()) == 1 or mistake == "export", "the parsers of options draw boxes"


def test_module_for_torchrun_tells_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "laconic.train", *words_of("wrong key", tmp_path)[1:]]
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
    """It works, or ends with code 2 and one line, or a usage before it."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({extras()}))\n", "utf-8")
    words = command.split()
    words = ["-m", "laconic.cli", *words[1:]] if words[0] == "laconic" else words
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONWARNINGS"] = "ignore::UserWarning:torch._subclasses.functional_tensor"  # torch's own, of numpy
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(_ROOT / "src")])
    done = subprocess.run(
        [sys.executable, *words], cwd=_ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    is_told = len(done.stderr.splitlines()) == 1 or done.stderr.startswith("usage: ")
    assert done.returncode == 0 or (done.returncode == 2 and is_told), done.stderr[-500:]
