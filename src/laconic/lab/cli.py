"""`laconic lab`: ordinary torchrun on an emulated cluster."""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from laconic.lab.lab import Lab, LabUnavailable, RunResult
from laconic.lab.rate import format_rate, parse_rate

_DESCRIPTION = """\
Run SCRIPT under torchrun on each of N emulated nodes: network namespaces joined by a bridge, every link limited in
both directions. At the end print the bytes that each node's interface sent and received. Nothing is left behind."""

_EPILOG = """\
examples:
  laconic lab --nodes 2 --local 2 --rate 200mbit -- train.py --steps 20
  laconic lab --rate 1gbit --json bytes.json -- -m laconic.train config.toml
  laconic lab --no-wire -- train.py

Node 0 writes to this terminal as if it ran alone; lines of other nodes begin with [node 1] and so on. When a rank
fails, the lab ends all ranks and shows the traceback of the first rank that failed. A script reads the counters of its
node with laconic.lab.interface_bytes(). Without root the lab needs a kernel with user namespaces, or --no-wire."""


_GRACE_S = 30.0
"""The seconds after Ctrl-C in which a training may end its step and save, as under torchrun."""


def add_cluster_options(parser: argparse.ArgumentParser, *, timeout_s: float | None = None) -> None:
    """Add the options of every command that opens a lab: --nodes, --local, --no-wire and --timeout."""
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="emulated nodes (default 2)")
    parser.add_argument("--local", type=int, default=2, metavar="L", help="ranks on each node (default 2)")
    parser.add_argument("--no-wire", action="store_true", help="run the same ranks on loopback, as logical nodes")
    default = f" (default {timeout_s:g})" if timeout_s else ""
    parser.add_argument(
        "--timeout", type=float, default=timeout_s, metavar="SECONDS", help=f"end a run after this long{default}"
    )


@contextlib.contextmanager
def leaving_in_order(command: str) -> Iterator[None]:
    """Turn signals into exceptions, so that the labs of the body close; show a user's mistake as one message.

    Raises: SystemExit with code 2 for a mistake of the user, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except (LabUnavailable, ValueError) as error:
        print(f"laconic {command}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"laconic {command}: interrupted; everything in the lab has ended", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="laconic lab",
        usage="laconic lab [options] -- SCRIPT [ARGS ...]\n       laconic lab [options] -- -m MODULE [ARGS ...]",
        description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_cluster_options(parser)
    parser.add_argument(
        "--rate", default="none", metavar="RATE",
        help="limit of each link in each direction, such as 200mbit or 1gbit; none (default) does not limit it",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    end = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:end])
    options.script += argv[end + 1 :]
    if not options.script or options.script == ["-m"]:
        parser.error("no script was given; write it after --, as in: laconic lab -- train.py")
    if options.script[0] != "-m" and not Path(options.script[0]).is_file():
        parser.error(f"there is no file {options.script[0]}; to run a module write -m before its name")
    if options.json and not os.access(options.json.absolute().parent, os.W_OK):
        parser.error(f"--json {options.json}: its folder does not exist or is not writable")
    return options


def main(argv: list[str]) -> int:
    """Run the command, and return the script's exit code, 124 after a timeout, or 128 + n after signal n.

    Raises: SystemExit as `leaving_in_order` does.
    """
    options = _parse(argv)
    with leaving_in_order("lab"):
        rate_bits_per_s = parse_rate(options.rate)
        with Lab(nodes=options.nodes, rate_bits_per_s=rate_bits_per_s, wire=not options.no_wire) as lab:
            result = lab.run(options.script, local=options.local, timeout_s=options.timeout, grace_s=_GRACE_S)
    for line in _describe(result, lab):
        print(f"laconic lab: {line}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(_as_json(result, lab, options.local), indent=2) + "\n")
    return result.exit_code


def _describe(result: RunResult, lab: Lab) -> Iterator[str]:
    link = "unlimited" if lab.rate_bits_per_s is None else format_rate(lab.rate_bits_per_s)
    for node, outcome in enumerate(result.nodes):
        if outcome.sent_bytes is not None and outcome.received_bytes is not None:
            yield (
                f"node {node} sent {outcome.sent_bytes / 1e6:,.2f} MB and received "
                f"{outcome.received_bytes / 1e6:,.2f} MB on its {link} link in {result.wall_s:.1f} s"
            )
    if result.nodes[0].sent_bytes is None:
        yield f"ran for {result.wall_s:.1f} s without a wire, so no bytes were measured"
    if result.timed_out:
        yield "ended at its timeout"
    elif failure := result.failure:
        yield f"rank {failure.rank} (node {failure.node}) failed first:\n{failure.error.rstrip()}"
    elif result.exit_code:
        codes = ", ".join(f"node {node}: {outcome.exit_code}" for node, outcome in enumerate(result.nodes))
        yield f"torchrun failed; exit codes are {codes}"


def _as_json(result: RunResult, lab: Lab, local: int) -> dict[str, Any]:
    values = dataclasses.asdict(result)
    per_node = [{"node": node, **outcome} for node, outcome in enumerate(values.pop("nodes"))]
    for outcome in per_node:
        del outcome["output"]
    return {
        "nodes": lab.nodes,
        "local": local,
        "rate_bits_per_s": lab.rate_bits_per_s,
        "wire": lab.wire,
        **values,
        "exit_code": result.exit_code,
        "per_node": per_node,
    }
