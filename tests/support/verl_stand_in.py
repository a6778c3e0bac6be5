"""A stand-in for `verl.workers.rollout.sglang_rollout.delta_loader` of verl 0.9.1: the conditions of `apply_delta`.

A flush has three tensors by name. The checksum is `torch.hash_tensor` of the bytes of places, XOR twice that of the
values. Each tensor's run of places has four bytes a value, and is int32 at a multiple of four bytes. Its values have
the tensor's dtype. They are spread over NaN, and given to the model's own loader, in order.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from tests.support.vllm_stand_in import load_masked


def apply_delta(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    tensors = dict(named_tensors)
    assert tensors.keys() == {"__delta_spec__", "__positions__", "__values__"}
    spec = json.loads(bytes(tensors["__delta_spec__"].numpy().tobytes()).decode())
    places, values = tensors["__positions__"], tensors["__values__"]
    assert spec["encoding"] == "indices"
    assert spec["checksum"] == int(torch.hash_tensor(places).item()) ^ (int(torch.hash_tensor(values).item()) << 1)
    weights = []
    for entry in spec["params"]:
        own = values[entry["val_start"] : entry["val_end"]]
        run = places[entry["pos_start"] : entry["pos_end"]]
        assert entry["pos_width"] == 4
        assert len(run) == 4 * len(own)
        assert own.dtype == getattr(torch, entry["dtype"])
        whole = torch.full((math.prod(entry["shape"]),), math.nan, dtype=own.dtype)
        whole[run.view(torch.int32).long()] = own
        weights.append((entry["name"], whole.view(entry["shape"])))
    load_masked(model, weights)
