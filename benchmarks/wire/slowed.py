"""One rank of the row `unequal`: `laconic train` on a part of a processor.

    laconic lab --nodes 2 --local 2 -- -m benchmarks.wire.slowed JOB.toml GROUPS.json

`GROUPS.json` has a control group for each rank, which holds it to a share of one processor. Making them wants root.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_PERIOD_US = 10_000
"""Short beside a step, so that a rank which has waited has saved up next to nothing."""
_ROOT = Path("/sys/fs/cgroup")
_FILES = {
    "cgroup.controllers": (".", {"cpu.max": "{quota_us} {period_us}", "cpu.weight": "10000"}),
    "cpu": ("cpu", {"cpu.cfs_period_us": "{period_us}", "cpu.cfs_quota_us": "{quota_us}", "cpu.shares": "100000"}),
}
"""The files of control groups of the second and of the first version, by a name that shows the version: the folder of
groups, and what to write. The weight lets other work on the machine take no part of a rank's share."""


@contextlib.contextmanager
def control_groups(shares: Sequence[float]) -> Iterator[list[str]]:
    """Make a control group for each share of a processor, and remove them at the end."""
    made: list[Path] = []
    above, contents = next(files for shown, files in _FILES.items() if (_ROOT / shown).exists())
    try:
        for place, share in enumerate(shares):
            folder = _ROOT / above / f"laconic-{os.getpid()}-{place}"
            folder.mkdir()
            made.append(folder)
            for file, text in contents.items():
                (folder / file).write_text(text.format(period_us=_PERIOD_US, quota_us=round(share * _PERIOD_US)))
        yield list(map(str, made))
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # a process that has just been killed may not be gone yet
                folder.rmdir()


def main(job: str, groups: str) -> int:
    """Train, slowed down; return the exit code."""
    from laconic.train import cli, loop  # noqa: F401  # all imports come before the limit

    group = json.loads(Path(groups).read_text())[int(os.environ["RANK"])]
    (Path(group) / "cgroup.procs").write_text("0")  # this process
    return cli.main([job])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
