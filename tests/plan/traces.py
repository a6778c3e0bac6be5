"""Jobs for tests of predictions, and traces of models that were never built, for tests of programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from laconic.config import Config, from_dict
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.model_trace import ModelTrace
from laconic.plan.phase import Arrival, OpWork, Phase
from laconic.plan.rehearsal import Rehearsals
from laconic.plan.rehearsed import StepWork
from laconic.rehearse.rings import Places

FLOPS_PER_S, MEMORY_BYTES_PER_S = 1e10, 1e9
HIDDEN, LAYERS, VOCABULARY = 48, 3, 96
MODEL = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 145, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
"""A tiny model whose sizes divide little."""


def job(table: Mapping[str, Any] = MODEL, *, rows: int = 1, tokens: int = 32, **sections: Mapping[str, Any]) -> Config:
    """A job with a model of random weights, `rows` of so many `tokens` on each rank."""
    return from_dict(
        Config,
        {
            **sections,
            "model": {"config": dict(table), **sections.get("model", {})},
            "data": {"kind": "python-stdlib", "sequence_length": tokens, **sections.get("data", {})},
            "train": {"micro_batch_size": rows, "device": "cpu", **sections.get("train", {})},
        },
    )


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """A parameter of a unit."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool


@dataclass(frozen=True, kw_only=True)
class MadeTrace(ModelTrace):
    """A trace of a model that was never built, with the parameters that its layers would have."""

    layers: Sequence[Sequence[ParameterSpec]]


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32, is_trained: bool = True) -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype=dtype, is_trained=is_trained)


def phase(seconds: float = 0.0, *, unit: int = 0, peak: int = 0, end: int = 0, trained: Iterable[str] = ()) -> Phase:
    """A forward phase in which the gradients of some parameters come, in place where that is possible."""
    work = (OpWork(0.0, flops=seconds * FLOPS_PER_S, dtype="float32"),) if seconds else ()
    come = tuple(Arrival(name, peak, peak, is_in_place=True) for name in trained)
    return Phase(unit=unit, is_backward=False, work=work, peak_bytes=peak, end_bytes=end, arrivals=come)


def trace(
    layers: Sequence[Sequence[ParameterSpec]],
    *,
    forward_s: float = 0.0,
    backward_s: float = 0.0,
    saved_bytes: int = 0,
) -> MadeTrace:
    """A root without parameters around layers that all take as long and save as much."""
    last = len(layers)
    there = [phase(unit=last)] * 2
    back = list(there)
    for unit, own in enumerate(layers):
        there.insert(-1, phase(forward_s, unit=unit, peak=saved_bytes, end=saved_bytes))
        trained = [each.name for each in own if each.is_trained]
        back.insert(1, phase(backward_s, unit=unit, end=-saved_bytes, trained=trained))
    return MadeTrace(
        layers=layers,
        units=(*(f"layers.{index}" for index in range(last)), "Model"),
        phases=(*there, *(replace(each, is_backward=True) for each in back)),
        device_type="cpu",
    )


def model_of(trace: MadeTrace) -> nn.Module:
    """A model with the parameters of a trace, on the meta device."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Module() for _ in trace.layers)
    for module, own in zip([*model.layers, model], [*trace.layers, ()], strict=True):
        for each in own:
            tensor = torch.empty(each.shape, dtype=each.dtype, device="meta")
            module.register_parameter(each.name, nn.Parameter(tensor, requires_grad=each.is_trained))
        module.forward = lambda *args, **kwargs: None  # phantoms replace it
    return model


def work(model: MadeTrace, config: Config, places: Places, device: str = "cpu") -> StepWork:
    """What a job with the model of a trace has to do."""
    rehearsals = Rehearsals(build=lambda _: model_of(model))
    return StepWork(job=config, trace=replace(model, device_type=device), rehearsals=rehearsals, places=places)


def cluster(nodes: int = 2, local: int = 2, **figures: object) -> ClusterSpec:
    """A cluster of round figures, without headers and latency to speak of."""
    given = {
        "device_memory_bytes": 10**10, "device_flops_per_s": {"float32": FLOPS_PER_S},
        "device_memory_bytes_per_s": MEMORY_BYTES_PER_S, "host_memory_bytes": 10**11,
        "host_to_device_bytes_per_s": 1e8, "device_to_host_bytes_per_s": 1e8, "local_bytes_per_s": 1e8,
        "local_latency_s": 1e-9, "wire_bits_per_s": 8e7, "wire_latency_s": 1e-9, "wire_header_factor": 1.0,
    }  # fmt: skip
    return ClusterSpec(nodes=nodes, ranks_per_node=local, **{**given, **figures})  # type: ignore[arg-type]
