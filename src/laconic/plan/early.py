"""`laconic plan`, in two steps: the job's file is read first, then the planner, and torch with it, is imported."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.config import ConfigError, load
from laconic.errors import say_mistake


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code, 2 for a mistake in the arguments or in the job, else 0."""
    words = argv[1:] if argv[:1] == ["job"] else argv
    if words and words[0].endswith(".toml"):
        try:
            load(words[0])
        except ConfigError as error:
            say_mistake("laconic plan", error)
            return 2
    from laconic.plan import cli

    return cli.main(argv)
