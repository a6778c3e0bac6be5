"""`torchrun ... -m laconic.train CONFIG.toml [--section.key value ...]`; alone, `laconic train` does the same.

[Note: One line in every log]
A mistake ends all ranks with exit code 2, and every log of the job gets one line about it. The first rank of each node
prints, since a node's ranks usually share a terminal or a file. A rank that has a log of its own, such as a file of
`torchrun --redirects` or a pipe of Slurm's, prints too. Such a rank's stderr is not that of its launcher. torchrun ends
with a traceback of its own; what a rank wrote into the file that torchrun names stands below that, as the cause.
"""

import contextlib
import json
import os
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from laconic.config import Config, ConfigError, JobError, load, parse_toml, type_in_words, values_of
from laconic.policy import keys_of, shown

_USAGE = """usage: laconic train [CONFIG.toml] [--SECTION.KEY VALUE ...]

Trains the model that CONFIG.toml describes; options override it. On 8 devices of one machine:
  torchrun --nproc-per-node 8 -m laconic.train CONFIG.toml --train.steps 100
A key of an inline model table is reached as --model.config.KEY VALUE. A value is spelt as in the file, a text without
quotes; a list is several values."""

_TABLE = "model.config."


def command(argv: list[str]) -> int:
    """Call `main` in a process that then exits: see [Note: Exit without teardown] in comm/launch.py."""
    config = _parse_or_say(argv)
    if isinstance(config, int):
        return config
    from laconic.comm.launch import ExitWithoutTeardown

    leaving = ExitWithoutTeardown()
    leaving.code = _run(config)
    return leaving.code


def main(argv: list[str]) -> int:
    """Run the command; return the exit code.

    It is 0; or 2 after one line about a mistake that the user can correct; or 128 + n after signal n, so that a
    scheduler does not take the run for a complete one.
    """
    config = _parse_or_say(argv)
    return config if isinstance(config, int) else _run(config)


def _parse_or_say(argv: list[str]) -> Config | int:
    """The configuration of a command line; or 2 after a line about a mistake in it, or 0 after --help.

    Nothing here imports torch, so that a mistake is told within a second.
    """
    if {"-h", "--help"} & {*argv}:
        if _is_first_in_its_log():
            print(_help())
        return 0
    try:
        return parse(argv)
    except JobError as error:
        _say_why(error)
        return 2


def _run(config: Config) -> int:
    """Train; return the exit code of `main`."""
    from torch.distributed.elastic.multiprocessing.errors import record

    from laconic.train.loop import run

    @record  # so that torchrun shows the traceback of the first failing rank; a JobError gets one line instead
    def recorded() -> int:
        try:
            stopped_by = run(config)["stopped_by"]
        except JobError as error:
            _say_why(error)
            return 2
        if stopped_by is not None:
            saved = (
                "without a checkpoint (train.save_every = -1)" if config.train.save_every < 0 else "with a checkpoint"
            )
            _say(f"stopped by {stopped_by}, {saved}; go on with --train.resume auto")
            return 128 + signal.Signals[stopped_by]
        return 0

    return recorded() or 0


def parse(argv: Sequence[str]) -> Config:
    """The configuration of a command line: defaults, then the file, then the options.

    Raises:
        ConfigError: a mistake in the file or in an option.
    """
    config = Config()
    if argv and not argv[0].startswith("-"):
        config, argv = load(argv[0]), argv[1:]
    sections = get_type_hints(Config)
    for section, given in _options(argv, config).items():
        if section not in sections:
            raise ConfigError(f"unknown option `--{section}`; options are --SECTION.KEY, as --help shows them")
        values = values_of(sections[section], given, f"--{section}.")
        config = replace(config, **{section: getattr(config, section).with_keys(**values)})
    return config


def _options(argv: Sequence[str], config: Config) -> dict[str, dict[str, Any]]:
    """The values of the options by section and key. Each is a list of what its words may mean, the likeliest first."""
    words: dict[str, list[str]] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            words[name] = [value] if equals else []
        elif not name:
            raise ConfigError(f"{word!r} follows no option; give the file first, then options --SECTION.KEY VALUE")
        else:
            words[name].append(word)
    found: dict[str, dict[str, Any]] = {}
    table: dict[str, Any] = {}
    for name, given in words.items():
        if name.startswith(_TABLE):
            if len(given) != 1:
                raise ConfigError(f"--{name} needs one value")
            table[name.removeprefix(_TABLE)] = _toml_value(given[0])
        else:
            section, _, key = name.partition(".")
            found.setdefault(section, {})[key] = _meanings(given)
    if table:
        before = config.model.config
        if isinstance(before, str):
            raise ConfigError(f"--{_TABLE}{next(iter(table))} needs model.config to be a table, got {before!r}")
        found.setdefault("model", {})["config"] = [{**(before or {}), **table}]
    return found


def _meanings(words: Sequence[str]) -> list[Any]:
    """What the words of an option may mean: as in a file, as a text, or as a list of these."""
    if len(words) == 1:
        values = [None] if words[0] == "None" else []
        values += [value for value in [_toml_value(words[0])] if not isinstance(value, str)]
        return [*values, words[0], [*map(_toml_value, words)], [*words]]
    return [[*map(_toml_value, words)], [*words]]


def _say_why(error: JobError) -> None:
    """Print a line, and give it to torchrun: [Note: One line in every log]."""
    line = " ".join(part.strip() for part in str(error).splitlines())  # other packages' messages have several lines
    _say(line)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        told = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": told}), encoding="utf-8")


def _say(line: str) -> None:
    """Print one line: [Note: One line in every log]."""
    if _is_first_in_its_log():
        rank = os.environ.get("RANK", "0")
        print(f"laconic train: {line}" if rank == "0" else f"laconic train: rank {rank}: {line}", file=sys.stderr)
        sys.stderr.flush()


def _is_first_in_its_log() -> bool:
    """Whether no other rank prints what this one would print where this one prints."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return True
    try:
        own, launchers = os.fstat(2), os.stat(f"/proc/{os.getppid()}/fd/2")
    except OSError:  # not Linux
        return False
    return not os.path.samestat(own, launchers)


def _toml_value(text: str) -> Any:
    """The value of a text that is a number, boolean, list or table in TOML; any other text stays a string."""
    try:
        return parse_toml(f"value = {text.lower() if text.lower() in ('true', 'false') else text}")["value"]
    except ValueError:
        return text


def _help() -> str:
    """The usage, and all keys with their documentation."""
    lines = [_USAGE]
    for section, cls in get_type_hints(Config).items():
        lines += ["", f"[{section}]"]
        for name, key in keys_of(cls).items():
            lines.append(f"  --{section}.{name} {type_in_words(key.hint)}")
            text = f"{key.documentation()} (default: {shown(key.default)})"
            lines += textwrap.wrap(text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
