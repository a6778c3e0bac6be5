"""The torchrun of one node in a lab: it also tells the keeper how a rank ended.

    python -m laconic.lab.agent TORCHRUN-ARGS...

Only the parent of a process surely learns how the process ended: see [Note: The first failing rank].
"""

import os

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from laconic.lab.worker import NODE_VARIABLE, send_event


def main() -> None:
    """Run torchrun with the arguments of the command line. Raises: ChildFailedError if a rank fails, as torchrun."""
    try:
        torchrun()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        place = {"rank": rank, "node": int(os.environ[NODE_VARIABLE]), "local_rank": failure.local_rank}
        send_event("ended", **place, pid=failure.pid, exit_code=failure.exitcode)
        raise


if __name__ == "__main__":
    main()
