"""Real saves of every kind, recorded: their files and their order of operations are those of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from laconic import checkpoint
from laconic.store import folder as store
from laconic.store.folder import CrashPoint
from tests.faults.recording import Recorder, attached, attached_to, served
from tests.support.launch import launch

COMMITTED = "committed"
"""The mark at the instant from which a checkpoint must survive."""
RUN = "checkpoints"
"""The folder of the checkpoints, in the recorded folder."""
STEPS = {"one rank": (1, 2, 3), "overwrite": (1, 2, 2, 1)}
"""The steps that are saved in this process, two of which are kept."""
JOBS: dict[str, dict[str, Any]] = {
    "ranks": {},
    "async": {"train": {"async_save": True}},
    "islands": {"sync": {"mode": "local", "every": 1, "islands": 2}},
    "slices": {"sync": {"mode": "local", "every": 1, "islands": 2, "slices": 2}},
    "cyclic": {"schedule": {"kind": "cyclic", "cut_by": "parameters"}},
}
"""The jobs that the trainer runs on two nodes of a rank each: three steps with a checkpoint after each, two kept."""
_RANKS = 2
_TEXT = "".join(f"{n} bottles of beer on the wall.\n" for n in range(99, 0, -1))


def small_model() -> nn.Module:
    """A model of three parameters; no power of two divides them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1, bias=False))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, so that every checkpoint differs."""
    model(torch.ones(2, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def record(kinds: list[str], root: Path, timeout_s: float = 90) -> dict[str, Recorder]:
    """Run the saves of some kinds, each in a folder of its own; return what they did to their files."""
    recorders = {}
    for kind in kinds:
        (root / kind).mkdir(parents=True)
        recorders[kind] = Recorder(root / kind, only=RUN)
        if kind in STEPS:
            _save(recorders[kind], STEPS[kind])
    if jobs := [kind for kind in kinds if kind in JOBS]:
        (root / "corpus.txt").write_text(_TEXT)
        with served(recorders) as address:
            launch(_train, jobs, address, str(root), num_ranks=_RANKS, num_local=1, timeout_s=timeout_s)
    return recorders


def _save(recorder: Recorder, steps: tuple[int, ...]) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with attached(recorder.announce), _marking(recorder.announce):
        for number, step in enumerate(steps):
            train_step(model, optimizer)
            checkpoint.save_checkpoint(
                recorder.root / RUN, step, model=model, optimizer=optimizer, extra={"number": number}
            )


@contextmanager
def _marking(announce: Callable[..., None]) -> Iterator[None]:
    passed: set[CrashPoint] = set()

    def mark(point: CrashPoint) -> None:
        passed.add(point)
        if point == CrashPoint.COMMITTED and CrashPoint.BEGUN in passed:  # token files are committed before
            announce(mark=COMMITTED)

    store.on_crash_point = mark
    try:
        yield
    finally:
        store.on_crash_point = None


def _train(kinds: list[str], address: str, root: str) -> None:
    """Run the jobs on this rank, one after the other."""
    from laconic.train.loop import run

    for kind in kinds:
        config = _job(Path(root), kind)
        with attached_to(address, kind) as announce, _marking(announce):
            run(config)
            dist.barrier()


def _job(root: Path, kind: str) -> Any:
    from laconic.config import Config, from_dict

    llama = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    sections: dict[str, dict[str, Any]] = {
        "model": {"config": {"model_type": "llama", "num_key_value_heads": 1, "tie_word_embeddings": False, **llama}},
        "data": {"kind": "text", "path": str(root / "corpus.txt"), "sequence_length": 8, "cache": str(root / "tokens")},
        "optimizer": {"lr": 0.01, "lr_schedule": "constant"},
        "train": {"steps": 3, "micro_batch_size": 1, "device": "cpu", "output": str(root / kind), "save_every": 1},
        "log": {"tensorboard": False, "progress": False},
    }
    for section, values in JOBS[kind].items():
        sections[section] = {**sections.get(section, {}), **values}
    return from_dict(Config, sections)
