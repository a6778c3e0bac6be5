"""The oracle of coded crossings: I x N x L ranks, their copies of the weights and sums of gradients, in one process.

Every value is coded block by block, in the plainest way; tests/codec checks the rotation, whose bits are a library's.
The owner of shard s is rank (s mod N, s div N). The twin knows which run of each tensor lies in which shard; nothing
else is sharded, cached or overlapped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from laconic.codec.rotation import rotate

BLOCK = 128
LEVELS = {
    "int8": [float(k) for k in range(-127, 128)],
    "int4": [float(k) for k in range(-7, 8)],
    "int2": [-3.0, -1.0, 1.0, 3.0],
    "e2m1": [sign * k for sign in (-1.0, 1.0) for k in (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)],
}
"""The whole numbers that a code stands for."""
STEPS = {"int2": 0.9957 / 2}
"""The steps that follow from a block's root mean square, in its multiples; others follow from its largest value."""
ROTATED = ("int4", "int2", "e2m1")
"""The codecs whose gradients are rotated."""
Runs = Mapping[str, Sequence[tuple[int, int]]]
"""For each tensor, by shard, the run [start, stop) of its flattened elements."""
Cuts = Mapping[str, Sequence[Sequence[int]]]


def coded(values: Tensor, codec: str, *, rotated: bool = False) -> Tensor:
    """The values (n,), fp32, as a receiver decodes them."""
    if codec == "bf16":
        return values.bfloat16().float()
    numel = values.numel()
    if rotated:
        padded = torch.cat([values, torch.zeros(-numel % 32)])
        values = rotate(padded)
    decoded = torch.cat([coded_block(block, codec) for block in values.split(BLOCK)]) if numel else values
    if rotated:
        decoded = rotate(decoded)
    return decoded[:numel]


def coded_block(values: Tensor, codec: str) -> Tensor:
    levels = torch.tensor(LEVELS[codec])
    root = values.double().square().mean().sqrt()
    step = root * STEPS[codec] if codec in STEPS else values.abs().max() / levels.max()
    step = step.float().clamp(min=2.0**-126).bfloat16().float()
    if not math.isfinite(float(step)):
        return torch.full_like(values, math.nan)
    if not values.any():
        return torch.zeros_like(values)
    inverse = step.reciprocal()  # a product with it, in fp32, decides between two levels that are equally near
    if codec == "e2m1":
        return levels[(values[:, None] * inverse - levels).abs().argmin(1)] * step
    if codec == "int8":
        return (values * inverse).round().clamp(levels.min(), levels.max()) * step
    places = values * (inverse / 2) + 2 if codec == "int2" else values * inverse + (levels.max() + 0.5)
    return levels[places.clamp(0, len(levels) - 1).long()] * step


class Twin:
    """All ranks of a cluster that send weights and gradients between nodes in few bits."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        runs: Runs,
        *,
        num_nodes: int,
        num_local: int,
        weights: str,
        gradients: str,
        feedback: bool = False,
        frozen: Collection[str] = (),
        as_values: bool = False,
        codes_frozen: bool = False,
        num_islands: int = 1,
        cuts: Cuts | None = None,
    ) -> None:
        """Tensors of one dimension and, unless `codes_frozen`, frozen ones cross exactly.

        `cuts` has, for each tensor and shard, the first element of its run that belongs to each island, and the end.
        """
        self.num_nodes, self.num_local, self.runs = num_nodes, num_local, runs
        self.num_islands, self.cuts = num_islands, cuts or {}
        self.weights, self.gradients, self.feedback = weights, gradients, feedback
        self.shape = {name: value.shape for name, value in parameters.items()}
        self.as_values = as_values
        covered = [name for name in parameters if codes_frozen or name not in frozen]
        self.is_coded = {name: value.ndim > 1 and name in covered for name, value in parameters.items()}
        self.trained = [name for name in parameters if name not in frozen]
        self.shards = {
            (name, shard): torch.nn.Parameter(value.flatten()[start:stop].clone())
            for name, value in parameters.items()
            for shard, (start, stop) in enumerate(runs[name])
        }
        """The exact weights, by tensor and shard."""
        self.copies: dict[str, Tensor] = {}
        """The weights with which every node computes, by tensor; empty before the first crossing."""
        self.lost: dict[tuple[str, int, int, int], Tensor] = {}

    def cross(self, *, exactly: bool = False) -> dict[str, Tensor]:
        """Let the weights cross. Returns the weights with which every rank computes next."""
        is_first = not self.copies
        for name, runs in self.runs.items():
            copy = self.copies.setdefault(name, torch.zeros(math.prod(self.shape[name])))
            for shard, (start, stop) in enumerate(runs):
                exact = self.shards[name, shard].detach()
                if self.as_values and self.is_coded[name]:
                    copy[start:stop] = coded(exact, self.weights)
                elif is_first or exactly or not self.is_coded[name] or self.weights == "exact":
                    copy[start:stop] = exact
                else:
                    copy[start:stop] += coded(exact - copy[start:stop], self.weights)
        return {name: copy.view(self.shape[name]).clone() for name, copy in self.copies.items()}

    def set_gradients(self, micro_batches: Sequence[Sequence[Mapping[str, Tensor]]]) -> None:
        """Set `.grad` of the shards from `micro_batches[a][rank][name]`, the gradients of each rank."""
        num_ranks = self.num_islands * self.num_nodes * self.num_local
        for name in self.trained:
            islands = [self._sums_of_island(name, island, micro_batches) for island in range(self.num_islands)]
            for shard in range(len(self.runs[name])):
                total = self._sum_over_islands(name, shard, [sums[shard] for sums in islands])
                self.shards[name, shard].grad = total / num_ranks

    def _sums_of_island(
        self, name: str, island: int, micro_batches: Sequence[Sequence[Mapping[str, Tensor]]]
    ) -> list[Tensor]:
        """The sums of one island's gradients, by shard."""
        nodes: list[Tensor] = []
        for node in range(island * self.num_nodes, (island + 1) * self.num_nodes):
            ranks = range(node * self.num_local, (node + 1) * self.num_local)
            fresh = [sum_in_order([batches[rank][name].flatten() for rank in ranks]) for batches in micro_batches]
            nodes.append(sum_in_order(fresh))
        sums = []
        for shard, (start, stop) in enumerate(self.runs[name]):
            parts = [values[start:stop] for values in nodes]
            owner = shard % self.num_nodes
            sums.append(sum_in_order(self._sent(parts, owner, name, shard, island)))
        return sums

    def _sum_over_islands(self, name: str, shard: int, islands: list[Tensor]) -> Tensor:
        """The sum of a shard's values as all islands use it: in two trips, one part for each island."""
        if self.num_islands == 1 or not self.is_coded[name] or self.gradients == "exact":
            return sum_in_order(islands)
        sums = []
        for owner, (start, stop) in enumerate(pairwise(self.cuts[name][shard])):
            parts = [values[start:stop] for values in islands]
            total = sum_in_order(self._sent(parts, owner, name, shard, -1 - owner))
            sums.append(coded(total, "bf16" if self.gradients == "bf16" else "int8"))
        return torch.cat(sums)

    def _sent(self, parts: list[Tensor], owner: int, name: str, shard: int, place: int) -> list[Tensor]:
        """The terms of a sum as its owner uses them: its own exact, the others decoded."""
        if not self.is_coded[name] or self.gradients == "exact":
            return parts
        return [
            part if index == owner else self._decoded(part, (name, shard, place, index))
            for index, part in enumerate(parts)
        ]

    def _decoded(self, values: Tensor, place: tuple[str, int, int, int]) -> Tensor:
        is_rotated = self.gradients in ROTATED
        if not self.feedback:
            return coded(values, self.gradients, rotated=is_rotated)
        whole = self.lost.get(place, torch.zeros_like(values)) + values
        sent = coded(whole, self.gradients, rotated=is_rotated)
        self.lost[place] = whole - sent
        return sent


def sum_in_order(values: Sequence[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total = total + value
    return total
