"""`laconic publish`: look at a folder of published versions, verify it, or squash it.

The command reads its options before it imports torch, so it reports a wrong option at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic.publish.source import FolderSource

_UNITS = ("B", "kB", "MB", "GB", "TB")


def main(argv: list[str]) -> int:
    """Run the command; return the exit code: 1 for damage, 2 for a mistake that the user can mend."""
    parser = argparse.ArgumentParser(prog="laconic publish", description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="read all versions, and compare all bytes and values with their digests")
    watch = actions.add_parser("watch", help="show versions, their sizes, and how far readers are behind")
    squash = actions.add_parser("squash", help="write the newest version, whole, into another folder")
    for action in (verify, watch, squash):
        action.add_argument("folder", help="the folder that the publisher writes")
    watch.add_argument("--once", action="store_true", help="show it once, and end")
    watch.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="how often to look (default: 5)")
    squash.add_argument("out", help="the folder to write into")
    options = parser.parse_args(argv)
    if options.action == "watch" and not options.every > 0:
        parser.error(f"--every {options.every}: must be positive")
    from laconic.publish.source import FolderSource
    from laconic.publish.upkeep import squash as write_squashed

    source = FolderSource(options.folder)
    try:
        if options.action == "verify":
            return _verify(source)
        if options.action == "squash":
            print(write_squashed(source, options.out))
            return 0
        return _watch(source, None if options.once else options.every)
    except (ValueError, OSError) as error:
        print(f"laconic publish: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def _verify(source: FolderSource) -> int:
    from laconic.publish.upkeep import verify
    from laconic.publish.versions import version_name

    num_damaged = num_versions = 0
    for verdict in verify(source):
        num_versions += 1
        num_damaged += bool(verdict.problem)
        seen = "intact" if verdict.has_values else "files intact; the values that it changes are not here"
        print(f"{version_name(verdict.version)}: {verdict.problem or seen}", flush=True)
    if not num_versions:
        print(f"laconic publish: {source} has no version", file=sys.stderr)
        return 2
    return 1 if num_damaged else 0


def _watch(source: FolderSource, every_s: float | None) -> int:
    shown = ""
    while True:
        table = "\n".join(_table(source))
        if table != shown:
            print(table, flush=True)
            shown = table
        if every_s is None:
            return 0
        time.sleep(every_s)


def _table(source: FolderSource) -> list[str]:
    from laconic.publish.upkeep import lags, summaries

    lines = [f"{'version':>9} {'step':>9} {'patch':>9} {'whole':>9}"]
    for each in summaries(source):
        cells = (str(each.version), _or_dash(each.step), _size(each.patch_bytes), _size(each.whole_bytes))
        lines.append(" ".join(f"{cell:>9}" for cell in cells) + (f"  {each.problem}" if each.problem else ""))
    for name, lag in lags(source).items():
        behind = "has no version" if lag is None else "is at the newest" if lag == 0 else f"is {lag} behind"
        lines.append(f"reader {name} {behind}")
    return [*lines, ""]


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "-"
    value, unit = float(nbytes), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
