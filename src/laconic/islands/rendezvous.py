"""`laconic rendezvous`: the server at which islands that come and go meet."""

import argparse
import signal
import socket
import threading
from collections.abc import Sequence

import torch.distributed as dist

_DESCRIPTION = """\
Serve as the rendezvous of islands that come and go (sync.rendezvous, laconic.Membership), until a signal ends this
process. It holds who trains and what has been agreed on, some kilobytes; no parameters pass through it. Run it on a
machine that outlives the islands, such as a login node. Like torchrun's rendezvous it trusts everybody who can reach
the port."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code: 0 after a signal, 2 if the port cannot be opened."""
    parser = argparse.ArgumentParser(
        prog="laconic rendezvous", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=29400, help="the port (default 29400; 0: any free one)")
    arguments = parser.parse_args(argv)
    over = threading.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: over.set())
    try:
        store = dist.TCPStore(arguments.host, arguments.port, is_master=True, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        parser.error(f"cannot listen on {arguments.host}:{arguments.port}: {str(error).splitlines()[0]}")
    print(f"laconic rendezvous: islands meet at {socket.gethostname()}:{store.port}", flush=True)
    while not over.wait(1.0):  # a wait without an end would not see signals
        pass
    return 0
