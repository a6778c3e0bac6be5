"""The line about a user's mistake that `laconic plan` prints."""

import os
import sys


def say(mistake: str, command: str = "job") -> None:
    """Print one line about a mistake, once for all ranks of a node, which share a terminal."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        name = "" if command == "job" else f" {command}"
        print(f"laconic plan{name}: {' '.join(mistake.split())}", file=sys.stderr)
