"""Real saves of every kind, recorded: their files and their order of operations are those of a run."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic import checkpoint, rehearse
from laconic.checkpoint import CheckpointError, commit, sidecar, storage
from laconic.checkpoint.commit import CheckpointManifest
from laconic.config import Config
from laconic.store import folder as store
from laconic.store.folder import CrashPoint
from tests.faults.power_loss import Recorder, attached
from tests.support.jobs import SMALL_LLAMA, job

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


def small_model() -> nn.Module:
    """A model of three parameters; no power of two divides them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 1, bias=False))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, so that every checkpoint differs."""
    model(torch.ones(2, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def record(kinds: list[str], root: Path) -> dict[str, Recorder]:
    """Run the saves of some kinds, each in a folder of its own; return what they did to their files."""
    recorders = {}
    for kind in kinds:
        (root / kind).mkdir(parents=True)
        recorder = recorders[kind] = Recorder(root / kind, only=RUN)
        with attached(recorder.announce):
            if kind in STEPS:
                _save(recorder, STEPS[kind])
            else:
                rehearse.ranks(_train, _job(root, kind), recorder, nodes=2, timeout_s=900)
    return recorders


def _save(recorder: Recorder, steps: tuple[int, ...]) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with _marking(recorder):
        for number, step in enumerate(steps):
            train_step(model, optimizer)
            checkpoint.save_checkpoint(
                recorder.root / RUN, step, model=model, optimizer=optimizer, extra={"number": number}
            )


@contextmanager
def _marking(recorder: Recorder) -> Iterator[None]:
    passed: set[CrashPoint] = set()

    def mark(point: CrashPoint) -> None:
        passed.add(point)
        if point == CrashPoint.COMMITTED and CrashPoint.BEGUN in passed:  # token files are committed before
            recorder.announce(mark=COMMITTED)

    store.on_crash_point = mark
    try:
        yield
    finally:
        store.on_crash_point = None


def _train(config: Config, recorder: Recorder) -> None:
    from laconic.train.loop import run

    with _marking(recorder):
        run(config)


def _job(root: Path, kind: str) -> Config:
    small = {"hidden_size": 8, "intermediate_size": 8}
    sections: dict[str, dict[str, Any]] = {
        "model": {"config": {"model_type": "llama", **SMALL_LLAMA, **small}},
        "data": {"sequence_length": 8},
        "train": {"steps": 3, "micro_batch_size": 1, "output": str(root / kind), "save_every": 1},
    }
    for section, values in JOBS[kind].items():
        sections[section] = {**sections.get(section, {}), **values}
    return job(root, **sections)


# -- stored ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """The checkpoint that a resume finds in a run's folder."""

    sequence: int
    """The number of the checkpoint that it loads; 0 if it starts anew."""
    digest: str
    """A hash of all tensors, numbers and sidecars of the checkpoint."""
    warned: tuple[str, ...] = ()
    """The warnings that the user sees."""
    refusal: str = ""
    """The message of the CheckpointError with which it refuses."""
    foreign: str = ""
    """Any other error."""


def load(folder: Path) -> Loaded:
    """Load the newest intact checkpoint of a run's folder, as a resume does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, refusal, foreign = None, "", ""
        try:
            found = commit.use_newest(folder, commit.candidates(folder), _everything)
        except CheckpointError as error:
            refusal = str(error)
        except Exception as error:  # of any kind: that is what the campaign counts
            foreign = f"{type(error).__name__}: {error}"
    sequence, digest = found or (0, "")
    return Loaded(sequence, digest, tuple(str(warning.message) for warning in caught), refusal, foreign)


def _everything(folder: Path, manifest: CheckpointManifest) -> tuple[int, str]:
    """Return the sequence and the digest of a checkpoint. Equal files are read only once: they give the same values."""
    content = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        content.update(repr((path.name, len(data))).encode() + data)
    if (key := content.digest()) not in _digests:
        _digests[key] = _digest(folder, manifest)
    return manifest.sequence, _digests[key]


_digests: dict[bytes, str] = {}


def _digest(folder: Path, manifest: CheckpointManifest) -> str:
    metadata = storage.read_metadata(folder)
    hasher = hashlib.sha256()
    for key, value in storage.read_values(folder, metadata, sorted(metadata.state_dict_metadata)).items():
        hasher.update(f"{key} {value!r}".encode())
        if isinstance(value, torch.Tensor):
            hasher.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for rank in range(manifest.world_size):
        hasher.update(repr(sidecar.read(folder, rank)).encode())
    return hasher.hexdigest()
