"""`laconic lab`: ordinary torchrun on an emulated cluster."""

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from laconic.lab.lab import Lab, LabUnavailable, RunResult
from laconic.lab.rate import format_rate, parse_rate

_DESCRIPTION = """\
Run SCRIPT under torchrun on each of N emulated nodes: network namespaces joined by a bridge, every link limited in
both directions. At the end it says how many bytes each node's interface sent and received. Nothing is left behind."""

_EPILOG = """\
examples:
  laconic lab --nodes 2 --local 2 --rate 200mbit -- train.py --steps 20
  laconic lab --rate 1gbit --json bytes.json -- -m laconic.cli train config.toml
  laconic lab --no-wire -- train.py

Node 0 writes to this terminal as if it ran alone; lines of other nodes begin with [node 1] and so on. When a rank
fails, all are ended and its traceback is the one shown. A script reads the counters of its node with
laconic.lab.interface_bytes(). Without root the lab needs a kernel with user namespaces, or --no-wire."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="laconic lab",
        usage="laconic lab [options] -- SCRIPT [ARGS ...]\n       laconic lab [options] -- -m MODULE [ARGS ...]",
        description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--nodes", type=int, default=2, metavar="N", help="emulated nodes (default 2)")
    parser.add_argument("--local", type=int, default=2, metavar="L", help="ranks on each node (default 2)")
    parser.add_argument(
        "--rate", type=_rate, metavar="RATE",
        help="of each link in each direction, as in 200mbit or 1gbit; none (the default) does not limit it",
    )  # fmt: skip
    parser.add_argument("--no-wire", action="store_true", help="run the same ranks on loopback, as logical nodes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end the run after this long")
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _rate(text: str) -> float | None:
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(argv: list[str]) -> int:
    """Run the command; its exit code is the script's, 2 for a mistake, 124 after a timeout, 128 + n after signal n."""
    parser = _parser()
    end = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:end])
    script = options.script + argv[end + 1 :]
    if not script or script == ["-m"]:
        parser.error("no script was given; write it after --, as in: laconic lab -- train.py")
    if script[0] != "-m" and not Path(script[0]).is_file():
        parser.error(f"there is no file {script[0]}; to run a module write -m before its name")
    if options.json and not os.access(options.json.absolute().parent, os.W_OK):
        parser.error(f"--json {options.json}: its folder does not exist or is not writable")
    previous = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with Lab(nodes=options.nodes, rate_bits_per_s=options.rate, wire=not options.no_wire) as lab:
            result = lab.run(script, local=options.local, timeout_s=options.timeout)
    except (LabUnavailable, ValueError) as error:
        print(f"laconic lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("laconic lab: interrupted; everything in the lab has ended", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    _report(result, options.rate, say=lambda line: print(line, file=sys.stderr))
    if options.json:
        options.json.write_text(json.dumps(_as_json(result, options), indent=2) + "\n")
    return result.exit_code


def _leave(number: int, _frame: FrameType | None) -> None:
    """Turn a signal into an exception, so that the lab is left in order."""
    sys.exit(128 + number)


def _report(result: RunResult, rate_bits_per_s: float | None, say: Callable[[str], None]) -> None:
    link = "unlimited" if rate_bits_per_s is None else format_rate(rate_bits_per_s)
    for node, outcome in enumerate(result.nodes):
        if outcome.sent_bytes is not None and outcome.received_bytes is not None:
            say(
                f"laconic lab: node {node} sent {outcome.sent_bytes / 1e6:,.2f} MB and received "
                f"{outcome.received_bytes / 1e6:,.2f} MB on its {link} link in {result.wall_s:.1f} s"
            )
    if result.nodes[0].sent_bytes is None:
        say(f"laconic lab: ran for {result.wall_s:.1f} s without a wire, so no bytes were measured")
    if result.timed_out:
        say("laconic lab: ended at its timeout")
    elif failure := result.failure:
        say(f"laconic lab: rank {failure.rank} (node {failure.node}) failed first:\n{failure.error.rstrip()}")
    elif result.exit_code:
        codes = ", ".join(f"node {node}: {outcome.exit_code}" for node, outcome in enumerate(result.nodes))
        say(f"laconic lab: torchrun failed; exit codes are {codes}")


def _as_json(result: RunResult, options: argparse.Namespace) -> dict[str, object]:
    return {
        "nodes": options.nodes,
        "local": options.local,
        "rate_bits_per_s": options.rate,
        "wire": not options.no_wire,
        "wall_s": result.wall_s,
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "failure": dataclasses.asdict(result.failure) if result.failure else None,
        "per_node": [
            {
                "node": node,
                "exit_code": outcome.exit_code,
                "sent_bytes": outcome.sent_bytes,
                "received_bytes": outcome.received_bytes,
            }
            for node, outcome in enumerate(result.nodes)
        ],
    }
