"""Mistakes in a job or in the options of a command, and the line about each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A command line with one mistake in it."""

    name: str
    words: tuple[str, ...]
    """The arguments of `laconic`; {job} stands for the path of a file with the content `job`."""
    expected: str
    """A part of the line about it."""
    job: bytes = b""
    lines: int | None = 1
    """The lines on stderr; None for the boxes that the parsers of options draw."""

    def argv(self, folder: Path) -> list[str]:
        """Write the job into `folder`; return the arguments of `laconic`."""
        path = folder / f"{self.name.replace(' ', '-')}.toml"
        path.write_bytes(self.job)
        return [word.format(job=path) for word in self.words]


_KEY = b"[train]\nstepz = 3\n"
MISTAKES: Sequence[Mistake] = (
    Mistake(name="wrong key", words=("train", "{job}"), job=_KEY, expected="train.steps"),
    Mistake(name="wrong type", words=("train", "{job}"), job=b"[train]\nsteps = 'x'\n", expected="an integer"),
    Mistake(name="wrong value", words=("train", "{job}"), job=b"[shard]\nwire = '5bit'\n", expected="4bit"),
    Mistake(name="wrong block", words=("train", "{job}"), job=b"[shard]\ngranularity = '0 rows'\n", expected="32 rows"),
    Mistake(name="no TOML", words=("train", "{job}"), job=b"[train\n", expected="not valid TOML"),
    Mistake(name="no file", words=("train", "/no/such/job.toml"), expected="/no/such/job.toml"),
    Mistake(name="wrong option", words=("train", "{job}", "--train.stepz", "3"), expected="--train.steps"),
    Mistake(name="plan", words=("plan", "{job}", "--cluster", "c.toml"), job=_KEY, expected="train.steps"),
    Mistake(name="compare", words=("compare", "{job}"), job=_KEY, expected="train.steps"),
    Mistake(name="export", words=("export", "run", "out", "--dtype", "int4"), expected="int4", lines=None),
)
"""One mistake of each kind."""


def problem_of(mistake: Mistake, code: int, errors: str) -> str:
    """What is wrong with the end of a command; nothing if it ended as it should."""
    if code != 2 or mistake.expected not in errors:
        return f"{mistake.name}: exit code {code}, {errors!r:.500}"
    if mistake.lines is not None and len(errors.splitlines()) != mistake.lines:
        return f"{mistake.name}: {len(errors.splitlines())} lines, {errors!r:.500}"
    return ""
