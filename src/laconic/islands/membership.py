"""The policy of islands that come and go while the others train, and the server at which they meet."""

import argparse
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from laconic.policy import Count, Policy, Positive


@dataclass(frozen=True, kw_only=True)
class Membership(Policy):
    """Islands that come and go while the others train on: [Note: Islands that come and go] in islands/elastic.py.

    Each island is a job of its own, with its own torchrun. The islands meet at a rendezvous, a small server that none
    of them hosts: `laconic rendezvous`.

    Raises:
        ValueError: a value is out of its range.
    """

    rendezvous: str
    """The address of the rendezvous, "HOST:PORT"."""
    islands: Count
    """The number of islands with which training starts. Later any number may come and go."""
    quorum: Count | None = None
    """The number of islands that must have taken all steps up to a sync before the sync begins. All others then join
    it after the step in which they are, so nobody waits for a slow island; the mean weighs islands by their tokens.
    Until then fast islands train on. None: every island takes the same number of steps, and the islands wait for each
    other at every sync."""
    timeout_s: Positive = 120.0
    """The longest, in seconds, that islands wait for one of them at a sync. Then they go on without that island. It
    must be longer than islands are apart, and longer than the largest message takes. An island whose process dies is
    noticed earlier."""
    start_timeout_s: Positive = 1800.0
    """The longest, in seconds, that an island waits to enter, and for the state of the others."""

    def _check_keys(self) -> None:
        host, _, port = self.rendezvous.rpartition(":")
        is_address = host and port.isdecimal() and 0 < int(port) < 1 << 16
        self._check("rendezvous", bool(is_address), "must be HOST:PORT, where `laconic rendezvous` runs")

    @property
    def host(self) -> str:
        """The host of the rendezvous; an IPv6 address without its brackets."""
        return self.rendezvous.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of the rendezvous."""
        return int(self.rendezvous.rpartition(":")[2])


_DESCRIPTION = """\
Serve as the rendezvous of islands that come and go (sync.rendezvous, laconic.Membership), until a signal ends this
process. It holds who trains and what has been agreed on, some kilobytes; no parameters pass through it. Run it on a
machine that outlives the islands, such as a login node. Like torchrun's rendezvous it trusts everybody who can reach
the port, so give --host the address of the network of the islands if the machine has others."""


def main(argv: Sequence[str]) -> int:
    """Run `laconic rendezvous`; return the exit code: 0 after a signal, 2 if the port cannot be opened."""
    import torch.distributed as dist  # not before: job descriptions have the policy, and need no torch

    parser = argparse.ArgumentParser(
        prog="laconic rendezvous", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="", help="the address to listen on (default: all of this machine)")
    parser.add_argument("--port", type=int, default=29400, help="the port (default 29400; 0: any free one)")
    arguments = parser.parse_args(argv)
    over = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: over.set())
    try:
        listener = _listen(arguments.host, arguments.port)
    except (OSError, OverflowError) as error:
        parser.error(f"cannot listen on {arguments.host or 'all addresses'}, port {arguments.port}: {error}")
    bound, port = listener.getsockname()[:2]
    # torch's own listener would ignore the host. The store closes this one at its end
    store = dist.TCPStore(bound, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    is_all = bound in ("0.0.0.0", "::")
    where = f"all addresses of this machine ({bound}), to which anybody may write" if is_all else bound
    host = socket.gethostname() if is_all else f"[{bound}]" if ":" in bound else bound
    print(f"laconic rendezvous: islands meet at {host}:{store.port}; it listens on {where}", flush=True)
    while not over.wait(1.0):  # a wait without an end would not see signals
        pass
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Open the port at an address, or at all of them. Raises: OSError, OverflowError."""
    if host in ("", "0.0.0.0", "::"):
        if host != "0.0.0.0" and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)
