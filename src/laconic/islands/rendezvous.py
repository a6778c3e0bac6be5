"""The server at which islands meet that come and go: `laconic rendezvous`."""

import argparse
import signal
import socket
import threading
from collections.abc import Sequence

_DESCRIPTION = """\
Serve as the rendezvous of islands that come and go (sync.rendezvous, laconic.Membership), until a signal ends this
process. It holds who trains and what has been agreed on, some kilobytes; no parameters pass through it. Run it on a
machine that outlives the islands, such as a login node. Like torchrun's rendezvous it trusts everybody who can reach
the port, so give --host the address of the network of the islands if the machine has others."""


def main(argv: Sequence[str]) -> int:
    """Run `laconic rendezvous`; return the exit code: 0 after a signal, 2 if the port cannot be opened."""
    import torch.distributed as dist  # not before: `--help` needs no torch

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
    except (OSError, OverflowError, UnicodeError) as error:  # the last: no host can have the name
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
