"""The kernel's counters of a network interface, which the engine's own byte counts must agree with."""

import os
from dataclasses import dataclass

import psutil

INTERFACE_VARIABLE = "LACONIC_LAB_INTERFACE"
"""The environment variable in which the lab names a node's interface. It is absent or empty without a wire."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterfaceBytes:
    """The bytes that a node has sent and received over one interface since it exists, headers included."""

    sent: int
    received: int

    def __sub__(self, earlier: "InterfaceBytes") -> "InterfaceBytes":
        return InterfaceBytes(sent=self.sent - earlier.sent, received=self.received - earlier.received)


def interface_bytes(interface: str | None = None) -> InterfaceBytes | None:
    """Read the counters of this node's interface, which all its ranks share, or of `interface`; None outside a lab.

    A script reads them twice and subtracts. Cost: one small file of /proc.

    Raises:
        ValueError: this network namespace has no interface of that name.
    """
    name = interface or os.environ.get(INTERFACE_VARIABLE)
    if not name:
        return None
    # psutil reads /proc/net, which belongs to the reader's network namespace; /sys belongs to whoever mounted it.
    counted = psutil.net_io_counters(pernic=True, nowrap=False).get(name)
    if counted is None:
        raise ValueError(f"this network namespace has no interface {name!r}; is {INTERFACE_VARIABLE} set by hand?")
    return InterfaceBytes(sent=counted.bytes_sent, received=counted.bytes_recv)
