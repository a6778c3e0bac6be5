"""The time from the start of a command to the line about a mistake in its job or its options.

Each command is a fresh process. Its files are in the page cache after the first run, which is not counted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.bench import Bench, campaign_row
from tests.support.record import Row

_LIMIT_S = 1.0
_RUNS = 11
_COMMAND = ("-c", "import sys; from laconic.cli import main; sys.exit(main(sys.argv[1:]))")
_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
"""What torchrun tells a rank."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A command line with one mistake in it."""

    name: str
    words: tuple[str, ...]
    """The arguments of `laconic`; {job} stands for the path of a file with the content `job`."""
    expected: str
    """A part of the line about it."""
    job: bytes = b""
    under_torchrun: bool = False
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
    Mistake(name="rank", words=("train", "{job}"), job=_KEY, expected="train.steps", under_torchrun=True),
    Mistake(name="wrong type", words=("train", "{job}"), job=b"[train]\nsteps = 'x'\n", expected="an integer"),
    Mistake(name="wrong value", words=("train", "{job}"), job=b"[shard]\nwire = '5bit'\n", expected="4bit"),
    Mistake(name="wrong block", words=("train", "{job}"), job=b"[shard]\ngranularity = '0 rows'\n", expected="32 rows"),
    Mistake(name="no TOML", words=("train", "{job}"), job=b"[train\n", expected="not valid TOML"),
    Mistake(name="no file", words=("train", "/no/such/job.toml"), expected="/no/such/job.toml"),
    Mistake(name="wrong option", words=("train", "{job}", "--train.stepz", "3"), expected="--train.stepz", lines=None),
    Mistake(name="plan", words=("plan", "{job}", "--cluster", "c.toml"), job=_KEY, expected="train.steps"),
    Mistake(name="compare", words=("compare", "{job}"), job=_KEY, expected="train.steps"),
    Mistake(name="export", words=("export", "run", "out", "--dtype", "int4"), expected="int4", lines=None),
)
"""One mistake of each kind."""


@campaign_row("wrong-key", section="mend")
def row(bench: Bench) -> Row:
    """Time every mistake."""
    runs = 3 if bench.quick else _RUNS
    found = {}
    for mistake in MISTAKES:
        seconds = [timed(mistake, bench.out) for _ in range(runs + 1)][1:]
        wall, processor = (statistics.median(each) for each in zip(*seconds, strict=True))
        print(f"{mistake.name}: {wall:.2f} s, {processor:.2f} s of user and system CPU", flush=True)
        found[mistake.name] = wall, processor
    worst = max(found, key=lambda name: found[name])
    return Row(
        claim="time to the error of a wrong key, and of ten other mistakes in a job or an option",
        required=f"<= {_LIMIT_S:.1f} s each",
        measured=f"wrong key: {found['wrong key'][0]:.2f} s; the slowest, {worst}: {found[worst][0]:.2f} s",
        is_met=found[worst][0] <= _LIMIT_S,
        note=f"medians of {runs} fresh processes each, files in the page cache; a wrong key takes "
        f"{found['wrong key'][1]:.2f} s of user and system CPU, {worst} {found[worst][1]:.2f} s.",
    )


def timed(mistake: Mistake, folder: Path) -> tuple[float, float]:
    """Run a command; return its seconds, and its seconds of user and system CPU.

    Raises:
        RuntimeError: the command does not end with code 2 and the line.
    """
    environment = os.environ | (_RANK if mistake.under_torchrun else {})
    command = [sys.executable, *_COMMAND, *mistake.argv(folder)]
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - start, os.times()
    if problem := problem_of(mistake, done.returncode, done.stderr):
        raise RuntimeError(problem)
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, processor


def problem_of(mistake: Mistake, code: int, errors: str) -> str:
    """What is wrong with the end of a command; nothing if it ended as it should."""
    if code != 2 or mistake.expected not in errors:
        return f"{mistake.name}: exit code {code}, {errors!r:.500}"
    if mistake.lines is not None and len(errors.splitlines()) != mistake.lines:
        return f"{mistake.name}: {len(errors.splitlines())} lines, {errors!r:.500}"
    return ""
