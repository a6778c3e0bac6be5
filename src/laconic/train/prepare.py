"""What a job needs before its first step, and what is refused there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from laconic.checkpoint import commit
from laconic.config.job import Config, JobError
from laconic.hf.models import build_model
from laconic.hf.tokenizer import Tokenizer

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in the output folder."""


def require_model(config: Config) -> None:
    """Refuse a job that names no model, before anything is created."""
    if config.model.config is None and config.model.path is None:
        raise JobError(
            "no model: set model.config (a table with `model_type`, or the path of a config.json) "
            "or model.path (a folder)"
        )


def open_output(config: Config) -> None:
    """Refuse a folder that cannot be written, or that holds another run's checkpoints, before anything costs time."""
    output = Path(config.train.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise JobError(f"train.output = {str(output)!r} cannot be written: {error}; choose another folder") from error
    if not config.train.resume and any((output / CHECKPOINTS).glob("step-*")):
        raise JobError(
            f"train.output = {str(output)!r} already holds checkpoints; go on from them with --train.resume true, or "
            "choose another folder"
        )


def newest_step(checkpoints: Path) -> int:
    """Of the newest checkpoint that looks complete; 0 if there is none."""
    found = (candidate.manifest for candidate in commit.candidates(checkpoints))
    return next((manifest.step for manifest in found if manifest is not None), 0)


def with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    table = config.model.config
    if not isinstance(table, dict) or "vocab_size" in table:
        return config
    table = {**table, "vocab_size": tokenizer.vocab_size}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, config=table))


def build_checked(config: Config, tokenizer: Tokenizer) -> nn.Module:
    model = build_model(config.model, config.lora, device="meta")
    vocab_size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if tokenizer.vocab_size > vocab_size:
        raise JobError(
            f"the tokenizer {config.data.tokenizer!r} has {tokenizer.vocab_size} tokens, but the model's vocabulary "
            f"has {vocab_size}; raise vocab_size in model.config, or use the model's own tokenizer"
        )
    return model


def differences(saved: dict[str, Any], current: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for each value that differs between two configurations, `train.resume` excepted."""
    found = []
    for key in sorted({*saved, *current}):
        name, old, new = f"{prefix}{key}", saved.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{name}.")
        elif old != new and name != "train.resume":
            found.append(f"{name}: {old} -> {new}")
    return found


@contextlib.contextmanager
def as_job_error() -> Iterator[None]:
    """Before the first step a ValueError is about the job: a model, mesh or checkpoint that does not fit."""
    try:
        yield
    except JobError:
        raise
    except ValueError as error:
        raise JobError(str(error)) from error
