"""What a step of a model computes, reads and keeps, traced on fake tensors: without data, weights or a device.

[Note: Traced like the engine runs]
Forward and backward run once on fake tensors, which have shapes but no elements. So autograd saves and frees exactly
what it saves and frees in training, and a mode that sees every operation counts it. The trace does what the engine does
around a model: it casts parameters and inputs to the compute dtype, and the gradient of a linear layer's weight is a
product into the bucket: [Note: Gradients written in place] in shard/linear.py. A phase is a stretch of one unit, and
its borders are the engine's: [Note: When a unit is done with backward] in shard/unit.py. Not counted are weights in any
form, gradients that have arrived, and transfers: a strategy's program knows these.

Fake tensors say that they are on the CPU, also for CUDA: torch's CPU builds cannot run autograd on fake CUDA tensors.
For CUDA the trace chooses the kernels of attention and dropout itself, and rounds allocations to 512 bytes as the
caching allocator does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laconic import registry
from laconic.config import Config, DataConfig, ShardConfig
from laconic.hf.layers import layers_to_shard, without_packed_rows
from laconic.models.build import build_model
from laconic.models.tokenizer import load_tokenizer, with_vocabulary
from laconic.partial.updates import partial_updates
from laconic.plan.equal_layers import list_of_equal, only, repeat_middle
from laconic.plan.phase import Phase
from laconic.plan.tracing import Tracing

LossFn = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""Runs a model on keyword arguments and returns the loss."""


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """What one micro-batch of a model computes, reads and keeps: [Note: Traced like the engine runs]."""

    units: tuple[str, ...]
    """The names of the modules given to `fully_shard`, in the order of its calls: layers in forward order, and then,
    by its class, the model itself, the root."""
    phases: tuple[Phase, ...]
    """In the order of execution: the root's embedding, the layers, the root's head and loss, and all of it backward."""
    device_type: str
    notes: tuple[str, ...] = ()
    """What the trace leaves out or assumes."""


def trace_model(
    model: nn.Module,
    arguments: Mapping[str, Any],
    *,
    units: Sequence[nn.Module] | None = None,
    loss: LossFn | None = None,
    compute_dtype: torch.dtype | None = None,
    device_type: str = "cpu",
    gradients_in_place: bool = True,
) -> ModelTrace:
    """Trace forward and backward of one micro-batch: [Note: Traced like the engine runs]. The model is left unchanged.

    Args:
        model: the model, on any device; the meta device is enough.
        arguments: the keyword arguments of the model: a micro-batch, with tensors on any device.
        units: the modules that `fully_shard` is called on. Default: a transformers model's layers. The model itself
            always follows as the root.
        loss: runs the model. Default: `model(**arguments, use_cache=False).loss`.
        compute_dtype: the dtype of gathered parameters and of inputs, `MixedPrecisionPolicy.param_dtype`. Default:
            their own.
        device_type: "cpu" or "cuda".
        gradients_in_place: whether the engine may write gradients into its buckets, as it does if it reduces them in
            the dtype of gathered parameters. False: autograd allocates all of them.

    Raises:
        TraceError: the model cannot be traced. The message names the module that cannot.
        ValueError: an unknown device type.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type must be 'cpu' or 'cuda', got {device_type!r}")
    layers = [layer for layer in (layers_to_shard(model) if units is None else units) if layer is not model]
    names = {module: name for name, module in model.named_modules()}
    make = partial(
        Tracing, model=model, arguments=arguments, loss=loss or _loss, compute_dtype=compute_dtype,
        device_type=device_type, gradients_in_place=gradients_in_place,
    )  # fmt: skip
    return ModelTrace(
        units=(*(names[layer] for layer in layers), type(model).__name__),
        phases=tuple(_run(model, layers, make)),
        device_type=device_type,
    )


def _run(model: nn.Module, layers: list[nn.Module], make: Callable[..., Tracing]) -> list[Phase]:
    """Trace the phases of all layers. Reference: the same with the last line alone."""
    with without_packed_rows() if "transformers" in sys.modules else nullcontext():
        if (container := list_of_equal(model, layers)) is not None:
            with only(container, (0, 1, len(layers) - 1)) as three:
                run = make(modules=[*three, model]).run()
            if (repeated := repeat_middle(run, len(layers))) is not None:
                return repeated
        return make(modules=[*layers, model]).run()


def _loss(model: nn.Module, arguments: Mapping[str, Any]) -> Tensor:
    loss: Tensor = model(**arguments, use_cache=False).loss
    return loss


# -- of the trainer's job ----------------------------------------------------------------------------------------------


def trace_job(config: Config, *, device_type: str | None = None, model: nn.Module | None = None) -> ModelTrace:
    """Trace one micro-batch of a job, as its ranks run it: [Note: Traced like the engine runs].

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
        gradients_in_place=writes_in_place(config.shard, config.model.dtype),
    )
    if config.train.compile:
        note = "train.compile fuses operations, so a step computes as much, but reads, writes and keeps less"
        return replace(trace, notes=(note,))
    return trace


def writes_in_place(shard: ShardConfig, dtype: str) -> bool:
    """Whether a job runs on laconic's engine and reduces gradients in the dtype in which layers compute.

    `dtype` is that of the model's parameters.
    """
    precision = shard.policy.precision
    param_dtype = precision.param_dtype or dtype
    return registry.named(shard.strategy).on_engine and (precision.reduce_dtype or param_dtype) == param_dtype


def build_untrained(config: Config) -> nn.Module:
    """The model of a job on the meta device.

    Raises:
        JobError: the model cannot be built; the message says why.
    """
    return build_model(with_vocabulary(config.model, lambda: load_tokenizer(config.data.tokenizer)), config.lora)


def batch_of(data: DataConfig, rows: int) -> dict[str, Any]:
    """A micro-batch without elements, as the arguments of its model: see data/batches.py."""
    ids = torch.empty((rows, data.sequence_length), dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": torch.empty_like(ids)}
