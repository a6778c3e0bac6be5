"""Damaged files of a job: tokens, metrics and model folders, each mutated and then used as a restart would use it.

A mutation is harmful if it changes what a run reads without a word (silent), raises what is no JobError (foreign), or
keeps a run from going on where nothing was lost (blocked). Tokens are made again from the corpus. A line of metrics has
a checksum. A model folder of Hugging Face has none, so flipped bits of weights, and of values of config.json, cannot be
told from intended ones: there only the structure is mutated, and a refusal is right.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.config import DataConfig, JobError, ModelConfig
from laconic.data import tokens
from laconic.hf.models import build_model
from laconic.hf.tokenizer import ByteTokenizer
from laconic.plan.padding import shapes_of
from laconic.train.loggers import JsonlLogger
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.support.record import Row

HARMS = ("silent", "foreign errors", "restarts blocked")
NUM_EACH = 400
_PAGE = 4096


@campaign_row("job-damage")
def row(bench: Bench) -> Row:
    """Try all kinds of files."""
    num_each = 8 if bench.quick else NUM_EACH
    found = [harm for kind in KINDS for harm in try_kind(kind, bench.out / f"damage-{kind}", num_each)]
    for harm in found:
        print(harm, flush=True)
    return faults_row(
        claim="mutations of token files, metrics and model folders, each followed by a restart",
        tried=num_each * len(KINDS),
        at_least=1000,
        harms={harm: sum(one.startswith(harm) for one in found) for harm in HARMS},
        note=f"{num_each} each of {', '.join(KINDS)}: flipped bits, zeroed pages, garbage, truncated, doubled, "
        "deleted, swapped and lengthened files. Values of config.json and the data of safetensors have no checksum in "
        "Hugging Face's format: there the campaign mutates names, sizes and structure.",
    )


def try_kind(kind: str, work: Path, num: int, seed: int = 0) -> Iterator[str]:
    """Mutate one kind of files `num` times, and yield the harms."""
    work.mkdir(parents=True)
    use = KINDS[kind](work)
    rng = random.Random(f"{kind}/{seed}")
    original = work / "original"
    for number in range(num):
        copy = work / "copy"
        shutil.copytree(original, copy)
        what = mutate(sorted(path for path in copy.rglob("*") if path.is_file()), rng)
        for harm in use(copy):
            yield f"{harm}: {kind} {number}, {what}"
        shutil.rmtree(copy)


def mutate(paths: list[Path], rng: random.Random) -> str:
    """Mutate one of several files; return the mutation in words."""
    path = rng.choice(paths)
    content = path.read_bytes()
    mutation = rng.choice(
        ("flip", "byte", "zeros", "garbage", "truncate", "double", "delete", "swap", "lengthen", "cut")
    )
    where = rng.randrange(_mutable(path, content)) if content else 0
    if mutation == "delete":
        path.unlink()
        return f"{path.name} deleted"
    changed = bytearray(content)
    if mutation == "flip" and content:
        changed[where] ^= 1 << rng.randrange(8)
    elif mutation == "byte" and content:
        changed[where] = rng.randrange(256)
    elif mutation == "zeros":
        start = where // _PAGE * _PAGE
        changed[start : start + _PAGE] = bytes(len(changed[start : start + _PAGE]))
    elif mutation == "garbage":
        changed = bytearray(rng.randbytes(len(content)))
    elif mutation == "truncate":
        del changed[where:]
    elif mutation == "double":
        changed *= 2
    elif mutation == "swap":
        changed = bytearray(rng.choice(paths).read_bytes())
    elif mutation == "lengthen":
        changed += rng.randbytes(rng.randrange(1, 9))
    elif mutation == "cut":
        del changed[where : where + rng.randrange(1, 9)]
    path.write_bytes(bytes(changed))
    return f"{mutation} at {where} of {path.name}"


def _mutable(path: Path, content: bytes) -> int:
    """The bytes of a file whose change can be noticed: of safetensors, the header."""
    if path.suffix == ".safetensors":
        return min(len(content), 8 + int.from_bytes(content[:8], "little"))
    return len(content)


def _noticed(action: Callable[[], Iterator[str]]) -> Iterator[str]:
    try:
        yield from action()
    except JobError as error:
        yield f"restarts blocked {error}"
    except BaseException as error:
        yield f"foreign errors {error!r}"


# -- tokens ------------------------------------------------------------------------------------------------------------


def _tokens(work: Path, **settings: Any) -> Callable[[Path], Iterator[str]]:
    """Prepare a corpus; then every restart must train on the same tokens."""
    rng = random.Random(0)
    path = work / "corpus.jsonl"
    documents = ["".join(rng.choices("abcdefgh ", k=rng.randrange(20, 200))) for _ in range(60)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = DataConfig(kind="jsonl", path=str(path), sequence_length=64, eval_fraction=0.1, **settings)

    def restart(folder: Path) -> list[np.ndarray]:
        data = tokens.open_data(tokens.prepare(config, ByteTokenizer(), folder), config)
        if isinstance(data, tokens.TokenFiles):
            return [data.train.copy(), data.evaluation.copy()]
        arrays = [getattr(data, name) for name in ("tokens", "counted", "bounds")]
        return [array.copy() for array in (*arrays, *vars(data.train).values(), *vars(data.evaluation).values())]

    goal = restart(work / "original")

    def use(copy: Path) -> Iterator[str]:
        def check() -> Iterator[str]:
            with contextlib.redirect_stderr(io.StringIO()):
                found = restart(copy)
            if not all(map(np.array_equal, found, goal)):
                yield "silent"

        return _noticed(check)

    return use


# -- metrics -----------------------------------------------------------------------------------------------------------


def _metrics(work: Path) -> Callable[[Path], Iterator[str]]:
    """Write a metrics file; then a restart must keep its lines, or say that some are gone."""
    (work / "original").mkdir()
    logger = JsonlLogger(work / "original" / "metrics.jsonl", after_step=0)
    for step in range(1, 41):
        logger._write({"step": step, "loss": 5.0 / step, "tokens": 64 * step, "traffic_bytes": {"node/weights": step}})
        if step % 10 == 0:
            logger.evaluation(step, {"eval_loss": 5.5 / step})
    logger.close()

    def figures(path: Path) -> list[dict[str, Any]]:
        names = ("step", "loss", "tokens", "traffic_bytes", "eval_loss")
        return [
            {key: row[key] for key in names if key in row} for row in map(json.loads, path.read_bytes().splitlines())
        ]

    goal = figures(work / "original" / "metrics.jsonl")

    def use(copy: Path) -> Iterator[str]:
        path = copy / "metrics.jsonl"
        was_there = path.exists()

        def check() -> Iterator[str]:
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                JsonlLogger(path, after_step=40).close()
            kept = figures(path)
            if any(row not in goal for row in kept) or (kept != goal and was_there and not said.getvalue()):
                yield "silent"

        return _noticed(check)

    return use


# -- model folders -----------------------------------------------------------------------------------------------------


def _model(work: Path) -> Callable[[Path], Iterator[str]]:
    """Write a model folder of several files; then it loads as it was, or is refused."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    table = {"model_type": "llama", "vocab_size": 40, "max_position_embeddings": 16, **sizes}
    model: Any = build_model(ModelConfig(config=table), device="cpu")
    model.save_pretrained(work / "original", max_shard_size="8KB")
    goal = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = (work / "original" / "config.json").read_bytes()

    def use(copy: Path) -> Iterator[str]:
        def check() -> Iterator[str]:
            with contextlib.suppress(JobError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with contextlib.suppress(ValueError):
                    shapes_of(str(copy))
                found = build_model(ModelConfig(path=str(copy)), device="cpu").state_dict()
                is_config_whole = (copy / "config.json").read_bytes() == config
                is_equal = found.keys() == goal.keys() and all(torch.equal(found[key], goal[key]) for key in goal)
                if is_config_whole and not is_equal:
                    yield "silent"

        return _noticed(check)

    return use


KINDS: dict[str, Callable[[Path], Callable[[Path], Iterator[str]]]] = {
    "tokens": _tokens,
    "rows": lambda work: _tokens(work, packing=True),
    "metrics": _metrics,
    "model": _model,
}
