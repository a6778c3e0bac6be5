"""The mean over islands of what each of them says, in codes: out to the rank that sums, and back to all.

[Note: Two trips, one number]
A vector is cut in as many parts as there are islands. Every island sends part j, encoded, to island j, which decodes
what all of them say, its own included, sums in fp32 in the order of islands, divides, encodes the mean and sends it to
all. Everybody, the summing island included, uses the decoded codes, so all islands have the same bits. Per rank that is
2 (I - 1) / I of the encoded vector out and as much in, whatever the number of islands; codes are never summed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codec.codecs import Codec
from laconic.comm.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Mean:
    """What came of one exchange."""

    value: Tensor
    """(numel,), fp32, the same bits on every island."""
    sent: Tensor
    """(numel,), fp32: what this island's own values were to the others, decoded."""
    sent_bytes: int
    """That left this rank."""


class CompressedAllReduce:
    """Means over the islands of a cluster. Not for two threads at once: messages are matched by their order."""

    def __init__(self, cluster: Cluster, codec: Codec) -> None:
        self._cluster, self._codec = cluster, codec
        self._group = cluster.island_group
        self._count, self._rank = cluster.num_islands, cluster.island_rank

    def mean(self, values: Tensor, divisor: Tensor | None = None) -> Mean:
        """The mean of all islands' values. Collective over the islands; blocks.

        Shapes: values (numel,), fp32, on the host. divisor: what sums are divided by, (numel,), the same on every
        island; default: the number of islands. Where it is zero nobody holds the coordinate and the mean is zero.
        Cost: 2 (I - 1) payloads of numel / I values out of this rank and into it; counted as "outer".
        """
        numel, part = values.numel(), -(-values.numel() // self._count)
        rows = torch.zeros(self._count, part)
        rows.view(-1)[:numel] = values
        codes = torch.stack([self._codec.encode(row) for row in rows])
        sent = torch.cat([self._codec.decode(code, part) for code in codes])[:numel]

        arrived = self._all_to_all(codes)
        total = self._codec.decode(arrived[0], part)
        for code in arrived[1:]:
            total += self._codec.decode(code, part)
        total = self._divided(total, divisor, self._rank * part)

        means = self._all_gather(self._codec.encode(total))
        value = torch.cat([self._codec.decode(code, part) for code in means])[:numel]
        sent_bytes = 2 * (self._count - 1) * self._codec.payload_bytes(part)
        self._cluster.traffic.count("island", "outer", sent_bytes=sent_bytes, received_bytes=sent_bytes)
        return Mean(value=value, sent=sent, sent_bytes=sent_bytes)

    def _divided(self, total: Tensor, divisor: Tensor | None, begin: int) -> Tensor:
        if divisor is None:
            return total / self._count
        own = torch.ones_like(total)
        part = divisor[begin : begin + total.numel()]
        own[: part.numel()] = part
        return torch.where(own > 0, total / own.clamp(min=1), 0.0)

    def _all_to_all(self, codes: Tensor) -> list[Tensor]:
        """Row j to island j; what all islands sent here, in their order."""
        arrived = [code if island == self._rank else torch.empty_like(code) for island, code in enumerate(codes)]
        self._trade([codes[island] for island in range(self._count)], arrived)
        return arrived

    def _all_gather(self, code: Tensor) -> list[Tensor]:
        arrived = [code if island == self._rank else torch.empty_like(code) for island in range(self._count)]
        self._trade([code] * self._count, arrived)
        return arrived

    def _trade(self, outgoing: list[Tensor], arriving: list[Tensor]) -> None:
        others = [island for island in range(self._count) if island != self._rank and outgoing[island].numel()]
        works = [dist.irecv(arriving[island], group=self._group, group_src=island) for island in others]
        works += [dist.isend(outgoing[island], group=self._group, group_dst=island) for island in others]
        for work in works:
            assert work is not None
            work.wait()
