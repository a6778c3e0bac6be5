"""An emulated cluster on one machine: network namespaces, a real bandwidth limit, ordinary torchrun.

    from laconic.lab import Lab

    with Lab(nodes=2, rate_bits_per_s=200e6) as lab:
        result = lab.run(["train.py", "--steps", "10"], local=2)
    print(result.exit_code, [node.sent_bytes for node in result.nodes])

A lab needs root, or a kernel that lets users create user namespaces, or `wire=False`. See `laconic lab --help`.
"""

from laconic.lab.counters import InterfaceBytes, interface_bytes
from laconic.lab.lab import Failure, Lab, LabUnavailable, NodeResult, RunResult
from laconic.lab.rate import format_rate, parse_rate

__all__ = [
    "Failure",
    "InterfaceBytes",
    "Lab",
    "LabUnavailable",
    "NodeResult",
    "RunResult",
    "format_rate",
    "interface_bytes",
    "parse_rate",
]
