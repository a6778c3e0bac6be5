"""Means over islands with a codec, in the two trips of codec/sums.py, or in one; an island's own term is decoded, too.

[Note: A sparse mean]
A sparse codec cannot encode a mean of several vectors as well as each of them. So there, every island sends its whole
vector to all others, in one trip, and every island sums them in the order of islands (SparseLoCo, arXiv 2508.15706).

[Note: Codes have no entropy code]
Codes cross in as many bits as each has, so their lengths are known beforehand: to receivers, to the plan, and to
islands that come and go. An entropy code would take that away and save little. In exchanges of a small model (0.13 M
parameters, 4 islands, 24 or 40 exchanges) the entropy of codes, with the scales, was 14 % below the bits sent for
`int4`, 6 % for `int2` with Muon and feedback, and 3 % for `e2m1` with feedback. Huffman codes saved 13, 3 and 2 %. With
the size and the sign of each value's last code as context the entropy was 18, 11 and 6 % below, at most.
"""

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from laconic import _compat
from laconic.codec import CODECS, Codec
from laconic.codec.messages import KnownLengths
from laconic.codec.payload import FewBits
from laconic.comm.cluster import Cluster
from laconic.comm.moves import NOTHING, Pending
from laconic.comm.traffic import Purpose, Traffic
from laconic.errors import JobError


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
    took_s: float = 0.0
    """The seconds from the call to the result."""


class IslandGroup:
    """The ranks with this rank's place in all islands, in the order of islands. Only one thread may use the group."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        """Take a group of `size` ranks, in which this rank is `rank`; None if there is one island."""
        self.rank, self.size, self._group = rank, size, group

    def _among(self) -> dist.ProcessGroup:
        assert self._group is not None, "one island alone sends nothing"
        return self._group

    @classmethod
    def of(cls, cluster: Cluster) -> "IslandGroup":
        """The group of a cluster, whose islands stay."""
        return cls(cluster.island_group, cluster.island_rank, cluster.num_islands)

    def start_all_to_all(self, landings: Tensor, messages: Tensor) -> Pending:
        """Send row i of `messages` to island i, and fill row i of `landings` with what island i sends. Blocks.

        This island's own row of `landings` has no meaning.

        Raises: RuntimeError if another rank is lost, or does not answer within the group's timeout.
        """
        others = [island for island in range(self.size) if island != self.rank and messages[island].numel()]
        works = [_compat.irecv(landings[island], self._among(), island) for island in others]
        works += [_compat.isend(messages[island], self._among(), island) for island in others]
        for work in works:
            work.wait()
        return NOTHING

    def all_gather(self, whole: Tensor, piece: Tensor, purpose: Purpose = "outer") -> Pending:
        """Fill `whole`, (I n,), with the `piece`, (n,), of every island; its own is there already. Blocks.

        Raises: see `start_all_to_all`.
        """
        rows = whole.view(self.size, len(piece))
        return self.start_all_to_all(rows, rows[self.rank].expand_as(rows))

    def gather(self, *values: int) -> list[list[int]]:
        """Return every island's values, in the order of islands. Raises: see `start_all_to_all`."""
        own = torch.tensor(values, dtype=torch.int64)
        if self._group is None:
            return [own.tolist()]
        told = [torch.empty_like(own) for _ in range(self.size)]
        _compat.all_gather(told, own, self._group)
        return [each.tolist() for each in told]

    def tell(self, vectors: Sequence[Tensor], lead: int, listeners: Sequence[int]) -> list[Tensor]:
        """Send vectors, which are on the host, from the island `lead` to others. Returns what a listener hears.

        Cost: the vectors' bytes for each listener, and 8 for a checksum of each vector.

        Raises:
            JobError: a bit has flipped on the way.
            RuntimeError: see `start_all_to_all`.
        """
        heard: list[Tensor] = []
        for vector in vectors if listeners else ():
            if self.rank == lead:
                parts = [vector, torch.tensor([crc_of(vector)])]
                works = [_compat.isend(part, self._among(), to) for part in parts for to in listeners if part.numel()]
            elif self.rank in listeners:
                parts = [torch.empty_like(vector), torch.empty(1, dtype=torch.int64)]
                works = [_compat.irecv(part, self._among(), lead) for part in parts if part.numel()]
                heard.append(parts[0])
            else:
                continue
            for work in works:
                work.wait()
            if int(parts[1]) != crc_of(parts[0]):
                raise JobError("the state that another island told has changed on the way; start this island again")
        return heard


def crc_of(vector: Tensor) -> int:
    """The CRC-32 of a vector on the host."""
    return zlib.crc32(vector.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def sent_bytes_of(numel: int, islands: int, codec: Codec) -> int:
    """The bytes that a rank sends for the mean of `numel` values over islands."""
    if codec.is_sparse:  # [Note: A sparse mean]
        return (islands - 1) * codec.payload_bytes(numel)
    return 2 * (islands - 1) * codec.payload_bytes(-(-numel // islands))


@torch.no_grad()
def mean_over_islands(
    values: Tensor,
    islands: IslandGroup,
    codec: Codec,
    traffic: Traffic,
    *,
    divisor: Tensor | None = None,
    weights: Sequence[int] | None = None,
) -> Mean:
    """Compute the mean of all islands' values. Collective over islands; blocks until the mean is there.

    One thread calls it for a group, in the same order on all islands. `divisor` divides the sums and is the same on
    every island. Where it is zero, the mean is zero: no island trains the coordinate. Default: the number of islands.
    `weights` has one number for each island, the same on every island. The mean is zero if all weights are. Default:
    all weigh the same.

    Shapes: values (numel,), fp32, on the host; divisor (numel,) -> value and sent (numel,), fp32.
    Cost: 2 (I - 1) payloads of numel / I values out of and into this rank, with a sparse codec I - 1 payloads of numel
        values, counted as "outer". One island alone sends nothing, and uses "fp32".
    Raises: ValueError if the codec cannot encode a value, such as NaN; RuntimeError if a rank is lost.
    """
    began = time.perf_counter()
    codec = codec if islands.size > 1 else CODECS["fp32"]
    trips = _in_one_trip if codec.is_sparse else _in_two_trips
    value, sent = trips(values, islands, codec, divisor, _scales(weights))
    sent_bytes = sent_bytes_of(values.numel(), islands.size, codec)
    traffic.count("island", "outer", sent_bytes=sent_bytes, received_bytes=sent_bytes)
    took_s = time.perf_counter() - began
    return Mean(value=value, sent=sent, sent_bytes=sent_bytes, num_islands=islands.size, took_s=took_s)


def _in_two_trips(
    values: Tensor, islands: IslandGroup, codec: Codec, divisor: Tensor | None, scales: Sequence[float] | None
) -> tuple[Tensor, Tensor]:
    """The mean, and what this island has sent: [Note: The two trips of an all-reduce]."""
    size, numel = islands.size, values.numel()
    part = -(-numel // size)
    coding, rank = FewBits.of_rows(codec, size, part), islands.rank
    messages = KnownLengths(islands, coding, values.device, "outer")
    rows = pad(values, (0, size * part - numel)).view(size, part)  # a copy
    there = messages.start_exchange(rows, codes_own=True)
    sent = torch.empty(size, part)
    for row in coding.places(size):  # so that no more than one part is there twice
        coding.decode_into(row, there.sent[row], sent[row])
    own = None if divisor is None else divisor[rank * part :][:part]
    arrived = list(there.arrive())
    arrived[rank] = there.sent[rank]
    sums = coding.sum(rank, arrived, rows[rank], is_own_coded=True, weights=scales)
    mean = _divided(sums, size if own is None else pad(own, (0, part - len(own)), value=1.0))
    del sums, there, arrived
    messages.start_gather(mean).finish(rows)
    return rows.view(-1)[:numel], sent.view(-1)[:numel]


def _in_one_trip(
    values: Tensor, islands: IslandGroup, codec: Codec, divisor: Tensor | None, scales: Sequence[float] | None
) -> tuple[Tensor, Tensor]:
    """The same of a sparse codec: [Note: A sparse mean]."""
    size, numel = islands.size, values.numel()
    coding = FewBits.of_rows(codec, size, numel)
    arrived = KnownLengths(islands, coding, values.device, "outer").start_gather(values).arrive()
    total, sent = torch.zeros(numel), torch.empty(0)
    for island in coding.places(size):
        for _, decoded in coding.decode(island, arrived[island]):
            total.add_(decoded, alpha=1.0 if scales is None else scales[island])
            sent = decoded if island == islands.rank else sent
    return _divided(total, size if divisor is None else divisor), sent


def _divided(sums: Tensor, counts: Tensor | int) -> Tensor:
    """Divide sums by counts of the same shape, or by one for all; zero where the count is."""
    if isinstance(counts, int):
        return sums / counts
    return torch.where(counts > 0, sums / counts.clamp(min=1), 0.0)


def _scales(weights: Sequence[int] | None) -> list[float] | None:
    """The factors of the islands' values, 1 on average; None if all are 1."""
    if weights is None or (len(set(weights)) == 1 and weights[0]):
        return None
    mean = sum(weights) / len(weights)
    return [weight / mean if mean else 0.0 for weight in weights]


def sum_over_islands(cluster: Cluster, values: Sequence[int]) -> list[int]:
    """Return the sum of each value over islands. Collective over the ranks at this place in all islands."""
    sums = torch.tensor(values, dtype=torch.int64)
    if cluster.island_group is not None and values:
        dist.all_reduce(sums, group=cluster.island_group)
    return [int(each) for each in sums]
