"""Sharded models written to safetensors folders and read back; transformers and peft load them, too."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import laconic
from laconic.errors import JobError
from laconic.hf import folder as hf_folder
from laconic.hf import saving
from laconic.hf.folder import ModelFolder, ModelFolderError
from laconic.models.build import ModelConfig, build_model
from tests.hf.zoo import LORA, NO_LORA, TINY, differing, spread, tokens, whole
from tests.support.launch import on_ranks, run_ranks
from tests.support.sharded_net import Net, build, shard

RANKS = 3


class Buffered(Net):
    """A model with a tied weight, buffers of several dtypes and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(17, 3)
        self.tied.weight = self.out.weight
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(0.25))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("table", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("forgotten", torch.ones(2), persistent=False)


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@on_ranks(RANKS)
def test_plain_modules(tmp_path: Path) -> None:
    """Save, spoil, load. Tensors go to rank 0 alone, and each rank reads its part and the buffers."""
    plain, model, rank = build(Buffered), shard(build(Buffered)), dist.get_rank()
    want = {name: tensor for name, tensor in plain.state_dict().items() if name != "tied.weight"}
    model(torch.randn(2, 5))  # with gathered weights in the root
    before = model.traffic.snapshot()
    laconic.save_safetensors(model, tmp_path / "net", max_file_bytes=3000)
    traffic = model.traffic.snapshot() - before
    fill(model, 3.0)
    read, original = list[int](), ModelFolder.read

    def counted(self: ModelFolder, key: str, part: tuple[slice, ...] = ()) -> Tensor:
        tensor = original(self, key, part)
        read.append(tensor.nbytes)  # of all ranks: they are threads of this process
        return tensor

    with nullcontext() if rank else mock.patch.object(ModelFolder, "read", counted):
        dist.barrier()
        laconic.load_safetensors(model, tmp_path / "net")
        dist.barrier()
    assert not differing(whole(plain), {**whole(model), "forgotten": plain.forgotten})  # type: ignore[dict-item]

    assert not differing(read_all(tmp_path / "net"), want)
    sizes = [path.stat().st_size for path in (tmp_path / "net").glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) < 3000 + 1500  # the header is not counted
    index = json.loads((tmp_path / "net" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == want.keys()
    held = sum(p.nbytes for name, p in plain.named_parameters() if name != "tied.weight")
    buffers = sum(buffer.nbytes for name, buffer in plain.named_buffers() if name != "forgotten")
    assert rank or sum(read) == held + RANKS * buffers
    sent = torch.tensor(traffic.total(direction="sent") if rank else 0)
    dist.all_reduce(sent)
    if rank:
        assert traffic.total() == traffic.total(direction="sent"), "nothing comes to the other ranks"
    else:
        assert traffic.total(purpose="control", direction="received") == int(sent)
        assert 0 < int(sent) < held


@on_ranks(RANKS)
def test_other_parallelisms(tmp_path: Path) -> None:
    """A model that tensor parallelism has cut too, and one that has slices on islands."""
    cut = build(Net)
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("dp", "tp"))
    for block in cut.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel()})
    shard(cut, mesh=mesh["dp"])
    laconic.save_safetensors(cut, tmp_path / "cut", dtype=torch.bfloat16)
    assert not differing(
        read_all(tmp_path / "cut"), {name: tensor.bfloat16() for name, tensor in build(Net).state_dict().items()}
    )
    plain = build_model(ModelConfig(config=TINY["qwen2"]), device="cpu")
    sliced = laconic.partial_updates(plain, slice_index=1, num_slices=2)
    unsliced = laconic.unsliced_state_dict(sliced)
    shard(sliced, [], mesh=laconic.init_mesh("cpu", islands=RANKS, nodes=1, local=1))
    laconic.save_safetensors(sliced, tmp_path / "sliced")
    fill(sliced, 3.0)
    laconic.load_safetensors(sliced, tmp_path / "sliced")
    assert not differing(unsliced, laconic.unsliced_state_dict(sliced))


def test_one_process_and_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, alone = build(Buffered), build(Buffered)
    laconic.save_safetensors(model, tmp_path / "net")
    fill(alone, 3.0)
    laconic.load_safetensors(alone, tmp_path / "net")
    assert not differing(dict(alone.state_dict()), dict(model.state_dict()))
    (tmp_path / "net" / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelFolderError, match="is not a readable safetensors file"):
        laconic.load_safetensors(alone, tmp_path / "net")
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    for call, folder in ((laconic.load_safetensors, "net"), (laconic.save_safetensors, "new")):
        with pytest.raises(ImportError, match=r"safetensors.* pip install '\.\[train\]' in a clone"):
            call(nn.Linear(2, 2), tmp_path / folder)
    assert not (tmp_path / "new").exists()


class Pushed(transformers.LlamaForCausalLM):
    """A model whose upload is a folder."""

    def push_to_hub(self, folder: str) -> str:  # type: ignore[override]
        self.save_pretrained(folder)
        return type(self).__name__


@on_ranks(2)
def test_transformers_and_peft_load_the_folders(tmp_path: Path) -> None:
    """Saved by both functions, and loaded by both and by `from_pretrained`."""
    for name in ("llama", "mixtral"):
        model: Any = spread(ModelConfig(config=TINY[name]), NO_LORA, "laconic")[0]
        want = whole(model)
        assert repr(model).startswith(f"Sharded{model._get_name()}(")
        assert hasattr(transformers, model._get_name())
        laconic.save_safetensors(model, tmp_path / name, max_file_bytes=20_000)
        model.save_pretrained(tmp_path / f"{name}-pretrained", max_shard_size=30_000)
        dist.barrier()
        for folder in (tmp_path / name, tmp_path / f"{name}-pretrained"):
            fill(model, 3.0)
            laconic.load_safetensors(model, folder)
            assert [key for key in differing(want, whole(model)) if "inv_freq" not in key] == []
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
            assert not differing(want, whole(loaded))
            assert loaded.generation_config.eos_token_id == 2
            assert json.loads((folder / "config.json").read_text())["architectures"] == [type(loaded).__name__]
            assert len(list(folder.glob("*.safetensors"))) > 1
    pushed: Any = Pushed(transformers.AutoConfig.for_model(**TINY["llama"]))
    laconic.fully_shard(pushed, mesh=laconic.init_mesh("cpu"))
    assert pushed.push_to_hub(str(tmp_path / "pushed")) == "Pushed"
    dist.barrier()
    assert json.loads((tmp_path / "pushed" / "config.json").read_text())["architectures"] == ["Pushed"]
    assert (tmp_path / "pushed" / "model.safetensors").is_file()


@on_ranks(2)
def test_adapters_are_saved_alone(tmp_path: Path) -> None:
    adapted: Any = spread(ModelConfig(config=TINY["llama"]), LORA, "laconic")[0]
    adapters = [p for p in adapted.parameters() if p.requires_grad]
    with torch.no_grad():
        torch.manual_seed(1)
        for parameter in adapters:
            parameter.normal_(std=0.3)
    want, logits = whole(adapted), adapted.eval()(input_ids=tokens()).logits
    before = adapted.traffic.snapshot()
    adapted.save_pretrained(tmp_path / "pretrained")
    received = (adapted.traffic.snapshot() - before).total(direction="received")
    assert received < sum(parameter.nbytes for parameter in adapters)
    laconic.save_safetensors(adapted, tmp_path / "saved")
    dist.barrier()
    for name in ("saved", "pretrained"):
        with torch.no_grad():
            for parameter in adapters:
                parameter.zero_()
        laconic.load_safetensors(adapted, tmp_path / name)
        assert differing(want, whole(adapted)) == []
        base = build_model(ModelConfig(config=TINY["llama"]), device="cpu")
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / name).eval()
        torch.testing.assert_close(loaded(input_ids=tokens()).logits, logits)


@on_ranks(2)
def test_failures_reach_every_rank(tmp_path: Path) -> None:
    model, rank = shard(build(Net)), dist.get_rank()
    if rank == 0:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "a file").touch()
        (tmp_path / "other").mkdir()
        save_file({"weight": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    dist.barrier()
    before = model.traffic.snapshot()
    with pytest.raises(JobError, match="full exists already; give a folder that does not"):
        laconic.save_safetensors(model, tmp_path / "full")
    assert (model.traffic.snapshot() - before).total() == 0
    write = hf_folder._write_file

    def write_on_full_disk(path: Path, tensors: dict[str, Tensor]) -> None:
        if "00002-of" in path.name:
            raise JobError(f"cannot write {path.name}: the disk is full")
        write(path, tensors)

    full = mock.patch.object(hf_folder, "_write_file", write_on_full_disk)
    with full if rank == 0 else nullcontext(), pytest.raises(JobError, match="the disk is full"):
        laconic.save_safetensors(model, tmp_path / "damaged", max_file_bytes=1000)
    with pytest.raises(JobError, match=r"do not fit the model \(missing: inp.weight, inp.bias.*unexpected: weight"):
        laconic.load_safetensors(model, tmp_path / "other")
    with pytest.raises(JobError, match=r"folder = .*is not a folder"):
        laconic.load_safetensors(model, tmp_path / "nowhere")
    with torch.device("meta"), pytest.raises(ValueError, match=r"call model\.to_empty"):
        laconic.save_safetensors(Net(), tmp_path / "meta")
    with pytest.raises(ValueError, match="ranks make different calls: load_safetensors, save_safetensors"):
        (laconic.save_safetensors if rank else laconic.load_safetensors)(model, tmp_path / "mixed")
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "other"]


def test_a_rank_that_waits_for_others_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(saving, "_warn", said.append)

    def save_late() -> None:
        model = shard(build(Net))
        time.sleep(dist.get_rank() * 2 * saving.PATIENCE_S)
        laconic.save_safetensors(model, tmp_path / "late")

    run_ranks(save_late, 2)
    assert said == ["save_safetensors"]
