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
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from laconic.config import Config, ConfigError, JobError, ModelConfig, load, parse_toml
from laconic.config.section import Section
from laconic.policy import keys_of, to_keys

_USAGE = """Trains the model that CONFIG.toml describes; options override it. On 8 devices of one machine:
  torchrun --nproc-per-node 8 -m laconic.train CONFIG.toml --train.steps 100
A key of an inline model table is reached as --model.config.KEY VALUE."""

_TABLE_PREFIX = "--model.config."


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
    try:
        return parse(argv)
    except JobError as error:
        _say_why(error)
        return 2
    except SystemExit as leaving:
        if leaving.code not in (0, None):
            raise
        return 0


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


def parse(argv: list[str]) -> Config:
    """The configuration of a command line: defaults, then the file, then the options.

    Raises:
        ConfigError: a mistake in the file.
        SystemExit: code 2, after tyro's message, for a mistake in an option; code 0 for --help.
    """
    config = Config()
    if argv and not argv[0].startswith("-"):
        config, argv = load(argv[0]), argv[1:]
    table, argv = _table_options(argv)
    if table:
        before = config.model.config
        if isinstance(before, str):
            raise ConfigError(f"{_TABLE_PREFIX}{next(iter(table))} needs model.config to be a table, got {before!r}")
        config = replace(config, model=replace(config.model, config={**(before or {}), **table}))
    with _registry():
        return tyro.cli(
            Config,
            args=argv,
            default=config,
            description=_USAGE,
            prog="laconic train",
            use_underscores=True,
            console_outputs=_is_first_in_its_log(),  # otherwise every rank draws the same box
            config=(tyro.conf.FlagConversionOff,),
        )


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


def _table_options(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Split off options `--model.config.KEY VALUE`, whose keys are those of transformers, unknown to tyro."""
    table: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith(_TABLE_PREFIX):
            rest.append(word)
            continue
        key, equals, value = word.removeprefix(_TABLE_PREFIX).partition("=")
        following = value if equals else next(words, None)
        if following is None:
            raise ConfigError(f"{word} needs a value")
        table[key] = _toml_value(following)
    return table, rest


def _toml_value(text: str) -> Any:
    """The value of a text that is a number, boolean, list or table in TOML; any other text stays a string."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def _registry() -> ConstructorRegistry:
    """Rules that teach tyro TOML's booleans, and keys that hold a table or a string."""
    table: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH|TABLE",
        instance_from_str=lambda words: _toml_value(words[0]) if words[0].lstrip().startswith("{") else words[0],
        is_instance=lambda value: value is None or isinstance(value, str | dict),
        str_from_instance=lambda value: [json.dumps(value)],
    )
    boolean: PrimitiveConstructorSpec[Any] = PrimitiveConstructorSpec(
        nargs=1,
        metavar="true|false",
        instance_from_str=_boolean,
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value).lower()],
    )
    specs = {bool: boolean, get_type_hints(ModelConfig)["config"]: table}
    registry = ConstructorRegistry()
    registry.primitive_rule(lambda info: specs.get(info.type))
    registry.struct_rule(_section)
    return registry


def _section(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Tell tyro the keys of a section: [Note: Keys] in policy.py."""
    cls: Any = info.type
    if not (isinstance(cls, type) and issubclass(cls, Section)):
        return None
    values = to_keys(info.default if isinstance(info.default, cls) else cls())
    fields = [
        StructFieldSpec(name=name, type=key.hint, default=values[name], helptext=key.documentation)
        for name, key in keys_of(cls).items()
    ]
    return StructConstructorSpec(instantiate=lambda **given: cls.of_keys(given), fields=tuple(fields))


def _boolean(words: list[str]) -> bool:
    if words[0].lower() not in ("true", "false"):
        raise ValueError(f"expected true or false, got {words[0]!r}")
    return words[0].lower() == "true"


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
