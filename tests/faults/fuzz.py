"""Random configurations, command lines, cluster files and jobs: each works, or is refused with one line.

Hypothesis draws files from the keys of the configuration, with values that fit, almost fit or are absurd, and with keys
and bytes of its own. A job that is accepted must read back equal from its own TOML. Other jobs are taken through their
preparation, a step and a checkpoint, with a small corpus and a small model; there sizes stay small, because memory is
not what is tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import tempfile
import tomllib
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from laconic.comm.launch import RankInfo
from laconic.config import Config, ConfigError, JobError, ModelConfig, from_dict, load, to_toml
from laconic.plan.cluster_file import cluster_from_dict, parse_cluster
from laconic.plan.cluster_spec import ClusterSpec
from laconic.strategies.checks import check_job
from laconic.train.cli import parse
from tests.faults.bench import Bench, Found, campaign
from tests.support.jobs import corpus
from tests.support.launch import launch

HARMS = ("foreign tracebacks", "silent differences")
_RANKS = tuple(
    RankInfo(rank=0, world_size=nodes * local, local_rank=0, num_local=local, num_nodes=nodes)
    for nodes, local in ((1, 1), (2, 2), (3, 1))
)

_MODEL = ModelConfig(config={"model_type": "llama"})
_INTEGERS, _SHARES = st.integers(1, 8), st.floats(0, 1)
_NUMBERS = st.one_of(
    st.integers(-2, 12),
    st.sampled_from([2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 1 << 10_000, -1]),
    st.floats(),
    st.sampled_from([0.0, 0.5, 1.0, 1e308, 5e-324]),
)
_TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", "\0", "a\nb", "x" * 5000, "auto", "host", "4bit", "32 rows", "9" * 500, "1 rows", "0 elements"]
    ),
)
_ANY = st.recursive(
    st.one_of(st.booleans(), _NUMBERS, _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)

Values = dict[str, st.SearchStrategy[Any]]
"""A strategy of hypothesis for the values of each key."""


@campaign("config-fuzz", "random configurations and command lines: a job, or one line", harms=HARMS)
def configurations(bench: Bench) -> Found:
    """Try all kinds of input."""
    share = 500 if bench.quick else 1
    numbers = {try_files: 90_000 // share, try_bytes: 10_000 // share, try_commands: 1_000 // share}
    found = [harm for try_some, num in numbers.items() for harm in try_some(num)]
    return sum(numbers.values()), found, "Tables, mutated files and command lines, checked against three launches."


def _sections(values: Callable[[str, Any], st.SearchStrategy[Any]], most: int) -> Values:
    """For each section a few keys, with `values` of (section.key, type)."""
    return {
        name: _some({key: values(f"{name}.{key}", hint) for key, hint in get_type_hints(cls).items()}, most)
        for name, cls in get_type_hints(Config).items()
    }


def _some(values: Values, most: int, least: int = 0) -> st.SearchStrategy[dict[str, Any]]:
    chosen = st.lists(st.sampled_from(sorted(values)), min_size=least, max_size=most, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: values[name] for name in names}))


def tables() -> st.SearchStrategy[dict[str, Any]]:
    """Tables of a few keys of each section, most with values of their types, and of unknown keys."""
    unknown = st.dictionaries(st.text(max_size=6), _ANY, max_size=1)
    sections = {
        name: st.one_of(*[several] * 9, st.builds(lambda a, b: a | b, several, unknown), _ANY)
        for name, several in _sections(lambda _, hint: st.one_of(*[_odd_values(hint)] * 6, _ANY), 3).items()
    }
    return _some(sections, 4)


def try_files(num: int) -> list[str]:
    """Read `num` random tables from files; return the harms."""

    def read(table: dict[str, Any]) -> str:
        try:
            text = tomli_w.dumps(table).encode()
        except (ValueError, TypeError, RecursionError):  # TOML cannot say it
            return ""
        return _read(text)

    return _try(tables(), read, num)


def try_bytes(num: int) -> list[str]:
    """Read `num` files that random bytes have changed; return the harms."""
    return _try(_changed(to_toml(Config()).encode(), st.binary(max_size=6)), _read, num)


def try_commands(num: int) -> list[str]:
    """Run the parser on `num` random command lines; return the harms."""
    keys = [f"{section}.{key}" for section, cls in get_type_hints(Config).items() for key in get_type_hints(cls)]
    names = st.one_of(
        st.sampled_from(keys), st.text(max_size=6), st.builds("model.config.{}".format, st.text(max_size=5))
    )
    words = st.one_of(_TEXTS, _NUMBERS.map(str), st.sampled_from(["true", "false", "[1", '{model_type = "llama"}']))
    options = st.tuples(names.map("--{}".format), words).flatmap(lambda pair: st.sampled_from([pair, pair[:1]]))
    lines = st.lists(options, max_size=3).map(lambda pairs: [word for pair in pairs for word in pair])
    return _try(lines, lambda words: _check(parse(words)), num)


def _changed(text: Any, new: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The text with other characters in the place of some."""
    places = st.tuples(st.integers(0, len(text)), st.integers(0, 20), new)
    return places.map(lambda change: text[: change[0]] + change[2] + text[change[0] + change[1] :])


def _try(values: st.SearchStrategy[Any], read: Callable[[Any], str | None], num: int) -> list[str]:
    """Let `read` take values: it may refuse them with a JobError, and returns the harm of one that it takes."""
    found: list[str] = []

    def use(value: Any) -> None:
        try:
            harm = read(value)
        except JobError as error:
            is_line = str(error).strip() and ("\n" not in str(error) or "\\n" in repr(value))  # which it may quote
            harm = "" if is_line else f"no single line: {error}"
        except BaseException as error:
            harm = f"foreign tracebacks: {error!r:.200}"
        if harm:
            found.append(f"{harm} of {value!r:.300}")

    each_drawn(values, use, num)
    return found


def _read(text: bytes) -> str:
    """Read a file, which must read back equal from its own TOML."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_bytes(text)
        config = load(path)
        _check(config)
        path.write_text(to_toml(config), encoding="utf-8")
        try:
            return "" if to_toml(load(path)) == to_toml(config) else "silent differences"
        except ConfigError as error:
            return f"silent differences: {error}"


def _check(config: Config) -> None:
    """Check a job, with a model, against several launches."""
    job = dataclasses.replace(config, model=_MODEL)
    for ranks in _RANKS:
        with contextlib.suppress(JobError):
            check_job(job, ranks)


def each_drawn(values: st.SearchStrategy[Any], use: Callable[[Any], None], num: int, number: int = 0) -> None:
    """Call `use` with `num` values, the same for each `number`."""

    @seed(number)
    @settings(
        max_examples=num, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(values)
    def run(value: Any) -> None:
        use(value)

    run()


def values_of(
    hint: Any, plain: Mapping[Any, st.SearchStrategy[Any]], tables: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """Values of a key's type: `plain` has those of bool, str, int and float, and `tables` those of tables."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values_of(part, plain, tables) for part in arguments if part is not types.NoneType))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(values_of(arguments[0], plain, tables), max_size=3)
    return plain.get(origin or hint, tables)


def _odd_values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a key's type, also odd ones."""
    plain: dict[Any, st.SearchStrategy[Any]] = {bool: st.booleans(), str: _TEXTS}
    plain |= {int: st.one_of(*[_INTEGERS] * 8, _NUMBERS), float: st.one_of(*[_SHARES] * 8, _NUMBERS)}
    return values_of(
        hint, plain, st.dictionaries(st.sampled_from(["model_type", "weights", "a.*", ""]), _ANY, max_size=3)
    )


# -- cluster files -----------------------------------------------------------------------------------------------------

_VALID = """\
nodes = 2
ranks_per_node = 8
device = "A100 SXM 80GB"
network = "10 GbE"
local_network = "PCIe 4 x16"
host_memory_bytes = "1 TB"
wire_latency_s = 3e-5
[device_flops_per_s]
bfloat16 = "250 TFLOP/s"
"""
_VALUES = (
    0, -1, 1, 7, 2**63, 10**400, 1e308, -0.0, math.inf, math.nan, 0.5, True, "", "x", "10 GbE", "-3 GB", "1e999 GB",
    "80 GB", "9" * 400 + " GB", "10 Gbit/s", "A100", "8 x 8 x 10 GbE", [], [1], {}, {"float32": 1}, {"x": "y"}, "\0",
)  # fmt: skip


def try_clusters(num: int) -> list[str]:
    """Read `num` cluster files with other characters, and as many with odd values. Returns the harms."""
    texts = _changed(_VALID, st.text(max_size=6))
    names = sorted({*ClusterSpec.__dataclass_fields__, "local_network", "host_link", "gpus"})
    odd = st.dictionaries(st.sampled_from(names), st.sampled_from(_VALUES), min_size=1, max_size=3)
    left_out = st.lists(st.sampled_from(names), max_size=1)
    valid = tomllib.loads(_VALID)
    tables = st.tuples(odd, left_out).map(lambda it: {k: v for k, v in (valid | it[0]).items() if k not in it[1]})
    return _try(texts, lambda text: _harm_of_cluster(parse_cluster(text)), num) + _try(
        tables, lambda table: _harm_of_cluster(cluster_from_dict(table)), num
    )


def _harm_of_cluster(spec: ClusterSpec) -> str:
    plain = {name: value for name, value in vars(spec).items() if isinstance(value, int | float)}
    is_right = all(
        math.isfinite(value) and (value > 0 or (value == 0 and name.endswith("_overlap")))
        for name, value in plain.items()
    )
    return "" if is_right else f"silent: {spec}"


@campaign(
    "cluster-fuzz",
    "damaged cluster files: read, or refused with one line",
    harms=("foreign", "silent", "no single line"),
)
def clusters(bench: Bench) -> Found:
    """Read damaged cluster files."""
    num = 250 if bench.quick else 10_000
    return 2 * num, try_clusters(num), "Half of them with random characters, half with odd values for random keys."


# -- jobs --------------------------------------------------------------------------------------------------------------

JOB_HARMS = ("foreign tracebacks", "no reason given")
NUM_PER_PROCESS = 100
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_MODELS: tuple[dict[str, Any], ...] = (
    {"model_type": "llama", **_SIZES, "num_key_value_heads": 1},
    {"model_type": "llama", **_SIZES, "tie_word_embeddings": True, "attention_dropout": 0.1},
    {"model_type": "gpt2", "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64},
    {"model_type": "mixtral", **_SIZES, "num_local_experts": 2, "num_key_value_heads": 2},
    {"model_type": "qwen3", **_SIZES, "head_dim": 8, "num_key_value_heads": 1},
    # wrong ones
    {"model_type": "llama", **_SIZES, "num_attention_heads": 3},
    {"model_type": "llama", **_SIZES, "vocab_size": 7},
    {"model_type": "llama", **_SIZES, "hidden_act": "nothing"},
    {"model_type": "llama", **_SIZES, "num_hidden_layers": 0},
    {"model_type": "llama", **_SIZES, "rope_parameters": {"rope_type": "x"}},
    {"model_type": "bert", **_SIZES},
    {"model_type": "t5"},
    {"model_type": "x"},
    {},
)


PATH_KEYS = ("data.cache", "data.path", "data.tokenizer", "model.path", "model.config", "train.output", "train.resume",
    "shard.cluster")  # fmt: skip
"""Keys whose values are paths, with a job that needs each."""


def wrong_paths(folder: Path) -> list[Path]:
    """Paths that cannot be read or written by anybody, root included; `folder` gets the files that they need."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file").write_text("x")
    (folder / "loop").unlink(missing_ok=True)
    (folder / "loop").symlink_to(folder / "loop")
    deep = folder.joinpath(*["y" * 200] * 40)
    return [folder / "file" / "x", folder / ("x" * 300), folder / "loop", folder / "loop" / "x", deep,
            Path("/proc/none/x")]  # fmt: skip


def job_with_path(key: str, path: Path, folder: Path) -> dict[str, Any]:
    """The table of a small job in `folder` whose `key` is the path."""
    corpus(folder)
    table: dict[str, dict[str, Any]] = {
        "model": {} if key == "model.path" else {"config": _MODELS[0]},
        "data": {"kind": "text", "path": str(folder / "corpus.txt"), "sequence_length": 16},
        "train": {"steps": 1, "output": str(folder / "out"), "device": "cpu"},
        "shard": {"strategy": "auto"} if key == "shard.cluster" else {},
    }
    section, _, name = key.partition(".")
    table[section][name] = str(path)
    return table


@campaign(
    "prepare-fuzz",
    "random jobs whose configuration is accepted: two steps and a checkpoint, or one line",
    harms=JOB_HARMS,
)
def jobs(bench: Bench) -> Found:
    """Try jobs, in processes of their own."""
    found: list[str] = []
    num_trained, num_parts = 0, 1 if bench.quick else 10
    for number in range(num_parts):
        folder = bench.out / f"prepare-{number}"
        trained, harms = launch(try_jobs, NUM_PER_PROCESS, folder, number, num_ranks=1, timeout_s=1800, backend=None)[0]
        shutil.rmtree(folder)
        found += harms
        num_trained += trained
    return num_parts * NUM_PER_PROCESS, found, f"{num_trained:,} of them trained, on one rank."


def try_jobs(
    num: int, folder: Path, number: int = 0, use: Callable[[Config], str | None] | None = None
) -> tuple[int, list[str]]:
    """Train `num` random jobs, with `harm_of` or `use`. Returns the number of those that trained, and the harms."""
    use = use or harm_of
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if use is harm_of:
            os.environ.pop(name, None)
    folder.mkdir(parents=True, exist_ok=True)
    corpus(folder)
    (folder / "rows.jsonl").write_text("".join(map(_row, range(40))))
    (folder / "empty.txt").write_text("")
    harms: list[str | None] = []

    def try_job(table: dict[str, Any]) -> None:
        harm = use(from_dict(Config, table))
        harms.append(f"{harm} of {json.dumps(table)}" if harm else harm)
        shutil.rmtree(folder / "out", ignore_errors=True)

    each_drawn(_jobs(folder).filter(_is_accepted), try_job, num, number)
    assert len(harms) == num, "too few configurations were accepted"
    return harms.count(None), [harm for harm in harms if harm]


def _is_accepted(table: dict[str, Any]) -> bool:
    """Whether a table is a configuration; others are the matter of `try_files`."""
    try:
        from_dict(Config, table)
    except JobError:
        return False
    return True


def harm_of(config: Config) -> str | None:
    """Train a job. Returns None if it trained, "" if it was refused in good order, else the harm."""
    from laconic.train.loop import run

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            run(config)
    except JobError as error:
        return "" if str(error).strip() else "no reason given"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/laconic/" in frame.filename][-1]
        places = (f"{Path(frame.filename).name}:{frame.lineno}" for frame in (own, frames[-1]))
        return f"foreign tracebacks: {error!r:.300} at {', '.join(places)}"
    return None


def _row(index: int) -> str:
    tokens = [*f"What is {index} + 1? {index + 1}".encode()]
    masks = {"labels": [-100] * 5 + tokens[5:]} if index % 2 else {"assistant_masks": [0] * 9 + [1] * (len(tokens) - 9)}
    return json.dumps({"input_ids": tokens, **masks}) + "\n"


def _jobs(folder: Path) -> st.SearchStrategy[dict[str, Any]]:
    """Tables of a small job, with some keys of some sections at random."""
    paths = st.sampled_from([str(folder / name) for name in ("corpus.txt", "rows.jsonl", "empty.txt", "none", "")])
    fixed: dict[str, dict[str, Any]] = {
        "model": {"config": {**_MODELS[0]}},
        "data": {"kind": "text", "path": str(folder / "corpus.txt"), "sequence_length": 16, "eval_fraction": 0.1},
        "train": {"micro_batch_size": 2, "device": "cpu"},
        "log": {"tensorboard": False},
    }
    # What would take long, reach the network or leave the folder.
    always: dict[str, dict[str, Any]] = {
        "train": {"output": str(folder / "out"), "steps": 2, "epochs": None, "compile": False},
        "data": {"cache": str(folder / "tokens")},
        "log": {"wandb": False, "memory_step": 0},
    }
    own: dict[str, st.SearchStrategy[Any]] = {
        "model.config": st.sampled_from(_MODELS),
        "model.path": paths,
        "data.kind": st.sampled_from(["text", "datasets"]),
        "data.path": paths,
        "data.tokenizer": st.sampled_from(["bytes", "bytes", str(folder), "x"]),
        "sync.recovery": st.sampled_from([str(folder / "recovery"), str(folder / "corpus.txt")]),
        "train.resume": st.sampled_from(["never", "auto", str(folder)]),
    }
    sections = _sections(lambda key, hint: own.get(key, _small_values(hint)), 5)

    def job(drawn: dict[str, dict[str, Any]]) -> dict[str, Any]:
        merged = {
            name: {**fixed.get(name, {}), **drawn.get(name, {}), **always.get(name, {})}
            for name in {**fixed, **always, **drawn}
        }
        if drawn.get("data", {}).get("kind") == "datasets":
            merged["data"]["path"] = str(folder / "rows.jsonl")
        return {name: {key: value for key, value in keys.items() if value is not None} for name, keys in merged.items()}

    return _some(sections, 4, 1).map(job)


def _small_values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a key's type, most of them small."""
    integers = st.one_of(*[st.integers(0, 4)] * 6, st.sampled_from([-1, 7, 16, 64, 1000]))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        str: st.sampled_from(["", "x", "\0", "auto", "host", "4bit", "8bit", "32 rows", "whole", "q_proj", "*.weight"]),
        int: integers,
        float: st.one_of(*[st.floats(0, 1)] * 6, st.sampled_from([2.0, 100.0, 1e308, 5e-324]), integers.map(float)),
    }
    tables = st.dictionaries(st.sampled_from(["weights", "gradients", "*", "*.weight"]), plain[str], max_size=2)
    return values_of(hint, plain, tables)
