"""`train.async_save` changes neither the trainer's runs nor its checkpoints, under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from laconic.checkpoint import commit, storage
from tests.support.jobs import job, train_all
from tests.support.launch import run_ranks

STRATEGIES = ("laconic", "fsdp2", "ddp")


def test_saving_in_the_background_changes_nothing(tmp_path: Path) -> None:
    configs = []
    for strategy in STRATEGIES:
        shared: dict[str, Any] = {"shard": {"strategy": strategy}, "optimizer": {"name": "adamw"}}
        sync, cut = str(tmp_path / f"{strategy} sync"), str(tmp_path / f"{strategy} async")
        configs += [
            job(tmp_path, **shared, train={"output": sync, "save_every": 1}),
            job(tmp_path, **shared, train={"output": cut, "save_every": 1, "steps": 3, "async_save": True}),
            job(tmp_path, **shared, train={"output": cut, "save_every": 1, "resume": "auto", "async_save": True}),
        ]
    summaries = run_ranks(train_all, 2, configs)[0]
    for index, strategy in enumerate(STRATEGIES):
        unbroken, start, rest = summaries[3 * index : 3 * index + 3]
        assert rest["start_step"] == 3
        assert start["losses"] + rest["losses"] == unbroken["losses"]
        folders = [tmp_path / f"{strategy} {way}" / "checkpoints" for way in ("sync", "async")]
        for folder in folders:
            assert [candidate.folder.name for candidate in commit.candidates(folder)] == ["step-4", "step-3"]
        for step in (3, 4):
            expected, found = (_tensors(folder / f"step-{step}") for folder in folders)
            assert found.keys() == expected.keys()
            assert len(found) > 60
            for key, tensor in expected.items():
                assert torch.equal(found[key], tensor), (strategy, step, key)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    metadata = storage.read_metadata(folder)
    return storage.read_values(folder, metadata, storage.tensors_of(metadata))
