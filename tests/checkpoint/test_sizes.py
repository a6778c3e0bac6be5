"""A checkpoint of one mesh loads on any other, by laconic and by PyTorch's FSDP2, without state on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from laconic import checkpoint, rehearse
from laconic.rehearse.mail import Letter
from laconic.shard.unit import unit_of
from tests.checkpoint import zoo
from tests.support.launch import run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Seen]]:
    """Save on two nodes of two ranks."""
    folder = tmp_path_factory.mktemp("saved")
    seen = run_ranks(save_each, 4, str(folder), local=2)[0]
    assert all(one.shard_dropped for one in seen.values())
    return folder, seen


@pytest.mark.parametrize("world_size", [3, 1])
def test_any_number_of_ranks_loads_it(world_size: int, saved: tuple[Path, dict[str, Seen]]) -> None:
    folder, expected = saved
    for rank, seen in enumerate(run_ranks(load_each, world_size, str(folder))):
        for name in LOADED_BY:
            assert_same(seen[name], expected[name], f"{name} on rank {rank}")


def test_fsdp2_reads_and_is_read(tmp_path: Path) -> None:
    """FSDP2 on 3 ranks -> laconic on 2, and laconic on 3 -> FSDP2 on 2, in every usual layout."""
    expected = run_ranks(save_both_ways, 3, str(tmp_path), local=1)[0]
    for seen in run_ranks(load_both_ways, 2, str(tmp_path)):
        assert len(seen) == 6
        for (what, who), found in seen.items():
            assert_same(found, expected["fsdp2" if "fsdp2" in what else "laconic"], f"{what} by {who}")


def test_no_state_crosses_the_wire(tmp_path: Path) -> None:
    """With sixty times the state in as many tensors, messages grow only by the digits of sizes."""
    small, large = (bytes_on_the_wire(tmp_path / str(hidden), hidden) for hidden in (16, 4096))
    assert large["state"] > 60 * small["state"]
    for what in small.keys() - {"state"}:
        assert 0 < large[what] < 1.1 * small[what] + 200, (what, small, large)


def assert_same(seen: Seen, expected: Seen, what: str) -> None:
    assert seen.whole.keys() == expected.whole.keys(), what
    for name, value in expected.whole.items():
        assert seen.whole[name].dtype == value.dtype, (what, name)
        assert torch.equal(seen.whole[name], value), (what, name)
    assert seen.numbers == expected.numbers, what
    torch.testing.assert_close(seen.logits, expected.logits, rtol=1e-5, atol=1e-6, msg=what)


# -- sizes -------------------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
    "own state": lambda model: zoo.Hoarder(model.parameters(), lr=0.05),
}
LOADED_BY = {"foreach": "fused", "own state": "own state"}
"""The optimizers that are saved, and those that load: `step` of another kernel may be elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All tensors, gathered, and the model's output on one rank."""

    whole: dict[str, Tensor]
    logits: Tensor
    numbers: dict[str, Any]
    shard_dropped: bool = False


def look(model: zoo.Zoo, optimizer: torch.optim.Optimizer) -> Seen:
    unit = unit_of(model.frozen)
    numbers = {
        f"{index}.{key}": value
        for index, kept in enumerate(optimizer.state.values())
        for key, value in kept.items()
        if not isinstance(value, Tensor)
    }
    numbers["betas"] = optimizer.param_groups[0].get("betas")
    return Seen(
        whole=zoo.whole(model, optimizer),
        logits=zoo.logits(model),
        numbers=numbers,
        shard_dropped=unit is not None and unit.buckets[0].stored.is_dropped,
    )


def save_each(folder: str) -> dict[str, Seen]:
    """Save one checkpoint for each optimizer."""
    seen = {}
    for name in LOADED_BY:
        model = zoo.shard(zoo.make_zoo(seed=0))
        optimizer = OPTIMIZERS[name](model)
        optimizer.param_groups[0]["lr"] = 0.125
        zoo.train(model, optimizer)
        checkpoint.save_checkpoint(f"{folder}/{name}", 2, model=model, optimizer=optimizer, extra={})
        seen[name] = look(model, optimizer)
    return seen


def load_each(folder: str) -> dict[str, Seen]:
    """Load into models with other values, some gathered or cached, and into optimizers with other kernels."""
    seen = {}
    for name, kernels in LOADED_BY.items():
        model = zoo.shard(zoo.make_zoo(seed=1))
        optimizer = OPTIMIZERS[kernels](model)
        zoo.train(model, optimizer, steps=1)
        assert checkpoint.load_checkpoint(f"{folder}/{name}", model=model, optimizer=optimizer) == {"step": 2}
        assert optimizer.param_groups[0]["lr"] == 0.125
        assert bool(optimizer.param_groups[0].get("fused")) == (kernels == "fused")
        seen[name] = look(model, optimizer)
        zoo.train(model, optimizer, steps=1)
    return seen


# -- with FSDP2 --------------------------------------------------------------------------------------------------------


def torch_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The tree that PyTorch's tutorials save and load."""
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def torch_load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a folder as a program without laconic does."""
    saved = torch_state(model, optimizer)
    dcp.load(saved, checkpoint_id=folder)
    set_model_state_dict(model, saved["model"])
    set_optimizer_state_dict(model, optimizer, saved["optim"])


def save_both_ways(folder: str) -> dict[str, Seen]:
    """Save FSDP2's state in two layouts, and laconic's state by its own function and by torch's."""
    fsdp2, fsdp2_optimizer = _trained(zoo.shard_fsdp2)
    dcp.save(torch_state(fsdp2, fsdp2_optimizer), checkpoint_id=f"{folder}/fsdp2")
    flattened = StateDictOptions(flatten_optimizer_state_dict=True)
    titan = {
        **get_model_state_dict(fsdp2),
        "optimizer": get_optimizer_state_dict(fsdp2, fsdp2_optimizer, options=flattened),
        "train_state": {"step": 2},
    }
    dcp.save(titan, checkpoint_id=f"{folder}/fsdp2 flattened")
    sharded, sharded_optimizer = _trained(zoo.shard)
    checkpoint.save_checkpoint(f"{folder}/laconic", 2, model=sharded, optimizer=sharded_optimizer, extra={})
    dcp.save(torch_state(sharded, sharded_optimizer), checkpoint_id=f"{folder}/laconic by torch")
    return {"fsdp2": look(fsdp2, fsdp2_optimizer), "laconic": look(sharded, sharded_optimizer)}


def load_both_ways(folder: str) -> dict[tuple[str, str], Seen]:
    """Load each folder by laconic and by torch. Returns what was loaded by (folder, loader)."""
    seen = {}
    for saved in ("fsdp2 flattened", "fsdp2", "laconic by torch"):
        model, optimizer = _fresh(zoo.shard)
        assert not checkpoint.load_dcp(f"{folder}/{saved}", model=model, optimizer=optimizer)
        seen[saved, "laconic"] = look(model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.125
    for saved, name in (("laconic/step-2", "fsdp2"), ("laconic by torch", "fsdp2"), ("fsdp2", "laconic by torch")):
        model, optimizer = _fresh(zoo.shard_fsdp2 if name == "fsdp2" else zoo.shard)
        torch_load(f"{folder}/{saved}", model, optimizer)
        seen[saved, name] = look(model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.125
    return seen


def _trained(spread: Callable[[zoo.Zoo], zoo.Zoo]) -> tuple[zoo.Zoo, torch.optim.Optimizer]:
    model = spread(zoo.make_zoo(seed=0, odd=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.8, 0.95))
    optimizer.param_groups[0]["lr"] = 0.125
    zoo.train(model, optimizer)
    return model, optimizer


def _fresh(spread: Callable[[zoo.Zoo], zoo.Zoo]) -> tuple[zoo.Zoo, torch.optim.Optimizer]:
    model = spread(zoo.make_zoo(seed=1, odd=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


# -- bytes on the wire -------------------------------------------------------------------------------------------------


def bytes_on_the_wire(folder: Path, hidden: int) -> dict[str, int]:
    """Return the bytes that the ranks send in saves and loads, and the bytes of a rank's part of the state."""
    found, doing = Counter[str](), ["training"]

    def count(letter: Letter) -> None:
        found[doing[0]] += sum(tensor.nbytes for tensor in letter.tensors)

    def body() -> None:
        dist.init_process_group("gloo")
        model = zoo.shard(zoo.make_zoo(seed=0, hidden=hidden))
        optimizer = torch.optim.AdamW(model.parameters())
        zoo.train(model, optimizer)
        saver, before = checkpoint.AsyncSaver(folder / "async"), model.traffic.snapshot()  # type: ignore[operator]
        arguments: dict[str, Any] = {"model": model, "optimizer": optimizer}
        for name, action in {
            "save": lambda: checkpoint.save_checkpoint(folder, 1, extra={}, **arguments),
            "load": lambda: checkpoint.load_checkpoint(folder, **arguments),
            "load_dcp": lambda: checkpoint.load_dcp(folder / "step-1", **arguments),
            "save asynchronously": lambda: (saver.save(1, extra={}, **arguments), saver.wait()),
        }.items():
            dist.barrier()
            doing[0] = name
            action()
            dist.barrier()
        assert (model.traffic.snapshot() - before).total() == 0  # type: ignore[operator]
        local = [t.to_local() for t in zoo.optimizer_tensors(model, optimizer).values() if hasattr(t, "to_local")]
        found["state"] = sum(tensor.nbytes for tensor in local)

    rehearse.ranks(body, local=2, on_message=count)
    assert found.pop("training")
    return dict(found)
