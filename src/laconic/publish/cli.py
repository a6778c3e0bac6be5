"""`laconic publish`: look at published versions, verify them, or serve them over HTTP.

The command reads its options before it imports torch, so it reports a wrong option at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

_DAY_S = 86_400


def main(argv: list[str]) -> int:
    """Run the command; return the exit code: 1 for damage, 2 for a mistake that the user can mend."""
    parser = argparse.ArgumentParser(prog="laconic publish", description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="read all versions, and compare all bytes and values with their digests")
    watch = actions.add_parser("watch", help="show versions, their sizes, and how far readers are behind")
    serve = actions.add_parser("serve", help="serve a folder over HTTP, for readers on machines that do not share it")
    verify.add_argument("folder", help="the folder that the publisher writes, or the address of its server")
    for action in (watch, serve):
        action.add_argument("folder", help="the folder that the publisher writes")
    watch.add_argument("--once", action="store_true", help="show it once, and end")
    watch.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="how often to look (default: 5)")
    serve.add_argument("--host", default="127.0.0.1", help="the address to serve at (default: this machine alone)")
    serve.add_argument("--port", type=int, default=8377, help="0 for any free one (default: 8377)")
    serve.add_argument(
        "--token-file", metavar="FILE", help="a file with the token (default: the variable LACONIC_PUBLISH_TOKEN)"
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


def _serve(options: argparse.Namespace) -> int:
    from laconic.publish.http_source import TOKEN_VARIABLE
    from laconic.publish.serving import WeightServer

    token = os.environ.get(TOKEN_VARIABLE)
    if options.token_file:
        token = Path(options.token_file).read_text(encoding="utf-8").strip()
    with WeightServer(options.folder, host=options.host, port=options.port, token=token) as server:
        waits = "" if Path(options.folder).is_dir() else "; it is not there yet"
        print(f"{server.url} serves {options.folder}{waits}", flush=True)
        server.serve_forever()
    return 0


def _verify(options: argparse.Namespace) -> int:
    from laconic.publish.reader import source_of
    from laconic.publish.staging import verify
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
    shown = ""
    while True:
        table = _table(options.folder)
        if table != shown:
            print(table, flush=True)
            shown = table
        if options.once:
            return 0
        time.sleep(options.every)


def _table(folder: str) -> str:
    """All versions by their manifests, oldest first, and how far each registered reader is behind."""
    from laconic.publish.versions import FolderSource, PublishError

    source = FolderSource(folder)
    versions = source.versions()
    lines = [f"{'version':>12} {'step':>12} {'patch':>12} {'whole':>12}"]
    for version in versions:
        cells, problem = [str(version), "-", "-", "-"], ""
        try:
            manifest = source.manifest(version)
            cells[1] = "-" if manifest.step is None else str(manifest.step)
            for kind in manifest.kinds:
                cells[2 if kind == "patch" else 3] = f"{manifest.nbytes(kind) / 1e6:.3f} MB"
        except (PublishError, OSError) as error:
            problem = f"  {error}"
        lines.append(" ".join(f"{cell:>12}" for cell in cells) + problem)
    for name, reader in source.registrations().items():
        lag = sum(version > (reader.version or 0) for version in versions)
        behind = "has no version" if reader.version is None else f"is {lag} behind" if lag else "is at the newest"
        lines.append(f"reader {name} {behind}")
    return "\n".join([*lines, ""])


_ACTIONS = {"verify": _verify, "watch": _watch, "serve": _serve}
