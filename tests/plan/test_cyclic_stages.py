"""The planned stages against those into which `laconic.cyclic.cut` cuts the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from laconic.config import Config
from laconic.cyclic import cut
from laconic.cyclic.links import ActivationMeta, ByteLayout
from laconic.cyclic.stage import trainable
from laconic.hf.models import build_model, materialize
from laconic.plan.cyclic_stages import Clock, PhantomStage, cut_trace
from laconic.plan.machine import Simulator
from laconic.plan.program import work_of
from laconic.rehearse import Machine
from tests.plan.traces import cluster, job

ROWS, TOKENS = 3, 37
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 301,
    "intermediate_size": 152, "num_hidden_layers": 5, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
    "windows of some layers": {
        **LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2,
    },
    "a head named embed_out": {
        "model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 5,
        "intermediate_size": 152, "vocab_size": 301, "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 5, "vocab_size": 301, "tie_word_embeddings": False,
    },
}  # fmt: skip


def job_of(name: str, **sections: Any) -> Config:
    cyclic = {"schedule": {"kind": "cyclic", "cut_by": "parameters"}, "optimizer": {"max_grad_norm": 0}}
    model = {"activation_checkpointing": bool(sections)}
    return job(MODELS[name], rows=ROWS, tokens=TOKENS, model=model, **cyclic, **sections)


@pytest.mark.parametrize(
    ("config", "num_stages"),
    [
        *(pytest.param(job_of(name), num, id=name) for name, num in (
            ("mixtral", 2), ("windows of some layers", 3), ("gpt2", 3), ("a head named embed_out", 2),
        )),
        pytest.param(job_of("llama", lora={"enabled": True, "targets": ["q_proj"]}), 2, id="adapters"),
    ],
)  # fmt: skip
def test_planned_stages_are_those_of_the_cut(config: Config, num_stages: int) -> None:
    planned = cut_trace(Simulator(cluster()), work_of(config, device_type="cpu"), num_stages)
    model = build_model(config.model, config.lora)
    materialize(model, config.model, torch.device("cpu"))
    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS)
    stages = cut(model, num_stages, example=ids, by="parameters")
    values: Any = (ids,)
    for stage, plan in zip(stages, planned, strict=True):
        for merges in (False, True):
            phantom = PhantomStage(plan, Machine(device_type="cpu"), Clock(Simulator(cluster())), merges=merges)
            assert message_bytes(phantom) == message_bytes(stage)
            assert frozen_bytes(phantom) == frozen_bytes(stage)
        values = stage(*values)
        if stage is not stages[-1]:
            sent, said = ActivationMeta.of(values), ActivationMeta.of(plan.outputs())
            assert said.layout.num_bytes == sent.layout.num_bytes
            assert said.gradients().layout.num_bytes == sent.gradients().layout.num_bytes


def message_bytes(stage: nn.Module) -> int:
    return ByteLayout(trainable(stage).values()).num_bytes


def frozen_bytes(stage: nn.Module) -> int:
    return sum(p.nbytes for p in stage.parameters() if not p.requires_grad)
