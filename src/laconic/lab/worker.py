"""What torchrun starts in a lab: runs the user's script, and tells the keeper which rank failed first.

    python worker.py SCRIPT [ARGS...]    or    python worker.py -m MODULE [ARGS...]

Started by its path and importing nothing of laconic, so that the script finds the interpreter as torchrun leaves it.

[Note: Whose traceback is shown]
When a rank fails, the others fail within milliseconds because their connection to it closes, and each would print a
traceback longer than the one that matters. All nodes of a lab share one file system, so the first failing rank creates
a file; a rank that finds it there was a consequence and says one line. Each rank tells the keeper when it starts and
when it has failed in Python. One that dies without a word (killed, or os._exit) is seen by the keeper, which watches
the process, and since nothing that another rank raises can kill a process, it was the cause, even if a victim was
quicker to create the file.
"""

import contextlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType

FOLDER_VARIABLE = "LACONIC_LAB_FOLDER"
EVENTS_FILE = "events"
FAILURE_FILE = "failure.json"


def _who() -> dict[str, int]:
    names = {"rank": "RANK", "node": "GROUP_RANK", "local_rank": "LOCAL_RANK"}
    return {key: int(os.environ[variable]) for key, variable in names.items()}


def _tell_keeper(event: str) -> None:
    """One short line, written at once, into the pipe that the keeper reads."""
    line = json.dumps(_who() | {"pid": os.getpid(), "event": event})
    with contextlib.suppress(OSError):  # a keeper that is gone has already ended us, or will
        pipe = os.open(Path(os.environ[FOLDER_VARIABLE]) / EVENTS_FILE, os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, line.encode() + b"\n")
        os.close(pipe)


def _claim_failure(error: str, exit_code: int) -> bool:
    """Whether this rank is the first to fail."""
    try:
        with open(Path(os.environ[FOLDER_VARIABLE]) / FAILURE_FILE, "x") as file:
            json.dump(_who() | {"exit_code": exit_code, "error": error}, file)
    except FileExistsError:
        return False
    return True


def _below_runpy(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy."""
    here = trace
    while here is not None and (here.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>")):
        here = here.tb_next
    return here or trace  # a script that does not exist fails in runpy itself


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def main() -> None:
    del sys.argv[0]
    is_module = sys.argv[0] == "-m"
    if is_module:
        del sys.argv[0]
    _tell_keeper("started")
    try:
        if is_module:
            sys.path[0] = os.getcwd()  # what `python -m` does
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # what `python SCRIPT` does
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        if _exit_code(error) != 0:
            _claim_failure(f"exited with code {error.code}", _exit_code(error))
            _tell_keeper("failed")
        raise
    except BaseException as error:
        error = error.with_traceback(_below_runpy(error.__traceback__))
        text = "".join(traceback.format_exception(error))
        if _claim_failure(text, 1):
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            print(f"rank {os.environ['RANK']} stops, since another failed: {repr(error)[:120]}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        _tell_keeper("failed")
        sys.exit(1)


if __name__ == "__main__":
    main()
