"""`laconic plan`, in two steps: the job's file is read first, then the planner, and torch with it, is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from laconic.config import ConfigError, load


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code, 2 for a mistake in the arguments or in the job, else 0."""
    words = argv[1:] if argv[:1] == ["job"] else argv
    if words and words[0].endswith(".toml"):
        try:
            load(words[0])
        except ConfigError as error:
            say(str(error))
            return 2
    from laconic.plan import cli

    return cli.main(argv)


def say(mistake: str, command: str = "job") -> None:
    """Print one line about a mistake, once for all ranks of a node, which share a terminal."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        name = "" if command == "job" else f" {command}"
        print(f"laconic plan{name}: {' '.join(mistake.split())}", file=sys.stderr)
