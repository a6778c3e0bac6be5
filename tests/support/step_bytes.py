"""The oracle of a step's bytes: what a node moves in one optimizer step, by strategy and level, as closed formulas.

[Note: Bytes of a step]
N nodes of L ranks make R = N L ranks. Two patterns make every strategy:

- A pass along the flat ring of all ranks brings every part to every rank, or sums it. Over each edge of the ring go
  (R - 1) / R of the buffer. One edge leaves each node, and L - 1 lie inside it.
- A pass on two levels joins ranks with the same place in all nodes: (N - 1) / N of the buffer leaves each node. And it
  joins the ranks of each node: L - 1 buffers move inside it.

A gather is one pass, a reduce-scatter one, an all-reduce two.

| strategy        | weights                                                     | gradients                           |
|-----------------|-------------------------------------------------------------|-------------------------------------|
| fsdp2           | flat, twice                                                 | flat, once                          |
| fsdp2-gloo      | flat, twice                                                 | flat, twice                         |
| fsdp2-hpz       | flat, then inside the node                                  | flat, once                          |
| fsdp2-two-level | two levels, twice                                           | two levels, once                    |
| hsdp            | inside the node, twice                                      | inside the node; across nodes twice |
| ddp             | never                                                       | flat, twice                         |
| ddp-bf16        | never                                                       | flat, twice, in 16 bits             |
| ddp-powersgd    | never                                                       | flat, twice, of the factors         |
| ddp-zero1       | flat, once                                                  | flat, twice                         |
| none            | two levels, twice                                           | two levels, once                    |
| host, device    | two levels, then inside the node; frozen ones inside, twice | two levels, once                    |
| 8bit, 4bit      | as host, in 8.125 or 4.125 bits between nodes               | as host, in as many bits            |
| values          | as host, in 8.125 bits between nodes                        | as host, in 4.125 bits              |
| zero++          | the same, but frozen ones cross, too                        | as host, in 4.125 bits              |

So HSDP crosses the wire with as many bytes as a cache does: its all-reduce gathers gradients where a cache gathers
weights. It pays in memory, because a rank keeps 1 / L of all states instead of 1 / R.

Codes carry a step of 16 bits for every 128 values. The formula counts every parameter as coded: vectors, which cross as
they are, are few.
"""

from dataclasses import dataclass

from laconic.shard.policies import Wire
from laconic.strategies.known.engine import VALUES_WIRE, ZERO_PLUS_PLUS


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """The bytes that one node moves in one step, as a mean over nodes. It receives as many as it sends."""

    node: float
    """Bytes that leave the node over the wire."""
    local: float
    """Bytes that ranks of the node send to each other."""

    def __add__(self, other: "StepBytes") -> "StepBytes":
        return StepBytes(node=self.node + other.node, local=self.local + other.local)

    def __rmul__(self, factor: float) -> "StepBytes":
        return StepBytes(node=factor * self.node, local=factor * self.local)


CODED = {
    **{name: Wire.of(name) for name in ("8bit", "4bit")},
    "values": Wire.of(VALUES_WIRE),
    "zero++": Wire.of(ZERO_PLUS_PLUS["wire"]),
}
"""The policy of crossings, by strategy."""


def step_bytes(
    strategy: str,
    *,
    nodes: int,
    local: int,
    weights_bytes: float,
    gradients_bytes: float,
    frozen_bytes: float = 0.0,
    itemsize: int = 4,
) -> StepBytes:
    """Return the bytes of a step of one micro-batch, from the second step on: [Note: Bytes of a step].

    Args:
        strategy: a PyTorch baseline of shard.strategy, "zero++", one of laconic's caches, "none", "host" or "device",
            or one of its wires, "8bit", "4bit" or "values".
        nodes: the number of nodes.
        local: the number of ranks on each node.
        weights_bytes: the bytes of all weights in the dtype in which they are gathered.
        gradients_bytes: the bytes of all gradients in the dtype in which they are reduced; under PowerSGD those of the
            factors, and of gradients that cross as they are.
        frozen_bytes: the part of `weights_bytes` that does not train.
        itemsize: the bytes of a value in `weights_bytes` and in `gradients_bytes`; it matters only to codecs.

    Raises:
        ValueError: an unknown strategy.
    """
    trained_bytes = weights_bytes - frozen_bytes
    flat_weights, flat_gradients = (_flat(nodes, local, size) for size in (weights_bytes, gradients_bytes))
    across_gradients, inside_gradients = _across(nodes, gradients_bytes), _inside(local, gradients_bytes)
    inside_weights = _inside(local, weights_bytes)
    cached = _across(nodes, trained_bytes) + 2 * inside_weights + inside_gradients + across_gradients
    two_levels = 2 * (_across(nodes, weights_bytes) + inside_weights) + inside_gradients + across_gradients
    known = {
        "fsdp2": 2 * flat_weights + flat_gradients,
        "fsdp2-gloo": 2 * flat_weights + 2 * flat_gradients,
        "fsdp2-hpz": flat_weights + inside_weights + flat_gradients,
        "fsdp2-two-level": two_levels,
        "hsdp": 2 * inside_weights + inside_gradients + 2 * across_gradients,
        "ddp": 2 * flat_gradients,
        "ddp-bf16": 2 / itemsize * 2 * flat_gradients,
        "ddp-powersgd": 2 * flat_gradients,
        "ddp-zero1": 2 * flat_gradients + _flat(nodes, local, trained_bytes),
        "none": two_levels,
        "host": cached,
        "device": cached,
    }
    for name, wire in CODED.items():
        codecs = wire.weight_codec, wire.gradient_codec
        weights, gradients = (codec.payload_bytes(128) / (128 * itemsize) if codec else 1.0 for codec in codecs)
        crossing = weights * _across(nodes, weights_bytes if wire.frozen else trained_bytes)
        known[name] = crossing + gradients * across_gradients + 2 * inside_weights + inside_gradients
    if strategy not in known:
        raise ValueError(f"no formula for strategy {strategy!r}")
    return known[strategy]


def _flat(nodes: int, local: int, nbytes: float) -> StepBytes:
    """A pass along the ring of all ranks."""
    ranks = nodes * local
    edge_bytes = (ranks - 1) / ranks * nbytes
    is_one_node = nodes == 1
    return StepBytes(node=0.0 if is_one_node else edge_bytes, local=(local if is_one_node else local - 1) * edge_bytes)


def _across(nodes: int, nbytes: float) -> StepBytes:
    """A pass between nodes, each rank with those of its place."""
    return StepBytes(node=(nodes - 1) / nodes * nbytes, local=0.0)


def _inside(local: int, nbytes: float) -> StepBytes:
    """A pass between the ranks of a node."""
    return StepBytes(node=0.0, local=(local - 1) * nbytes)
