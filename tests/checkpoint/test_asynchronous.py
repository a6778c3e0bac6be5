"""A save in the background has the state at the call, to the bit, and keeps every promise of an ordinary save."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from laconic import checkpoint
from laconic.checkpoint import commit, storage
from laconic.checkpoint.asynchronous import HostMemory
from laconic.store.folder import CrashPoint, damage
from tests.checkpoint import background
from tests.support.launch import run_ranks


def test_a_save_has_the_state_at_the_call_to_the_bit(tmp_path: Path) -> None:
    for seen in run_ranks(background.save_while_training, 3, str(tmp_path)):
        assert seen["under_way"] == [(False, True), (False, True)]
        assert seen["folder of 4"] == str(tmp_path / "async" / "step-4")
    for step in (2, 4):
        sync, background_ = (tmp_path / kind / f"step-{step}" for kind in ("sync", "async"))
        expected, found = _everything(sync), _everything(background_)
        assert len(expected) > 40
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert _equal(found[key], value), (step, key)
        for rank in range(3):
            assert (sync / f"rank-0000{rank}.json").read_bytes() == (background_ / f"rank-0000{rank}.json").read_bytes()
        assert not damage(background_, commit.CheckpointManifest.read(background_ / commit.MANIFEST).files)
    assert not _equal(_everything(tmp_path / "async" / "step-2")["model.up.weight"], expected["model.up.weight"])


def test_one_save_is_under_way_at_a_time(tmp_path: Path) -> None:
    for passed in run_ranks(background.one_at_a_time, 2, str(tmp_path)):
        names = [line.split(":")[0] for line in passed]
        assert names == sorted(names)
        assert {"save step 1", "save step 2"} == set(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-2"]


def test_a_failure_is_raised_by_the_next_call_on_every_rank(tmp_path: Path) -> None:
    for said in run_ranks(background.fail_in_the_background, 2, str(tmp_path)):
        assert [said[0], said[1], said[3]] == ["begun"] * 3
        for message in (said[2], said[4]):
            assert "rank 1: extra['extra']['thing'] is a object" in message
    found = [candidate.folder.name for candidate in commit.candidates(tmp_path)]
    assert found == ["step-4", "step-1"]


@pytest.mark.parametrize("point", [CrashPoint.WRITTEN, CrashPoint.LISTED, CrashPoint.COMMITTED])
def test_a_kill_leaves_a_complete_checkpoint(point: CrashPoint, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"died with exit code|failed"):
        run_ranks(background.die_while_training, 2, str(tmp_path), point)
    step, state = run_ranks(background.load_newest, 1, str(tmp_path))[0]
    assert step == (4 if point == CrashPoint.COMMITTED else 2)
    assert torch.equal(state["up.bias.step"], torch.tensor(2.0))


def test_alone_and_without_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    with checkpoint.AsyncSaver(tmp_path) as saver:
        saver.save(1, model=model, optimizer=None, extra={"a": 1})
        with torch.no_grad():
            expected = model.weight.clone()
            model.weight.zero_()
    assert checkpoint.load_checkpoint(tmp_path, model=model, optimizer=None) == {"step": 1, "a": 1}
    assert torch.equal(model.weight, expected)
    with pytest.raises(checkpoint.CheckpointError, match="keep=1"):
        checkpoint.AsyncSaver(tmp_path, keep=1)


def test_an_error_of_the_run_is_not_hidden_by_one_of_the_save(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), checkpoint.AsyncSaver(tmp_path) as saver:  # noqa: PT012
        saver.save(1, model=torch.nn.Linear(3, 2), optimizer=None, extra={"bad": object()})
        raise ZeroDivisionError
    assert not commit.candidates(tmp_path)


def test_host_memory_is_allocated_once() -> None:
    memory = HostMemory()
    tensors: dict[Any, torch.Tensor] = {
        "odd": torch.arange(5, dtype=torch.uint8),
        "bf16": torch.randn(3, 7).bfloat16(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "strided": torch.arange(12).view(3, 4).t(),
    }
    copies = memory.copies_of(tensors)
    for key, tensor in tensors.items():
        assert copies[key].dtype == tensor.dtype
        assert torch.equal(copies[key], tensor), key
        assert (
            copies[key].untyped_storage().nbytes() == tensor.nbytes
        )  # DCP would copy a view of a larger storage again
    addresses = [copy.data_ptr() for copy in copies.values() if copy.numel()]
    assert max(addresses) - min(addresses) < 5 * 64 + sum(tensor.nbytes for tensor in tensors.values())
    tensors["odd"] += 1
    again = memory.copies_of(tensors)
    assert [copy.data_ptr() for copy in again.values() if copy.numel()] == addresses
    assert torch.equal(again["odd"], tensors["odd"])


class OnXpu(torch.Tensor):
    """A tensor that says it is on an accelerator."""

    device = torch.device("xpu", 1)


def test_host_memory_is_pinned_for_any_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    waited: list[torch.device] = []
    empty = torch.empty

    def pretend(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            pinned.extend(size)
        return empty(*size, **options)

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch, "empty", pretend)
    monkeypatch.setattr("torch.accelerator.current_stream", stream)
    tensors: dict[Any, torch.Tensor] = {"weight": torch.arange(5.0).as_subclass(OnXpu), "step": torch.ones(())}
    copies = HostMemory().copies_of(tensors)
    assert (pinned, waited) == ([128], [torch.device("xpu", 1)])
    assert torch.equal(copies["weight"], torch.arange(5.0))


def _everything(folder: Path) -> dict[str, Any]:
    metadata = storage.read_metadata(folder)
    return storage.read_values(folder, metadata, metadata.state_dict_metadata)


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
