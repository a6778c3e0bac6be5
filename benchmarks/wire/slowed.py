"""One rank of the row `unequal`: `laconic train` on a part of a processor.

    laconic lab --nodes 2 --local 2 -- -m benchmarks.wire.slowed JOB.toml LIMITS.json

`LIMITS.json` has a limit for each rank: the share of one processor that it may use, and the control group that holds it
to that. Without a control group another process stops the rank and lets it go on, as `cpulimit` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_PERIOD_S = 0.01
"""Short beside a step, so that a rank which has waited has saved up next to nothing."""
_ROOT = Path("/sys/fs/cgroup")
_FILES = {
    "cgroup.controllers": (".", {"cpu.max": "{quota_us} {period_us}", "cpu.weight": "10000"}),
    "cpu": ("cpu", {"cpu.cfs_period_us": "{period_us}", "cpu.cfs_quota_us": "{quota_us}", "cpu.shares": "100000"}),
}
"""The files of control groups of the second and of the first version, by a name that shows the version: the folder of
groups, and what to write. The weight lets other work on the machine take no part of a rank's share."""


@contextlib.contextmanager
def control_groups(shares: Sequence[float]) -> Iterator[list[str | None]]:
    """Make a control group for each share of a processor, and remove them at the end; None where it is not allowed."""
    made: list[Path] = []
    try:
        yield [_made(share, f"laconic-{os.getpid()}-{place}", made) for place, share in enumerate(shares)]
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # a process that has just been killed may not be gone yet
                folder.rmdir()


def _made(share: float, name: str, made: list[Path]) -> str | None:
    values = {"period_us": round(_PERIOD_S * 1e6), "quota_us": round(share * _PERIOD_S * 1e6)}
    try:
        above, contents = next(files for shown, files in _FILES.items() if (_ROOT / shown).exists())
        folder = _ROOT / above / name
        folder.mkdir()
        made.append(folder)
        for file, text in contents.items():
            (folder / file).write_text(text.format(**values))
    except (StopIteration, OSError):
        return None
    return str(folder)


def slow_down(share: float, group: str | None) -> None:
    """Let this process have a share of a processor from now on."""
    if group is not None:
        (Path(group) / "cgroup.procs").write_text("0")  # this process
        return
    rank = os.getpid()
    if os.fork():
        return
    with contextlib.suppress(ProcessLookupError):  # the rank has ended
        while os.getppid() == rank:
            time.sleep(share * _PERIOD_S)
            os.kill(rank, signal.SIGSTOP)
            time.sleep((1 - share) * _PERIOD_S)
            os.kill(rank, signal.SIGCONT)
    os._exit(0)


def main(job: str, limits: str) -> int:
    """Train, slowed down; return the exit code."""
    from laconic.train import cli, loop  # noqa: F401  # all imports come before the limit

    slow_down(*json.loads(Path(limits).read_text())[int(os.environ["RANK"])])
    return cli.main([job])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
