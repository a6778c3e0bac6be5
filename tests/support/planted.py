"""`laconic doctor` on a rank whose node, the last one, is ill: python -m tests.support.planted FAULTS."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pyroute2 import IPRoute

from laconic.doctor import cli, probes
from laconic.lab import Lab
from laconic.lab.wire import INTERFACE, token_bucket
from laconic.plan.measure import Effort
from tests.support.launch import PATIENCE_S

SLOW_BITS_PER_S = 10e6
_ROOT, _IPC_LOCK, _CAPABILITY_VERSION = 0xFFFFFFFF, 14, 0x20080522


def slow_link() -> None:
    """What this node sends passes a slower filter."""
    route = IPRoute()
    index = route.link_lookup(ifname=INTERFACE)[0]
    route.tc("del", index=index, handle=0, parent=_ROOT)
    route.tc("add", "tbf", index, 0x10000, parent=_ROOT, **token_bucket(SLOW_BITS_PER_S))


def small_memlock() -> None:
    """A limit of 64 KiB, without the capability that lifts it."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << _IPC_LOCK)  # effective, of the capabilities 0 to 31
    assert libc.capset(header, sets) == 0


def slow_node() -> None:
    well = probes.multiply

    def many_times(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> None:
        for _ in range(12):
            well(a, b, product)

    probes.multiply = many_times


FAULTS: dict[str, Callable[[], None]] = {
    "slow-link": slow_link,
    "memlock": small_memlock,
    "clock": lambda: setattr(probes, "wall_clock", lambda: time.time() + 90),
    "versions": lambda: setattr(torch, "__version__", "2.12.0"),
    "slow-node": slow_node,
    "loopback": lambda: os.environ.update(GLOO_SOCKET_IFNAME="lo"),
    "missing": lambda: os.environ.update(GLOO_SOCKET_IFNAME="eth7"),
}
"""By name, which is the kind of the finding, but for both wrong interfaces."""


@contextmanager
def open_lab() -> Iterator[Lab]:
    """A healthy lab of two nodes."""
    with Lab(nodes=2, rate_bits_per_s=200e6) as lab:
        lab.warm_up(["laconic.doctor.cli", "pyroute2", "torch._dynamo"])
        yield lab


def examine(lab: Lab, *faults: str) -> tuple[int, str, list[str]]:
    """Plant the faults for one run of the doctor: exit code, output of rank 0, kinds of findings."""
    result = lab.run(["-m", "tests.support.planted", *faults], show=False, timeout_s=PATIENCE_S)
    said = result.nodes[0].output
    assert not result.timed_out, said
    return result.exit_code, said, re.findall(r"^(?:error|warning) +([a-z-]+): ", said, re.M)


def main() -> int:
    probes.QUICK = Effort(
        products=(64,), attention_tokens=(64,), copies_bytes=(1 << 16,), transfers_bytes=(1 << 12,), repetitions=2,
        enough_s=1e-4,
    )  # fmt: skip
    probes._PLACEMENT_S = 1e-9  # one step of each
    if os.environ["RANK"] == "1":
        for name in sys.argv[1:]:
            FAULTS[name]()
    return cli.main([])


if __name__ == "__main__":
    sys.exit(main())
