"""The program that torchrun starts in a lab: it runs the user's script, and reports the rank's failure to the keeper.

    python worker.py SCRIPT [ARGS...]    or    python worker.py -m MODULE [ARGS...]

torchrun starts this file by its path, and this file imports nothing of laconic. So the user's script finds the same
interpreter as under torchrun alone.

[Note: The first failing rank]
This is [Note: Failing together] for scripts that know nothing of laconic. When a rank fails, the other ranks fail
within milliseconds, because their connections to the failed rank close. Each would print a long traceback, and hide the
one that matters. All nodes of a lab share one file system, so the first rank to fail creates a file. A rank that fails
later finds the file, and prints one line instead of its traceback.
Each rank sends an event to the keeper when it starts, and when it has failed in Python. A signal or os._exit may also
end a rank without an event. The keeper watches the processes and notices that. It may be too late to see how a rank
ended, because torchrun forgets the process soon. So torchrun tells the keeper as well: agent.py. An exception of
another rank cannot end a process in this way. So such a rank made the others fail, even if another rank created the
file earlier.
"""

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

FOLDER_VARIABLE = "LACONIC_LAB_FOLDER"  # the environment variable with the path of the lab's folder
NODE_VARIABLE = "LACONIC_LAB_NODE"  # the environment variable with the number of the node
EVENTS_FILE = "events"  # the pipe in the folder; a rank writes one JSON object a line, and the keeper reads
FAILURE_FILE = "failure.json"  # the file in the folder that the first failing rank creates
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def _identify() -> dict[str, int]:
    names = {"rank": "RANK", "node": "GROUP_RANK", "local_rank": "LOCAL_RANK"}
    return {key: int(os.environ[variable]) for key, variable in names.items()}


def send_event(event: str, **facts: int) -> None:
    """Tell the keeper of an event of one rank, and `facts` about the rank and its process."""
    line = json.dumps({"event": event, **facts})
    with contextlib.suppress(OSError):  # the keeper was killed, so this process will end too
        pipe = os.open(Path(os.environ[FOLDER_VARIABLE]) / EVENTS_FILE, os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, line.encode() + b"\n")  # a short line arrives in one piece
        os.close(pipe)


def claim_failure(folder: Path, failure: dict[str, Any]) -> bool:
    """Record a rank's failure, and return whether it is the first.

    The file appears with all of its text: a rank that writes may be killed because of another's failure.
    """
    own = folder / f"{os.getpid()}-{FAILURE_FILE}"
    own.write_text(json.dumps(failure))
    try:
        os.link(own, folder / FAILURE_FILE)
    except FileExistsError:
        return False
    finally:
        own.unlink()
    return True


def _claim(error: str, exit_code: int) -> bool:
    return claim_failure(Path(os.environ[FOLDER_VARIABLE]), {**_identify(), "exit_code": exit_code, "error": error})


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy."""
    own_files = (__file__, runpy.__file__, "<frozen runpy>")
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in own_files:
        first = first.tb_next
    return first or trace  # a script that does not exist fails in runpy itself


def main() -> None:
    """Run the script or module of the command line as Python itself would. Raises: SystemExit if it fails."""
    del sys.argv[0]
    is_module = sys.argv[0] == "-m"
    if is_module:
        del sys.argv[0]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # this process ends with torchrun
    send_event("started", **_identify(), pid=os.getpid())
    try:
        if is_module:
            sys.path[0] = os.getcwd()  # as `python -m` does
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # as `python SCRIPT` does
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        exit_code = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        if exit_code != 0:
            _claim(f"exited with code {error.code}", exit_code)
            send_event("failed", **_identify(), pid=os.getpid())
        raise
    except BaseException as error:  # of any kind, KeyboardInterrupt too: a rank must not fail without an event
        error = error.with_traceback(_skip_own_frames(error.__traceback__))
        text = "".join(traceback.format_exception(error))
        if _claim(text, 1):
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            print(f"rank {os.environ['RANK']} stops, since another failed: {repr(error)[:120]}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        send_event("failed", **_identify(), pid=os.getpid())
        sys.exit(1)


if __name__ == "__main__":
    main()
