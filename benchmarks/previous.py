"""Runs of another version of the sources, beside those of this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import tomli_w

from laconic.compare import runner
from laconic.config import Config, to_toml

_REPOSITORY = Path(__file__).parents[1]


def parent_of_added(file: str) -> str:
    """Return the revision before the commit that added `file`."""
    return f"{_git('log', '--diff-filter=A', '--format=%H', '-1', '--', file)}^"


@contextmanager
def source_at(revision: str, out: Path) -> Iterator[Path]:
    """Check out a revision below `out`, and remove it at the end."""
    folder = out.absolute() / "before"
    shutil.rmtree(folder, ignore_errors=True)
    _git("worktree", "prune")
    _git("worktree", "add", "--detach", "--force", str(folder), revision)
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


@contextmanager
def running(source: Path) -> Iterator[None]:
    """Let comparisons in the body train with the laconic of `source`.

    Job files leave out the values at their defaults, because older sources do not know keys that came later.
    """
    defaults = tomllib.loads(to_toml(Config()))

    def to_short_toml(config: Config) -> str:
        sections = {}
        for section, values in tomllib.loads(to_toml(config)).items():
            default = defaults.get(section, {})
            sections[section] = {key: value for key, value in values.items() if value != default.get(key)}
        return tomli_w.dumps({section: values for section, values in sections.items() if values})

    environment = mock.patch.dict(os.environ, PYTHONPATH=str(source / "src"))
    with environment, mock.patch.object(runner, "to_toml", to_short_toml):
        yield


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(_REPOSITORY), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()
