"""The emulated wire in numbers. What is made of them is in network.py.

[Note: The wire]
    node 0's namespace                 the switch's namespace                 node 1's namespace
    wire0  (tbf) ====== veth ====== port0 (tbf) -- bridge -- port1 (tbf) ====== veth ====== (tbf) wire0
The filter on wire0 limits what a node sends, the one on its port what it receives, so a node has a full-duplex link
of the given rate, and three nodes that talk to one share that one's link. All namespaces are anonymous: they live as
long as a process is in them or holds their descriptor, so the kernel removes them, interfaces and all, with the last.

What makes the rate accurate:
- Segmentation offload stays on. The kernel then moves packets of up to 64 KiB through the filter, which charges each
  with the headers that all its segments would have. Without it two cores cannot both fill 1 Gbit/s and train.
- A filter lets `burst` bytes pass at once after idling, and cuts packets larger than that. So the size of offloaded
  packets is limited to what the link carries in about 1 ms, and the bucket holds one such packet and 2 ms of the link.
- The frames are jumbo frames (9000 bytes), so headers take 0.7 % of the wire instead of 4.4 %, and interface counters,
  which see one header per offloaded packet, agree with payload bytes.
- The queue in front of a filter is deep (0.2 s): a dropped packet costs TCP up to 200 ms of silence, which would be
  noise in every measured step, while a standing queue costs nothing to a transfer limited by the rate.
- IPv6 is off on the wire, so nothing but the experiment sends.
"""

INTERFACE = "wire0"
"""The name of a node's end of its cable."""

MTU_BYTES = 9000

_FRAME_BYTES = MTU_BYTES + 14  # with the Ethernet header, which filters count too
_MAX_OFFLOADED_BYTES = 65536
_LATE_S = 0.002
_QUEUE_S = 0.2


def node_address(node: int) -> str:
    return f"10.77.{node // 250}.{node % 250 + 1}"


def offloaded_bytes(bits_per_s: float | None) -> int:
    """The largest packet to hand to a link at once: 1 ms of it, two frames at least."""
    if bits_per_s is None:
        return _MAX_OFFLOADED_BYTES
    return int(min(max(bits_per_s / 8 * 1e-3, 2 * _FRAME_BYTES), _MAX_OFFLOADED_BYTES))


def token_bucket(bits_per_s: float) -> dict[str, int]:
    """Parameters of the filter for one end of a cable: bytes per second, bytes at once, bytes waiting."""
    bytes_per_s = bits_per_s / 8
    # One offloaded packet with its segments' headers, and what the link carries while a busy core is late for a timer.
    burst_bytes = offloaded_bytes(bits_per_s) + _FRAME_BYTES + int(bytes_per_s * _LATE_S)
    limit_bytes = burst_bytes + max(int(bytes_per_s * _QUEUE_S), 1 << 20)
    return {"rate": int(bytes_per_s), "burst": burst_bytes, "limit": min(limit_bytes, 2**31), "mtu": MTU_BYTES}
