"""Checkpoints of laconic as the campaigns compare them: everything that is in them, without a model."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from laconic.checkpoint import CheckpointError, commit, sidecar, storage
from laconic.checkpoint.commit import CheckpointManifest


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
