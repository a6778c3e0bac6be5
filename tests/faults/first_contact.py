"""The first commands of a newcomer who has installed the library alone, and forgets torchrun: each works, or says why.

Packages that laconic's extras bring cannot be imported in these processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_COMMAND_S = 60
COMMANDS = (
    "laconic",
    "laconic --help",
    "laconic --version",
    "laconic convert",
    "laconic train",
    "laconic train examples/lora.toml",
    "laconic train no-such-file.toml",
    "laconic plan examples/lora.toml",
    "laconic compare --demo",
    "laconic doctor",
    "laconic lab examples/minimal.py",
    "laconic export",
    "laconic publish",
    "laconic publish watch --once no-such-folder",
    "laconic publish verify no-such-folder",
    "laconic rendezvous --port none",
    "-m laconic.train examples/lora.toml",
    "examples/minimal.py",
    "examples/come_and_go.py",
    "examples/train_gpt.py",
    "examples/train_gpt_ddp.py",
)


def extras() -> list[str]:
    """The packages that the library must not need."""
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    named = next(each for each in contracts if each["name"] == "The library depends on torch alone")
    return [*named["forbidden_modules"], "accelerate", "lightning", "matplotlib", "trl"]


def problem_of(command: str, folder: Path) -> str:
    """How the command fails a newcomer; nothing if it works, or ends with code 2 and one line, or a usage before it."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({extras()}))\n", "utf-8")
    words = command.split()
    words = ["-m", "laconic.cli", *words[1:]] if words[0] == "laconic" else words
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONWARNINGS"] = "ignore::UserWarning:torch._subclasses.functional_tensor"  # torch's own, of numpy
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(_ROOT / "src")])
    done = subprocess.run(
        [sys.executable, *words], cwd=_ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=_COMMAND_S, check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    is_told = len(lines) == 1 or done.stderr.startswith("usage: ")
    if "Traceback" not in done.stderr and (done.returncode == 0 or (done.returncode == 2 and is_told)):
        return ""
    return f"{command}: exit code {done.returncode}, {done.stderr[-500:]!r}"
