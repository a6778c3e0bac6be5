"""Texts for operations that no rank can run on its part: each says what to do in the place that asked."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

HISTOGRAM = (
    "A histogram, a plot or an array of a sharded tensor needs all its elements: use tensor.full_tensor(), which every "
    "rank must call, or tensor.to_local() for those of this rank"
)
_HISTOGRAMS = {"aten::histc", "aten::histogram", "aten::histogramdd", "aten::bincount", "aten::bucketize"}
_GENERAL = (
    "Use .to_local() for this rank's elements, .full_tensor() for all of them, or call the sharded module, which "
    "gathers its parameters"
)


def remedy_for(func: Any) -> str:
    """What the caller of the aten function `func`, which is not defined on a RaggedTensor, can do instead."""
    if func._schema.name in _HISTOGRAMS:
        return HISTOGRAM
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        text = _remedy_in(frame)
        if text:
            return text
        frame = frame.f_back
    return _GENERAL


def _remedy_in(frame: FrameType) -> str:
    """The remedy of a function that is at work; empty for most functions."""
    name, holder = frame.f_code.co_name, frame.f_locals.get("self")
    if frame.f_globals.get("__name__") == "torch.nn.init" and not name.startswith("_"):
        return (
            f"nn.init.{name} needs the whole tensor: call it before fully_shard, or fill a plain tensor from one seed "
            f"on every rank and copy it: whole = torch.empty(p.shape); nn.init.{name}(whole); then p.copy_(whole) "
            "under torch.no_grad()"
        )
    if isinstance(holder, torch.optim.Optimizer):
        return (
            f"{type(holder).__name__} needs whole tensors. Optimizers that work element by element, such as AdamW and "
            "SGD, step sharded parameters as they are; for whole matrices there are laconic.optim.Muon and Shampoo. "
            "Or let it step plain tensors that p.full_tensor() makes on every rank, and copy them back with p.copy_()"
        )
    return ""
