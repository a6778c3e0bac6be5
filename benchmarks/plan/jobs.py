"""The jobs whose predictions are held to measurements: models, strategies and what varies besides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laconic.config import Config, ConfigError, from_dict
from laconic.plan.candidates import CANDIDATES
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.estimates import Estimate
from laconic.plan.prediction import Predictor, Refusal

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 96, "intermediate_size": 260, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    "demo": {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 256, "vocab_size": 5003,
        "bos_token_id": 0, "eos_token_id": 0,
    },
    "qwen2": {
        "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 680, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": True, "vocab_size": 4096,
    },
    "vocabulary": {
        "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
        "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "deep": {
        "model_type": "llama", "hidden_size": 160, "intermediate_size": 432, "num_hidden_layers": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
    "experts": {
        "model_type": "mixtral", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 256, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""transformers configurations, from some 0.3 to some 13 million parameters."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "none": {"shard": {"cache": "none"}},
    "host": {},
    "device": {"shard": {"cache": "device"}},
    "8bit": {"shard": {"wire": "8bit"}},
    "4bit": {"shard": {"wire": "4bit"}},
    "zero++": {"shard": {"strategy": "zero++"}},
}
"""laconic's strategies of every-step training, as sections of a job."""

ISLANDS: dict[str, dict[str, Any]] = {
    "islands fp32": {"sync": {"codec": "fp32", "every": 2}},
    "islands int4": {"sync": {"codec": "int4", "every": 2}},
    "islands int8, 2 fragments": {"sync": {"codec": "int8", "every": 4, "fragments": 2}},
    "islands bf16, 2 fragments, overlap 1": {"sync": {"codec": "bf16", "every": 4, "fragments": 2, "overlap": 1}},
    "islands top64": {"sync": {"codec": "top64", "every": 2, "error_feedback": True}},
    "islands e2m1, sequential": {"sync": {"codec": "e2m1", "every": 4, "fragments": 2, "pattern": "sequential"}},
    "islands int4, 2 slices": {"sync": {"codec": "int4", "every": 2, "slices": 2}},
}
"""Local steps; every node is an island."""

PEERS: dict[str, dict[str, Any]] = {
    name: {"shard": {"strategy": name}}
    for name in ("fsdp2", "fsdp2-gloo", "fsdp2-hpz", "fsdp2-two-level", "hsdp", "ddp", "ddp-bf16", "ddp-powersgd")
}
"""The strategies of PyTorch."""

VARIANTS: dict[str, dict[str, Any]] = {
    "LoRA": {"lora": {"enabled": True, "rank": 4, "targets": ["q_proj", "v_proj"]}},
    "2 micro-batches": {"train": {"accumulation": 2}},
    "bf16 parameters": {"shard": {"param_dtype": "bfloat16"}},
    "bf16 parameters, fp32 sums": {"shard": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
    "adamw8bit": {"optimizer": {"name": "adamw8bit"}},
    "muon": {"optimizer": {"name": "muon"}},
    "shampoo": {"optimizer": {"name": "shampoo"}},
    "checkpointing": {"model": {"activation_checkpointing": True}},
    "weights stay": {"shard": {"reshard_after_forward": False}},
    "offload": {"shard": {"offload": True}},
    "checks": {"shard": {"check_every": 1}},
    "checks every 2 steps": {"shard": {"check_every": 2}},
    "device budget": {"shard": {"device_budget_bytes": 700_000}},
    "5 micro-batches": {"train": {"accumulation": 5}},
    "NF4": {"lora": {"enabled": True, "rank": 4, "targets": ["q_proj", "v_proj"], "quantize": "nf4"}},
    "DoRA": {"lora": {"enabled": True, "rank": 4, "targets": ["q_proj", "v_proj"], "dora": True}},
}
"""The sections in which jobs differ besides the strategy, by name."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job under a strategy."""

    name: str
    config: Config
    candidate: str
    """The planner's name of the strategy."""


def make_case(
    name: str, model: str, *layers: Mapping[str, Mapping[str, Any]], out: Path, candidate: str, steps: int = 4
) -> Case:
    """Make the case of a model with sections laid over the defaults, the last on top."""
    job: dict[str, Any] = {
        "model": {"config": MODELS[model]},
        "data": {"sequence_length": 64, "cache": str(out / "tokens")},
        "train": {
            "steps": steps, "micro_batch_size": 1, "device": "cpu", "save_every": -1, "log_every": 1000,
            "resume": "never", "output": str(out / "runs" / name.replace(" ", "-").replace(",", "")),
        },
        "log": {"tensorboard": False, "memory_step": 0},
    }  # fmt: skip
    for layer in layers:
        for section, values in layer.items():
            job[section] = {**job.get(section, {}), **values}
    if "sync" in job:
        job["sync"] = {"mode": "local", **job["sync"]}
        job["train"]["steps"] = 3 * job["sync"]["every"]
    if "targets" in job.get("lora", {}) and model == "gpt2":
        job["lora"]["targets"] = ["c_attn"]
    return Case(name=name, config=from_dict(Config, job), candidate=candidate)


def make_cases(
    model: str, jobs: Sequence[tuple[str, Sequence[Mapping[str, Any]], str]], *, out: Path, steps: int
) -> list[Case]:
    """Make cases of one model, each given as its name, its sections and its candidate. Unknown strategies are named."""
    found = []
    for name, layers, candidate in jobs:
        try:
            found.append(make_case(f"{model}, {name}", model, *layers, out=out, candidate=candidate, steps=steps))
        except ConfigError as error:
            print(f"left out: {model}, {name}: {error}", flush=True)
    return found


def candidate_of(strategy: str) -> str:
    """The planner's name of a strategy that is a key of one of the tables above."""
    return "local-steps" if strategy in ISLANDS else strategy


class Predictions:
    """Predicts cases. Jobs that differ in their strategy alone share a trace."""

    def __init__(self) -> None:
        self._predictors: dict[str, Predictor] = {}

    def of(self, case: Case, cluster: ClusterSpec) -> Estimate | Refusal:
        """Predict a case on a cluster."""
        config = case.config
        plain = dataclasses.replace(
            config, shard=config.shard.with_keys(strategy="laconic", cache="host", wire=None, device_budget_bytes=0),
            train=replace(config.train, output="", steps=4), optimizer=type(config.optimizer)(),
        )  # fmt: skip
        traced = self._predictors.setdefault(repr(plain), Predictor(config, cluster, device_type="cpu"))
        predictor = traced.on(cluster).with_job(config, same_model=True)
        return predictor.estimate(CANDIDATES[case.candidate], job=config)
