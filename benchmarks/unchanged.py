"""Do two versions of the sources train the same, to the bit? If so, the change between them has no numeric effect.

    python -m benchmarks.unchanged --before HEAD               the working tree against the last commit, some 4 minutes
    python -m benchmarks.unchanged --before v1 --after v2 --jobs host,muon --out runs/unchanged.json

Both versions run the same small jobs on this machine, on CPU with Gloo. Every job runs once from its beginning, and
once more from the checkpoint in its middle. The command compares the files that both versions write: losses, gradient
norms, the bytes of each rank by level, purpose and direction, every file of every checkpoint, and everything else. It
exits with code 1 if there is a difference.

This process does not import laconic. Only its ranks import laconic, each from the version that it runs.

[Note: Comparison of files]
Every file becomes a list of leaves; a leaf is a path and a value. A JSON or TOML file and the `.metadata` file of
torch.distributed.checkpoint have one leaf for each of their values, in full precision. Any other file has one leaf, its
hash. Both versions must have the same leaves with equal values, except for the leaves that `EXCLUDED` names.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import pickle
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.launch import launch

RENAMED_KEYS: dict[str, str] = {}
"""Renamed keys of the configuration: old "section.key" -> new "section.key". `JOBS` has the new keys."""
RENAMED_NAMES: dict[str, str] = {}
"""Other renamed words of settings, metrics, levels and purposes: old -> new."""
COUNTERS = ("laconic.comm.traffic:Traffic", "laconic.traffic:Traffic")
"""The class whose `count` is called for every transfer: the first that a version has."""
COMMAND = ("laconic.cli", "train")
"""The command `laconic train`: a module and its arguments."""
EXCLUDED = {
    r".*\b(step_s|data_s|wait_s|hidden_s|exposed_s|tokens_per_s)\b.*": "durations, and a rate that depends on one",
    r".*\bresident_bytes\b.*": "memory of the process, which depends on allocators and threads",
    r".*(summary\.json:|\.)cyclic\b.*": "figures that an earlier release's trainer had",
    r".*/tokenizer/chat_template\.jinja:": "a file that an earlier release wrote",
    r".*\b(data\.(format|padding|too_long)|log\.(progress|wandb_project))": "keys that an earlier release had",
    r".*\b(crc32|interface_received_bytes\b.*)": "figures that an earlier release had",
    r".*\bversions\.laconic": "the version under test",
    r".*/\.lock:": "the process that holds the lock",
    r".*/\.metadata:storage_meta\.(save_id|load_id)": "random numbers that torch draws for every save",
    r"cyclic-.*\bwire_bytes\b.*": "a sum over some levels; these jobs compare the sums over all levels",
    r".*/manifest\.json:(checksum|files\.\d+\.(sha256|size_bytes))": "hashes of files that are compared themselves",
}
"""The leaves that may differ: a pattern of "job/file:key" -> the reason."""
LEVEL = r"(?<=[:.])(island|node|local)/"
"""The level in the key of a byte count."""
KINDS = {"checkpoint files": "/checkpoints/", "losses": "loss|grad_norm", "bytes": "bytes", "rest": ""}
"""The kinds of leaves: name -> pattern of the path. A leaf has the first kind that fits."""
TIMEOUT_S = 120  # for one run of a job, which takes a few seconds
PRELOADED = ("torch._dynamo", "transformers.models.llama.modeling_llama", "peft")
STEPS, MIDDLE = 8, 4
SIZES = {"hidden_size": 64, "intermediate_size": 132, "num_hidden_layers": 3, "num_attention_heads": 4}
MODEL = {"model_type": "llama", **SIZES, "num_key_value_heads": 4, "max_position_embeddings": 32}
BASE = {
    "model": {"config": {**MODEL, "tie_word_embeddings": False}},
    "data": {"kind": "text", "path": "corpus.txt", "sequence_length": 16, "eval_fraction": 0.1},
    "optimizer": {"lr": 0.01, "warmup_steps": 2},
    "train": {"steps": STEPS, "save_every": MIDDLE, "eval_every": MIDDLE, "micro_batch_size": 2, "device": "cpu"},
    "log": {"tensorboard": False},
}
"""The settings of all jobs. Paths are relative, so both versions write the same paths."""
STREAMED = {"mode": "local", "every": 4, "fragments": 2, "overlap": 1, "error_feedback": True}
"""Every fragment syncs twice. One fragment is in flight when the checkpoint in the middle is saved."""
CYCLIC = {"kind": "cyclic", "cut_by": "parameters"}
"""The other ways to cut a model measure times, so two runs may cut the model differently."""
JOBS: dict[str, dict[str, Any]] = {
    "none": {"shard.cache": "none", "train.accumulation": 2},
    "host": {"shard.cache": "host", "train.accumulation": 2},
    "device": {"shard.cache": "device", "train.accumulation": 2},
    "mixed": {"shard": {"device_budget_bytes": 40_000, "param_dtype": "bfloat16", "reduce_dtype": "float32"}},
    "lora": {"lora.enabled": True, "lora.rank": 3, "lora.dropout": 0.1},
    "islands": {"sync": {**STREAMED, "codec": "bf16", "mixing": 0.5}},
    "partial": {"sync": {**STREAMED, "codec": "bf16", "slices": 2}, "train.async_save": True},
    "cyclic-v1": {"schedule": {**CYCLIC, "rule": "v1", "states": "replicated"}, "optimizer.max_grad_norm": 0.5},
    "cyclic-lag2": {"schedule": {**CYCLIC, "rule": "lag2", "states": "sharded"}, "optimizer.max_grad_norm": 0.0},
    "cyclic-v2": {"schedule": {**CYCLIC, "rule": "v2", "states": "shared"}, "optimizer.max_grad_norm": 0.0},
    "adamw8bit": {"optimizer.name": "adamw8bit", "model.activation_checkpointing": True},
    "muon": {"optimizer.name": "muon", "shard.cache": "device"},
    "shampoo": {"optimizer": {"name": "shampoo", "update_every": 2, "block_size": 64}},
}
"""The jobs: settings by name. They run on 2 nodes x 2 ranks. Cyclic jobs run on 3 ranks of one node; with shared stages
these are the devices of two workers."""


def run_version(version: str | None, work: Path, names: list[str]) -> None:
    """Run the jobs with the sources of a version, each in its own folder below `work`."""
    copy_sources(version, work)
    for name in names:
        folder = work / name
        prepare(folder, name, is_before=work.name == "before")
        problem = run_job(folder, name, "first")
        if not problem:
            shutil.copytree(folder / "first", folder / "resumed", ignore=shutil.ignore_patterns(f"step-{STEPS}"))
            problem = run_job(folder, name, "resumed")
        (folder / "problem.log").write_text(problem)
        print(f"{work.name}: {name} {problem or 'is done'}", flush=True)


def copy_sources(version: str | None, folder: Path) -> None:
    """Copy `src` of a commit, a folder or the working tree into `folder`, because somebody may edit the original."""
    root = Path(__file__).resolve().parents[1]
    folder.mkdir()
    if Path(version or root).is_dir():
        shutil.copytree(Path(version or root) / "src", folder / "src")
    else:
        archive = subprocess.run(["git", "archive", str(version), "src"], cwd=root, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive.stdout)


def prepare(folder: Path, name: str, *, is_before: bool) -> None:
    """Write the corpus of a job, and the configurations of its two runs: from the beginning, and from the middle."""
    (folder / "first").mkdir(parents=True)
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"{n} bottles of beer on the wall, take one down: {n - 1}.\n" for n in range(400, 0, -1)))
    os.utime(corpus, (0, 0))  # the name of the tokenised corpus depends on the time of the file
    keys, words = ({new: old for old, new in table.items()} for table in (RENAMED_KEYS, RENAMED_NAMES))
    for output in ("first", "resumed"):
        run = {"train.output": output, "train.resume": output == "resumed"}
        settings = dict(pair for table in (BASE, JOBS[name], run) for pair in walk(table))
        if is_before:
            settings = {keys.get(key, key): words.get(value, value) for key, value in settings.items()}
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
        (folder / f"{output}.toml").write_text("".join(lines))


def run_job(folder: Path, name: str, output: str) -> str:
    """Run one configuration of a job on all its ranks, and return an error message, or an empty string."""
    num_ranks, num_local = (3, 3) if name.startswith("cyclic") else (4, 2)
    try:
        launch(
            run_rank, folder, output, num_ranks=num_ranks, num_local=num_local, backend=None, timeout_s=TIMEOUT_S,
            preloaded=PRELOADED,
        )  # fmt: skip
    except (RuntimeError, TimeoutError) as error:
        return f"failed: {error}"
    return ""


def run_rank(folder: Path, output: str) -> None:
    """Run `laconic train` with the sources of a version, and write the bytes of its transfers."""
    os.chdir(folder)
    rank = os.environ["RANK"]
    log = os.open(f"{output}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [*COMMAND, f"{output}.toml"]
    sys.path.insert(0, str(folder.parent / "src"))
    found = str(importlib.import_module("laconic").__file__)
    assert found.startswith(sys.path[0]), f"laconic is {found}, expected in {sys.path[0]}"
    sizes = record_bytes()
    try:
        runpy.run_module(COMMAND[0], run_name="__main__", alter_sys=True)
    except SystemExit as exit_:
        if exit_.code:
            text = Path(f"{output}-{rank}.log").read_text(errors="replace")
            raise RuntimeError(f"exit code {exit_.code}; the end of its output:\n{text[-4000:]}") from None
    finally:
        Path(f"{output}-{rank}.bytes.json").write_text(json.dumps(sizes))


def record_bytes() -> Counter[str]:
    """Return a counter of the bytes of all transfers from now on, by "level/purpose/direction"."""
    for name in COUNTERS:
        with contextlib.suppress(ImportError, AttributeError):
            cls = pkgutil.resolve_name(name)
            break
    else:
        raise RuntimeError(f"this version has none of {COUNTERS}; add its class that counts bytes to COUNTERS")
    count, signature = cls.count, inspect.signature(cls.count)
    sizes: Counter[str] = Counter()

    def count_here_too(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        kind = "/".join(value for value in given.values() if isinstance(value, str))
        sizes.update({f"{kind}/{key}": value for key, value in given.items() if isinstance(value, int)})
        count(*args, **kwargs)

    cls.count = count_here_too
    if getattr(cls, "observer", 0) is None:  # else transfers count themselves where nobody observes them
        cls.observer = staticmethod(lambda *_: None)
    return sizes


def leaves_of(folder: Path, name: str, *, is_before: bool) -> dict[str, Any]:
    """Return the leaves of the files that both runs of a job wrote: [Note: Comparison of files]."""
    leaves: dict[str, Any] = {}
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".log")
    metrics_first = sorted(files, key=lambda path: (path.suffix != ".jsonl", path))  # their differences say most
    for file in metrics_first:
        for path, value in walk(read(file), f"{file.relative_to(folder.parent)}:"):
            path, value = renamed(path, value) if is_before else (path, value)
            if name.startswith("cyclic") and re.search(LEVEL, path):
                path = re.sub(LEVEL, "all/", path)
                value += leaves.get(path, 0)
            if not any(re.fullmatch(pattern, path) for pattern in EXCLUDED):
                leaves[path] = value
    return leaves


def read(file: Path) -> Any:
    """Return the content of a file: nested values if the format is known, else a hash."""
    if file.name == ".metadata":
        return pickle.loads(file.read_bytes())
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    parse = {".json": json.loads, ".toml": tomllib.loads}.get(file.suffix)
    return parse(file.read_text()) if parse else hashlib.sha256(file.read_bytes()).hexdigest()


def walk(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for every leaf of nested dicts, lists and dataclasses."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from walk(item, f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), value


def renamed(path: str, value: Any) -> tuple[str, Any]:
    """Return a leaf of the version before under its name in the version after."""
    for old, new in (RENAMED_KEYS | RENAMED_NAMES).items():
        path = re.sub(rf"(?<![\w-]){re.escape(old)}(?![\w-])", new, path)
    return path, RENAMED_NAMES.get(value, value) if isinstance(value, str) else value


def compare(name: str, works: list[Path]) -> dict[str, Any]:
    """Compare a job. Return, for each kind, the numbers of equal leaves and of all leaves, and all differences."""
    problems = [f"{work.name} {text}" for work in works if (text := (work / name / "problem.log").read_text())]
    before, after = (leaves_of(work / name, name, is_before=work is works[0]) for work in works)
    equal: dict[str, dict[str, bool]] = {kind: {} for kind in KINDS}
    for path in {**before, **after}:
        kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, path))
        counted = path.partition(":")[0] if kind == "checkpoint files" else path
        was, now = (repr(leaves.get(path, "nothing")) for leaves in (before, after))
        equal[kind][counted] = equal[kind].get(counted, True) and was == now
        if was != now:
            problems.append(f"{path} was {was[:200]} and is {now[:200]}")
    problems += [f"there are no {kind} to compare" for kind, found in equal.items() if not found]
    counts = {kind: f"{sum(found.values())}/{len(found)}" for kind, found in equal.items()}
    return {"job": name, **counts, "equal?": "NO" if problems else "yes", "differences": problems}


def table_of(rows: list[dict[str, Any]]) -> str:
    """Return a table with a line for each job."""
    columns = ("job", *KINDS, "equal?")
    lines = [columns, *([row[column] for column in columns] for row in rows)]
    return "\n".join(" | ".join(f"{cell:<16}" for cell in line).rstrip() for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.unchanged", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, help="a commit, or a folder that has src")
    parser.add_argument("--after", help="the same; default: the working tree")
    parser.add_argument("--jobs", default=",".join(JOBS), help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="write counts and differences as JSON")
    options = parser.parse_args()
    names = options.jobs.split(",")
    if unknown := sorted(set(names) - set(JOBS)):
        parser.error(f"there are no jobs {unknown}; there are {', '.join(JOBS)}")
    with tempfile.TemporaryDirectory() as folder:
        works = [Path(folder).resolve() / name for name in ("before", "after")]
        for version, work in zip((options.before, options.after), works, strict=True):
            run_version(version, work, names)
        rows = [compare(name, works) for name in names]
    print(f"\n{table_of(rows)}")
    for row in rows:
        if row["differences"]:
            print(f"\n{row['job']}: {len(row['differences'])} differences, the first: {row['differences'][0]}")
    if options.out is not None:
        report = {"before": options.before, "after": options.after, "jobs": rows}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(row["differences"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
