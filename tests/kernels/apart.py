"""Run a module that needs triton in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TRITON = Path(sys.prefix) / "triton"
"""Where the Makefile puts triton: torch and DeepSpeed would import it in every process."""


def told(module: str, *arguments: str, **variables: str) -> dict[str, Any]:
    """The JSON object in the last line that a module prints; `variables` are of its environment."""
    path = os.pathsep.join([str(TRITON), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-m", module, *arguments], env={**os.environ, **variables, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))
