"""Makes the network of a lab, of the kernel's parts: see [Note: The wire]."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyroute2 import IPRoute

from laconic.lab import linux
from laconic.lab.counters import InterfaceBytes, interface_bytes
from laconic.lab.wire import INTERFACE, MTU_BYTES, node_address, offloaded_bytes, token_bucket

_TC_ROOT = 0xFFFFFFFF
_TBF_HANDLE = 0x10000
_NETWORK_FILE = "/proc/self/ns/net"


class Network:
    """A switch and its nodes. The calling process must be single-threaded, for it visits the namespaces it makes."""

    def __init__(self, nodes: int) -> None:
        self._home = os.open(_NETWORK_FILE, os.O_RDONLY)
        try:
            self._switch = self._new_namespace()
            self._switch_route = IPRoute()  # a netlink socket stays in the namespace it was opened in
            self._switch_route.link("add", ifname="switch", kind="bridge")
            bridge = self._index(self._switch_route, "switch")
            self._nodes: list[int] = []
            self._node_routes: list[IPRoute] = []
            for node in range(nodes):
                self._add_node(node, bridge)
            self._switch_route.link("set", index=bridge, state="up")
        finally:
            linux.set_network_namespace(self._home)
        self._shaped = False

    @staticmethod
    def _new_namespace() -> int:
        """Enter a new namespace and return its descriptor."""
        linux.unshare(linux.CLONE_NEWNET)
        return os.open(_NETWORK_FILE, os.O_RDONLY)

    @staticmethod
    def _index(route: IPRoute, name: str) -> int:
        return route.link_lookup(ifname=name)[0]

    def _add_node(self, node: int, bridge: int) -> None:
        namespace = self._new_namespace()
        self._nodes.append(namespace)
        route = IPRoute()
        self._node_routes.append(route)
        port = f"port{node}"
        switch = self._switch_route
        switch.link(
            "add", ifname=port, kind="veth", mtu=MTU_BYTES,
            peer={"ifname": INTERFACE, "mtu": MTU_BYTES, "net_ns_fd": namespace},
        )  # fmt: skip
        switch.link("set", index=self._index(switch, port), master=bridge, state="up")
        _disable_ipv6(INTERFACE)
        wire = self._index(route, INTERFACE)
        route.link("set", index=self._index(route, "lo"), state="up")
        route.addr("add", index=wire, address=node_address(node), prefixlen=16)
        route.link("set", index=wire, state="up")

    @contextmanager
    def inside(self, node: int) -> Iterator[None]:
        """Run the body, and what it starts, in the namespace of `node`."""
        linux.set_network_namespace(self._nodes[node])
        try:
            yield
        finally:
            linux.set_network_namespace(self._home)

    def set_rate(self, bits_per_s: float | None) -> None:
        """Limit every link to `bits_per_s` in each direction; None removes the limit."""
        ends = [(route, INTERFACE) for route in self._node_routes]
        ends += [(self._switch_route, f"port{node}") for node in range(len(self._nodes))]
        for route, name in ends:
            index = self._index(route, name)
            if self._shaped:
                route.tc("del", index=index, handle=0, parent=_TC_ROOT)
            # Read by TCP when a connection is made, so connections that outlive a change of rate keep the old size.
            route.link("set", index=index, gso_max_size=offloaded_bytes(bits_per_s))
            if bits_per_s is not None:
                route.tc("add", "tbf", index, _TBF_HANDLE, parent=_TC_ROOT, **token_bucket(bits_per_s))
        self._shaped = bits_per_s is not None

    def counters(self, node: int) -> InterfaceBytes:
        with self.inside(node):
            counted = interface_bytes(INTERFACE)
        assert counted is not None
        return counted


def _disable_ipv6(interface: str) -> None:
    switch = Path(f"/proc/sys/net/ipv6/conf/{interface}/disable_ipv6")
    if switch.exists():  # a kernel without IPv6 has nothing to turn off; a read-only /proc/sys keeps some chatter
        try:
            switch.write_text("1")
        except OSError:
            return
