"""The emulated wire in numbers; network.py makes the interfaces and filters.

[Note: The wire]
    node 0's namespace                 the switch's namespace                 node 1's namespace
    wire0  (tbf) ====== veth ====== port0 (tbf) -- bridge -- port1 (tbf) ====== veth ====== (tbf) wire0
The filter on wire0 limits the bytes that a node sends, and the filter on its port the bytes that it receives. So each
node has a full-duplex link of the given rate, and nodes that talk to one node share that node's link. All namespaces
are anonymous. The kernel removes them and their interfaces when no process is in them or holds their descriptor.

The rate is accurate for these reasons:
- Segmentation offload stays on. The kernel then moves packets of up to 64 KiB through the filter, which charges each
  with the headers that all its segments would have. Without it two cores cannot both fill 1 Gbit/s and train.
- After a pause a filter lets `burst` bytes pass at once, and it cuts packets larger than that. So offloaded packets
  hold no more than the link carries in about 1 ms, and the bucket holds one such packet and 2 ms of the link.
- The frames are jumbo frames (9000 bytes), so headers take 0.7 % of the wire instead of 4.4 %. The interface counters
  see one header per offloaded packet, so they agree with payload bytes.
- The queue in front of a filter is deep (0.2 s). A dropped packet costs TCP up to 200 ms of silence, which would be
  noise in every measured step. A standing queue costs nothing to a transfer that the rate limits.
- IPv6 is off on the wire, so only the experiment sends.
"""

INTERFACE = "wire0"  # a node's end of its cable

MTU_BYTES = 9000

_FRAME_BYTES = MTU_BYTES + 14  # with the Ethernet header, which filters count too
_MAX_OFFLOADED_BYTES = 65536
_LATE_S = 0.002
_QUEUE_S = 0.2


def node_address(node: int) -> str:
    """Return the IPv4 address of a node on the wire."""
    return f"10.77.{node // 250}.{node % 250 + 1}"


def offloaded_bytes(bits_per_s: float | None) -> int:
    """Return the largest packet to hand to a link at once: 1 ms of the link, and at least two frames."""
    if bits_per_s is None:
        return _MAX_OFFLOADED_BYTES
    return int(min(max(bits_per_s / 8 * 1e-3, 2 * _FRAME_BYTES), _MAX_OFFLOADED_BYTES))


def token_bucket(bits_per_s: float) -> dict[str, int]:
    """Return the parameters of the filter at one end of a cable: bytes per second, at once and waiting."""
    bytes_per_s = bits_per_s / 8
    # One offloaded packet with its segments' headers, and the bytes of the time that a busy core is late for a timer.
    burst_bytes = offloaded_bytes(bits_per_s) + _FRAME_BYTES + int(bytes_per_s * _LATE_S)
    limit_bytes = burst_bytes + max(int(bytes_per_s * _QUEUE_S), 1 << 20)
    return {"rate": int(bytes_per_s), "burst": burst_bytes, "limit": min(limit_bytes, 2**31), "mtu": MTU_BYTES}
