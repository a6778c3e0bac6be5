"""The end of ranks whose launcher has died.

[Note: Orphans]
torchrun's agent starts the ranks of a machine, and ends them when the job fails. If the agent itself is killed, its
ranks would train on, write into the output folder and hold their devices, while the scheduler starts the job anew. So
a thread of each rank looks at its parent process every half second: the kernel gives an orphan another parent. Linux
could send a signal instead (PR_SET_PDEATHSIG), but SIGKILL says nothing, and a rank that waits in a collective would
not answer SIGTERM. The process ends at once, in whatever it does: files appear whole or not at all. Ranks that were
started without torchrun are no orphans when their parent ends, as under `nohup`.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

_INTERVAL_S = 0.5


@contextlib.contextmanager
def ending_with_launcher() -> Iterator[None]:
    """End this process, with one line and exit code 1, within a second after its launcher: [Note: Orphans]."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    launcher, done = os.getppid(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(launcher, done), daemon=True)
    watcher.start()
    try:
        yield
    except Exception:
        _end_if_orphan(launcher)  # the other orphans have ended, and connections to them failed first
        raise
    finally:
        done.set()
        watcher.join()


def _watch(launcher: int, done: threading.Event) -> None:
    while not done.wait(_INTERVAL_S):
        _end_if_orphan(launcher)


def _end_if_orphan(launcher: int) -> None:
    if os.getppid() != launcher:
        with contextlib.suppress(OSError):  # the terminal may have ended too
            print(
                f"rank {os.environ.get('RANK')} ends, because its launcher (torchrun, process {launcher}) has died; "
                "start the job again with --train.resume auto",
                file=sys.stderr,
                flush=True,
            )
        os._exit(1)
