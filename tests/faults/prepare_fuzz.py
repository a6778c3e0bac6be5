"""Random jobs that the configuration accepts, taken through their preparation, a step and a checkpoint.

`config_fuzz` reads and validates configurations. Here a small corpus and a small model meet what it accepts: each job
trains for two steps, or is refused with a JobError. Sizes stay small, because memory is not what is tried.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import traceback
import warnings
from pathlib import Path
from typing import Any, get_type_hints

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from laconic.config import Config, JobError, from_dict
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.faults.config_fuzz import values_of
from tests.support.jobs import corpus
from tests.support.launch import launch
from tests.support.record import Row

HARMS = ("foreign tracebacks", "no reason given")
NUM_JOBS, NUM_PER_PROCESS = 1_000, 100
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


@campaign_row("prepare-fuzz")
def row(bench: Bench) -> Row:
    """Try jobs, in processes of their own."""
    num_jobs = NUM_PER_PROCESS if bench.quick else NUM_JOBS
    found: list[str] = []
    num_trained = 0
    for number in range(num_jobs // NUM_PER_PROCESS):
        folder = bench.out / f"prepare-{number}"
        trained, harms = launch(try_jobs, NUM_PER_PROCESS, folder, number, num_ranks=1, timeout_s=1800, backend=None)[0]
        shutil.rmtree(folder)
        print(f"{number}: {trained} trained", *harms, sep="\n", flush=True)
        found += harms
        num_trained += trained
    return faults_row(
        claim="random jobs whose configuration is accepted: two steps and a checkpoint, or one line",
        tried=num_jobs,
        at_least=1_000,
        harms={harm: sum(one.startswith(harm) for one in found) for harm in HARMS},
        note=f"{num_trained:,} of them trained, on one rank; small models of five families, and wrong ones.",
    )


def try_jobs(num: int, folder: Path, number: int = 0) -> tuple[int, list[str]]:
    """Train `num` random jobs in this process. Returns the number of those that trained, and the harms."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    folder.mkdir(parents=True, exist_ok=True)
    corpus(folder)
    (folder / "chat.jsonl").write_text("".join(_conversation(index) for index in range(40)))
    (folder / "empty.txt").write_text("")
    found: list[str] = []
    num_tried = num_trained = 0

    @seed(number)
    @settings(
        max_examples=20 * num,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(_jobs(folder))
    def run(table: dict[str, Any]) -> None:
        nonlocal num_tried, num_trained
        if num_tried == num:
            return
        try:
            config = from_dict(Config, table)
        except JobError:  # the matter of `config_fuzz`
            return
        num_tried += 1
        harm = harm_of(config)
        num_trained += harm is None
        if harm:
            found.append(f"{harm} of {json.dumps(table)}")
        shutil.rmtree(folder / "out", ignore_errors=True)

    run()
    assert num_tried == num, "too few configurations were accepted"
    return num_trained, found


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
        place = traceback.extract_tb(error.__traceback__)[-1]
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/laconic/" in frame.filename][-1]
        return (
            f"foreign tracebacks: {error!r:.300} at {own.filename.rpartition('/')[2]}:{own.lineno}, "
            f"{place.filename.rpartition('/')[2]}:{place.lineno}"
        )
    return None


def _conversation(index: int) -> str:
    turns = [{"role": "user", "content": f"What is {index} + 1?"}, {"role": "assistant", "content": str(index + 1)}]
    return json.dumps({"messages": turns, "prompt": f"{index} ", "completion": str(index), "text": str(index)}) + "\n"


def _jobs(folder: Path) -> st.SearchStrategy[dict[str, Any]]:
    """Tables of a small job, with some keys of some sections at random."""
    paths = st.sampled_from([str(folder / name) for name in ("corpus.txt", "chat.jsonl", "empty.txt", "none", "")])
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
        "data.kind": st.sampled_from(["text", "jsonl", "datasets"]),
        "data.path": paths,
        "data.tokenizer": st.sampled_from(["bytes", "bytes", str(folder), "x"]),
        "data.chat_template": st.one_of(paths, st.just("{{ x")),
        "sync.recovery": st.sampled_from([str(folder / "recovery"), str(folder / "corpus.txt")]),
        "train.resume": st.sampled_from(["never", "auto", str(folder)]),
    }
    sections = {}
    for name, cls in get_type_hints(Config).items():
        keys = {key: own.get(f"{name}.{key}", _values(hint)) for key, hint in get_type_hints(cls).items()}
        sections[name] = st.lists(st.sampled_from(sorted(keys)), max_size=5, unique=True).flatmap(
            lambda chosen, keys=keys: st.fixed_dictionaries({key: keys[key] for key in chosen})  # type: ignore[misc]
        )

    def job(drawn: dict[str, dict[str, Any]]) -> dict[str, Any]:
        merged = {
            name: {**fixed.get(name, {}), **drawn.get(name, {}), **always.get(name, {})}
            for name in {**fixed, **always, **drawn}
        }
        if drawn.get("data", {}).get("kind") == "jsonl":
            merged["data"]["path"] = str(folder / "chat.jsonl")
        return {name: {key: value for key, value in keys.items() if value is not None} for name, keys in merged.items()}

    chosen = st.lists(st.sampled_from(sorted(sections)), min_size=1, max_size=4, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: sections[name] for name in names})).map(job)


def _values(hint: Any) -> st.SearchStrategy[Any]:
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
