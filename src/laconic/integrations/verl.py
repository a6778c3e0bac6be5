"""Published versions for the loader that verl brings into SGLang, `apply_delta`.

SGLang's engines take it by name, and need neither a patch of SGLang nor a trainer of verl:

    loader = "verl.workers.rollout.sglang_rollout.delta_loader.apply_delta"  # of verl 0.9.1
    engine = sglang.Engine(model_path=path, custom_weight_loader=[loader])
    ...
    for flush in delta_flushes(reader.patches()):  # between two requests
        engine.update_weights_from_tensor(flush, load_format=loader)

Tests run against a stand-in with the conditions of this loader. By hand, they ran against `apply_delta` of verl 0.9.1.

[Note: What verl's loader takes]
A flush is three tensors by name. `__values__` has the new values of several tensors, one after the other, in one dtype.
`__positions__` has their places in the flattened tensors, as the bytes of int32. `__delta_spec__` is JSON in bytes:
which run of both belongs to which tensor, the tensors' shapes, and a checksum of both. The loader spreads each over a
tensor of NaN ([Note: Masked patches] in masked.py), and calls the model's own loader. A long run is cut, as the loader
needs eight bytes for each of its places.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from laconic.integrations.masked import INT32_NUMEL, masked
from laconic.publish import WeightPatch

_PLACE_BYTES = 4


def delta_flushes(
    patches: Iterable[WeightPatch], *, max_entry_numel: int = 64 << 20, max_flush_numel: int = 256 << 20
) -> Iterator[list[tuple[str, Tensor]]]:
    """Turn what `Reader.patches` yields into flushes for verl's loader: [Note: What verl's loader takes].

    Each flush is a list of (name, tensor), on the host, for one call of the loader on every rank of the engine, in
    this order. Patches and whole values alike become flushes. If a call fails, the engine's weights are of two
    versions: begin anew with all values, from a new `Reader`.

    Shapes: `__positions__` (4 c,), uint8, and `__values__` (c,), with c up to `max_flush_numel`. Cost: host memory for
        one flush.

    Raises:
        PublishError: see `masked`; int32 reaches no tensor of more than 2^31 elements.
    """
    waiting: list[WeightPatch] = []
    for patch in masked(patches, most_numel=INT32_NUMEL):
        for entry in _cut(patch, min(max_entry_numel, max_flush_numel)):
            numel = sum(len(each.values) for each in waiting) + len(entry.values)
            if waiting and (waiting[0].dtype != entry.dtype or numel > max_flush_numel):
                yield _flush(waiting)
                waiting = []
            waiting.append(entry)
    if waiting:
        yield _flush(waiting)


def _cut(patch: WeightPatch, most: int) -> Iterator[WeightPatch]:
    """Yield a patch in runs of up to `most` elements."""
    assert patch.indices is not None
    for begin in range(0, len(patch.values), most):
        end = begin + most
        yield patch._replace(indices=patch.indices[begin:end], values=patch.values[begin:end])


def _flush(entries: list[WeightPatch]) -> list[tuple[str, Tensor]]:
    values = torch.cat([entry.values for entry in entries])
    places = torch.cat([entry.indices.to(torch.int32) for entry in entries if entry.indices is not None])
    positions = places.view(torch.uint8)
    described: list[dict[str, Any]] = []
    begin = 0
    for entry in entries:
        end = begin + len(entry.values)
        described.append(
            {
                "name": entry.name,
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.shape),
                "pos_start": begin * _PLACE_BYTES,
                "pos_end": end * _PLACE_BYTES,
                "pos_width": _PLACE_BYTES,
                "val_start": begin,
                "val_end": end,
            }
        )
        begin = end
    checksum = _hash(positions) ^ (_hash(values) << 1)
    spec = json.dumps({"encoding": "indices", "params": described, "checksum": checksum}).encode()
    return [
        ("__delta_spec__", torch.frombuffer(bytearray(spec), dtype=torch.uint8)),
        ("__positions__", positions),
        ("__values__", values),
    ]


def _hash(values: Tensor) -> int:
    return int(torch.hash_tensor(values).item())  # int() of a tensor of uint64 raises OverflowError
