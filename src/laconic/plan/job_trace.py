"""The trace of the trainer's job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from laconic import registry
from laconic.config import Config, DataConfig, ScheduleConfig, ShardConfig
from laconic.hf.models import build_model
from laconic.hf.tokenizer import load_tokenizer, with_vocabulary
from laconic.partial.updates import partial_updates
from laconic.plan.model_trace import ModelTrace, trace_model


def trace_job(config: Config, *, device_type: str | None = None, model: nn.Module | None = None) -> ModelTrace:
    """Trace one micro-batch of a job, as its ranks run it: [Note: Traced like the engine runs] in plan/model_trace.py.

    Rows have data.sequence_length tokens; where rows are as long as their longest document, that is the most.

    Args:
        config: the job.
        device_type: "cpu" or "cuda". Default: that of train.device, and "cuda" for "auto".
        model: the job's model, if it is built already. It is left unchanged, and has no slices.

    Raises:
        JobError: the model cannot be built; the message says why.
        ValueError: the model cannot be divided into sync.slices slices.
        TraceError: the model cannot be traced.
    """
    sync = config.sync
    if model is None or sync.slices > 1:
        model = build_untrained(config)
    if sync.slices > 1:  # slices are equally large, so the first stands for all
        partial_updates(model, slice_index=0, num_slices=sync.slices, include=sync.slice_include)
    device_type = device_type or ("cuda" if config.train.device == "auto" else torch.device(config.train.device).type)
    precision = config.shard.policy.precision
    trace = trace_model(
        model,
        batch_of(config.data, config.train.micro_batch_size),
        compute_dtype=getattr(torch, precision.param_dtype) if precision.param_dtype else None,
        device_type=device_type,
        gradients_in_place=writes_in_place(config.shard, config.schedule, config.model.dtype),
    )
    if config.train.compile:
        note = "train.compile fuses operations, so a step computes as much, but reads, writes and keeps less"
        return replace(trace, notes=(note,))
    return trace


def writes_in_place(shard: ShardConfig, schedule: ScheduleConfig, dtype: str) -> bool:
    """Whether a job runs on laconic's engine and reduces gradients in the dtype in which layers compute.

    `dtype` is that of the model's parameters.
    """
    precision = shard.policy.precision
    param_dtype = precision.param_dtype or dtype
    is_ours = registry.named(shard.strategy).on_engine and not schedule.is_cyclic
    return is_ours and (precision.reduce_dtype or param_dtype) == param_dtype


def build_untrained(config: Config) -> nn.Module:
    """The model of a job on the meta device.

    Raises:
        JobError: the model cannot be built; the message says why.
    """
    return build_model(with_vocabulary(config.model, lambda: load_tokenizer(config.data.tokenizer)), config.lora)


def batch_of(data: DataConfig, rows: int) -> dict[str, Any]:
    """A micro-batch without elements, as the arguments of its model: see data/batches.py."""
    ids = torch.empty((rows, data.sequence_length), dtype=torch.int64, device="meta")
    found = {"input_ids": ids, "labels": torch.empty_like(ids)}
    if data.packing is not None or data.format in ("prompt-completion", "messages"):
        found["num_items_in_batch"] = torch.empty((), device="meta")
    if data.packing:
        found["position_ids"] = torch.empty_like(ids)
    return found
