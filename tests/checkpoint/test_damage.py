"""Damaged, foreign and hostile checkpoints are refused with a reason. One process, no process group."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from laconic import checkpoint
from laconic.checkpoint import CheckpointError, commit, storage
from laconic.store import folder as store
from tests.checkpoint.zoo import make_small
from tests.faults import damage


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = make_small()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        _step(model, optimizer)
        extra = {"tokens": 10 * step, "rng": checkpoint.rng_state()}
        checkpoint.save_checkpoint(folder, step, model=model, optimizer=optimizer, extra=extra)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder."""
    return shutil.copytree(saved, tmp_path / "run")


def _load(folder: Path, model: nn.Module | None = None) -> dict[str, Any] | None:
    model = model or make_small()
    return checkpoint.load_checkpoint(folder, model=model, optimizer=torch.optim.AdamW(model.parameters()))


def _flip(*paths: Path) -> None:
    for path in paths:
        data = bytearray(path.read_bytes())
        data[(len(data) - 1) // 2] ^= 0x10
        path.write_bytes(data)


def _dangle(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(path.with_name("gone"))


def _copy_over(source: Path, target: Path) -> None:
    shutil.rmtree(target)
    shutil.copytree(source, target)


def _swap(folder: Path) -> None:
    (folder / "step-1").rename(folder / "x")
    (folder / "step-2").rename(folder / "step-1")
    (folder / "x").rename(folder / "step-2")


LOSSES: dict[str, tuple[Any, int]] = {
    "folder": (lambda folder: shutil.rmtree(folder / "step-2"), 1),
    "folder dangles": (lambda folder: _dangle(folder / "step-2"), 1),
    "folder of the step before": (lambda folder: _copy_over(folder / "step-1", folder / "step-2"), 1),
    "latest is nonsense": (lambda folder: (folder / "latest").write_bytes(b"\xff"), 2),
    "latest names nothing": (lambda folder: (folder / "latest").write_text("step-8\n"), 2),
    "all values": (lambda folder: _flip(*folder.glob("step-*/__0_0.distcp")), 0),
    "all names": (_swap, 0),
    "everything dangles": (_dangle, 0),
}
"""What is lost, and the step that a resume then loads; 0 if it refuses."""


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_lost_is_noticed_and_never_a_fresh_start(loss: str, folder: Path) -> None:
    lose, step = LOSSES[loss]
    lose(folder)
    if step == 0:
        warnings.simplefilter("ignore")
        with pytest.raises(CheckpointError, match=r"none of the checkpoints.*is intact"):
            _load(folder)
        return
    with pytest.warns(UserWarning, match="is damaged and is skipped") as caught:
        loaded = _load(folder)
    assert loaded is not None
    assert loaded["step"] == step
    assert [Path(warning.filename).name for warning in caught] == ["test_damage.py"]


def test_an_older_manifest_of_the_same_step_is_noticed(tmp_path: Path) -> None:
    """Back from step 4, step 2 is saved again; then its first manifest is put in the place of the new one."""
    model = make_small()
    for number, step in enumerate((1, 2, 4, 2)):
        path = checkpoint.save_checkpoint(tmp_path, step, model=model, optimizer=None, extra={"n": number}, keep=4)
        if number == 1:
            shutil.copy(path / "manifest.json", tmp_path / "first")
    shutil.copy(tmp_path / "first", tmp_path / "step-2" / "manifest.json")
    with pytest.warns(UserWarning, match=r"step-2 is damaged and is skipped: rank-00000.json"):
        loaded = checkpoint.load_checkpoint(tmp_path, model=model, optimizer=None)
    assert loaded == {"step": 4, "n": 2}


def test_a_damaged_checkpoint_is_never_removed(folder: Path, tmp_path: Path) -> None:
    manifest = (folder / "step-2" / "manifest.json").rename(tmp_path / "manifest")
    for step in (3, 4, 5):
        checkpoint.save_checkpoint(folder, step, model=make_small(), optimizer=None, extra={})
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-2", "step-4", "step-5"]
    with pytest.warns(UserWarning, match=r"step-2 is damaged .*; it is kept as step-2.damaged"):
        checkpoint.save_checkpoint(folder, 2, model=make_small(), optimizer=None, extra={})
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-2", "step-2.damaged", "step-5"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = make_small()
        assert checkpoint.load_checkpoint(folder, model=model, optimizer=None)["step"] == 2  # type: ignore[index]
    manifest.rename(folder / "step-2.damaged" / "manifest.json")
    assert _load(folder / "step-2.damaged")["step"] == 2  # type: ignore[index]


def test_the_only_intact_copy_of_a_step_stays_until_another_is_committed(folder: Path) -> None:
    """After a kill, `step-2.old` is intact and `step-2` is not. Step 2 is saved again, and killed once more."""
    shutil.rmtree(folder / "step-1")
    shutil.copytree(folder / "step-2", folder / "step-2.old")
    _flip(folder / "step-2" / "__0_0.distcp")
    steps: list[int] = []

    def resume(point: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = make_small()
            found = checkpoint.load_checkpoint(folder, model=model, optimizer=None, strict=False)
        steps.append(found["tokens"] if found else 0)

    store.on_crash_point = resume
    try:
        checkpoint.save_checkpoint(folder, 2, model=make_small(), optimizer=None, extra={"tokens": 7})
    finally:
        store.on_crash_point = None
    assert set(steps) == {20, 7}
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-2"]


def test_save_keeps_the_newest_and_leaves_no_rubbish(tmp_path: Path) -> None:
    model = make_small()
    (tmp_path / "step-9.tmp").mkdir()
    for step in range(1, 6):
        path = checkpoint.save_checkpoint(tmp_path, step, model=model, optimizer=None, extra={}, keep=3)
        assert path == tmp_path / f"step-{step}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3", "step-4", "step-5"]
    with pytest.raises(CheckpointError, match="keep=1"):
        checkpoint.save_checkpoint(tmp_path, 6, model=model, optimizer=None, extra={}, keep=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not writable"):
        checkpoint.save_checkpoint(tmp_path / "file" / "run", 1, model=model, optimizer=None, extra={})


def test_any_folder_is_loaded_itself_and_one_that_the_nodes_do_not_share_refused(saved: Path, tmp_path: Path) -> None:
    """Rank 0 must see the other ranks' files before it commits a checkpoint."""
    assert _load(saved / "step-1")["step"] == 1  # type: ignore[index]
    assert _load(tmp_path) is _load(tmp_path / "absent") is None
    temporary = commit.begin(tmp_path, 3)
    manifest = commit.CheckpointManifest.read(saved / "step-1" / commit.MANIFEST)
    with pytest.raises(CheckpointError, match="file system that all nodes share"):
        commit.commit(tmp_path, temporary, manifest, keep=2, patience_s=0)
    assert commit.candidates(tmp_path) == []


def test_absurd_metadata_is_refused(folder: Path) -> None:
    """Lengths that no memory holds, and places of bytes before the file."""
    path = folder / "step-2" / ".metadata"
    data = path.read_bytes()
    absurd = [data[:11] + b"\x8d" + (2**62).to_bytes(8, "little") + data[11:], data.replace(b"K\x0d", b"M\xff\xff")]
    for index in range(len(data) - 8):
        if data[index] == 0x8C:  # the length of a short string becomes that of a long one
            absurd.append(data[:index] + b"\x8d" + (2**61).to_bytes(8, "little") + data[index + 2 :])
    for mutated in absurd[:: max(1, len(absurd) // 20)]:
        path.write_bytes(mutated)
        model = make_small()
        with pytest.raises(CheckpointError):
            checkpoint.load_dcp(path.parent, model=model, optimizer=torch.optim.AdamW(model.parameters()))


class _Hostile:
    """An object that makes a folder when an ordinary unpickler reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.folder),))


def test_hostile_values_in_a_foreign_folder_run_nothing(tmp_path: Path) -> None:
    model = make_small()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    saved: dict[str, Any] = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    saved["optim"]["param_groups"][0]["lr"] = _Hostile(tmp_path / "made")
    dcp.save(saved, checkpoint_id=tmp_path / "folder")
    with pytest.raises(CheckpointError, match="holds objects, which are not read"):
        checkpoint.load_dcp(tmp_path / "folder", model=model, optimizer=optimizer)
    assert not (tmp_path / "made").exists()


class _ByName:
    """An attribute as Python 3.11.2 pickles members of an enum: by `getattr`."""

    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> Any:
        return (getattr, (self.of, self.name))


def test_members_of_enums_load_that_any_python_has_written(folder: Path) -> None:
    folder /= "step-2"
    formats = dcp_metadata._MEM_FORMAT_ENCODING

    class Old(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (getattr, (formats, value.name)) if isinstance(value, formats) else NotImplemented

    written, expected = io.BytesIO(), storage.read_metadata(folder)
    Old(written).dump(expected)
    assert b"getattr" in written.getvalue()
    (folder / ".metadata").write_bytes(written.getvalue())
    assert storage.read_metadata(folder) == expected
    for hostile in (_ByName(dcp_metadata.Metadata, "__init__"), _ByName(formats, "mro"), _ByName(Path, "unlink")):
        (folder / ".metadata").write_bytes(pickle.dumps(hostile))
        with pytest.raises(CheckpointError, match="is no member of an enum"):
            storage.read_metadata(folder)


def test_random_states_of_any_accelerator_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    state, restored = torch.arange(3, dtype=torch.uint8), list[torch.Tensor]()
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    monkeypatch.setattr("torch.xpu.is_initialized", lambda: True)
    monkeypatch.setattr("torch.xpu.get_rng_state", lambda: state)
    monkeypatch.setattr("torch.xpu.set_rng_state", restored.append)
    saved = checkpoint.rng_state()
    assert saved["xpu"] is state
    checkpoint.set_rng_state(saved)
    assert restored == [state]
    del saved["xpu"]
    checkpoint.set_rng_state({**saved, "cuda": state})  # written on another kind of machine
    assert len(restored) == 1


def test_extra_and_random_numbers_come_back(tmp_path: Path) -> None:
    model = make_small()
    tensors = {"bf16": torch.randn(3).bfloat16(), "empty": torch.empty(0, 2), "flag": torch.tensor(True)}
    extra = {"n": 3, "x": 0.1, "none": None, "list": [1, "two"], "rng": checkpoint.rng_state(), "tensors": tensors}
    checkpoint.save_checkpoint(tmp_path, 7, model=model, optimizer=None, extra=extra)
    expected, of_numpy = torch.rand(3), np.random.random(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = checkpoint.load_checkpoint(tmp_path, model=model, optimizer=None)
    assert loaded is not None
    checkpoint.set_rng_state(loaded.pop("rng"))
    assert torch.equal(torch.rand(3), expected)
    assert np.array_equal(np.random.random(3), of_numpy)
    for key, tensor in loaded.pop("tensors").items():
        assert tensor.dtype == tensors[key].dtype
        assert torch.equal(tensor, tensors[key])
    assert loaded == {"n": 3, "x": 0.1, "none": None, "list": [1, "two"], "step": 7}


def test_any_damage_is_noticed_and_the_checkpoint_before_is_used(folder: Path) -> None:
    """A sample of `python -m tests.faults --rows checkpoint-damage`."""
    kinds, harmed = damage.tally(folder, 80)
    assert set(kinds) == set(damage.KINDS)
    assert harmed == []
