"""All-reduce over islands with a codec: encoded values go to the rank that sums them, and the mean goes back to all.

[Note: The two trips of an all-reduce]
A vector is cut into as many parts as there are islands. Every island sends part j, encoded, to island j. Island j
decodes the parts of all islands, its own included, and sums them in fp32 in the order of islands. It divides the sum,
encodes the mean and sends it to all. Every island, island j included, uses the decoded mean, so all islands have the
same bits. Encoded values are never summed. A rank sends and receives 2 (I - 1) / I of the encoded vector.

A sparse codec cannot encode a mean of several vectors as well as each of them. So there, every island sends its whole
vector to all others, in one trip, and every island sums them in the order of islands (SparseLoCo, arXiv 2508.15706).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic import _compat
from laconic.codec import CODECS, Codec
from laconic.comm.cluster import Cluster
from laconic.comm.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The result of one all-reduce."""

    value: Tensor
    """The mean, (numel,), fp32, the same bits on every island."""
    sent: Tensor
    """This island's own values as the others decode them, (numel,), fp32."""
    sent_bytes: int
    num_islands: int = 1
    """The number of islands that took part."""
    newcomers: tuple[int, ...] = ()
    """The islands that enter after this mean, and that this island tells the state: islands/elastic.py."""
    took_s: float = 0.0
    """The seconds from the call to the result."""


class IslandGroup:
    """The ranks with this rank's place in all islands, in the order of islands. Only one thread may use the group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        """Take a group of `size` ranks, in which this rank is `rank`; None if there is one island."""
        self.rank, self.size, self._group = rank, size, group

    @classmethod
    def of(cls, cluster: Cluster) -> "IslandGroup":
        """The group of a cluster, whose islands stay."""
        return cls(cluster.island_group, cluster.island_rank, cluster.num_islands)

    def exchange(self, outgoing: Sequence[Tensor]) -> list[Tensor]:
        """Send tensor j to island j, all of one shape for each pair. Returns what islands sent, this island's included.

        Raises: RuntimeError if another rank is lost, or does not answer within the group's timeout.
        """
        arriving = [each if island == self.rank else torch.empty_like(each) for island, each in enumerate(outgoing)]
        others = [island for island in range(self.size) if island != self.rank and outgoing[island].numel()]
        if others:
            assert self._group is not None
            works = [_compat.irecv(arriving[island], self._group, island) for island in others]
            works += [_compat.isend(outgoing[island], self._group, island) for island in others]
            for work in works:
                work.wait()
        return arriving

    def gather(self, *values: int) -> list[list[int]]:
        """Return every island's values, in the order of islands. Raises: see `exchange`."""
        own = torch.tensor(values, dtype=torch.int64)
        if self._group is None:
            return [own.tolist()]
        told = [torch.empty_like(own) for _ in range(self.size)]
        _compat.all_gather(told, own, self._group)
        return [each.tolist() for each in told]


class CompressedAllReduce:
    """Means over a group of islands. Only one thread may use it: messages are matched by their order."""

    def __init__(self, islands: IslandGroup, codec: Codec, traffic: Traffic) -> None:
        self._islands, self._traffic = islands, traffic
        self._num_islands, self._rank = islands.size, islands.rank
        self._codec = codec if self._num_islands > 1 else CODECS["fp32"]  # one island sends nothing

    @torch.no_grad()
    def mean(self, values: Tensor, divisor: Tensor | None = None, weights: Sequence[int] | None = None) -> Mean:
        """Compute the mean of all islands' values. Collective over islands; blocks until the mean is there.

        `divisor` divides the sums and is the same on every island. Where it is zero, the mean is zero: no island trains
        the coordinate. Default: the number of islands. `weights` has one number for each island, the same on every
        island. The mean is zero if all weights are. Default: all weigh the same.

        Shapes: values (numel,), fp32, on the host; divisor (numel,) -> value and sent (numel,), fp32.
        Cost: 2 (I - 1) payloads of numel / I values out of and into this rank, with a sparse codec I - 1 payloads of
            numel values, counted as "outer".
        Raises: ValueError if the codec cannot encode a value, such as NaN; RuntimeError if a rank is lost.
        """
        began = time.perf_counter()
        scales = self._scales(weights)
        if self._codec.is_sparse:
            return self._sparse_mean(values, divisor, scales, began)
        numel, part = values.numel(), -(-values.numel() // self._num_islands)
        codes = self._encode_parts(values, part)
        sent = self._join(codes, numel)
        total = self._sum(self._islands.exchange(codes), part, scales)
        means = self._islands.exchange([self._codec.encode(self._divide(total, divisor))] * self._num_islands)
        sent_bytes = 2 * (self._num_islands - 1) * self._codec.payload_bytes(part)
        return self._report(self._join(means, numel), sent, sent_bytes, began)

    def _sparse_mean(
        self, values: Tensor, divisor: Tensor | None, scales: Sequence[float] | None, began: float
    ) -> Mean:
        """The mean in one trip: [Note: The two trips of an all-reduce]."""
        numel = values.numel()
        code = self._codec.encode(values)
        total = self._sum(self._islands.exchange([code] * self._num_islands), numel, scales)
        counts = torch.full_like(total, self._num_islands) if divisor is None else divisor
        value = torch.where(counts > 0, total / counts.clamp(min=1), 0.0)
        sent_bytes = (self._num_islands - 1) * self._codec.payload_bytes(numel)
        return self._report(value, self._codec.decode(code, numel), sent_bytes, began)

    def _scales(self, weights: Sequence[int] | None) -> list[float] | None:
        """The factors of the islands' values, 1 on average; None if all are 1."""
        if weights is None or (len(set(weights)) == 1 and weights[0]):
            return None
        mean = sum(weights) / len(weights)
        return [weight / mean if mean else 0.0 for weight in weights]

    def _encode_parts(self, values: Tensor, part: int) -> list[Tensor]:
        """Encode one part of the vector for each island, (part,); the last are filled up with zeros."""
        rows = torch.zeros(self._num_islands, part)
        rows.view(-1)[: values.numel()] = values
        return [self._codec.encode(row) for row in rows]

    def _sum(self, codes: Sequence[Tensor], numel: int, scales: Sequence[float] | None) -> Tensor:
        """Decode (numel,) values of every island and sum them in the order of islands."""
        total = torch.zeros(numel)
        for island, code in enumerate(codes):
            total.add_(self._codec.decode(code, numel), alpha=1.0 if scales is None else scales[island])
        return total

    def _divide(self, total: Tensor, divisor: Tensor | None) -> Tensor:
        """Divide the sums of this island's part of the vector, (part,), by the same part of `divisor`, (numel,)."""
        if divisor is None:
            return total / self._num_islands
        own = torch.ones_like(total)
        part = divisor[self._rank * total.numel() :][: total.numel()]
        own[: part.numel()] = part
        return torch.where(own > 0, total / own.clamp(min=1), 0.0)

    def _join(self, codes: Sequence[Tensor], numel: int) -> Tensor:
        part = -(-numel // self._num_islands)
        joined = torch.empty(self._num_islands, part)
        for row, code in zip(joined, codes, strict=True):  # so that no more than one part is there twice
            row.copy_(self._codec.decode(code, part))
        return joined.view(-1)[:numel]

    def _report(self, value: Tensor, sent: Tensor, sent_bytes: int, began: float) -> Mean:
        self._traffic.count("island", "outer", sent_bytes=sent_bytes, received_bytes=sent_bytes)
        took_s = time.perf_counter() - began
        return Mean(value=value, sent=sent, sent_bytes=sent_bytes, num_islands=self._num_islands, took_s=took_s)


def sum_over_islands(cluster: Cluster, values: Sequence[int]) -> list[int]:
    """Return the sum of each value over islands. Collective over the ranks at this place in all islands."""
    sums = torch.tensor(values, dtype=torch.int64)
    if cluster.island_group is not None and values:
        dist.all_reduce(sums, group=cluster.island_group)
    return [int(each) for each in sums]
