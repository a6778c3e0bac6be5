"""Damaged, foreign and hostile checkpoints are refused with a reason. One process, no process group."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laconic import checkpoint
from laconic.checkpoint import CheckpointError, commit, storage
from tests.checkpoint.job import files_of, make_model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        _step(model, optimizer)
        extra = {"tokens": 10 * step, "rng": checkpoint.rng_state()}
        checkpoint.save_checkpoint(folder, step, model=model, optimizer=optimizer, extra=extra)
    return folder


def _load(folder: Path, model: nn.Module | None = None) -> dict[str, Any] | None:
    model = model or make_model()
    return checkpoint.load_checkpoint(folder, model=model, optimizer=torch.optim.AdamW(model.parameters()))


def _flip(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


def _truncate(path: Path, where: float) -> None:
    path.write_bytes(path.read_bytes()[: int(where * path.stat().st_size)])


def _remove(path: Path, where: float) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [_flip, _truncate, _remove])
def test_damage_to_any_file_is_noticed_and_the_older_checkpoint_loaded(harm: Any, saved: Path, tmp_path: Path) -> None:
    names = [path.name for path in files_of(saved / "step-2")]
    assert names == [".metadata", "__0_0.distcp", "manifest.json", "rank-00000.json"]
    for number, name in enumerate(names):
        for where in (0.0, 0.3, 0.6, 0.999):
            folder = tmp_path / f"{number}-{where}"
            shutil.copytree(saved, folder)
            harm(folder / "step-2" / name, where)
            if harm is _remove and name == "manifest.json":  # without a manifest the folder was never committed
                assert _load(folder)["step"] == 1  # type: ignore[index]
                continue
            with pytest.warns(UserWarning, match="step-2 is damaged and is skipped"):
                loaded = _load(folder)
            assert loaded is not None
            assert (loaded["step"], loaded["tokens"]) == (1, 10), (name, where)


def test_damage_to_all_is_an_error_and_not_a_fresh_start(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    for step in (1, 2):
        _flip(folder / f"step-{step}" / "__0_0.distcp", 0.5)
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match="none of the checkpoints"):
        _load(folder)


def test_damage_to_latest_does_not_matter(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    (folder / "latest").write_text("nonsense")
    assert _load(folder)["step"] == 2  # type: ignore[index]


def test_nothing_to_load_is_none(tmp_path: Path) -> None:
    assert _load(tmp_path) is None
    assert _load(tmp_path / "absent") is None


def test_save_keeps_the_newest_and_leaves_no_rubbish(tmp_path: Path) -> None:
    model = make_model()
    (tmp_path / "step-9.tmp").mkdir()
    for step in range(1, 6):
        path = checkpoint.save_checkpoint(tmp_path, step, model=model, optimizer=None, extra={}, keep=3)
        assert path == tmp_path / f"step-{step}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-3", "step-4", "step-5"]
    with pytest.raises(CheckpointError, match="keep=1"):
        checkpoint.save_checkpoint(tmp_path, 6, model=model, optimizer=None, extra={}, keep=1)


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="not writable"):
        checkpoint.save_checkpoint(tmp_path / "file" / "run", 1, model=make_model(), optimizer=None, extra={})


def test_folder_that_the_nodes_do_not_share_is_refused(saved: Path, tmp_path: Path) -> None:
    """Rank 0 must see the other ranks' files before it commits a checkpoint."""
    temporary = commit.begin(tmp_path, 3)
    with pytest.raises(CheckpointError, match="file system that all nodes share"):
        commit.commit(tmp_path, temporary, commit.Manifest.read(saved / "step-1"), keep=2, patience_s=0)
    assert commit.candidates(tmp_path) == []


def test_another_model_is_refused_by_the_tensors_that_differ(saved: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"another model.*0\.0\.weight is float32\[13, 7\] in the checkpoint and float32\[5, 7\]"
    ):
        _load(saved, make_model(hidden=5))
    larger = make_model()
    larger.append(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(CheckpointError, match=r"only in the model: 2\.0\.bias, 2\.0\.weight"):
        _load(saved, larger)
    smaller = nn.Sequential(*list(make_model())[:1])
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: 1\.0\.bias"):
        _load(saved, smaller)
    with pytest.raises(CheckpointError, match=r"bfloat16\[13, 7\] in the model"):
        _load(saved, make_model().bfloat16())


def test_another_optimizer_is_refused(saved: Path) -> None:
    model = make_model()
    with pytest.raises(CheckpointError, match="written with AdamW, this run uses SGD"):
        checkpoint.load_checkpoint(saved, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"train different parameters: 1\.0\.bias, 1\.0\.weight, 1\.1\.bias"):
        checkpoint.load_checkpoint(saved, model=model, optimizer=torch.optim.AdamW(model[0].parameters()))


def test_settings_of_the_optimizer_come_back(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.1, 0.2))
    checkpoint.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, extra={})
    other = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, other)
    checkpoint.load_checkpoint(tmp_path, model=model, optimizer=other)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["betas"]) == (0.5, (0.1, 0.2))
    assert not other.state  # the saved optimizer had not taken a step


def test_a_folder_that_is_a_checkpoint_is_loaded_itself(saved: Path) -> None:
    assert _load(saved / "step-1")["step"] == 1  # type: ignore[index]


class _Hostile:
    """An object that makes a folder when an ordinary unpickler reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.folder),))


@pytest.mark.parametrize("payload", ["hostile", pickle.loads, print])
def test_hostile_metadata_runs_nothing(payload: Any, saved: Path, tmp_path: Path) -> None:
    """The manifest has the hash of the hostile file, as a stranger's manifest would."""
    folder = tmp_path / "run"
    shutil.copytree(saved / "step-2", folder)
    made = tmp_path / "made"
    pickled = pickle.dumps(_Hostile(made) if payload == "hostile" else payload)
    (folder / ".metadata").write_bytes(pickled)
    with pytest.raises(CheckpointError, match=r"\.metadata (names|holds)"):
        storage.read_metadata(folder)
    manifest = commit.Manifest.read(folder)
    files = tuple(commit.describe_file(folder, record.name) for record in manifest.files)
    commit.Manifest(**{**vars(manifest), "files": files}).write(folder)
    with pytest.raises(CheckpointError):
        _load(folder)
    assert not made.exists()
    pickle.loads(pickled)
    assert made.exists() == (payload == "hostile")


def test_extra_holds_no_objects(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"extra\['extra'\]\['schedule'\] is a Linear"):
        checkpoint.save_checkpoint(tmp_path, 1, model=make_model(), optimizer=None, extra={"schedule": nn.Linear(1, 1)})


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
    model = make_model()
    tensors = {"bf16": torch.randn(3).bfloat16(), "empty": torch.empty(0, 2), "flag": torch.tensor(True)}
    extra = {"n": 3, "x": 0.1, "none": None, "list": [1, "two"], "rng": checkpoint.rng_state(), "tensors": tensors}
    checkpoint.save_checkpoint(tmp_path, 7, model=model, optimizer=None, extra=extra)
    expected = torch.rand(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = checkpoint.load_checkpoint(tmp_path, model=model, optimizer=None)
    assert loaded is not None
    checkpoint.set_rng_state(loaded["rng"])
    assert torch.equal(torch.rand(3), expected)
    assert {key: loaded[key] for key in ("n", "x", "none", "list", "step")} == {
        "n": 3,
        "x": 0.1,
        "none": None,
        "list": [1, "two"],
        "step": 7,
    }
    for key, tensor in tensors.items():
        assert loaded["tensors"][key].dtype == tensor.dtype
        assert torch.equal(loaded["tensors"][key], tensor)
