"""A checkpoint written by several ranks becomes a folder that transformers (or peft) loads to the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from laconic import checkpoint
from laconic.config import Config, DataConfig, LoraConfig, ModelConfig, to_dict
from laconic.models import export, export_cli
from laconic.models.build import build_model
from tests.hf.zoo import LORA, NO_LORA, TINY, spread, tokens, train, whole
from tests.support.launch import run_ranks


def train_and_save(run: str, name: str, lora: LoraConfig, tokenizer: str) -> dict[str, Tensor]:
    """Take three steps, save as the trainer does, and return the gathered parameters. Runs on each rank."""
    config = Config(
        model=ModelConfig(config=TINY[name]), lora=lora, data=DataConfig(tokenizer=tokenizer, sequence_length=16)
    )
    model, _ = spread(config.model, lora, "laconic")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    train(model, optimizer, 3)
    extra = {"config": to_dict(config)}
    checkpoint.save_checkpoint(Path(run) / "checkpoints", 3, model=model, optimizer=optimizer, extra=extra)
    return whole(model)


def in_training(name: str, lora: LoraConfig, values: dict[str, Tensor]) -> Any:
    """Build the trained model, unsharded."""
    model = build_model(ModelConfig(config=TINY[name]), lora, device="cpu").eval()
    model.load_state_dict(values, strict=False)
    return model


@pytest.fixture(scope="module")
def llama_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    run, tokenizer = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("tokenizer")
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "tokenizer_config.json").write_text("{}")
    (tokenizer / "weights.safetensors").write_text("not a tokenizer's")
    return run, run_ranks(train_and_save, 2, str(run), "llama", NO_LORA, str(tokenizer))[0]


def test_full_model_in_several_files(llama_run: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    run, values = llama_run
    assert export_cli.main([str(run), str(tmp_path / "out"), "--max-file-bytes", "30000"]) == 0
    out = tmp_path / "out"
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) < 30_000 + 4_000  # the header is not counted
    exported = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(exported(tokens()).logits, in_training("llama", NO_LORA, values)(tokens()).logits)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert exported.generation_config.eos_token_id == 2
    assert (out / "tokenizer.json").exists()
    assert not (out / "weights.safetensors").exists()
    export.export(run, tmp_path / "half", dtype=torch.bfloat16)
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert {p.dtype for p in exported.parameters()} == {torch.bfloat16}
    assert torch.equal(exported.lm_head.weight, values["lm_head.weight"].bfloat16())


@pytest.mark.parametrize(("name", "lora"), [("gpt2", NO_LORA), ("gpt2", LORA), ("mixtral", LORA)])
def test_merged_and_as_adapter(name: str, lora: LoraConfig, tmp_path: Path) -> None:
    """GPT-2 stores its layers transposed; a mixture's folder has other names for the experts than the model."""
    run = tmp_path / "run"
    values = run_ranks(train_and_save, 2, str(run), name, lora, "bytes")[0]
    export.export(run / "checkpoints" / "step-3", tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model = in_training(name, lora, values)
    logits = model(input_ids=tokens()).logits
    base = build_model(ModelConfig(config=TINY[name]), device="cpu").eval()
    assert not torch.allclose(base(tokens()).logits, logits, atol=1e-2)
    if lora.enabled:
        assert export_cli.main([str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
        assert [path.name for path in (tmp_path / "adapter").glob("*.safetensors")] == ["adapter_model.safetensors"]
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert torch.equal(adapted(input_ids=tokens()).logits, logits)
        model = model.merge_and_unload()
    assert torch.equal(exported(tokens()).logits, model(tokens()).logits)


def test_refusals(
    llama_run: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(llama_run[0])

    def refused(*argv: str) -> str:
        assert export_cli.main(list(argv)) == 2
        return capsys.readouterr().err

    assert "exists already" in refused(run, run)
    assert "has no adapter" in refused(run, str(tmp_path / "out"), "--adapter")
    assert "there is no checkpoint" in refused(str(tmp_path), str(tmp_path / "out"))
    model = torch.nn.Linear(2, 2)
    checkpoint.save_checkpoint(tmp_path / "foreign", 1, model=model, optimizer=None, extra={})
    assert "does not say which model" in refused(str(tmp_path / "foreign"), str(tmp_path / "out"))
    extra = {"config": to_dict(Config(model=ModelConfig(config=TINY["llama"])))}
    checkpoint.save_checkpoint(tmp_path / "other", 1, model=model, optimizer=None, extra=extra)
    assert "lacks lm_head.weight, model.embed_tokens.weight" in refused(str(tmp_path / "other"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
