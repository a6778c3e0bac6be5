"""Sharded models written to safetensors folders and read back; transformers and peft load them, too."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import laconic
from laconic.errors import JobError
from laconic.hf import folder as hf_folder
from laconic.hf import saving
from laconic.hf.folder import ModelFolder, ModelFolderError
from laconic.hf.models import ModelConfig, build_model
from tests.hf.zoo import LORA, NO_LORA, TINY, differing, spread, tokens, whole
from tests.support.launch import run_ranks
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


def plain_models(folder: str) -> dict[str, Any]:
    """A plain module, a sharded one and one that tensor parallelism has cut too: save, spoil, load. On each rank."""
    model = shard(build(Buffered))
    want = whole(model)
    model(torch.randn(2, 5))  # with gathered weights in the root
    before = model.traffic.snapshot()
    laconic.save_safetensors(model, f"{folder}/net", max_file_bytes=3000)
    traffic = model.traffic.snapshot() - before
    fill(model, 3.0)
    read: list[int] = []
    original = ModelFolder.read

    def counted(self: ModelFolder, key: str, part: tuple[slice, ...] = ()) -> Tensor:
        tensor = original(self, key, part)
        read.append(tensor.nbytes)
        return tensor

    ModelFolder.read = counted  # type: ignore[method-assign]
    laconic.load_safetensors(model, f"{folder}/net")
    ModelFolder.read = original  # type: ignore[method-assign]
    got = whole(model)

    cut = build(Net)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 3, 3), mesh_dim_names=("dp", "tp"))
    for block in cut.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel()})
    shard(cut, mesh=mesh["dp"])
    laconic.save_safetensors(cut, f"{folder}/cut", dtype=torch.bfloat16)
    sliced = laconic.partial_updates(
        build_model(ModelConfig(config=TINY["qwen2"]), device="cpu"), slice_index=1, num_slices=2
    )
    unsliced = laconic.unsliced_state_dict(sliced)
    shard(sliced, [], mesh=laconic.init_mesh("cpu", islands=RANKS, nodes=1, local=1))
    laconic.save_safetensors(sliced, f"{folder}/sliced")
    fill(sliced, 3.0)
    laconic.load_safetensors(sliced, f"{folder}/sliced")
    return {
        "differing": differing(want, {**got, "forgotten": want["forgotten"]}),
        "sliced": differing(unsliced, laconic.unsliced_state_dict(sliced)),
        "received": traffic.total(purpose="control", direction="received"),
        "all": traffic.total(),
        "sent": traffic.total(direction="sent"),
        "read": sum(read),
    }


@pytest.mark.machine
def test_plain_modules_and_other_parallelisms(tmp_path: Path) -> None:
    results = run_ranks(plain_models, RANKS, str(tmp_path))
    model = build(Buffered)
    stored = {name: t for path in (tmp_path / "net").glob("*.safetensors") for name, t in load_file(path).items()}
    want = {name: t for name, t in model.state_dict().items() if name != "tied.weight"}
    assert not differing(stored, want)
    sizes = [path.stat().st_size for path in (tmp_path / "net").glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) < 3000 + 1500  # the header is not counted
    index = json.loads((tmp_path / "net" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == want.keys()
    assert [result["differing"] for result in results] == [[]] * RANKS
    assert [result["sliced"] for result in results] == [[]] * RANKS

    held = sum(t.nbytes for t in (p for name, p in model.named_parameters() if name != "tied.weight"))
    assert results[0]["received"] == sum(result["sent"] for result in results[1:])
    assert 0 < results[0]["received"] < held
    assert all(result["all"] == result["sent"] for result in results[1:])  # nothing comes to the other ranks
    buffers = sum(buffer.nbytes for name, buffer in model.named_buffers() if name != "forgotten")
    assert sum(result["read"] for result in results) == held + RANKS * buffers

    cut = load_file(tmp_path / "cut" / "model.safetensors")
    assert not differing(cut, {name: t.bfloat16() for name, t in build(Net).state_dict().items()})
    alone = build(Buffered)
    fill(alone, 3.0)
    laconic.load_safetensors(alone, tmp_path / "net")
    assert not differing(dict(alone.state_dict()), dict(model.state_dict()))
    laconic.save_safetensors(alone, tmp_path / "alone")
    assert not differing(load_file(tmp_path / "alone" / "model.safetensors"), want)


class Pushed(transformers.LlamaForCausalLM):
    """A model whose upload is a folder."""

    def push_to_hub(self, folder: str) -> str:  # type: ignore[override]
        self.save_pretrained(folder)
        return type(self).__name__


def transformers_models(folder: str) -> list[list[str]]:
    """Save by both functions, and load back. Returns the names of tensors that differ. Runs on each rank."""
    found: list[list[str]] = []
    for name in ("llama", "gpt2", "mixtral"):
        model: Any = spread(ModelConfig(config=TINY[name]), NO_LORA, "laconic")[0]
        want = whole(model)
        assert repr(model).startswith(f"Sharded{model._get_name()}(")
        assert hasattr(transformers, model._get_name())
        laconic.save_safetensors(model, f"{folder}/{name}", max_file_bytes=20_000)
        model.save_pretrained(f"{folder}/{name}-pretrained", max_shard_size=30_000)
        for source in (name, f"{name}-pretrained"):
            fill(model, 3.0)
            laconic.load_safetensors(model, f"{folder}/{source}")
            found.append([key for key in differing(want, whole(model)) if "inv_freq" not in key])
        torch.save(want, f"{folder}/{name}-{dist.get_rank()}.pt")
    pushed: Any = Pushed(transformers.AutoConfig.for_model(**TINY["llama"]))
    laconic.fully_shard(pushed, mesh=laconic.init_mesh("cpu"))
    assert pushed.push_to_hub(f"{folder}/pushed") == "Pushed"

    adapted: Any = spread(ModelConfig(config=TINY["llama"]), LORA, "laconic")[0]
    adapters = [p for p in adapted.parameters() if p.requires_grad]
    with torch.no_grad():
        torch.manual_seed(1)
        for parameter in adapters:
            parameter.normal_(std=0.3)
    want = whole(adapted)
    before = adapted.traffic.snapshot()
    adapted.save_pretrained(f"{folder}/adapter-pretrained")
    received = (adapted.traffic.snapshot() - before).total(direction="received")
    assert received < sum(parameter.nbytes for parameter in adapters)
    laconic.save_safetensors(adapted, f"{folder}/adapter")
    for source in ("adapter", "adapter-pretrained"):
        with torch.no_grad():
            for parameter in adapters:
                parameter.zero_()
        laconic.load_safetensors(adapted, f"{folder}/{source}")
        found.append(differing(want, whole(adapted)))
    logits = adapted.eval()(input_ids=tokens()).logits
    torch.save(logits, f"{folder}/logits-{dist.get_rank()}.pt")
    return found


def test_transformers_and_peft_load_the_folders(tmp_path: Path) -> None:
    for found in run_ranks(transformers_models, RANKS, str(tmp_path)):
        assert found == [[]] * 8
    for name in ("llama", "gpt2", "mixtral"):
        want = torch.load(tmp_path / f"{name}-0.pt")
        for source in (name, f"{name}-pretrained"):
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / source)
            assert not differing(want, whole(model))
            assert model.generation_config.eos_token_id == 2
            config = json.loads((tmp_path / source / "config.json").read_text())
            assert config["architectures"] == [type(model).__name__]
            assert len(list((tmp_path / source).glob("*.safetensors"))) > 1
    assert json.loads((tmp_path / "pushed" / "config.json").read_text())["architectures"] == ["Pushed"]
    assert (tmp_path / "pushed" / "model.safetensors").is_file()
    for source in ("adapter", "adapter-pretrained"):
        base = build_model(ModelConfig(config=TINY["llama"]), device="cpu")
        model = peft.PeftModel.from_pretrained(base, tmp_path / source).eval()
        torch.testing.assert_close(model(input_ids=tokens()).logits, torch.load(tmp_path / "logits-0.pt"))


def failures(folder: str) -> list[str]:
    """Return the messages of calls that must fail on all ranks. Runs on each rank."""
    model, rank = shard(build(Net)), dist.get_rank()
    messages = []

    def refused(call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises((JobError, ValueError)) as caught:
            call(*args, **options)
        messages.append(str(caught.value))

    before = model.traffic.snapshot()
    refused(laconic.save_safetensors, model, f"{folder}/full")
    assert (model.traffic.snapshot() - before).total() == 0
    write = hf_folder._write_file

    def write_on_full_disk(path: Path, tensors: dict[str, Tensor]) -> None:
        if "00002-of" in path.name:
            raise JobError(f"cannot write {path.name}: the disk is full")
        write(path, tensors)

    hf_folder._write_file = write_on_full_disk
    refused(laconic.save_safetensors, model, f"{folder}/damaged", max_file_bytes=1000)
    hf_folder._write_file = write
    refused(laconic.load_safetensors, model, f"{folder}/other")
    refused(laconic.load_safetensors, model, f"{folder}/nowhere")
    with torch.device("meta"):
        refused(laconic.save_safetensors, Net(), f"{folder}/meta")
    refused(laconic.save_safetensors if rank else laconic.load_safetensors, model, f"{folder}/mixed")

    warned = Path(folder) / "warned"
    saving.PATIENCE_S = 0.05 if rank == 0 else 60.0
    saving._warn = lambda call: warned.write_text(call)
    while rank == 1 and not warned.exists():  # rank 0 says that it waits
        time.sleep(0.01)
    laconic.save_safetensors(model, f"{folder}/late")
    return messages


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"safetensors.* pip install '\.\[train\]' in a clone"):
        laconic.load_safetensors(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ImportError, match=r"pip install '\.\[train\]' in a clone"):
        laconic.save_safetensors(nn.Linear(2, 2), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_failures_reach_every_rank(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a file").touch()
    laconic.save_safetensors(nn.Linear(2, 2), tmp_path / "other")
    results = run_ranks(failures, 2, str(tmp_path))
    for exists, disk, other, nowhere, meta, mixed in results:
        assert "full exists already; give a folder that does not" in exists
        assert "the disk is full" in disk
        assert "do not fit the model (missing: inp.weight, inp.bias" in other
        assert "unexpected: bias, weight" in other
        assert "folder = " in nowhere
        assert "is not a folder" in nowhere
        assert "call model.to_empty" in meta
        assert "ranks make different calls: load_safetensors, save_safetensors" in mixed
    assert (tmp_path / "warned").read_text() == "save_safetensors"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "late", "other", "warned"]
    (tmp_path / "other" / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelFolderError, match="is not a readable safetensors file"):
        laconic.load_safetensors(nn.Linear(2, 2), tmp_path / "other")
