"""Compares the traces of ranks with the oracle's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.shard.random_trees.case import Case, Precision
from tests.shard.random_trees.play import Entry, Part, Trace

_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 6e-2}
"""The largest error, relative to the largest element."""


def tolerance(case: Case) -> float:
    """The tolerance of the coarsest dtype in a case."""
    units = [node.unit.precision or Precision() for node in case.root.walk() if node.unit is not None]
    dtypes = {node.dtype for node in case.root.walk()}
    dtypes |= {dtype for unit in units for dtype in (unit.param_dtype, unit.reduce_dtype, unit.output_dtype) if dtype}
    if any(node.kind == "custom" for node in case.root.walk()):
        dtypes.add("float32")
    has_islands = case.axes is not None and len(case.axes) == 3  # their sums are rounded once more
    return max(_TOLERANCE[dtype] for dtype in dtypes) * (1.5 if has_islands else 1.0)


def differences(case: Case, found: list[Trace], wanted: list[Trace]) -> Iterator[str]:
    """Yield what differs, in the order of the run: "label: how"."""
    labels = [[entry.label for entry in trace] for trace in found]
    expected = [[entry.label for entry in trace] for trace in wanted]
    for rank, (got, want) in enumerate(zip(labels, expected, strict=True)):
        if got != want:
            first = next((pair for pair in zip(got, want, strict=False) if pair[0] != pair[1]), (len(got), len(want)))
            yield f"rank {rank} recorded {first[0]}, the oracle {first[1]}"
            return
    allowed = tolerance(case)
    for place, want in enumerate(wanted[0]):
        entries = [trace[place] for trace in found]
        if any(isinstance(entry.value, Part) for entry in entries):
            how = _parts_differ(entries, want, allowed)
            if how:
                yield f"{want.label}: {how}"
            continue
        for rank, entry in enumerate(entries):
            own = wanted[rank][place]
            how = _differ(entry.value, own.value, own.scale, allowed)
            if how:
                yield f"{own.label} on rank {rank}: {how}"


def _parts_differ(entries: list[Entry], want: Entry, allowed: float) -> str:
    missing = [rank for rank, entry in enumerate(entries) if not isinstance(entry.value, Part)]
    if missing:
        return f"no sharded tensor on ranks {missing}, but on the others"
    if want.value is None:
        size = max((float(e.value.values.abs().max()) for e in entries if e.value.values.numel()), default=0.0)
        return f"{'not ' if size else ''}zero, not None"
    by_start: dict[int, Part] = {}
    for part in (entry.value for entry in entries if entry.value.values.numel()):
        other = by_start.setdefault(part.start, part)  # of another island, if there are several
        if not torch.equal(other.values, part.values):
            return "islands differ"
    parts = [by_start[start] for start in sorted(by_start)]
    shape = entries[0].value.shape
    values = torch.cat([part.values for part in parts]) if parts else entries[0].value.values
    if values.numel() != want.value.numel() or shape != tuple(want.value.shape):
        return f"shape {shape}, not {tuple(want.value.shape)}"
    return _differ(values.view(shape), want.value, want.scale, allowed)


def _differ(got: Any, want: Any, scale: float, allowed: float) -> str:
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        if got is None and want is not None:
            return f"None, not {'zero' if not bool(want.any()) else 'a value'}"
        if want is None and got is not None:
            return f"{'not ' if bool(got.any()) else ''}zero, not None"
        return "" if got == want else f"{got}, not {want}"
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    if not got.numel():
        return ""
    got, want = got.double(), want.double()
    if not bool(got.isfinite().all()):
        return "not finite"
    error = float((got - want).abs().max())
    size = max(float(want.abs().max()), scale)
    if error <= allowed * size + allowed * 0.1:
        return ""
    ratio = float((got * want).sum() / (want * want).sum()) if bool(want.any()) else float("inf")
    return f"differs by {error:.3g} of {size:.3g}, {ratio:.4g} times the oracle's"
