"""What the kernel says went over an interface: the truth that byte counts are held to."""

import os
from dataclasses import dataclass
from pathlib import Path

INTERFACE_VARIABLE = "LACONIC_LAB_INTERFACE"
"""Set by the lab in every process of a node: the name of its interface. Absent or empty where there is no wire."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterfaceBytes:
    """Bytes that passed one interface since it was made, headers included."""

    sent: int
    """Bytes the node put on the wire."""
    received: int
    """Bytes the node took off the wire."""

    def __sub__(self, earlier: "InterfaceBytes") -> "InterfaceBytes":
        return InterfaceBytes(sent=self.sent - earlier.sent, received=self.received - earlier.received)


def interface_bytes(interface: str | None = None) -> InterfaceBytes | None:
    """The counters of this node's interface, shared by all ranks of the node; None outside a lab.

    A script reads them twice and subtracts. Cost: one small file of /proc.
    Raises: ValueError if `interface` does not exist in this network namespace.
    """
    name = interface or os.environ.get(INTERFACE_VARIABLE)
    if not name:
        return None
    # /proc/net belongs to the network namespace of the reader; /sys/class/net to that of whoever mounted /sys.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        label, _, numbers = line.partition(":")
        if label.strip() == name:
            fields = numbers.split()
            return InterfaceBytes(sent=int(fields[8]), received=int(fields[0]))
    raise ValueError(f"there is no interface {name!r} in this network namespace; is {INTERFACE_VARIABLE} set by hand?")
