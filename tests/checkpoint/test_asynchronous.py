"""A save in the background has the state at the call, to the bit, and keeps every promise of an ordinary save."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laconic import checkpoint
from laconic.checkpoint import commit, storage
from laconic.checkpoint.asynchronous import HostMemory
from laconic.shard import cache
from laconic.store import folder as store
from laconic.store.folder import CrashPoint, damage
from tests.checkpoint import zoo
from tests.support.launch import on_ranks


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
    with pytest.raises(ZeroDivisionError), checkpoint.AsyncSaver(tmp_path / "bad") as saver:  # noqa: PT012
        saver.save(1, model=model, optimizer=None, extra={"bad": object()})
        raise ZeroDivisionError  # an error of the run is not hidden by one of the save
    assert not commit.candidates(tmp_path / "bad")


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


def test_host_memory_of_any_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is page-locked, it waits for the stream, and a larger save unlocks what it replaces."""
    told: list[Any] = []

    def lock(nbytes: int, device: torch.device, **_: Any) -> torch.Tensor:
        told.append((nbytes, device.type))
        return torch.empty(nbytes, dtype=torch.uint8)

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: told.append("waited"))

    monkeypatch.setattr(cache, "make_slab", lock)
    monkeypatch.setattr(cache, "free_slab", lambda slab, device: told.append(("unlocked", len(slab))))
    monkeypatch.setattr("torch.accelerator.current_stream", stream)
    memory = HostMemory()
    for size in (100, 80, 3000):
        tensor = torch.arange(float(size)).as_subclass(OnXpu)
        assert torch.equal(memory.copies_of({"weight": tensor})["weight"], torch.arange(float(size)))  # type: ignore[dict-item]
    steps = [(0, "cpu"), ("unlocked", 0), (448, "xpu"), "waited", "waited", ("unlocked", 448), (12032, "xpu"), "waited"]
    assert told == steps


def _everything(folder: Path) -> dict[str, Any]:
    metadata = storage.read_metadata(folder)
    return storage.read_values(folder, metadata, metadata.state_dict_metadata)


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# -- background --------------------------------------------------------------------------------------------------------


def _made() -> dict[str, Any]:
    model = zoo.shard(zoo.make_zoo(seed=0))
    optimizer = zoo.Hoarder(model.parameters())
    zoo.train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


@on_ranks(3)
def test_a_save_has_the_state_at_the_call_to_the_bit(tmp_path: Path) -> None:
    """Save the same state with and without the background, twice. Training goes on while the background saves wait."""
    state, rank = _made(), dist.get_rank()
    extra = {"rank": rank, "tensor": torch.ones(2), "rng": checkpoint.rng_state()}
    go_on = threading.Event()
    with checkpoint.AsyncSaver(tmp_path / "async") as saver:
        assert saver.wait() is None
        for step in (2, 4):
            sync, in_background = (tmp_path / kind / f"step-{step}" for kind in ("sync", "async"))
            checkpoint.save_checkpoint(tmp_path / "sync", step, extra=extra, **state)
            go_on.clear()
            store.on_crash_point = lambda point: point != CrashPoint.BEGUN or go_on.wait(60) or None
            saver.save(step, extra=extra, **state)
            state["model"].seen.fill_(-1)
            extra["tensor"].mul_(2)
            state["optimizer"].param_groups[0]["lr"] *= 0.5
            zoo.train(state["model"], state["optimizer"])  # it has collectives too, while the save's collectives wait
            assert not in_background.exists()
            go_on.set()
            assert saver.wait() == in_background
            store.on_crash_point = None
            dist.barrier()
            expected, found = _everything(sync), _everything(in_background)
            assert len(expected) > 40
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert _equal(found[key], value), (step, key)
            own = f"rank-0000{rank}.json"
            assert (sync / own).read_bytes() == (in_background / own).read_bytes()
            assert not damage(in_background, commit.CheckpointManifest.read(in_background / commit.MANIFEST).files)
    assert not _equal(_everything(tmp_path / "async" / "step-2")["model.up.weight"], expected["model.up.weight"])


@on_ranks(2)
def test_a_failure_is_raised_by_the_next_call_on_every_rank(tmp_path: Path) -> None:
    """Rank 1 cannot encode a value. One save is under way at a time, also without a wait between them."""
    passed = list[str]()
    store.on_crash_point = lambda point: passed.append(threading.current_thread().name)
    state, bad = _made(), {"thing": object() if dist.get_rank() == 1 else 1}
    message = r"rank 1: extra\['extra'\]\['thing'\] is a object"
    saver = checkpoint.AsyncSaver(tmp_path)
    saver.save(1, extra={}, **state)
    saver.save(2, extra=bad, **state)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        saver.save(3, extra={}, **state)
    saver.save(4, extra={}, **state)
    saver.wait()
    with checkpoint.AsyncSaver(tmp_path) as other:
        other.save(5, extra=bad, **state)
        with pytest.raises(checkpoint.CheckpointError, match=message):
            other.wait()
    store.on_crash_point = None
    assert passed == sorted(passed)
    assert {"save step 1", "save step 4"} <= set(passed)
    dist.barrier()
    assert [candidate.folder.name for candidate in commit.candidates(tmp_path)] == ["step-4", "step-1"]
