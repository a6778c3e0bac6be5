"""The states, the transfers and the time of an optimizer's step, from its settings and its parameters' layouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from laconic.codec.tiles import Tiling
from laconic.comm.traffic import Level
from laconic.config.sections import OptimizerConfig
from laconic.layout.bucket import BucketLayout
from laconic.optim import muon
from laconic.optim.adamw8bit import MIN_8BIT_SIZE
from laconic.optim.owners import Matrix, assign
from laconic.optim.shampoo import cost_of, preconditioned_blocks
from laconic.plan.buckets import Shape
from laconic.plan.phase import Operations, Phase

_MOST_ADAMW8BIT_PASSES = 12
"""The times that AdamW8bit's plain steps read or write an fp32 value, counted in optim/adamw8bit.py."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The trained parameters of one bucket, or of one plain list of whole tensors."""

    layout: BucketLayout
    itemsize: int
    """The bytes of an element of the parameter."""
    is_hidden: bool
    """True in a layer, False in the root, whose matrices (embedding, output layer) Muon and Shampoo leave to AdamW."""


@dataclass(kw_only=True)
class OptimizerCost:
    """An optimizer's step on one rank, as a mean over the ranks that share the parameters."""

    state_bytes: float = 0.0
    """The bytes of the fullest rank's states."""
    transient_bytes: float = 0.0
    """The most bytes that the step takes besides."""
    phase: Phase
    sent_bytes: Counter[Level] = field(default_factory=Counter)
    """The bytes that a rank sends to owners of matrices and back."""


def optimizer_cost(settings: OptimizerConfig, trained: Sequence[Trained], shape: Shape) -> OptimizerCost:
    """The cost of `settings` on parameters that lie in `trained` layouts, cut over the ranks of `shape`.

    AdamW and AdamW8bit work on this rank's elements. Muon and Shampoo move matrices to owners: [Note: Owners] in
    optim/owners.py.
    """
    by_matrix = settings.name in ("muon", "shampoo")
    plain = [each for each in trained if not (by_matrix and each.is_hidden)]
    matrices, vectors = _split(trained if by_matrix else ())
    if settings.name == "adamw8bit":
        cost = _adamw8bit(plain)
    else:
        numel = sum(each.layout.shard_numel for each in plain) + sum(_share(*each) for each in vectors)
        itemsize = plain[0].itemsize if plain else trained[0].itemsize if trained else 4
        passes = 7 if settings.fused or settings.name != "adamw" else 20  # foreach: one pass for each operation
        passes = 20 if by_matrix else passes
        cost = OptimizerCost(
            state_bytes=2 * numel * itemsize,
            transient_bytes=numel * itemsize if by_matrix else 0.0,
            phase=_simple(passes * numel * itemsize),
        )
    if matrices:
        _add_matrices(cost, settings, matrices, shape)
    return cost


def adamw_cost(settings: OptimizerConfig, numel: float, itemsize: int) -> OptimizerCost:
    """The cost of torch's AdamW on `numel` elements of a rank: two states, and as many passes as its kernels take."""
    passes = 7 if settings.fused else 20  # without fused kernels, a pass for each operation
    return OptimizerCost(state_bytes=2 * numel * itemsize, phase=_simple(passes * numel * itemsize))


def _simple(memory_bytes: float) -> Phase:
    work = Operations(dtype=None, flops=0.0, memory_bytes=memory_bytes, count=1)
    return Phase(work=(work,) if memory_bytes else (), peak_bytes=0, end_bytes=0)


def _split(trained: Sequence[Trained]) -> tuple[list[tuple[Trained, int]], list[tuple[Trained, int]]]:
    """The matrices and the other tensors of hidden layers, as (bucket, index)."""
    every = [(each, index) for each in trained if each.is_hidden for index in range(len(each.layout.slots))]
    is_matrix = [len(each.layout.slots[index].shape) in (2, 3) for each, index in every]
    matrices = [pair for pair, matrix in zip(every, is_matrix, strict=True) if matrix]
    return matrices, [pair for pair, matrix in zip(every, is_matrix, strict=True) if not matrix]


def _share(trained: Trained, index: int) -> float:
    return trained.layout.slots[index].numel / trained.layout.num_shards


def _adamw8bit(trained: Sequence[Trained]) -> OptimizerCost:
    state_bytes = memory_bytes = 0.0
    for each in trained:
        for slot in each.layout.slots:
            numel = slot.numel / each.layout.num_shards
            if slot.numel < MIN_8BIT_SIZE:
                state_bytes += 8 * numel
            else:
                scales = math.prod(Tiling().grid(slot.shape).scales_shape) / each.layout.num_shards
                state_bytes += 2 * numel + 2 * 4 * scales
            memory_bytes += numel * (4 * _MOST_ADAMW8BIT_PASSES + 2 * each.itemsize + 4)
    return OptimizerCost(state_bytes=state_bytes, phase=_simple(memory_bytes))


def _add_matrices(
    cost: OptimizerCost, settings: OptimizerConfig, matrices: Sequence[tuple[Trained, int]], shape: Shape
) -> None:
    """Add the work of owners, and the transfers to them and back."""
    is_muon = settings.name == "muon"
    planned = [matrix for each, index in matrices for matrix in _matrices_of(each, index, settings)]
    loads = [0.0] * shape.ranks
    owners = assign(planned, loads)
    for index, owner in owners:
        for level, nbytes in _moves(planned[index], owner, shape):
            cost.sent_bytes[level] += 2 * nbytes / shape.ranks  # type: ignore[assignment]
    itemsize = matrices[0][0].itemsize
    own = sum(_share(*pair) for pair in matrices)
    if is_muon:
        cost.state_bytes += own * itemsize
        flops = 2 * max(loads)
        dtype = str(muon.DTYPE).removeprefix("torch.")
    else:
        preconditioners = [0.0] * shape.ranks
        for index, owner in owners:
            blocks = preconditioned_blocks(planned[index].spec.shape, settings.block_size)
            preconditioners[owner] += 2 * 4 * sum(block.rows**2 + block.columns**2 for block in blocks)
        moments = 1 if settings.grafting in ("sgd", "none") else 2
        own_moments = [0.0] * shape.ranks
        for index, owner in owners:
            own_moments[owner] += moments * 4 * planned[index].numel
        cost.state_bytes += max(map(sum, zip(preconditioners, own_moments, strict=True)))
        flops, dtype = max(loads), "float32"
    arriving = [0.0] * shape.ranks
    for index, owner in owners:
        arriving[owner] += planned[index].nbytes
    cost.transient_bytes += 2 * max(arriving) / 4 + own * itemsize
    product = Operations(dtype=dtype, flops=flops, memory_bytes=6 * own * itemsize, count=1)
    cost.phase = Phase(work=(*cost.phase.work, product), peak_bytes=0, end_bytes=0)


def _matrices_of(trained: Trained, index: int, settings: OptimizerConfig) -> Iterator[Matrix]:
    slot = trained.layout.slots[index]
    if settings.name == "muon":
        rows, columns = slot.shape[-2:]
        cost = muon.cost_of(rows, columns, settings.ns_steps) * (slot.shape[0] if len(slot.shape) == 3 else 1)
        itemsize = muon.DTYPE.itemsize
    else:
        cost = cost_of(slot.shape, settings.block_size, settings.update_every)
        itemsize = trained.itemsize
    spec: Any = SimpleNamespace(shape=slot.shape, layout=trained.layout, index=index)
    yield Matrix(spec=spec, cost=cost, itemsize=itemsize)


def _moves(matrix: Matrix, owner: int, shape: Shape) -> Iterator[tuple[Level, float]]:
    """The level and the bytes of each message to the owner."""
    for shard in matrix.spec.layout.holders(matrix.spec.index):
        if shard != owner:
            is_local = shard % shape.nodes == owner % shape.nodes
            yield "local" if is_local else "node", matrix.num_held(shard) * matrix.itemsize
