"""The emulated wire: namespaces, interfaces and filters of the kernel, and their numbers.

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

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.lab import linux
from laconic.lab.counters import InterfaceBytes, interface_bytes

if TYPE_CHECKING:
    from pyroute2 import IPRoute  # which only a lab with a wire needs

INTERFACE = "wire0"  # a node's end of its cable

MTU_BYTES = 9000

_FRAME_BYTES = MTU_BYTES + 14  # with the Ethernet header, which filters count too
_MAX_OFFLOADED_BYTES = 65536  # the kernel's default
_OFFLOADED_S = 0.001  # the time of a link for one offloaded packet
_LATE_S = 0.002  # the time by which a busy core is late for a timer
_QUEUE_S, _MIN_QUEUE_BYTES = 0.2, 1 << 20
_MAX_LIMIT_BYTES = 2**31  # the kernel keeps the limit in 32 bits
_TC_ROOT = 0xFFFFFFFF  # TC_H_ROOT of <linux/pkt_sched.h>: the parent of an interface's only filter
_TBF_HANDLE = 0x10000  # written 1: in the commands of tc


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


class LabNetwork:
    """A switch and its nodes. The calling thread moves between their namespaces, so its process must have no other.

    Raises: OSError or pyroute2.NetlinkError if the kernel refuses, ImportError without pyroute2.
    """

    def __init__(self, nodes: int) -> None:
        from pyroute2 import IPRoute

        self._new_route = IPRoute  # a netlink socket stays in the namespace it was opened in
        self._home = self._open_namespace()
        self._nodes: list[int] = []
        self._ends: list[tuple[IPRoute, int]] = []  # for each end of a cable: a socket in its namespace, its index
        self._shaped = False
        try:
            linux.unshare(linux.CLONE_NEWNET)
            self._switch = self._open_namespace()  # never read or closed: it keeps the namespace alive
            switch = self._new_route()
            switch.link("add", ifname="switch", kind="bridge")
            bridge = switch.link_lookup(ifname="switch")[0]
            for node in range(nodes):
                self._add_node(node, switch, bridge)
            switch.link("set", index=bridge, state="up")
        finally:
            linux.setns(self._home, linux.CLONE_NEWNET)

    @staticmethod
    def _open_namespace() -> int:
        return os.open("/proc/self/ns/net", os.O_RDONLY)

    def _add_node(self, node: int, switch: IPRoute, bridge: int) -> None:
        linux.unshare(linux.CLONE_NEWNET)
        self._nodes.append(self._open_namespace())
        route = self._new_route()
        peer = {"ifname": INTERFACE, "mtu": MTU_BYTES, "net_ns_fd": self._nodes[node]}
        switch.link("add", ifname=f"port{node}", kind="veth", mtu=MTU_BYTES, peer=peer)
        port, wire = switch.link_lookup(ifname=f"port{node}")[0], route.link_lookup(ifname=INTERFACE)[0]
        switch.link("set", index=port, master=bridge, state="up")
        _disable_ipv6(INTERFACE)
        route.link("set", index=route.link_lookup(ifname="lo")[0], state="up")
        route.addr("add", index=wire, address=node_address(node), prefixlen=16)
        route.link("set", index=wire, state="up")
        self._ends += [(route, wire), (switch, port)]

    def namespace(self, node: int) -> int:
        """The descriptor of the namespace of `node`."""
        return self._nodes[node]

    @contextlib.contextmanager
    def inside(self, node: int) -> Iterator[None]:
        """Run the body, and the processes it starts, in the namespace of `node`."""
        linux.setns(self._nodes[node], linux.CLONE_NEWNET)
        try:
            yield
        finally:
            linux.setns(self._home, linux.CLONE_NEWNET)

    def set_rate(self, bits_per_s: float | None) -> None:
        """Limit every link to `bits_per_s` in each direction; None removes the limit."""
        for route, index in self._ends:
            if self._shaped:
                route.tc("del", index=index, handle=0, parent=_TC_ROOT)
            # TCP reads this size when it opens a connection, so connections that are open keep the old size.
            route.link("set", index=index, gso_max_size=offloaded_bytes(bits_per_s))
            if bits_per_s is not None:
                route.tc("add", "tbf", index, _TBF_HANDLE, parent=_TC_ROOT, **token_bucket(bits_per_s))
        self._shaped = bits_per_s is not None

    def counters(self, node: int) -> InterfaceBytes:
        """Return the counters of the interface of `node`."""
        with self.inside(node):
            counted = interface_bytes(INTERFACE)
        assert counted is not None
        return counted


def _disable_ipv6(interface: str) -> None:
    # A kernel without IPv6 has no such file. Where /proc/sys is read-only, some IPv6 packets stay on the wire.
    with contextlib.suppress(OSError):
        Path(f"/proc/sys/net/ipv6/conf/{interface}/disable_ipv6").write_text("1")
