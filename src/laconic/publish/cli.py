"""`laconic publish`: look at published versions, verify them, squash them, or serve them over HTTP.

The command reads its options before it imports torch, so it reports a wrong option at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic.publish.source import FolderSource

_DAY_S = 86_400
_UNITS = ("B", "kB", "MB", "GB", "TB")


def main(argv: list[str]) -> int:
    """Run the command; return the exit code: 1 for damage, 2 for a mistake that the user can mend."""
    parser = argparse.ArgumentParser(prog="laconic publish", description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="read all versions, and compare all bytes and values with their digests")
    watch = actions.add_parser("watch", help="show versions, their sizes, and how far readers are behind")
    squash = actions.add_parser("squash", help="write the newest version, whole, into another folder")
    serve = actions.add_parser("serve", help="serve a folder over HTTP, for readers on machines that do not share it")
    for action in (watch, serve):
        action.add_argument("folder", help="the folder that the publisher writes")
    for action in (verify, squash):
        action.add_argument("folder", help="the folder that the publisher writes, or the address of its server")
    watch.add_argument("--once", action="store_true", help="show it once, and end")
    watch.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="how often to look (default: 5)")
    squash.add_argument("out", help="the folder to write into")
    serve.add_argument("--host", default="127.0.0.1", help="the address to serve at (default: this machine alone)")
    serve.add_argument("--port", type=int, default=8377, help="0 for any free one (default: 8377)")
    serve.add_argument(
        "--token-file", metavar="FILE", help="a file with the token (default: the variable LACONIC_PUBLISH_TOKEN)"
    )
    serve.add_argument(
        "--tell", action="append", default=[], metavar="URL", help="POST each new version to this address, too"
    )
    options = parser.parse_args(argv)
    if options.action == "watch" and not 0 < options.every <= _DAY_S:
        parser.error(f"--every {options.every}: must be positive, and at most {_DAY_S}, a day")
    if options.action == "serve" and not 0 <= options.port < 1 << 16:
        parser.error(f"--port {options.port}: must be 0 to 65535")
    try:
        return _ACTIONS[options.action](options)
    except (ValueError, OSError) as error:
        print(f"laconic publish: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


def _squash(options: argparse.Namespace) -> int:
    from laconic.publish.reader import source_of
    from laconic.publish.upkeep import squash

    print(squash(source_of(options.folder), options.out))
    return 0


def _serve(options: argparse.Namespace) -> int:
    from laconic.publish.announcing import Announcer
    from laconic.publish.http_source import TOKEN_VARIABLE
    from laconic.publish.serving import WeightServer

    token = os.environ.get(TOKEN_VARIABLE)
    if options.token_file:
        token = Path(options.token_file).read_text(encoding="utf-8").strip()
    with (
        WeightServer(options.folder, host=options.host, port=options.port, token=token) as server,
        Announcer(options.folder, options.tell),
    ):
        waits = "" if Path(options.folder).is_dir() else "; it is not there yet"
        print(f"{server.url} serves {options.folder}{waits}", flush=True)
        server.serve_forever()
    return 0


def _verify(options: argparse.Namespace) -> int:
    from laconic.publish.reader import source_of
    from laconic.publish.upkeep import verify
    from laconic.publish.versions import version_name

    source = source_of(options.folder)
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


def _watch(options: argparse.Namespace) -> int:
    from laconic.publish.source import FolderSource

    source = FolderSource(options.folder)
    shown = ""
    while True:
        table = "\n".join(_table(source))
        if table != shown:
            print(table, flush=True)
            shown = table
        if options.once:
            return 0
        time.sleep(options.every)


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


_ACTIONS = {"verify": _verify, "watch": _watch, "squash": _squash, "serve": _serve}
