"""Models come out as transformers would make them, however they are sharded, and bad input is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.initialization import no_init_weights

from laconic.config import JobError, LoraConfig, ModelConfig
from laconic.hf.layers import layers_to_shard
from laconic.models.build import build_model
from tests.hf.zoo import LORA, NO_LORA, STRATEGIES, TINY, differing, spread, tokens, whole
from tests.support.launch import on_ranks

SEED = 5


def transformers_own(name: str) -> Any:
    """The reference: transformers' weight initialisation and nothing else drawn from the seed."""
    config = transformers.AutoConfig.for_model(**TINY[name])
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.manual_seed(SEED)
    model.init_weights()
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each architecture saved by transformers, Llama in several files."""
    made = {}
    for name in TINY:
        made[name] = tmp_path_factory.mktemp(name)
        transformers_own(name).save_pretrained(made[name], max_shard_size="20KB" if name == "llama" else "1GB")
    assert (made["llama"] / "model.safetensors.index.json").exists()
    return made


@pytest.mark.parametrize("name", TINY)
def test_initialisation_is_that_of_transformers(name: str) -> None:
    state = torch.get_rng_state()
    model = build_model(ModelConfig(config=TINY[name], init_seed=SEED), device="cpu")
    assert torch.equal(torch.get_rng_state(), state)  # a job's other draws do not depend on the model
    assert differing(whole(model), whole(transformers_own(name))) == []


@pytest.mark.parametrize("name", TINY)
def test_folder_gives_what_from_pretrained_gives(name: str, folders: dict[str, Path]) -> None:
    model: Any = build_model(ModelConfig(path=str(folders[name])), device="cpu").eval()
    pretrained = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
    assert differing(whole(model), whole(pretrained)) == []
    assert torch.equal(model(tokens()).logits, pretrained(tokens()).logits)
    assert name != "gpt2" or model.lm_head.weight is model.transformer.wte.weight, "tied weights stay tied"
    half = build_model(ModelConfig(path=str(folders[name]), dtype="bfloat16"), device="cpu")
    pretrained = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert differing(whole(half), whole(pretrained)) == []
    config = folders[name] / "config.json"
    unfilled: Any = build_model(ModelConfig(config=str(config)))
    assert unfilled.config.vocab_size == json.loads(config.read_text())["vocab_size"]
    assert next(unfilled.parameters()).device.type == "meta"


@pytest.mark.parametrize(("lora", "names"), [(NO_LORA, ("gpt2", "mixtral")), (LORA, ("llama",))], ids=["full", "lora"])
@on_ranks(2)
def test_sharded_models_hold_the_same_numbers_and_read_only_their_part(
    folders: dict[str, Path], lora: LoraConfig, names: tuple[str, ...]
) -> None:
    """Drawn and from a folder, under every strategy, as the unsharded model."""
    for name in names:
        for config in (ModelConfig(config=TINY[name], init_seed=SEED), ModelConfig(path=str(folders[name]))):
            expected = whole(build_model(config, lora, device="cpu"))
            for strategy in STRATEGIES:
                model, bytes_read = spread(config, lora, strategy)
                assert differing(whole(model), expected) == [], (name, strategy)
                total = sum(path.stat().st_size for path in folders[name].glob("*.safetensors"))
                assert not config.path or strategy == "ddp" or name == "mixtral" or bytes_read <= 0.6 * total


def test_folder_of_the_base_model_alone(tmp_path: Path) -> None:
    """The oldest GPT-2 folders have names without `transformer.`, and store masks as tensors."""
    reference = transformers_own("gpt2")
    reference.save_pretrained(tmp_path)
    reference.transformer.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "h.0.attn.c_attn.weight" in stored
    stored["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = build_model(ModelConfig(path=str(tmp_path)), device="cpu")
    assert differing(whole(model), whole(reference)) == []


def test_layers_to_shard() -> None:
    for name, layer in [("llama", "LlamaDecoderLayer"), ("gpt2", "GPT2Block"), ("mixtral", "MixtralDecoderLayer")]:
        for lora in (NO_LORA, LORA):
            model = build_model(ModelConfig(config=TINY[name]), lora)
            assert [type(module).__name__ for module in layers_to_shard(model)] == [layer] * 2
    no_names: Any = build_model(ModelConfig(config=TINY["llama"]))
    no_names._no_split_modules = None
    assert layers_to_shard(no_names) == list(no_names.model.layers)


def test_activation_checkpointing_changes_no_gradient() -> None:
    gradients, calls = [], []
    for on in (False, True):
        config = ModelConfig(config=TINY["llama"], activation_checkpointing=on)
        model: Any = build_model(config, device="cpu")
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, on=on: calls.append(on))
        model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert calls == [False, True, True]  # once, then once more in backward
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**TINY["llama"], "model_type": "lama"}, "'lama' is unknown to transformers; near it are llama"),
        (
            {**TINY["llama"], "hiden_size": 64},
            "unknown key `model.config.hiden_size`.*nearest valid key is `hidden_size`",
        ),
        ({**TINY["llama"], "num_attention_heads": 5}, "not a valid llama configuration.*multiple of the number of"),
        ({"model_type": "vit"}, "'vit' is no causal language model"),
        ("/nowhere/config.json", "/nowhere/config.json is not a readable transformers configuration"),
        (None, "no model is given; set model.config"),
        (ModelConfig(path="/nowhere"), "'/nowhere' is not a folder"),
    ],
)
def test_bad_configuration_is_refused(config: Any, message: str) -> None:
    with pytest.raises(JobError, match=f"(?s){message}"):
        build_model(config if isinstance(config, ModelConfig) else ModelConfig(config=config))


NORM = "model.norm.weight"
MODEL, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
BREAKS: dict[str, tuple[str, Any]] = {
    f"missing: {NORM}": (MODEL, {NORM: None}),
    "unexpected: model.layers.7.mlp.bias": (MODEL, {"model.layers.7.mlp.bias": torch.ones(1)}),
    rf"wrong shape: {NORM} is \[31\], expected \[32\]": (MODEL, {NORM: torch.ones(31)}),
    "model.safetensors is not a readable safetensors file": (MODEL, "nonsense"),
    "has no config.json": (CONFIG, None),
    "config.json is not a readable transformers config": (CONFIG, "{"),
    "has no safetensors file; it has pytorch_model.bin, pickled files": (MODEL, None),
    "gone.safetensors is not a readable safetensors file": (
        INDEX, json.dumps({"weight_map": {NORM: "gone.safetensors"}})
    ),
}  # fmt: skip
"""By the message: the file of the folder that is changed, and its new text or tensors; None takes the file away."""


@pytest.mark.parametrize("message", BREAKS)
def test_bad_folder_is_refused(message: str, folders: dict[str, Path], tmp_path: Path) -> None:
    for path in folders["qwen2"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "pytorch_model.bin").touch()
    name, change = BREAKS[message]
    if isinstance(change, dict):
        tensors = load_file(tmp_path / name) | change
        kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        save_file(kept, tmp_path / name, metadata={"format": "pt"})
    elif change is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(change)
    with pytest.raises(JobError, match=f"{re.escape(str(tmp_path))}.*{message}"):
        build_model(ModelConfig(path=str(tmp_path)), device="cpu")
