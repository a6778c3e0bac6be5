"""Damage to any file of a checkpoint: is it noticed, and is the checkpoint before used?"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from laconic.checkpoint import commit
from tests.faults import saves
from tests.faults.bench import Bench, campaign_row, faults_row
from tests.support.record import Row

NUM_MUTATIONS = 4000
HARMS = ("went unnoticed", "did not load the one before", "foreign errors")
KINDS = ("flip", "flips", "zeros", "truncate", "append", "empty", "delete", "dangle", "folder", "from before", "swap")


def mutate(newest: Path, before: Path, choice: random.Random) -> str:
    """Damage a file of the checkpoint `newest`, in one of `KINDS`; return what was done."""
    files = sorted(path for path in newest.iterdir())
    path, kind = choice.choice(files), choice.choice(KINDS)
    data = path.read_bytes()
    where = choice.randrange(len(data))
    if kind == "flip":
        path.write_bytes(data[:where] + bytes([data[where] ^ 1 << choice.randrange(8)]) + data[where + 1 :])
    elif kind == "flips":
        mask = bytes(choice.getrandbits(8) if choice.random() < 0.01 else 0 for _ in data)
        path.write_bytes(bytes(byte ^ other for byte, other in zip(data, mask, strict=True)))
    elif kind == "zeros":
        path.write_bytes(data[:where] + bytes(len(data) - where))
    elif kind == "truncate":
        path.write_bytes(data[:where])
    elif kind == "append":
        path.write_bytes(data + choice.randbytes(1 + choice.randrange(9)))
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind in ("delete", "dangle", "folder"):
        path.unlink()
        if kind == "dangle":
            path.symlink_to(path.with_name("gone"))
        elif kind == "folder":
            path.mkdir()
    elif kind == "from before":
        shutil.copy(before / path.name, path)
    else:  # two files of the checkpoint change places
        other = choice.choice([other for other in files if other != path])
        data, others = path.read_bytes(), other.read_bytes()
        path.write_bytes(others)
        other.write_bytes(data)
        return f"{kind} {path.name}, {other.name}"
    return f"{kind} {path.name} at {where} of {len(data)}"


def damaged_loads(folder: Path, count: int, *, seed: int = 0) -> Iterator[tuple[str, saves.Loaded]]:
    """Yield mutations that changed the newest checkpoint of the run `folder`, and what a resume then loads."""
    choice = random.Random(seed)
    newest, before = (candidate.folder for candidate in commit.candidates(folder)[:2])
    intact = {path.name: path.read_bytes() for path in newest.iterdir()}
    done = 0
    while done < count:
        what = mutate(newest, before, choice)
        found = {path.name: path.read_bytes() if path.is_file() else None for path in newest.iterdir()}
        if found != intact:  # zeros may have been zeros
            done += 1
            yield what, saves.load(folder)
        for name in {*found, *intact}:
            path = newest / name
            if os.path.lexists(path) and not path.is_file():
                path.unlink() if path.is_symlink() else path.rmdir()
            path.write_bytes(intact[name])


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
    newest = commit.candidates(folder)[0].folder
    aside = newest.rename(folder.with_name("aside"))
    (folder / commit.LATEST).rename(folder.with_name(commit.LATEST))
    before = saves.load(folder)
    aside.rename(newest)
    folder.with_name(commit.LATEST).rename(folder / commit.LATEST)
    assert before.sequence == saves.load(folder).sequence - 1
    assert not before.warned
    kinds, harmed = Counter[str](), []
    for what, loaded in damaged_loads(folder, count, seed=seed):
        kinds[next(kind for kind in reversed(KINDS) if what.startswith(kind))] += 1
        if harm := harm_of(loaded, before, newest):
            harmed.append(f"{harm}: {what}: {loaded}")
    return kinds, harmed


@campaign_row("checkpoint-damage")
def row(bench: Bench) -> Row:
    """Count the mutations of the files of checkpoints that do harm."""
    root, count = bench.out / "checkpoint-damage", 40 if bench.quick else NUM_MUTATIONS
    kinds, harmed = Counter[str](), []
    runs = ["one rank", "ranks", "islands", "cyclic"]
    saves.record(runs, root, timeout_s=900)
    for seed, run in enumerate(runs):
        found, harms = tally(root / run / saves.RUN, count // len(runs), seed=seed)
        kinds += found
        harmed += harms
    for example in harmed[:9]:
        print(example, flush=True)
    counts = ", ".join(f"{kind} {number:,}" for kind, number in sorted(kinds.items()))
    return faults_row(
        claim="damage to any file of a checkpoint: a warning, and the checkpoint before",
        tried=kinds.total(),
        at_least=2000,
        harms={harm: sum(text.startswith(harm) for text in harmed) for harm in HARMS},
        note=f"Of checkpoints of one rank, of two, of islands and of the cyclic schedule: {counts}.",
    )
