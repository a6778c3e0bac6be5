"""The fenced blocks of the documentation, what a comment before a block says about it, and checks of shell commands.

`<!-- not run: REASON -->` before a block: it cannot run here. `<!-- diff: OLD NEW -->`: it shows how one file of the
repository differs from another. `<!-- part of: FILE -->`: its lines stand in a file that another test runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from laconic.cli import COMMANDS, main
from laconic.errors import JobError
from laconic.train.cli import parse

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[a-z ]+): (?P<about>.*?) -->\n+)?^(?P<fence>```)(?P<language>[a-z]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    """"not run", "diff", "part of" or nothing."""
    about: str
    """The text of the comment after the mark."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    """All fenced blocks of README, CONTRIBUTING and docs."""
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("fence")) + 1
            mark, about = match["mark"] or "", match["about"] or ""
            yield Block(path.relative_to(ROOT).as_posix(), line, match["language"], match["text"], mark, about)


# -- shell commands: options parse, and files and targets exist; nothing runs ------------------------------------------


_OTHER_PROGRAMS = {"pip", "mkdocs", "diff", "tensorboard", "export", "ssh", "cd", "git", "source"}
"""Programs whose arguments are not checked."""


class _Parsed(Exception):
    """The arguments of a command are valid."""


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a block. Lines that begin with `$ ` are the commands if there are any; the rest is output."""
    text = text.replace("\\\n", " ")
    lines = re.findall(r"^\$ (.*)$", text, re.MULTILINE) or text.splitlines()
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield [word for word in words if word != "..."]


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one command.

    Raises:
        AssertionError: a file, a module, a target, a program or an option does not exist.
    """
    program, arguments = words[0], words[1:]
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert arguments, words
        assert set(arguments) <= set(targets), f"{words}: the targets are {targets}"
    elif program == "laconic":
        _check_laconic(arguments, monkeypatch)
    elif program == "torchrun":
        given = get_args_parser().parse_args(arguments)
        _check_program(given.training_script, given.training_script_args, is_module=given.module, words=words)
    elif program == "python":
        is_module = arguments[0] == "-m"
        rest = arguments[1:] if is_module else arguments
        _check_program(rest[0], rest[1:], is_module=is_module, words=words)
    else:
        assert program in _OTHER_PROGRAMS, f"{words}: {program} is not known here"


def _check_program(script: str, arguments: list[str], *, is_module: bool, words: list[str]) -> None:
    if not is_module:
        assert (ROOT / script).is_file() or script.startswith("your_"), f"{words}: no file {script}"
    elif script == "laconic.train":
        check_job(arguments)
    else:
        assert importlib.util.find_spec(script) is not None, f"{words}: no module {script}"


def _check_laconic(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert arguments[0] in COMMANDS, arguments
    if arguments[0] == "train":
        check_job(arguments[1:])
        return
    if "--help" in arguments:
        return
    original = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        original(self, *args, **kwargs)
        raise _Parsed

    with monkeypatch.context() as patch:
        patch.setattr("laconic.plan.early.load", lambda _: None)  # the reader's own job
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        with pytest.raises(_Parsed):
            main(arguments)


def check_job(arguments: list[str]) -> None:
    """Parse a job and its options. A file of the reader's own, `my_...`, is as good as an example."""
    if arguments and arguments[0] == "--help":
        return
    file = "examples/pretrain.toml" if arguments[0].startswith("my_") else arguments[0]
    try:
        parse([str(ROOT / file), *arguments[1:]])
    except JobError as error:
        raise AssertionError(f"laconic train {' '.join(arguments)}: {error}") from error
