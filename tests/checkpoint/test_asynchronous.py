"""A save in the background has the state at the call, to the bit, and keeps every promise of an ordinary save."""

from __future__ import annotations

import os
import signal
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
from tests.support.jobs import job, train_all
from tests.support.launch import run_ranks


def test_a_save_has_the_state_at_the_call_to_the_bit(tmp_path: Path) -> None:
    for seen in run_ranks(save_while_training, 3, str(tmp_path)):
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
    for passed in run_ranks(one_at_a_time, 2, str(tmp_path)):
        names = [line.split(":")[0] for line in passed]
        assert names == sorted(names)
        assert {"save step 1", "save step 2"} == set(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1", "step-2"]


def test_a_failure_is_raised_by_the_next_call_on_every_rank(tmp_path: Path) -> None:
    for said in run_ranks(fail_in_the_background, 2, str(tmp_path)):
        assert [said[0], said[1], said[3]] == ["begun"] * 3
        for message in (said[2], said[4]):
            assert "rank 1: extra['extra']['thing'] is a object" in message
    found = [candidate.folder.name for candidate in commit.candidates(tmp_path)]
    assert found == ["step-4", "step-1"]


@pytest.mark.parametrize("point", [CrashPoint.WRITTEN, CrashPoint.LISTED, CrashPoint.COMMITTED])
def test_a_kill_leaves_a_complete_checkpoint(point: CrashPoint, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"died with exit code|failed"):
        run_ranks(die_while_training, 2, str(tmp_path), point)
    step, state = run_ranks(load_newest, 1, str(tmp_path))[0]
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


def test_host_memory_asks_for_its_bytes_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger save unlocks what it replaces."""
    told: list[Any] = []

    def lock(nbytes: int, device: torch.device, **_: Any) -> torch.Tensor:
        told.append((nbytes, device.type))
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(cache, "make_slab", lock)
    monkeypatch.setattr(cache, "free_slab", lambda slab, device: told.append(("unlocked", len(slab))))
    monkeypatch.setattr("torch.accelerator.current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    memory = HostMemory()
    for size in (100, 80, 3000):
        memory.copies_of({"weight": torch.ones(size).as_subclass(OnXpu)})  # type: ignore[dict-item]
    assert told == [(0, "cpu"), ("unlocked", 0), (448, "xpu"), ("unlocked", 448), (12032, "xpu")]


def _everything(folder: Path) -> dict[str, Any]:
    metadata = storage.read_metadata(folder)
    return storage.read_values(folder, metadata, metadata.state_dict_metadata)


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# -- background --------------------------------------------------------------------------------------------------------


def _made() -> tuple[zoo.Zoo, torch.optim.Optimizer]:
    model = zoo.shard(zoo.make_zoo(seed=0))
    optimizer = zoo.Hoarder(model.parameters())
    zoo.train(model, optimizer)
    return model, optimizer


def save_while_training(folder: str) -> dict[str, Any]:
    """Save the same state with and without the background, twice. Training goes on while the background saves wait."""
    model, optimizer = _made()
    extra = {"rank": dist.get_rank(), "tensor": torch.ones(2), "rng": checkpoint.rng_state()}
    arguments: dict[str, Any] = {"model": model, "optimizer": optimizer, "extra": extra}
    seen: dict[str, Any] = {"under_way": []}
    go_on = threading.Event()
    with checkpoint.AsyncSaver(f"{folder}/async") as saver:
        assert saver.wait() is None
        for step in (2, 4):
            checkpoint.save_checkpoint(f"{folder}/sync", step, **arguments)
            go_on.clear()
            store.on_crash_point = lambda point: point != CrashPoint.BEGUN or go_on.wait(60) or None
            saver.save(step, **arguments)
            model.seen.fill_(-1)
            extra["tensor"].mul_(2)
            optimizer.param_groups[0]["lr"] *= 0.5
            zoo.train(model, optimizer)  # training has collectives too, while the save's collectives wait
            seen["under_way"].append((os.path.exists(f"{folder}/async/step-{step}"), not go_on.is_set()))
            go_on.set()
            seen[f"folder of {step}"] = str(saver.wait())
            store.on_crash_point = None
            dist.barrier()
    return seen


def one_at_a_time(folder: str) -> list[str]:
    """Begin two saves without a wait between them. Returns the crash points in the order in which this rank passes."""
    model, optimizer = _made()
    passed: list[str] = []
    store.on_crash_point = lambda point: passed.append(f"{threading.current_thread().name}: {point}")
    with checkpoint.AsyncSaver(folder) as saver:
        for step in (1, 2):
            saver.save(step, model=model, optimizer=optimizer, extra={})
    return passed


def fail_in_the_background(folder: str) -> list[str]:
    """Return the outcome of each call: a save, a save that rank 1 cannot encode, a call that raises its error, ..."""
    model, optimizer = _made()
    saver = checkpoint.AsyncSaver(folder)
    bad = {"thing": object() if dist.get_rank() == 1 else 1}
    outcomes = []
    for step, extra in ((1, {}), (2, bad), (3, {}), (4, {})):
        try:
            saver.save(step, model=model, optimizer=optimizer, extra=extra)
            outcomes.append("begun")
        except checkpoint.CheckpointError as error:
            outcomes.append(str(error))
    saver.wait()
    with checkpoint.AsyncSaver(folder) as other:
        other.save(5, model=model, optimizer=optimizer, extra=bad)
        try:
            other.wait()
        except checkpoint.CheckpointError as error:
            outcomes.append(str(error))
    return outcomes


def die_while_training(folder: str, point: CrashPoint) -> None:
    """Kill one rank in the background of the second save, at `point`, while training goes on."""
    model, optimizer = _made()
    saver = checkpoint.AsyncSaver(folder)
    saver.save(2, model=model, optimizer=optimizer, extra={})
    saver.wait()
    dist.barrier()
    rank = 1 if point == CrashPoint.WRITTEN else 0

    def kill(passed: CrashPoint) -> None:
        if passed == point and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    store.on_crash_point = kill
    saver.save(4, model=model, optimizer=optimizer, extra={})
    while True:
        zoo.train(model, optimizer)


def load_newest(folder: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the newest checkpoint's step and state."""
    model = zoo.shard(zoo.make_zoo(seed=1))
    optimizer = zoo.Hoarder(model.parameters())
    loaded = checkpoint.load_checkpoint(folder, model=model, optimizer=optimizer)
    assert loaded is not None
    return loaded["step"], zoo.whole(model, optimizer)


# -- trainer -----------------------------------------------------------------------------------------------------------


STRATEGIES = ("laconic", "fsdp2", "ddp")


@pytest.mark.machine
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
    return storage.read_values(folder, metadata, storage.entries_of(metadata))
