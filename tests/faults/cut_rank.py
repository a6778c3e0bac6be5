"""A rank of `laconic train` in the lab, whose first rank of the last node takes its node's link down for a while.

`python -m tests.faults.cut_rank up`, run on a node, ends a cut that has outlived its rank.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from pyroute2 import IPRoute

from laconic.lab.network import INTERFACE
from laconic.train.cli import command


def cut(after_s: float, for_s: float) -> None:
    """Take the link of this node down after `after_s` seconds, for `for_s` seconds or until this rank ends."""
    time.sleep(after_s)
    set_link("down")
    print(f"the link is cut for {for_s:.1f} s", file=sys.stderr, flush=True)
    time.sleep(for_s)
    set_link("up")


def set_link(state: str) -> None:
    """Take the link of this node "up" or "down"."""
    with IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname=INTERFACE)[0], state=state)


def main(after: str, duration: str, *arguments: str) -> int:
    """Train, and cut the link after `after` seconds for `duration` seconds; not at all with a duration of 0."""
    is_last_node = int(os.environ["GROUP_RANK"]) == int(os.environ["GROUP_WORLD_SIZE"]) - 1
    if is_last_node and os.environ["LOCAL_RANK"] == "0" and float(duration) > 0:
        threading.Thread(target=cut, args=(float(after), float(duration)), daemon=True).start()
    return command(list(arguments))


if __name__ == "__main__":
    if sys.argv[1:] == ["up"]:
        set_link("up")
    else:
        sys.exit(main(*sys.argv[1:]))
