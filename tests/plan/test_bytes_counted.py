"""Predicted payload bytes of a step against the counters of real runs, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from laconic import init_mesh
from laconic.config import Config, ShardConfig, from_dict
from laconic.layers.scaled import SCALED_FORMATS
from laconic.layers.scaled_linear import ScaledWeight
from laconic.plan.candidates import CANDIDATES
from laconic.plan.estimates import Estimate
from laconic.plan.prediction import Predictor
from laconic.plan.rehearsal import Rehearsals
from laconic.plan.rehearsed import RehearsedStep, StepWork
from laconic.rehearse.rings import Places
from tests.plan.traces import FLOPS_PER_S, cluster, model_of, spec, trace
from tests.support.float8 import Float8Weight
from tests.support.jobs import corpus, table, train_all
from tests.support.launch import run_ranks
from tests.support.sharded_net import moved, shard

EVERY = 2
"""The steps between two syncs of islands."""
ISLANDS: dict[str, Any] = {"sync": {"mode": "local", "codec": "int4", "every": EVERY}}
ADAPTERS: dict[str, Any] = {"lora": {"enabled": True, "rank": 2, "targets": ["q_proj"]}}
TWICE = {"train": {"accumulation": 2}}
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "host, adapters": ("host", ADAPTERS),
    "4bit, checked, two micro-batches": ("4bit", {"shard": {"wire": "4bit", "check_every": 1}, **TWICE}),
    "slices": ("local-steps", {"sync": {**ISLANDS["sync"], "slices": 2}}),
    "none": ("none", {"shard": {"cache": "none"}}),
    "zero++, adapters, two micro-batches": ("zero++", {"shard": {"strategy": "zero++"}, **ADAPTERS, **TWICE}),
    "none, weights stay until backward": ("none", {"shard": {"cache": "none", "reshard_after_forward": False}}),
    "device, recomputed, three micro-batches": (
        "device",
        {"shard": {"cache": "device"}, "train": {"accumulation": 3}, "model": {"activation_checkpointing": True}},
    ),
    "4bit, offloaded, two micro-batches": ("4bit", {"shard": {"wire": "4bit", "offload": True}, **TWICE}),
    "host, checked every other step": ("host", {"shard": {"check_every": 2}}),
    "muon": ("host", {"optimizer": {"name": "muon", "lr": 0.01}}),
    "islands": ("local-steps", ISLANDS),
}  # fmt: skip
"""(candidate, sections) of each job."""
NAMES = list(JOBS)


def jobs(folder: Path) -> dict[str, Config]:
    """The jobs with four heads and an odd size, which slices divide."""
    corpus(folder)
    found = {}
    for name, (_, sections) in JOBS.items():
        job = table(folder, **sections)
        odd = {"hidden_size": 24, "intermediate_size": 38, "num_attention_heads": 4, "num_key_value_heads": 2}
        job["model"]["config"].update(odd)
        job["train"]["output"] = str(folder / name)
        job["train"]["steps"] = 3 * EVERY if "sync" in sections else 4 if "every other" in name else 3
        found[name] = from_dict(Config, job)
    return found


def predicted(name: str, config: Config, nodes: int, local: int) -> Estimate:
    rates = {"float32": FLOPS_PER_S, "bfloat16": FLOPS_PER_S}  # of which bytes know nothing
    on = cluster(nodes, local, device_flops_per_s=rates)
    estimate = Predictor(config, on).estimate(CANDIDATES[JOBS[name][0]])
    assert isinstance(estimate, Estimate), estimate
    return estimate


def counted(by_step: list[dict[str, int]], config: Config) -> dict[str, float]:
    """The mean over a round of syncs that is not the last, as the end waits for all; or from one check to the next."""
    every = EVERY if config.sync.is_local else config.shard.policy.checks.interval
    warm = by_step[every : 2 * every] if every > 1 else by_step[2:3]
    return {kind: sum(step.get(kind, 0) for step in warm) / len(warm) for kind in {key for s in warm for key in s}}


@pytest.mark.parametrize(
    ("nodes", "local", "names"),
    [
        (2, 2, NAMES[1:2]),
        pytest.param(3, 1, [NAMES[0], *NAMES[2:]], marks=pytest.mark.campaign),
    ],
    ids=["2x2", "3x1"],
)
def test_predicted_bytes_are_the_counted_ones(tmp_path: Path, nodes: int, local: int, names: list[str]) -> None:
    configs = {name: config for name, config in jobs(tmp_path).items() if name in names}
    summaries = run_ranks(train_all, nodes * local, list(configs.values()), local=local)[0]
    for (name, config), summary in zip(configs.items(), summaries, strict=True):
        found = counted(summary["traffic_bytes"], config)
        assert sum(found.values()) > 0
        estimate = predicted(name, config, nodes, local)
        said = {f"{level}/{purpose}": nodes * local * size for (level, purpose), size in estimate.sent_bytes.items()}
        assert said == pytest.approx(found, abs=1e-6), name
        assert estimate.tokens == summary["tokens_per_step"]


# -- weights that cross in few bits, as elements or with scales --------------------------------------------------------

WIDTH = 48
TRACE = trace([[spec("weight", WIDTH, WIDTH)] for _ in range(3)])


def converted(layer: Any, weight_format: str) -> nn.Module:
    form = SCALED_FORMATS.get(weight_format)
    weight = layer.weight.detach()
    layer.weight = nn.Parameter(Float8Weight(weight) if form is None else ScaledWeight(weight, form))  # type: ignore
    return layer


def predicted_in_few_bits(keys: dict[str, Any], nodes: int, local: int, weight_format: str) -> dict[str, float]:
    def build(job: Config) -> nn.Module:
        model = model_of(TRACE)
        for layer in model.layers:  # type: ignore[union-attr]
            converted(layer, weight_format)
        return model

    config, places = Config(shard=ShardConfig.of_keys(keys)), Places(nodes=nodes, local=local)
    work = StepWork(job=config, trace=TRACE, rehearsals=Rehearsals(build=build), places=places)
    reading = RehearsedStep(cluster(nodes, local), work).read()
    return {f"{level} {purpose}": size for (level, purpose), size in reading.sent_bytes.items() if purpose != "control"}


def job_counted(nodes: int, weight_format: str, keys: dict[str, Any]) -> dict[str, int]:
    """The bytes of the third step, in which caches and orders are known."""
    layers = [converted(nn.Linear(WIDTH, WIDTH, bias=False), weight_format) for _ in range(3)]
    model: Any = shard(nn.Sequential(*layers), layers, mesh=init_mesh("cpu", nodes=nodes), **keys)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        with moved(model) as sent:
            model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    sizes = sent.snapshot.sizes.items()
    return {f"{level} {kind}": size for (level, kind, way), size in sizes if way == "sent" and kind != "control"}


@pytest.mark.parametrize(
    ("nodes", "local", "weight_format", "keys"),
    [
        (2, 2, "float8", {"cache": "none", "reshard_after_forward": False}),
        (2, 1, "nvfp4", {"cache": "host"}),
        (3, 1, "fp8_128x128", {"cache": "host"}),
    ],
)
def test_predicted_bytes_of_gathers_in_few_bits_are_the_counted_ones(
    nodes: int, local: int, weight_format: str, keys: dict[str, Any]
) -> None:
    counted = run_ranks(job_counted, nodes * local, nodes, weight_format, keys, local=local)[0]
    assert predicted_in_few_bits(keys, nodes, local, weight_format) == pytest.approx(counted)
