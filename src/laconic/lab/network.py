"""The network of a lab, made of namespaces, interfaces and filters of the kernel: see [Note: The wire]."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from pyroute2 import IPRoute

from laconic.lab import linux
from laconic.lab.counters import InterfaceBytes, interface_bytes
from laconic.lab.wire import INTERFACE, MTU_BYTES, node_address, offloaded_bytes, token_bucket

_TC_ROOT = 0xFFFFFFFF  # TC_H_ROOT of <linux/pkt_sched.h>: the parent of an interface's only filter
_TBF_HANDLE = 0x10000  # written 1: in the commands of tc


class LabNetwork:
    """A switch and its nodes. The calling thread moves between their namespaces, so its process must have no other.

    Raises: OSError or pyroute2.NetlinkError if the kernel refuses.
    """

    def __init__(self, nodes: int) -> None:
        self._home = self._open_namespace()
        self._nodes: list[int] = []
        self._ends: list[tuple[IPRoute, int]] = []  # for each end of a cable: a socket in its namespace, its index
        self._shaped = False
        try:
            linux.unshare(linux.CLONE_NEWNET)
            self._switch = self._open_namespace()  # never read or closed: it keeps the namespace alive
            switch = IPRoute()  # a netlink socket stays in the namespace it was opened in
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
        route = IPRoute()
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
