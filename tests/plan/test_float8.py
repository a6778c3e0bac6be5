"""Weights that cross in few bits, as elements or with scales: predicted bytes against those that the engine counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from laconic import fully_shard, init_mesh
from laconic.codec.scaled import SCALED_FORMATS
from laconic.codec.scaled_linear import ScaledWeight
from laconic.comm.cluster import Cluster
from laconic.config import Config, ShardConfig
from laconic.plan.machine import Simulator
from laconic.plan.program import Shape, work_of
from laconic.plan.rehearsal import Rehearsals
from laconic.plan.rehearsed import RehearsedStep
from tests.plan.traces import cluster, model_of, spec, trace
from tests.support.float8 import Float8Weight
from tests.support.launch import run_ranks

WIDTH = 48
TRACE = trace([[spec("weight", WIDTH, WIDTH)] for _ in range(3)])
CACHES: dict[str, dict[str, Any]] = {
    "host": {"cache": "host"}, "device": {"cache": "device"},
    "kept": {"cache": "none", "reshard_after_forward": False},
}  # fmt: skip


def caches(weight_format: str) -> dict[str, dict[str, Any]]:
    return CACHES if weight_format == "float8" else {"host": CACHES["host"]}


def converted(layer: nn.Module, weight_format: str) -> nn.Module:
    if weight_format != "float8":
        weight: Any = ScaledWeight(layer.weight.detach(), SCALED_FORMATS[weight_format])  # type: ignore[operator]
    else:
        weight = Float8Weight(layer.weight.detach())  # type: ignore[operator]
    layer.weight = nn.Parameter(weight)
    return layer


def predicted(keys: dict[str, Any], nodes: int, local: int, weight_format: str) -> dict[str, float]:
    def build(job: Config) -> nn.Module:
        model = model_of(TRACE)
        for layer in model.layers:
            converted(layer, weight_format)
        return model

    config, machine = Config(shard=ShardConfig.of_keys(keys)), Simulator(cluster(nodes, local), device_type="cpu")
    work = work_of(config, device_type="cpu", trace=TRACE, rehearsals=Rehearsals(build=build))
    reading = RehearsedStep(machine, work, Shape(nodes=nodes, local=local)).read(machine)
    return {f"{level} {purpose}": size for (level, purpose), size in reading.sent_bytes.items() if purpose != "control"}


def job_counted(nodes: int, weight_format: str) -> dict[str, dict[str, int]]:
    """By cache: the bytes of the third step, in which caches and orders are known."""
    found = {}
    for name, keys in caches(weight_format).items():
        mesh = init_mesh("cpu", nodes=nodes)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
        for layer in layers:
            fully_shard(converted(layer, weight_format), mesh=mesh, **keys)
        model = fully_shard(nn.Sequential(*layers), mesh=mesh, **keys)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        traffic = Cluster.of(mesh).traffic
        for _ in range(3):
            before = traffic.snapshot()
            model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sizes = (traffic.snapshot() - before).sizes
        found[name] = {
            f"{level} {purpose}": size
            for (level, purpose, way), size in sizes.items()
            if way == "sent" and purpose != "control"
        }
    return found


@pytest.mark.parametrize(
    ("nodes", "local", "weight_format"), [(2, 2, "float8"), (2, 2, "nvfp4"), (3, 1, "fp8_128x128")]
)
def test_predicted_bytes_of_gathers_in_few_bits_are_the_counted_ones(
    nodes: int, local: int, weight_format: str
) -> None:
    counted = run_ranks(job_counted, nodes * local, nodes, weight_format, local=local)[0]
    for name, keys in caches(weight_format).items():
        assert predicted(keys, nodes, local, weight_format) == pytest.approx(counted[name]), name
