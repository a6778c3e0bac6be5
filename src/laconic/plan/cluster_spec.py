"""The figures of a run's machines, as one object in SI units.

[Note: Shared figures]
Some figures are of one rank and some of a whole node, as the hardware has them. Each rank has a device of its own. The
ranks of a node share the node's wire, its host memory, and perhaps the link to the host. Rates between ranks hold while
all ranks of the cluster talk at once, as they do in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch

from laconic.comm.traffic import Level
from laconic.config.section import ConfigError, Section
from laconic.policy import Bound, Count

DTYPES = ("float32", "tfloat32", "bfloat16", "float16", "float8")
"""The types of numbers whose products have a rate. `float32` is without tensor cores; `tfloat32` with them."""
DEFAULT_HEADER_FACTOR = 1.0456
"""TCP with timestamps in Ethernet frames of 1500 bytes: 1514 bytes for 1448 of payload."""

_Bytes = Annotated[int, Bound(lambda value: 1e6 <= value <= 1e15, "lie between 1 MB and 1 PB")]
_BytesPerS = Annotated[float, Bound(lambda value: 1e3 <= value <= 1e15, "lie between 1 kB/s and 1 PB/s")]
_BitsPerS = Annotated[float, Bound(lambda value: 1e3 <= value <= 1e15, "lie between 1 kbit/s and 1 Pbit/s")]
_Latency = Annotated[float, Bound(lambda value: 1e-9 <= value <= 10, "lie between 1 ns and 10 s")]
_Share = Annotated[float, Bound(lambda value: 0 <= value <= 1, "lie in [0, 1]")]
_PositiveShare = Annotated[float, Bound(lambda value: 0.001 <= value <= 1, "lie in [0.001, 1]")]
_HeaderFactor = Annotated[float, Bound(lambda value: 1 <= value <= 2, "lie in [1, 2], since headers only add bytes")]
_LEAST_FLOPS, _MOST_FLOPS = 1e6, 1e18


@dataclass(frozen=True, kw_only=True)
class ClusterSpec(Section):
    """The figures of a cluster: [Note: Shared figures].

    Raises:
        ConfigError: a figure is zero, negative, impossible or missing. The message names the figure.
    """

    nodes: Count
    """The number of machines."""
    ranks_per_node: Count
    """The number of ranks, and so of devices, on each machine."""
    device: str | None = None
    """The name of the devices, for people."""
    network: str | None = None
    """The name of the network between nodes, for people."""

    device_memory_bytes: _Bytes
    """The memory of one rank's device. On CPU: a rank's part of its node's memory."""
    device_flops_per_s: Mapping[str, float]
    """The rate that large matrix products reach on one device, by dtype: some of `DTYPES`."""
    device_memory_bytes_per_s: _BytesPerS
    """The bytes that one device reads and writes in its memory, together. A copy counts twice."""

    device_attention_share: _PositiveShare = 1.0
    """The rate of fused attention, as a share of that of products."""
    device_launch_s: _Latency | None = None
    """What each operation of a model takes besides its work, where nothing hides it: on a CPU. None: nothing."""

    host_memory_bytes: _Bytes
    """The memory of one node."""
    host_memory_bytes_per_s: _BytesPerS | None = None
    """The bytes that one node's processors read and write in its memory, together; None if that sets no limit."""
    host_to_device_bytes_per_s: _BytesPerS
    """The bytes that one link brings from host memory to a device. On CPU: of a copy inside the memory."""
    device_to_host_bytes_per_s: _BytesPerS
    """The same in the other direction, which works at the same time."""
    ranks_per_host_link: Count = 1
    """The number of a node's ranks that share one such link."""

    local_bytes_per_s: _BytesPerS | None = None
    """The payload bytes that one rank sends to the other ranks of its node, while it receives as many."""
    local_latency_s: _Latency | None = None
    """The time that the smallest collective inside a node adds to compute. On a CPU, compute does not hide it."""
    local_overlap: _Share = 1.0
    """The share of a transfer inside the node that compute hides. On a CPU the cores that compute copy."""
    wire_bits_per_s: _BitsPerS | None = None
    """The bits that leave one node, headers included, while as many enter it. Its ranks share them."""
    wire_latency_s: _Latency | None = None
    """The same between nodes."""
    wire_overlap: _Share = 1.0
    """The share of a transfer between nodes that compute hides."""
    wire_header_factor: _HeaderFactor = DEFAULT_HEADER_FACTOR
    """The bytes that a node's network interface counts for each byte of payload."""

    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Where each figure comes from, by key; `device_flops_per_s.bfloat16` for a rate."""

    @property
    def ranks(self) -> int:
        """The number of ranks of the cluster."""
        return self.nodes * self.ranks_per_node

    def flops_per_s(self, dtype: str | torch.dtype) -> float:
        """Return the FLOP/s of large matrix products of a dtype of torch, or of one of `DTYPES`.

        Raises:
            ConfigError: the cluster has no such figure.
        """
        name = str(dtype).removeprefix("torch.")
        name = "float8" if name.startswith("float8") else name
        if name not in self.device_flops_per_s:
            raise ConfigError(
                f"device_flops_per_s.{name} is missing; give the rate of large matrix products in {name} (the cluster "
                f"has {', '.join(self.device_flops_per_s)})"
            )
        return self.device_flops_per_s[name]

    def bytes_per_s(self, level: Level) -> float:
        """Return the payload bytes per second that leave one rank (`local`), or one node (`node` and `island`).

        Raises:
            ConfigError: the cluster has no such figure.
        """
        if level == "local":
            return self._given("local_bytes_per_s")
        return self._given("wire_bits_per_s") / 8 / self.wire_header_factor

    def latency_s(self, level: Level) -> float:
        """Return the duration of the smallest collective on a level.

        Raises:
            ConfigError: the cluster has no such figure.
        """
        return self._given("local_latency_s" if level == "local" else "wire_latency_s")

    def overlap(self, level: Level) -> float:
        """Return the share of a transfer on a level that compute hides."""
        return self.local_overlap if level == "local" else self.wire_overlap

    def host_bytes_per_s(self, *, to_device: bool) -> float:
        """Return the bytes per second of one rank's host copies in a direction, while its node's other ranks copy."""
        link = self.host_to_device_bytes_per_s if to_device else self.device_to_host_bytes_per_s
        return link / self.ranks_per_host_link

    def _given(self, key: str) -> float:
        value: float | None = getattr(self, key)
        if value is None:
            raise ConfigError(_missing(key))
        return value

    @classmethod
    def prefix(cls) -> str:
        """Nothing: the file has no sections."""
        return ""

    def _check_keys(self) -> None:
        self._check("device_flops_per_s", bool(self.device_flops_per_s), f"must have a rate of {' or '.join(DTYPES)}")
        for dtype, rate in self.device_flops_per_s.items():
            if dtype not in DTYPES:
                raise ConfigError(f"device_flops_per_s.{dtype} is unknown; use {', '.join(DTYPES)}")
            if not _LEAST_FLOPS <= rate <= _MOST_FLOPS:
                raise ConfigError(f"device_flops_per_s.{dtype} = {rate!r} must lie between 1 MFLOP/s and 1 EFLOP/s")
        message = f"must be at most ranks_per_node = {self.ranks_per_node}, the ranks that can share a link"
        self._check("ranks_per_host_link", self.ranks_per_host_link <= self.ranks_per_node, message)
        for count, keys in (
            (self.ranks_per_node, ("local_bytes_per_s", "local_latency_s")),
            (self.nodes, ("wire_bits_per_s", "wire_latency_s")),
        ):
            for key in keys:
                if count > 1 and getattr(self, key) is None:
                    raise ConfigError(_missing(key))


_MEANINGS = {
    "nodes": "the number of machines",
    "ranks_per_node": "the number of ranks on each machine",
    "device_memory_bytes": "the memory of one device, or `device`, the name of one in the table",
    "device_flops_per_s": "a section with the FLOP/s of large matrix products by dtype, or `device`",
    "device_memory_bytes_per_s": "the rate of one device's memory, or `device`",
    "host_memory_bytes": "the memory of one machine",
    "host_to_device_bytes_per_s": "the rate of copies to a device, `host_link`, or `device`",
    "device_to_host_bytes_per_s": "the rate of copies from a device, `host_link`, or `device`",
    "local_bytes_per_s": "the rate between ranks of a node, `local_network`, or `device`",
    "local_latency_s": "the latency between ranks of a node, `local_network`, or `device`",
    "wire_bits_per_s": "the rate at which data leaves a node, or `network`, the name of one in the table",
    "wire_latency_s": "the latency between nodes, or `network`, the name of one in the table",
}


def _missing(key: str) -> str:
    """The message for a figure that is needed and not there."""
    return f"{key} is missing; give {_MEANINGS[key]}"


def refuse_missing(values: Mapping[str, object]) -> None:
    """Refuse the arguments of a `ClusterSpec` that lack one without a default.

    Raises:
        ConfigError: a figure is missing. The message names the first, and what gives it.
    """
    optional = ("local_", "wire_")  # the spec itself knows when it needs them
    for key in _MEANINGS:
        if key not in values and not key.startswith(optional):
            raise ConfigError(_missing(key))
