"""The jobs of the grid: published models, trained in full or by LoRA, under strategies of torch and of laconic.

A careful user's settings: parameters and AdamW's states in fp32, bf16 for compute and for what crosses, activations of
decoder layers computed again in backward, one row a rank. LoRA has rank 16 on all linear layers but the output layer,
and its frozen base rests in bf16. Experts of GPT-OSS are fused, and get no adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from laconic.config import Config, from_dict
from laconic.plan.candidates import CANDIDATES
from laconic.plan.estimates import Estimate
from laconic.plan.known import models
from laconic.plan.prediction import Predictor, Refusal
from laconic.strategies import parallelize

MODELS: Mapping[str, str] = MappingProxyType(
    {"Llama 3 8B": "llama-3.1-8b", "Llama 3 70B": "llama-3-70b", "GPT-OSS-120B": "gpt-oss-120b"}
)
"""The models by their names for people; the other name is that of the planner's table. Nothing is downloaded."""
FORMS = ("full", "LoRA")
TOKENS = (2048, 8192)
"""The tokens of a rank's row."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A strategy of the grid."""

    candidate: str
    """The name of the strategy in the planner."""
    label: str
    """Its name in the tables."""
    offloads: bool = False
    """Whether sharded parameters, gradients and states rest on the host, and the optimizer steps there."""
    is_shared: bool = False
    """Whether torch has the same, which sends as much."""

    @property
    def is_own(self) -> bool:
        """Whether it is laconic's."""
        return CANDIDATES[self.candidate].is_own

    @property
    def is_exact(self) -> bool:
        """Whether it trains the same as ZeRO-3."""
        return not CANDIDATES[self.candidate].inexact


RIVALS = (
    Rival(candidate="fsdp2", label="FSDP2"),
    Rival(candidate="hsdp", label="HSDP"),
    Rival(candidate="host", label="host"),
    Rival(candidate="device", label="device"),
    Rival(candidate="pipeline", label="pipeline", is_shared=True),
    Rival(candidate="4bit", label="4bit"),
    Rival(candidate="fsdp2", label="FSDP2 offload", offloads=True),
    Rival(candidate="host", label="host offload", offloads=True),
)
"""In the order of the tables. Torch's offload runs with HSDP's mesh as well, and is not here; nor is its own pipeline:
ours counts on both sides."""
BY_LABEL: Mapping[str, Rival] = MappingProxyType({rival.label: rival for rival in RIVALS})


def job(model: str, form: str, tokens: int) -> Config:
    """The job of a model of `MODELS`: see the head of this file."""
    return from_dict(
        Config,
        {
            "model": {
                "config": dict(models()[MODELS[model]].config),
                "dtype": "bfloat16" if form == "LoRA" else "float32",
                "activation_checkpointing": True,
            },
            "lora": {"enabled": form == "LoRA", "rank": 16},
            "shard": {"param_dtype": "bfloat16"},
            "data": {"sequence_length": tokens},
            "train": {"device": "cuda", "micro_batch_size": 1},
        },
    )


def simulate(predictor: Predictor, rival: Rival, *, keeps_spans: bool = False) -> Estimate | Refusal:
    """A step of the predictor's job under a strategy, whose own code runs unchanged in the rehearsal."""
    candidate, config = CANDIDATES[rival.candidate], predictor.config
    if not rival.offloads:
        return predictor.estimate(candidate, keeps_spans=keeps_spans)
    if rival.is_own:
        offloaded = replace(config, shard=config.shard.with_keys(offload=True))
        return predictor.with_job(offloaded, same_model=True).estimate(candidate, keeps_spans=keeps_spans)
    # laconic train has no key for this, so another job's name keeps its rehearsals apart
    other = replace(config, train=replace(config.train, output="runs/fsdp2-offload"))
    with _torch_offloads():
        return predictor.with_job(other, same_model=True).estimate(candidate, keeps_spans=keeps_spans)


@contextmanager
def _torch_offloads() -> Iterator[None]:
    """Let the trainer's FSDP2 keep its shards in page-locked host memory, as its users write it."""

    def fill(model: nn.Module, setup: Any) -> None:
        model.to_empty(device="cpu")

    offloading = partial(fully_shard, offload_policy=CPUOffloadPolicy())
    with mock.patch.object(parallelize, "fully_shard", offloading), mock.patch.object(parallelize, "_fill", fill):
        yield
