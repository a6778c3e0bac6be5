"""Each storage of torch.distributed.checkpoint keeps a sharded model to the bit, or is refused before it writes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard as fsdp2

import laconic
from tests.support.launch import launch, run_ranks
from tests.support.sharded_net import full_parameters, ragged


class Odd(nn.Module):
    """Fewer rows than ranks, one element, three dims, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.flat = nn.Linear(5, 7), nn.Linear(3, 2, bias=False)
        self.one, self.cube = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(2, 3, 4))
        self.register_buffer("mean", torch.randn(3))


@dataclass(frozen=True)
class Storage:
    """A writer of DCP and its reader."""

    write: Callable[[str], Any]
    read: Callable[[str], Any]
    keeps_boxes: bool = True
    """True if it keeps several boxes of one tensor in a file."""
    refusal: str = r"keeps one tensor a name and file.*laconic\.whole\(\)"
    """Of what it would lose."""
    takes_parts: bool = True
    """False if it expects whole tensors on one rank."""


STORAGES = {
    "files": Storage(dcp.FileSystemWriter, dcp.FileSystemReader),
    "files, one a tensor": Storage(
        lambda path: dcp.FileSystemWriter(path, single_file_per_rank=False, thread_count=2), dcp.FileSystemReader
    ),
    "fsspec": Storage(FsspecWriter, FsspecReader),
    "safetensors": Storage(
        lambda path: dcp.HuggingFaceStorageWriter(path, save_distributed=True), dcp.HuggingFaceStorageReader,
        keeps_boxes=False,
    ),
    "safetensors, joined": Storage(
        lambda path: dcp.HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True),
        dcp.HuggingFaceStorageReader, keeps_boxes=False,
    ),
    "safetensors, of rank 0": Storage(
        dcp.HuggingFaceStorageWriter, dcp.HuggingFaceStorageReader,
        refusal=r"without save_distributed=True expects whole tensors.*laconic\.save_safetensors", takes_parts=False,
    ),
}  # fmt: skip
SAVES: dict[str, Callable[[Any, Any], Any]] = {
    "save": lambda state, writer: dcp.save(state, storage_writer=writer),
    "save, deduplicated": lambda state, writer: dcp.save(
        state, storage_writer=writer, planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    ),
    "async_save": lambda state, writer: dcp.async_save(state, storage_writer=writer).result(),  # type: ignore[union-attr]
}


def whole_of(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = model.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def read_by(kind: str, folder: str, storage: Storage) -> dict[str, Tensor]:
    """Read into another model: laconic's, FSDP2's or a plain one."""
    model: Any = Odd(seed=1)
    if kind == "laconic":
        laconic.fully_shard(model, granularity=laconic.elements(1))
    elif kind == "fsdp2":
        fsdp2(model)
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=storage.read(folder), no_dist=kind == "plain")
    set_model_state_dict(model, state)
    return full_parameters(model) if kind == "laconic" else whole_of(model)


def cells(folder: str, ways: Sequence[str]) -> int:
    """Try each storage with some ways to save and each cut; return the number of cells."""
    num = 0
    for (name, storage), way, is_whole in product(STORAGES.items(), ways, (True, False)):
        save, model, path = SAVES[way], Odd(seed=0), f"{folder}/{name}-{way}-{is_whole}"
        wanted = {key: value.detach().clone() for key, value in model.state_dict().items()}
        block = laconic.whole() if is_whole else laconic.elements(1)
        laconic.fully_shard(model, granularity=block)
        state = get_model_state_dict(model)
        num += 1
        if not storage.takes_parts or not (storage.keeps_boxes or is_whole):
            with pytest.raises(BaseException, match=storage.refusal):
                save(state, storage.write(path))
            continue
        save(state, storage.write(path))
        dist.barrier()
        for kind in ("laconic", "fsdp2", "plain"):
            for key, value in read_by(kind, path, storage).items():
                assert torch.equal(value, wanted[key]), (name, way, is_whole, kind, key)
        if name == "safetensors, joined":
            [file] = Path(path).glob("*.safetensors")
            joined = load_file(file)
            assert all(torch.equal(joined[key], value) for key, value in wanted.items())
    return num


@pytest.mark.parametrize(
    ("num_ranks", "ways"),
    [(3, ["save"]), *(pytest.param(size, list(SAVES), marks=pytest.mark.heavy) for size in (2, 5))],
    ids=lambda given: str(given) if isinstance(given, int) else ", ".join(given),
)
def test_each_storage_keeps_the_bits_or_is_refused(num_ranks: int, ways: list[str], tmp_path: Path) -> None:
    assert set(run_ranks(cells, num_ranks, str(tmp_path), ways)) == {len(STORAGES) * len(ways) * 2}


def save_in_another_process(folder: str) -> dict[str, Tensor]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it starts a process
    model = laconic.fully_shard(Odd(seed=0), granularity=laconic.elements(1))
    kind = AsyncCheckpointerType.PROCESS
    state = get_model_state_dict(model)
    saving: Any = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(folder), async_checkpointer_type=kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the copies are taken
    saving.result()
    _async_process_executor._CHECKPOINT_PROCESS = None  # ends it
    dist.barrier()
    return read_by("laconic", folder, STORAGES["files"])


@pytest.mark.machine
def test_another_process_saves(tmp_path: Path) -> None:
    wanted = Odd(seed=0).state_dict()
    for found in launch(save_in_another_process, str(tmp_path), num_ranks=2):
        for key, value in found.items():
            assert torch.equal(value, wanted[key]), key
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(ragged(torch.ones(3, 2), 2)[0], tmp_path / "file")
