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

from laconic.codec import CODECS, Codec
from laconic.comm.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Mean:
    """The result of one all-reduce."""

    value: Tensor
    """The mean, (numel,), fp32, the same bits on every island."""
    sent: Tensor
    """This island's own values as the others decode them, (numel,), fp32."""
    sent_bytes: int
    took_s: float = 0.0
    """The seconds from the call to the result."""


class CompressedAllReduce:
    """Means over the islands of a cluster. Only one thread may use it: messages are matched by their order."""

    def __init__(self, cluster: Cluster, codec: Codec) -> None:
        self._cluster = cluster
        self._num_islands, self._rank = cluster.num_islands, cluster.island_rank
        self._codec = codec if self._num_islands > 1 else CODECS["fp32"]  # one island sends nothing

    @torch.no_grad()
    def mean(self, values: Tensor, divisor: Tensor | None = None) -> Mean:
        """Compute the mean of all islands' values. Collective over islands; blocks until the mean is there.

        `divisor` divides the sums and is the same on every island. Where it is zero, the mean is zero: no island trains
        the coordinate. Default: the number of islands.

        Shapes: values (numel,), fp32, on the host; divisor (numel,) -> value and sent (numel,), fp32.
        Cost: 2 (I - 1) payloads of numel / I values out of and into this rank, with a sparse codec I - 1 payloads of
            numel values, counted as "outer".
        Raises: ValueError if the codec cannot encode a value, such as NaN.
        """
        began = time.perf_counter()
        if self._codec.is_sparse:
            return self._sparse_mean(values, divisor, began)
        numel, part = values.numel(), -(-values.numel() // self._num_islands)
        rows = torch.zeros(self._num_islands, part)
        rows.view(-1)[:numel] = values
        codes = [self._codec.encode(row) for row in rows]
        sent = self._join(codes, numel)
        arrived = self._exchange(codes)
        total = self._codec.decode(arrived[0], part)
        for code in arrived[1:]:
            total += self._codec.decode(code, part)
        means = self._exchange([self._codec.encode(self._divide(total, divisor))] * self._num_islands)
        sent_bytes = 2 * (self._num_islands - 1) * self._codec.payload_bytes(part)
        self._cluster.traffic.count("island", "outer", sent_bytes=sent_bytes, received_bytes=sent_bytes)
        value = self._join(means, numel)
        return Mean(value=value, sent=sent, sent_bytes=sent_bytes, took_s=time.perf_counter() - began)

    def _sparse_mean(self, values: Tensor, divisor: Tensor | None, began: float) -> Mean:
        """The mean in one trip: [Note: The two trips of an all-reduce]."""
        numel = values.numel()
        code = self._codec.encode(values)
        arrived = self._exchange([code] * self._num_islands)
        total = torch.zeros_like(values)
        for theirs in arrived:
            total += self._codec.decode(theirs, numel)
        counts = torch.full_like(total, self._num_islands) if divisor is None else divisor
        value = torch.where(counts > 0, total / counts.clamp(min=1), 0.0)
        sent_bytes = (self._num_islands - 1) * self._codec.payload_bytes(numel)
        self._cluster.traffic.count("island", "outer", sent_bytes=sent_bytes, received_bytes=sent_bytes)
        sent = self._codec.decode(code, numel)
        return Mean(value=value, sent=sent, sent_bytes=sent_bytes, took_s=time.perf_counter() - began)

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
        return torch.cat([self._codec.decode(code, part) for code in codes])[:numel]

    def _exchange(self, outgoing: Sequence[Tensor]) -> list[Tensor]:
        """Send code j to island j. Returns the codes from all islands, in their order, this island's own included."""
        arriving = [code if island == self._rank else torch.empty_like(code) for island, code in enumerate(outgoing)]
        group = self._cluster.island_group
        others = [island for island in range(self._num_islands) if island != self._rank and outgoing[island].numel()]
        works = [dist.irecv(arriving[island], group=group, group_src=island) for island in others]
        works += [dist.isend(outgoing[island], group=group, group_dst=island) for island in others]
        for work in works:
            assert work is not None
            work.wait()
        return arriving


def sum_over_islands(cluster: Cluster, values: Sequence[int]) -> list[int]:
    """Return the sum of each value over islands. Collective over the ranks at this place in all islands."""
    sums = torch.tensor(values, dtype=torch.int64)
    if cluster.island_group is not None and values:
        dist.all_reduce(sums, group=cluster.island_group)
    return [int(each) for each in sums]


def gather_from_islands(cluster: Cluster, value: int) -> list[int]:
    """Return every island's value, in the order of islands. Collective over the ranks at this place in all islands."""
    if cluster.island_group is None:
        return [value]
    values = [torch.zeros(1, dtype=torch.int64) for _ in range(cluster.num_islands)]
    dist.all_gather(values, torch.tensor([value]), group=cluster.island_group)
    return [int(each) for each in values]
