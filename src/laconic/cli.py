"""The `laconic` command. It imports only the module of the subcommand that runs."""

import importlib.metadata
import sys
from collections.abc import Sequence

from laconic.extras import run

COMMANDS = {
    "train": ("laconic.train.cli:command", "train a model from a config file (started by torchrun, or alone)"),
    "export": ("laconic.models.export_cli:main", "turn a checkpoint into a Hugging Face safetensors folder"),
    "compare": ("laconic.compare.cli:main", "run one job under several strategies in the lab, side by side"),
    "rendezvous": ("laconic.islands.rendezvous:main", "serve as the meeting point of islands that come and go"),
    "lab": ("laconic.lab.cli:main", "run a script under torchrun on an emulated cluster with a slow wire"),
    "publish": ("laconic.publish.cli:main", "look at published weights, verify them, or serve them over HTTP"),
    "doctor": ("laconic.doctor.cli:main", "say what this cluster is, whether it is well, and what to set"),
    "plan": (
        "laconic.plan.early:main",
        "compute the cost of a run before it starts, or a model's padding",
    ),
}
"""The name of each subcommand -> (its function as "module:function", a line of help).
The function gets the arguments after the subcommand's name, and returns the exit code."""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: laconic <command> [arguments]", "", "commands:"]
    lines += [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", "laconic <command> --help explains a command; laconic --version prints the version."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code: 0, 1 for a failed run, 2 for a mistake in the arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--help"], ["-h"], ["help"]):
        print(_usage())
        return 0
    if arguments[:1] == ["--version"]:
        print(f"laconic {importlib.metadata.version('laconic')}")
        return 0
    if not arguments:
        print(_usage(), file=sys.stderr)
        return 2
    if arguments[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(f"laconic: no command is called {arguments[0]!r}; choose one of {known}, or --help", file=sys.stderr)
        return 2
    return run(f"laconic {arguments[0]}", COMMANDS[arguments[0]][0], arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
