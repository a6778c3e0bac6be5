"""Damage to files, and its campaigns: checkpoints, tokens and model folders, each used as a restart does.

A fault copies a folder, damages one file of the copy in one of `KINDS`, and uses the copy. Published weights and the
recovery of islands have further faults of their own: published.py, recovery_damage.py.

A job's damage is harmful if it changes what a run reads without a word (silent), raises what is no JobError (foreign),
or keeps a run from going on where nothing was lost (blocked). Tokens are made again from the corpus. A model folder of
Hugging Face has no checksum, so flipped bits of weights, and of values of config.json, cannot be told from intended
ones: there only the structure is mutated, and a refusal is right.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.checkpoint import commit
from laconic.config import DataConfig, JobError, ModelConfig
from laconic.data import tokens
from laconic.models.tokenizer import ByteTokenizer
from laconic.store.files import remove
from tests.faults import saves
from tests.faults.bench import Bench, Found, campaign

_PAGE = 4096
EDITS: dict[str, Callable[[bytes, int, random.Random], bytes]] = {
    "flip": lambda data, at, dice: data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :],
    "flips": lambda data, at, dice: bytes(byte ^ (dice.getrandbits(8) if dice.random() < 0.01 else 0) for byte in data),
    "zeros": lambda data, at, dice: data[:at] + bytes(len(data) - at),
    "page of zeros": lambda data, at, dice: data[:at] + bytes(len(data[at : at + _PAGE])) + data[at + _PAGE :],
    "garbage": lambda data, at, dice: dice.randbytes(len(data)),
    "truncation": lambda data, at, dice: data[:at],
    "cut": lambda data, at, dice: data[:at] + data[at + dice.randrange(1, 9) :],
    "growth": lambda data, at, dice: data + dice.randbytes(dice.randrange(1, 99)),
    "doubling": lambda data, at, dice: data + data,
    "emptying": lambda data, at, dice: b"",
}
"""A kind of damage: (content of a file, place, chance) -> damaged content."""
KINDS = (*EDITS, "deletion", "dangling link", "folder", "replacement", "exchange")
"""The last two put another file in the place of this one, or let the two change places."""


def damage(
    path: Path,
    others: Sequence[Path],
    dice: random.Random,
    *,
    before: Sequence[Path] = (),
    kinds: Sequence[str] = KINDS,
    reach: int | None = None,
) -> str:
    """Damage a file in one of `kinds`, so that it is another one than before; return what was done.

    Args:
        path: the file.
        others: the files that may come into its place, or change places with it.
        dice: the chance.
        before: older files that may come into its place. Default: `others`.
        kinds: of `KINDS`.
        reach: the first bytes of the file, to which places are bound. Default: all.
    """
    data = path.read_bytes()
    while True:
        kind, at = dice.choice(kinds), dice.randrange(reach or len(data) or 1)
        if kind in EDITS:
            new = EDITS[kind](data, at, dice) if data or kind == "growth" else data
            told = f"{kind} of {path.name} at {at} of {len(data)}"
        elif kind in ("replacement", "exchange"):
            possible = before if before and kind == "replacement" else others
            other = dice.choice([each for each in possible if each != path] or [path])
            new, told = other.read_bytes(), f"{kind} of {path.name} and {other.name}"
        else:
            remove(path)
            if kind == "folder":
                path.mkdir()
            elif kind == "dangling link":
                path.symlink_to(path.with_name("gone"))
            return f"{kind} of {path.name}"
        if new != data:
            path.write_bytes(new)
            if kind == "exchange":
                other.write_bytes(data)
            return told


def tries(
    intact: Path, num: int, spoil: Callable[[Path, random.Random], str], use: Callable[[Path], str], *, seed: object = 0
) -> Iterator[tuple[str, str]]:
    """Copy a folder, `spoil` the copy and `use` it, `num` times. Yields what was done, and what `use` returned."""
    dice, copy = random.Random(f"{seed}"), intact.with_name("copy")
    for _ in range(num):
        made = dict[int, str]()

        def copy_file(source: str, target: str, made: dict[int, str] = made) -> None:
            """Copy a file once, with all of its names."""
            first = made.setdefault(os.stat(source).st_ino, target)
            shutil.copyfile(source, target) if first == target else os.link(first, target)

        shutil.copytree(intact, copy, copy_function=copy_file)
        what = spoil(copy, dice)
        yield what, use(copy)
        shutil.rmtree(copy)


# -- checkpoints -------------------------------------------------------------------------------------------------------

NUM_MUTATIONS = 4000
HARMS = ("went unnoticed", "did not load the one before", "foreign errors")


def harm_of(loaded: saves.Loaded, before: saves.Loaded, newest: Path) -> str:
    """The harm of a mutation; empty if the user is warned of it, and has the checkpoint before."""
    if loaded.foreign:
        return "foreign errors"
    if not any(str(newest) in text and "is damaged" in text for text in loaded.warned):
        return "went unnoticed"
    if (loaded.sequence, loaded.digest, loaded.refusal) != (before.sequence, before.digest, ""):
        return "did not load the one before"
    return ""


def tally(folder: Path, count: int, *, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Count the mutations of the newest checkpoint of the run `folder` by kind, and list those that do harm."""
    newest, earlier = (candidate.folder.name for candidate in commit.candidates(folder)[:2])
    shutil.copytree(folder, older := folder.with_name("older"))
    remove(older / newest)
    remove(older / commit.LATEST)
    before = saves.load(older)
    assert before.sequence == saves.load(folder).sequence - 1
    assert not before.warned

    def spoil(copy: Path, dice: random.Random) -> str:
        files = sorted((copy / newest).iterdir())
        path = dice.choice(files)
        return damage(path, files, dice, before=[copy / earlier / path.name])

    def use(copy: Path) -> str:
        loaded = saves.load(copy)
        return f"{harm}: {loaded}" if (harm := harm_of(loaded, before, copy / newest)) else ""

    found = list(tries(folder, count, spoil, use, seed=seed))
    kinds = Counter(what.partition(" of ")[0] if "page" not in what else "page of zeros" for what, _ in found)
    return kinds, [f"{harm}, {what}" for what, harm in found if harm]


@campaign(
    "checkpoint-damage",
    "damage to any file of a checkpoint: a warning, and the checkpoint before",
    harms=HARMS,
)
def checkpoints(bench: Bench) -> Found:
    """Mutate the files of checkpoints."""
    root, count = bench.out / "checkpoint-damage", 40 if bench.quick else NUM_MUTATIONS
    kinds, harmed = Counter[str](), []
    runs = ["one rank", "ranks", "islands", "cyclic"]
    saves.record(runs, root)
    for seed, run in enumerate(runs):
        found, harms = tally(root / run / saves.RUN, count // len(runs), seed=seed)
        kinds += found
        harmed += harms
    return kinds.total(), harmed, f"Of {', '.join(runs)}: {dict(kinds)}."


# -- a job's files -----------------------------------------------------------------------------------------------------

JOB_HARMS = ("silent", "foreign errors", "restarts blocked")


@campaign(
    "job-damage",
    "mutations of token files and model folders, each followed by a restart",
    harms=JOB_HARMS,
)
def job(bench: Bench) -> Found:
    """Try all kinds of files."""
    num_each = 8 if bench.quick else 400
    found = [harm for kind in JOB_FILES for harm in try_files(kind, bench.out / f"damage-{kind}", num_each)]
    return num_each * len(JOB_FILES), found, f"{num_each} each of {', '.join(JOB_FILES)}."


def try_files(kind: str, work: Path, num: int) -> list[str]:
    """Damage one kind of a job's files `num` times, and return the harms."""
    work.mkdir(parents=True)
    check = JOB_FILES[kind](work)
    kinds = [each for each in KINDS if each not in _NOT_OF.get(kind, ("folder",))]

    def spoil(copy: Path, dice: random.Random) -> str:
        paths = sorted(path for path in copy.rglob("*") if path.is_file())
        path = dice.choice(paths)
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little") if path.suffix == ".safetensors" else None
        return damage(path, paths, dice, kinds=kinds, reach=header)

    def use(copy: Path) -> str:
        try:
            return check(copy)
        except JobError as error:
            return f"restarts blocked {error}"
        except BaseException as error:
            return f"foreign errors {error!r}"

    return [f"{harm}: {kind}, {what}" for what, harm in tries(work / "original", num, spoil, use, seed=kind) if harm]


_NOT_OF = {"model": ("folder", "flips", "zeros", "page of zeros")}
"""Kinds of damage that are not tried. A folder in the way is reported and stays; the others change weights."""


_TEXTS, _ROWS = "text", "input_ids"


def _tokens(work: Path, field: str = _TEXTS) -> Callable[[Path], str]:
    """Prepare a corpus; then every restart must train on the same tokens."""
    rng = random.Random(0)
    path = work / "corpus.jsonl"
    documents = ["".join(rng.choices("abcdefgh ", k=rng.randrange(20, 200))) for _ in range(60)]
    rows = [{field: text if field == _TEXTS else [*text.encode()]} for text in documents]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(kind="datasets", path=str(path), sequence_length=64, eval_fraction=0.1)

    def restart(folder: Path) -> list[np.ndarray]:
        with contextlib.redirect_stderr(io.StringIO()):
            data = tokens.open_data(tokens.prepare(config, ByteTokenizer(), folder), config)
        if isinstance(data, tokens.TokenFiles):
            return [data.train.copy(), data.evaluation.copy()]
        names = ("tokens", "counted", "bounds", "num_targets", "train", "evaluation")
        return [getattr(data, name).copy() for name in names]

    goal = restart(work / "original")
    return lambda copy: "" if all(map(np.array_equal, restart(copy), goal)) else "silent"


def _model(work: Path) -> Callable[[Path], str]:
    """Write a model folder of several files; then it loads as it was, or is refused."""
    from laconic.models.build import build_model
    from laconic.plan.padding import shapes_of

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    table = {"model_type": "llama", "vocab_size": 40, "max_position_embeddings": 16, **sizes}
    model: Any = build_model(ModelConfig(config=table), device="cpu")
    model.save_pretrained(work / "original", max_shard_size="8KB")
    goal = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = (work / "original" / "config.json").read_bytes()

    def check(copy: Path) -> str:
        with contextlib.suppress(JobError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(ValueError):
                shapes_of(str(copy))
            found = build_model(ModelConfig(path=str(copy)), device="cpu").state_dict()
            is_equal = found.keys() == goal.keys() and all(torch.equal(found[key], goal[key]) for key in goal)
            return "silent" if (copy / "config.json").read_bytes() == config and not is_equal else ""
        return ""

    return check


JOB_FILES: dict[str, Callable[[Path], Callable[[Path], str]]] = {
    "tokens": _tokens,
    "rows": lambda work: _tokens(work, _ROWS),
    "model": _model,
}
"""Each writes the folder `original`, and returns what uses a copy of it: the harm, or nothing."""
