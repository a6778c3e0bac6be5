"""LoRA: adapters as peft makes them, around a base that stays what it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from laconic import checkpoint
from laconic.config import JobError, LoraConfig, ModelConfig
from laconic.hf import lora
from laconic.hf.layers import base_model
from laconic.hf.models import build_model
from tests.hf.zoo import LORA, TINY, differing, spread, tokens, whole
from tests.support.launch import on_ranks


@pytest.mark.parametrize("name", TINY)
def test_only_adapters_train_and_the_start_is_the_base_model(name: str) -> None:
    config = ModelConfig(config=TINY[name])
    plain, adapted = build_model(config, device="cpu").eval(), build_model(config, LORA, device="cpu").eval()
    assert torch.equal(adapted(input_ids=tokens()).logits, plain(input_ids=tokens()).logits)
    trainable = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    assert trainable
    for tensor_name, parameter in trainable.items():
        assert ("lora_A" in tensor_name) != ("lora_B" in tensor_name)
        assert bool(parameter.abs().sum() > 0) == ("lora_A" in tensor_name)
    with lora.adapters_put_aside(adapted):
        assert differing(whole(base_model(adapted)), whole(plain)) == []


def test_adapters_are_those_of_peft() -> None:
    """Names, shapes, scale and spread of values are those of a model that has values when peft wraps it."""
    config = ModelConfig(config={**TINY["llama"], "hidden_size": 256}, dtype="bfloat16")
    adapted: Any = build_model(config, LORA, device="cpu")
    settings = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, "target_modules": "all-linear"}
    wrapped: Any = peft.get_peft_model(build_model(config, device="cpu"), peft.LoraConfig(**settings))
    shapes = {n: (p.shape, p.dtype, p.requires_grad) for n, p in adapted.named_parameters()}
    assert shapes == {n: (p.shape, p.dtype, p.requires_grad) for n, p in wrapped.named_parameters()}
    assert {(dtype, trains) for _, dtype, trains in shapes.values()} == {(torch.float32, True), (torch.bfloat16, False)}
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name:
            other = wrapped.get_parameter(name)
            assert parameter.std().item() == pytest.approx(other.std().item(), rel=0.15), name
            assert parameter.abs().max() <= 1 / parameter.shape[1] ** 0.5  # kaiming_uniform_(a=sqrt(5))
    assert next(layer for _, _, layer in lora.adapted_layers(adapted)).scaling == {"default": 2.0}
    again, reseeded = (build_model(replace(config, init_seed=seed), LORA, device="cpu") for seed in (0, 1))
    assert differing(whole(adapted), whole(again)) == []
    assert differing(whole(adapted), whole(reseeded)) != []


def test_targets() -> None:
    """A mixture gets adapters on its linear layers alone."""
    mixture: Any = build_model(ModelConfig(config=TINY["mixtral"]), LORA)
    assert {name for _, name, _ in lora.adapted_layers(mixture)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    config = ModelConfig(config=TINY["llama"])
    model = build_model(config, LoraConfig(enabled=True, targets=("q_proj",)), device="cpu")
    assert [".q_proj." in n for n, p in model.named_parameters() if p.requires_grad] == [True] * 4
    with pytest.raises(JobError, match=r"\['query'\] fits no layer of LlamaForCausalLM.*k_proj.*q_proj"):
        build_model(config, LoraConfig(enabled=True, targets=("query",)))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_dora_starts_from_the_norms_that_peft_computes(name: str) -> None:
    config = ModelConfig(config=TINY[name])
    adapted: Any = build_model(config, LoraConfig(enabled=True, rank=3, dora=True), device="cpu").eval()
    plain: Any = build_model(config, device="cpu").eval()
    start = plain(input_ids=tokens()).logits
    targets = sorted({layer for _, layer, _ in lora.adapted_layers(adapted)})
    settings = {"r": 3, "use_dora": True, "target_modules": targets, "fan_in_fan_out": name == "gpt2"}
    wrapped = peft.get_peft_model(plain, peft.LoraConfig(**settings))
    magnitudes = {n: p for n, p in adapted.named_parameters() if "lora_magnitude_vector" in n}
    assert magnitudes
    for parameter_name, parameter in magnitudes.items():
        assert parameter.requires_grad
        torch.testing.assert_close(parameter, wrapped.get_parameter(parameter_name))
    torch.testing.assert_close(adapted(input_ids=tokens()).logits, start)


@on_ranks(2, local=1)
def test_frozen_base_in_host_memory_is_saved_and_loaded(tmp_path: Path) -> None:
    """On two nodes of one rank, frozen shards are in host memory, and a load must make cached node shards invalid.

    The same steps follow on training without a break, on a load into the same model, and on a load into a new model.
    """
    pairs: list[tuple[Any, torch.optim.Optimizer]] = []
    for _ in range(2):
        model, _ = spread(ModelConfig(config=TINY["llama"]), LORA, "laconic")
        pairs.append((model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)))

    def two_steps(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(2):
            loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = pairs[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # other values than a new model starts with
    for pair in pairs:
        two_steps(*pair)  # now the frozen weights are cached; the load makes them stale
    checkpoint.save_checkpoint(tmp_path, 2, model=model, optimizer=optimizer, extra={})
    saved = whole(model)
    losses = two_steps(model, optimizer)
    assert losses[1] != losses[0]
    for each, its_optimizer in pairs:
        checkpoint.load_checkpoint(tmp_path, model=each, optimizer=its_optimizer)
        assert differing(whole(each), saved) == []
        assert two_steps(each, its_optimizer) == losses
