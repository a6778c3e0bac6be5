"""The shell commands of the pages, run one after another, as a reader of a page would.

This machine has no second box and little time: there are fewer ranks and steps, and what needs the reader's own files,
other machines, or an installation is left out. `test_blocks.py` parses those as well.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks, commands
from tests.support.launch import free_port
from tests.support.published import published

_NOT_HERE = re.compile(
    r"^(pip|make|export|cd|git|ssh|mkdocs|diff|tensorboard|source|python -m venv)\b"
    r"|--nnodes|box1|/shared/|10\.0\.0|my_job|your_script|\bjob\.toml"
    r"|examples/islands|rendezvous|publish serve|--demo|-m (pytest|tests|benchmarks)"
)
"""Commands of other programs, of other machines, of the reader's own files, that never end, and those of `make`."""
_SHORTER = (
    (re.compile(r"--nproc-per-node \d+"), "--nproc-per-node 2"),
    (re.compile(r"^(torchrun .*)?-m laconic\.train \S+(?! --train)$"), r"\g<0> --train.steps 3"),
    (re.compile(r"-- -m laconic\.train \S+$"), r"\g<0> --train.steps 3"),
    (re.compile(r"--train\.steps \d+"), "--train.steps 3"),
    (re.compile(r"^laconic compare (?!.*--steps).*$"), r"\g<0> --steps 3"),
    (re.compile(r"(laconic compare .*)--steps \d+"), r"\1--steps 3"),
    (re.compile(r"^laconic publish watch"), "laconic publish watch --once"),
    (re.compile(r"^torchrun "), "torchrun --master-port {port} "),
)
_COMMAND_S = 300


def _by_page() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for block in (block for block in blocks() if block.language in ("sh", "") and not block.mark):
        for words in commands(block.text):
            line, lines = shlex.join(words), found.setdefault(block.page, [])
            is_again = line.startswith("laconic compare") and any(line in others for others in found.values())
            if not is_again and not _NOT_HERE.search(line):
                lines.append(line)
    return {page: lines for page, lines in found.items() if lines}


@pytest.mark.campaign(seconds=150)
@pytest.mark.parametrize("page", _by_page())
def test_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    published(tmp_path / "weights", num_versions=2)
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for line in _by_page()[page]:
        for pattern, shorter in _SHORTER:
            line = pattern.sub(shorter, line)
        words = shlex.split(line.format(port=free_port()))
        done = subprocess.run(
            words, cwd=tmp_path, env={**os.environ, "PATH": places, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_COMMAND_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
