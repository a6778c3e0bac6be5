"""The kernel's byte counters of a network interface. They check the bytes that the engine counts itself."""

import os
from dataclasses import dataclass

import psutil

LOOPBACK = "lo"
"""The interface over which the ranks of a node reach each other, by sockets."""
INTERFACE_VARIABLE = "LACONIC_LAB_INTERFACE"
"""The environment variable in which the lab names a node's interface. It is absent or empty without a wire."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterfaceBytes:
    """The bytes that one interface has sent and received since the kernel made it, headers included."""

    sent: int
    received: int

    def __sub__(self, earlier: "InterfaceBytes") -> "InterfaceBytes":
        return InterfaceBytes(sent=self.sent - earlier.sent, received=self.received - earlier.received)


def interface_bytes(interface: str | None = None) -> InterfaceBytes | None:
    """Read the counters of `interface`, by default of this node's interface; return None outside a lab.

    All ranks of a node share its interface. A script reads the counters twice and subtracts. Cost: one file of /proc.

    Raises:
        ValueError: this network namespace has no interface of that name.
    """
    name = interface or os.environ.get(INTERFACE_VARIABLE)
    if not name:
        return None
    # psutil reads /proc/net, which shows the reader's network namespace. /sys shows the one in which it was mounted.
    counted = psutil.net_io_counters(pernic=True, nowrap=False).get(name)
    if counted is None:
        raise ValueError(f"this network namespace has no interface {name!r}; is {INTERFACE_VARIABLE} set by hand?")
    return InterfaceBytes(sent=counted.bytes_sent, received=counted.bytes_recv)


def loopback_bytes() -> InterfaceBytes | None:
    """Read the bytes that the processes of this node have exchanged over sockets; None outside a lab with a wire."""
    return interface_bytes(LOOPBACK) if os.environ.get(INTERFACE_VARIABLE) else None
