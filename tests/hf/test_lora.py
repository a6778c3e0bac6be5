"""LoRA: adapters as peft makes them, around a base that stays what it was; also one in few bits."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import laconic
from laconic import checkpoint
from laconic.config import JobError, LoraConfig, ModelConfig, load
from laconic.hf import lora
from laconic.hf.layers import base_model
from laconic.layers.linear import QuantizedLinear, quantized_layers
from laconic.models.build import build_model, layers_to_shard
from laconic.models.export import export
from tests.hf.zoo import LORA, TINY, differing, spread, tokens, train, whole
from tests.support.jobs import job, train_all
from tests.support.launch import on_ranks, run_ranks


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

    model, optimizer = pairs[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # other values than a new model starts with
    for pair in pairs:
        train(*pair, 2)  # now the frozen weights are cached; the load makes them stale
    checkpoint.save_checkpoint(tmp_path, 2, model=model, optimizer=optimizer, extra={})
    saved = whole(model)
    losses = train(model, optimizer, 2)
    assert losses[1] != losses[0]
    for each, its_optimizer in pairs:
        checkpoint.load_checkpoint(tmp_path, model=each, optimizer=its_optimizer)
        assert differing(whole(each), saved) == []
        assert train(each, its_optimizer, 2) == losses


# -- a base in few bits ------------------------------------------------------------------------------------------------


ODD = {**TINY["llama"], "attention_bias": True}  # matrices of 50 x 32: their last block is partial
BASE = {"enabled": True, "rank": 2}


@on_ranks(2, local=1)
def test_adapters_of_stacked_experts() -> None:
    """Peft registers a parametrization in each forward, which calls `set_` on the gathered experts."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 31}
    torch.manual_seed(0)
    model: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    experts = [f"mlp.experts.{name}_proj" for name in ("gate_up", "down")]
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts))
    plain, rows, losses = copy.deepcopy(model), torch.arange(20).view(2, 10), []
    for layer in layers_to_shard(model):
        laconic.fully_shard(layer, cache="host")
    laconic.fully_shard(model, cache="host")
    for each in (plain, model):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        losses.append(train(each, optimizer, 3, rows))
    assert losses[0] == losses[1]


def test_the_base_is_the_plain_model_rounded(tmp_path: Path) -> None:
    """Drawn or read from a folder, in either format; biases, norms, embeddings and the output layer are untouched."""
    plain: Any = build_model(ModelConfig(config=ODD), device="cpu")
    plain.save_pretrained(tmp_path)
    for source in (ModelConfig(config=ODD), ModelConfig(path=str(tmp_path))):
        for weight_format, limit in (("nf4", 0.1), ("int8", 0.01)):
            coded = build_model(source, LoraConfig(**BASE, quantize=weight_format, targets=("q_proj",)), device="cpu")
            unwrapped: Any = coded.get_base_model()  # type: ignore[operator]
            assert len(list(quantized_layers(coded))) == 14
            assert coded.peft_config["default"].base_model_name_or_path == source.path  # type: ignore[union-attr]
            for name, layer in plain.named_modules():
                if not isinstance(layer, nn.Linear) or name == "lm_head":
                    continue
                other = unwrapped.get_submodule(name)
                other = getattr(other, "base_layer", other)
                expected = QuantizedLinear.of(layer, weight_format)
                assert differing(whole(other), whole(expected)) == []
                assert 0 < (other.weight - layer.weight).norm() < limit * layer.weight.norm()
                decoded, batch = other.dequantized(), torch.randn(3, layer.in_features)
                assert torch.equal(decoded(batch), other(batch))
                assert (decoded.bias is not None) == (layer.bias is not None)
                assert decoded.training == other.training
                assert not decoded.weight.requires_grad
            assert torch.equal(unwrapped.lm_head.weight, plain.lm_head.weight)


def test_an_empty_layer_has_a_frozen_bias_unless_it_has_none() -> None:
    bias = QuantizedLinear(3, 5).bias
    assert bias is not None
    assert (tuple(bias.shape), bias.requires_grad) == ((5,), False)
    assert QuantizedLinear(3, 5, bias=False).bias is None


def test_peft_wraps_it_and_merging_is_refused() -> None:
    model: Any = build_model(ModelConfig(config=ODD), device="cpu")
    laconic.quantize_(model, "nf4", skip=["*.mlp.*", "lm_head"])
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.Linear)
    assert not isinstance(model.model.layers[0].mlp.up_proj, QuantizedLinear)
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    loss = adapted(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
    with pytest.raises(RuntimeError, match="adapter merged into it"):
        adapted.merge_adapter()
    for wrong, part in ({"weight_format": "fp3"}, "not known"), ({"skip": ["nothing"]}, "matches no linear layer"):
        with pytest.raises(ValueError, match=part):
            laconic.quantize_(build_model(ModelConfig(config=ODD)), **wrong)
    with pytest.raises(ValueError, match="no linear layer to quantise"):
        laconic.quantize_(nn.LayerNorm(3))
    broken = nn.Sequential(nn.Linear(3, 3))
    nn.init.constant_(broken[0].weight, float("nan"))
    with pytest.raises(ValueError, match="0: cannot quantise"):
        laconic.quantize_(broken)
    with pytest.raises(JobError, match=r"lora\.quantize = 'nf4': GPT2LMHeadModel has no linear layer"):
        build_model(ModelConfig(config=TINY["gpt2"]), LoraConfig(**BASE, quantize="nf4"))


def test_a_folder_of_plain_weights_fills_a_quantised_model_and_is_not_written_from_one(tmp_path: Path) -> None:
    plain: Any = build_model(ModelConfig(config=ODD), device="cpu")
    laconic.save_safetensors(plain, tmp_path / "plain")
    coded: Any = laconic.quantize_(build_model(ModelConfig(config=ODD, init_seed=1), device="cpu"))
    laconic.load_safetensors(coded, tmp_path / "plain")
    assert differing(whole(coded), whole(laconic.quantize_(plain))) == []
    with pytest.raises(ValueError, match="quantised weights, which from_pretrained would not read"):
        laconic.save_safetensors(coded, tmp_path / "coded")
    assert not (tmp_path / "coded").exists()


def qlora(folder: Path, name: str, **sections: Any) -> Any:
    lora = {**BASE, "quantize": "nf4", "dora": True, **sections.pop("lora", {})}
    train = {"steps": 2, "output": str(folder / name), **sections.pop("train", {})}
    return job(folder, lora=lora, train=train, **sections)


@pytest.mark.heavy
def test_sharded_training_equals_unsharded(tmp_path: Path) -> None:
    """DoRA's losses on 2 nodes under FSDP2, all caches and mixed precision; resume; and the exports agree."""
    runs: dict[str, dict[str, Any]] = {
        "fsdp2": {"shard": {"strategy": "fsdp2"}},
        "device": {"shard": {"cache": "device", "granularity": "whole"}, "model": {"activation_checkpointing": True}},
        "host": {"train": {"save_every": 0}},
        "bf16": {"shard": {"param_dtype": "bfloat16"}},
    }
    configs = [qlora(tmp_path, name, **settings) for name, settings in runs.items()]
    configs.append(qlora(tmp_path, "host", train={"steps": 3, "resume": "auto", "save_every": 0}))
    summaries = run_ranks(train_all, 2, configs, local=1)[0]
    found = dict(zip([*runs, "resumed"], summaries, strict=True))
    assert found["device"]["losses"] == found["host"]["losses"]
    assert found["host"]["losses"] == pytest.approx(found["fsdp2"]["losses"], rel=1e-6)  # sums in another order
    assert found["bf16"]["losses"] == pytest.approx(found["fsdp2"]["losses"], rel=2e-3)
    assert found["resumed"]["start_step"] == 2
    export(tmp_path / "host", tmp_path / "merged")
    export(tmp_path / "host", tmp_path / "adapter", adapter=True)
    for exported in ("merged", "adapter"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / exported)
        text = "naïve <0x41> 🙂\n\t"
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    merged: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    base: Any = build_model(load(tmp_path / "host" / "config.toml").model, device="cpu")
    for name, layer in list(base.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            base.set_submodule(name, QuantizedLinear.of(layer).dequantized())
    start = base(input_ids=tokens()).logits
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()(input_ids=tokens()).logits
    assert (adapted - start).abs().max() > 1e-3
    torch.testing.assert_close(merged(input_ids=tokens()).logits, adapted, atol=1e-5, rtol=1e-5)


def rest(cache: str, weight_format: str | None) -> list[Any]:
    """Run a frozen model twice. Return its bytes on device and host of this rank, and the bytes sent by run."""
    table = {**TINY["llama"], "hidden_size": 96, "intermediate_size": 250, "num_hidden_layers": 4}
    model: Any = build_model(ModelConfig(config=table, dtype="bfloat16"), device="cpu").requires_grad_(False)
    in_bf16 = sum(parameter.nbytes for parameter in model.parameters())
    if weight_format is not None:
        laconic.quantize_(model, weight_format, skip=())  # type: ignore[arg-type]
    ratio = sum(parameter.nbytes for parameter in model.parameters()) / in_bf16
    for unit in [*layers_to_shard(model), model]:
        laconic.fully_shard(unit, mesh=laconic.init_mesh("cpu"), cache=cache)  # type: ignore[arg-type]
    sent = []
    for _ in range(2):
        before = model.traffic.snapshot()
        with torch.no_grad():
            model(input_ids=tokens())
        now = model.traffic.snapshot() - before
        sent.append((now.total("node", "weights", "sent"), now.total("local", "weights", "sent")))
    return [model.memory().device_bytes, model.memory().host_bytes, sent, ratio]


@on_ranks(4, local=2)
def test_the_bytes_of_the_base() -> None:
    """On 2 nodes x 2 ranks: at rest on device and host, and on both levels of the network, against bf16."""
    plain, nf4 = rest("none", None), rest("none", "nf4")
    plain_on_host, nf4_on_host, int8_on_host = (rest("host", weight_format) for weight_format in (None, "nf4", "int8"))
    assert nf4[0] <= 0.28 * plain[0]
    assert nf4_on_host[1] <= 0.28 * plain_on_host[1]
    assert int8_on_host[1] <= 0.53 * plain_on_host[1]
    assert plain_on_host[0] == nf4_on_host[0] == 0, "frozen shards rest in the host cache alone"
    (wire, local), (wire_again, local_again) = nf4_on_host[2]
    assert (wire_again, local_again) == (0, local)
    assert nf4[2] == [(wire, local)] * 2
    assert 0 < local <= 0.28 * plain_on_host[2][0][1]
    assert plain[3] == 1.0
    assert nf4[3] <= 0.28
