"""The numbers of the emulated wire; network.py makes the interfaces and filters.

[Note: The wire]
    node 0's namespace                 the switch's namespace                 node 1's namespace
    wire0  (tbf) ====== veth ====== port0 (tbf) -- bridge -- port1 (tbf) ====== veth ====== (tbf) wire0
The filter on wire0 limits the bytes that a node sends, and the filter on its port the bytes that it receives. So each
node has a full-duplex link of the given rate, and nodes that talk to one node share that node's link. All namespaces
are anonymous. The kernel removes them and their interfaces when no process is in them or holds their descriptor.

The rate is accurate for these reasons:
- Segmentation offload stays on. The kernel then moves packets of up to 64 KiB through the filter, which charges each
  with the headers that all its segments would have. Without it two cores cannot both fill 1 Gbit/s and train.
- After a pause a filter lets `burst` bytes pass at once, and it cuts packets that are larger than `burst`. So offloaded
  packets hold no more than the link carries in about 1 ms, and `burst` is one such packet and 2 ms of the link.
- The frames are jumbo frames (9000 bytes), so headers take 0.7 % of the wire instead of 4.4 %. The interface counters
  see one header per offloaded packet, so they agree with payload bytes.
- The queue in front of a filter is deep (0.2 s). After a dropped packet TCP may be silent for 200 ms, which would be
  noise in every measured step. A full queue does not slow down a transfer that the rate limits anyway.
- IPv6 is off on the wire, so only the experiment sends packets.
"""

INTERFACE = "wire0"  # a node's end of its cable

MTU_BYTES = 9000

_FRAME_BYTES = MTU_BYTES + 14  # with the Ethernet header, which filters count too
_MAX_OFFLOADED_BYTES = 65536  # the kernel's default
_OFFLOADED_S = 0.001  # the time of a link for one offloaded packet
_LATE_S = 0.002  # the time by which a busy core is late for a timer
_QUEUE_S, _MIN_QUEUE_BYTES = 0.2, 1 << 20
_MAX_LIMIT_BYTES = 2**31  # the kernel keeps the limit in 32 bits


def node_address(node: int) -> str:
    """Return the IPv4 address of a node on the wire."""
    return f"10.77.{node // 250}.{node % 250 + 1}"  # 250 nodes share the third number; the fourth is 1 to 250


def offloaded_bytes(bits_per_s: float | None) -> int:
    """Return the size of the largest offloaded packet: 1 ms of the link, but at least two frames and at most 64 KiB."""
    if bits_per_s is None:
        return _MAX_OFFLOADED_BYTES
    return int(min(max(bits_per_s / 8 * _OFFLOADED_S, 2 * _FRAME_BYTES), _MAX_OFFLOADED_BYTES))


def token_bucket(bits_per_s: float) -> dict[str, int]:
    """Return the parameters of the filter at one end of a cable: `rate` in bytes per second, the others in bytes."""
    bytes_per_s = bits_per_s / 8
    # One offloaded packet, one frame for the headers of its segments, and the bytes that a late timer must make up for.
    burst_bytes = offloaded_bytes(bits_per_s) + _FRAME_BYTES + int(bytes_per_s * _LATE_S)
    queue_bytes = max(int(bytes_per_s * _QUEUE_S), _MIN_QUEUE_BYTES)
    limit_bytes = min(burst_bytes + queue_bytes, _MAX_LIMIT_BYTES)
    return {"rate": int(bytes_per_s), "burst": burst_bytes, "limit": limit_bytes, "mtu": MTU_BYTES}
