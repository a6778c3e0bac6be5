"""What a reader has is what `laconic export` writes of the same step, to the bit, for each kind of architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from laconic import checkpoint
from laconic.config import Config, ModelConfig, to_dict
from laconic.models import export
from laconic.models.build import build_model
from laconic.publish import FolderSource, Publisher, Reader
from laconic.publish.versions import version_name
from tests.hf.zoo import LORA, NO_LORA, TINY, spread, train
from tests.reference import publish as reference
from tests.support.launch import run_ranks
from tests.support.published import assert_same, write

_LLAMA = {**TINY["llama"], "num_hidden_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "gpt2": {**TINY["gpt2"], "n_layer": 1},
    "mixtral": {**TINY["mixtral"], "num_hidden_layers": 1},
    "tied": {**_LLAMA, "tie_word_embeddings": True},
    "phi3": {**_LLAMA, "model_type": "phi3", "pad_token_id": 0},  # fused projections
}
STEPS = 2
RENAMED = ("mixtral", "gpt2", "tied")
"""Those whose folders of the hub have other names than the model, or fewer."""
ADAPTED = {"laconic": ("gpt2", "mixtral"), "fsdp2": ("llama",)}


def train_and_publish(folder: str, lora: Any, strategy: str) -> None:
    """Publish each step of each model, and save the last. Runs on each rank."""
    torch.manual_seed(0)
    for name in MODELS if lora == NO_LORA else ADAPTED[strategy]:
        config = Config(model=ModelConfig(config=MODELS[name]), lora=lora)
        model, _ = spread(config.model, lora, strategy)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=3e-2)
        others = [Publisher(model, Path(folder) / name / "hub", names="hub")] if lora == NO_LORA else []
        others += [Publisher(model, Path(folder) / name / "merged", adapters="merged")] if lora != NO_LORA else []
        with Publisher(model, Path(folder) / name / "versions", base_every=STEPS) as publisher:
            for step in range(STEPS):
                train(model, optimizer, 1)
                publisher.publish(step=step)
                for other in others:
                    write(other)
        run, extra = Path(folder) / name / "run" / "checkpoints", {"config": to_dict(config)}
        checkpoint.save_checkpoint(run, STEPS, model=model, optimizer=None, extra=extra)


def exported(folder: Path, *, adapter: bool = False) -> dict[str, Tensor]:
    out = folder / f"out-{adapter}"
    export.export(folder / "run", out, dtype=torch.bfloat16, adapter=adapter)
    return {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    run_ranks(train_and_publish, 2, str(folder), NO_LORA, "laconic")
    return folder


def zeros_of(wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_reader_has_what_export_and_save_pretrained_write(name: str, published: Path, tmp_path: Path) -> None:
    """In the names of the model and of the hub: experts one by one, and tensors that transformers renames."""
    torch.manual_seed(1)
    model: Any = build_model(ModelConfig(config=MODELS[name]), NO_LORA, device="cpu").to(torch.bfloat16)
    assert Reader(published / name / "versions").update(model) == STEPS
    wanted = exported(published / name)
    assert_same({key: tensor for key, tensor in model.state_dict().items() if key in wanted}, wanted)
    by_hand = zeros_of(wanted)
    source = FolderSource(published / name / "versions")
    last_whole = max(version for version in source.versions() if source.manifest(version).is_whole)
    for version in range(last_whole, STEPS + 1):
        kind = "whole" if version == last_whole else "patch"
        reference.apply(source.folder / version_name(version), by_hand, kind)
    assert_same(by_hand, wanted)

    model.save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    state = zeros_of(wanted)
    Reader(published / name / "hub").update(state)
    assert_same(state, wanted)
    other = build_model(ModelConfig(config=MODELS[name]), NO_LORA, device="cpu").to(torch.bfloat16)
    Reader(published / name / "hub").update(other)
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert (set(wanted) != set(model.state_dict())) == (name in RENAMED)


@pytest.mark.parametrize("strategy", ADAPTED)
def test_adapters_are_what_export_writes(strategy: str, tmp_path: Path) -> None:
    """Alone, and merged into the base model."""
    run_ranks(train_and_publish, 2, str(tmp_path), LORA, strategy)
    for name in ADAPTED[strategy]:
        wanted = exported(tmp_path / name, adapter=True)
        state = zeros_of(wanted)
        Reader(tmp_path / name / "versions").update(state)
        assert_same(state, wanted)
        model: nn.Module = build_model(ModelConfig(config=MODELS[name]), LORA, device="cpu").to(torch.bfloat16)
        Reader(tmp_path / name / "versions").update(model)
        own = {key.replace(".default", ""): tensor for key, tensor in model.state_dict().items() if "lora" in key}
        assert_same(own, wanted)
        wanted = exported(tmp_path / name)
        state = zeros_of(wanted)
        Reader(tmp_path / name / "merged").update(state)
        assert_same(state, wanted)
