"""Measurements of all ranks together beyond the figures of a cluster file: clocks, each link, device and placement.

[Note: Sure bounds of a clock]
All ranks write down their clock, exchange what they wrote, and look at the clock again. Rank 0's first look came before
rank r's second one, and rank r's first before rank 0's second. So r's clock minus 0's lies between (r's first - 0's
second) and (r's second - 0's first), however slow the network or the machine is. Rounds make the bounds narrower.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist
from torch import nn

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.plan.measure import Effort, Figure
from laconic.shard.api import fully_shard
from laconic.shard.policies import Where

QUICK = Effort(repetitions=3, enough_s=0.05)
"""Enough to show the figures; a cluster file takes more repetitions."""
_CLOCK_ROUNDS = 10
_MOST_DISTANCE = 4
"""Among many nodes, each measures its links with this many before it and after it."""
_LINK_BYTES = tuple(2**power for power in range(17, 30, 2))
_LINK_S = 0.25
"""Long beside the bursts that a switch or a filter lets through."""
_REPETITIONS = 3
_PRODUCTS = 30
_PRODUCT_ROWS = {"cpu": 512}
_DEVICE_ROWS = 8192
_PLACEMENT_S = 3.0
"""The steps of a placement take this long together, and at least one step."""
_MOST_STEPS = 10
_LAYERS = 6
_CROSSING_S = 0.25
"""The model of a placement is so large that its weights cross the wire in about this time."""
_WIDTHS = (64, 4096)


@dataclass(frozen=True, kw_only=True)
class PlacementStep:
    """A step of a small model with its node shards in one place."""

    where: Where
    step_s: float
    """The median of the steps, each on its slowest rank."""
    sent_bytes: int
    """Payload that a node sends in a step."""
    numel: int
    """Of the model."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What all ranks have measured together; equal on all of them."""

    clocks_s: list[tuple[float, float]]
    """By rank: the least and the most that its clock is ahead of rank 0's: [Note: Sure bounds of a clock]."""
    links: dict[tuple[int, int], float]
    """By sending and receiving node: payload bits per second."""
    products_s: list[float]
    """By rank: the time of the same product, the shortest of many, while all ranks compute."""
    figures: dict[str, float]
    """The medians of the figures, by key of the cluster file."""
    steps: list[PlacementStep]


def measure_all(cluster: Cluster, ranks: RankGroup, figures: list[Figure]) -> Measured:
    """Measure everything besides `figures`, which were measured before. Collective over all ranks."""
    by_key = {figure.key: figure.median for figure in figures}
    return Measured(
        clocks_s=clock_bounds(ranks),
        products_s=product_times(cluster, ranks),
        links=link_rates(cluster, ranks),
        figures=by_key,
        steps=placement_steps(cluster, ranks, by_key.get("wire_bits_per_s")),
    )


def wall_clock() -> float:
    """The time that log files and the file system have, in seconds."""
    return time.time()


def clock_bounds(ranks: RankGroup) -> list[tuple[float, float]]:
    """See `Measured.clocks_s`. Collective."""
    looks = []
    for _ in range(_CLOCK_ROUNDS):
        first = wall_clock()
        ranks.gather(None)
        looks.append([first, wall_clock()])
    by_rank = ranks.gather(looks)
    return [
        (
            max(own[0] - zero[1] for own, zero in zip(rounds, by_rank[0], strict=True)),
            min(own[1] - zero[0] for own, zero in zip(rounds, by_rank[0], strict=True)),
        )
        for rounds in by_rank
    ]


def turns(nodes: int) -> Iterator[list[tuple[int, int]]]:
    """The turns in which links are measured: (sending, receiving) nodes. In a turn each node sends, receives or waits.

    A node that did both would blame the other direction: the acknowledgements of what it receives wait behind what it
    sends. Nodes at most `_MOST_DISTANCE` apart meet, in a circle.
    """
    met = set()
    for distance in range(1, min(nodes // 2, _MOST_DISTANCE) + 1):
        groups: dict[int, list[tuple[int, int]]] = {}
        for node in range(nodes):
            pair = node, (node + distance) % nodes
            if frozenset(pair) not in met:
                met.add(frozenset(pair))
                groups.setdefault(2 if pair[1] < node else node // distance % 2, []).append(pair)
        for pairs in groups.values():
            yield pairs
            yield [(to, of) for of, to in pairs]


def link_rates(cluster: Cluster, ranks: RankGroup) -> dict[tuple[int, int], float]:
    """See `Measured.links`. Collective.

    All ranks of a node send at once, each to the rank with its place, as in training. The best of some repetitions
    counts: other work on the machines can only make a link look slower than it is.
    """
    group = cluster.gather_groups["node"]
    if group is None:
        return {}
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else cluster.device

    def seconds(turn: list[tuple[int, int]], nbytes: int) -> float:
        """The time until this rank has what it receives in this turn; 0 if it receives nothing."""
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        sends = [
            dist.P2POp(dist.isend, buffer, group=group, group_peer=to) for of, to in turn if of == cluster.node_rank
        ]
        takes = [
            dist.P2POp(dist.irecv, buffer, group=group, group_peer=of) for of, to in turn if to == cluster.node_rank
        ]
        ranks.gather(None)  # all ranks begin together
        start = time.perf_counter()
        for work in dist.batch_isend_irecv(sends + takes) if sends + takes else []:
            work.wait()
        _finish(device)
        return time.perf_counter() - start if takes else 0.0

    rates: dict[tuple[int, int], float] = {}
    for turn in turns(cluster.num_nodes):
        seconds(turn, 1)  # connects
        for nbytes in _LINK_BYTES:
            best = min(seconds(turn, nbytes) for _ in range(_REPETITIONS))
            if max(ranks.gather(best)) >= _LINK_S:
                break
        by_rank = ranks.gather(8 * nbytes / best if best else 0.0)
        for of, to in turn:
            rates[of, to] = sum(by_rank[to * cluster.num_local : (to + 1) * cluster.num_local])
    return rates


def product_times(cluster: Cluster, ranks: RankGroup) -> list[float]:
    """See `Measured.products_s`. Collective. The shortest of many is free of what else a processor does meanwhile."""
    device = cluster.device
    rows = _PRODUCT_ROWS.get(device.type, _DEVICE_ROWS)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    factors = [torch.randn(rows, rows, device=device).to(dtype) for _ in range(2)]
    product = torch.empty_like(factors[0])
    ranks.gather(None)
    own = []
    for _ in range(_PRODUCTS):
        start = time.perf_counter()
        multiply(factors[0], factors[1], product)
        _finish(device)
        own.append(time.perf_counter() - start)
    return ranks.gather(min(own))


def multiply(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> None:
    """The work by which devices are compared."""
    torch.matmul(a, b, out=product)


def placement_steps(cluster: Cluster, ranks: RankGroup, wire_bits_per_s: float | None) -> list[PlacementStep]:
    """Steps of a small model with each place for its node shards, by the engine itself. Collective."""
    dtype = torch.float32 if cluster.device_type == "cpu" else torch.bfloat16
    crossing_bytes = (wire_bits_per_s or 1e9) / 8 * _CROSSING_S
    width = int((crossing_bytes / dtype.itemsize / _LAYERS) ** 0.5) // 64 * 64
    width = min(max(width, _WIDTHS[0]), _WIDTHS[1])
    return [_steps_with(where, cluster, ranks, width, dtype) for where in get_args(Where)]


def _steps_with(where: Where, cluster: Cluster, ranks: RankGroup, width: int, dtype: torch.dtype) -> PlacementStep:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers).to(cluster.device, dtype)
    numel = sum(parameter.numel() for parameter in model.parameters())
    for layer in (*layers, model):
        fully_shard(layer, mesh=cluster.mesh, cache=where)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.ones(64, width, device=cluster.device, dtype=dtype)

    def step() -> None:
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    _timed(step, ranks, cluster.device)  # makes buffers
    durations: list[float] = []
    before = cluster.traffic.snapshot()
    while sum(durations) < _PLACEMENT_S and len(durations) < _MOST_STEPS:
        durations.append(_timed(step, ranks, cluster.device))
    sent = (cluster.traffic.snapshot() - before).total("node", direction="sent") // len(durations)
    in_node = cluster.num_local * sent
    return PlacementStep(where=where, step_s=statistics.median(durations), sent_bytes=in_node, numel=numel)


def _timed(action: Callable[[], None], ranks: RankGroup, device: torch.device) -> float:
    """The duration of an action on the slowest rank. Collective."""
    start = time.perf_counter()
    action()
    _finish(device)
    return max(ranks.gather(time.perf_counter() - start))


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
