"""The warm process of a lab: it has imported the modules that ranks want, and starts ranks as its forks.

    python -m laconic.lab.warm DESCRIPTOR MODULE...

[Note: Warm ranks]
Python takes seconds to import torch and transformers, and on two cores four ranks take four times as long. So a lab
that runs many scripts has one process that imports these modules once. For each node of a run it forks an agent, which
enters the node's namespace and forks the node's ranks. An agent stands in for torchrun: it sets the variables that
torchrun sets, waits for its ranks, and tells the keeper how they ended. Agents become children of the keeper, as every
torchrun is. The process itself never computes, so it has no thread of torch's pools that a fork would lack.
"""

import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

from laconic.lab import linux, worker
from laconic.lab.channel import Channel

_NUM_FDS = 2  # of a node's stdout and stderr; a third is the node's network namespace, if it has one


def _serve(channel: Channel) -> None:
    """Start an agent for each request, and answer with its PID, until the keeper ends."""
    while True:
        try:
            request, fds = channel.receive()
        except EOFError:
            return
        read_end, write_end = os.pipe()
        between = os.fork()
        if not between:  # it ends at once, so that the keeper adopts the agent
            own = os.getpid()
            agent = os.fork()
            if not agent:
                channel.close()
                _in_fork(_run_agent, request, fds, own)
            os.write(write_end, str(agent).encode())
            os._exit(0)
        os.waitpid(between, 0)
        agent = int(os.read(read_end, 32))
        for fd in (read_end, write_end, *fds):
            os.close(fd)
        channel.send({"pid": agent})


def _in_fork(function: Any, *args: Any) -> NoReturn:
    """Call a function that returns an exit code in a process that then ends, without this process's own end."""
    code = 1
    try:
        code = function(*args)
    except BaseException:  # of any kind: a fork must not go on with its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_agent(request: dict[str, Any], fds: list[int], parent: int) -> int:
    """Start the ranks of a node, and wait for them; return the exit code of the first that failed, or 0."""
    os.setsid()
    while os.getppid() == parent:  # it ends at once, and then the keeper is the parent
        time.sleep(0.001)
    linux.die_with_parent()
    for number, fd in enumerate(fds[:_NUM_FDS], start=1):
        os.dup2(fd, number)
    for namespace in fds[_NUM_FDS:]:
        linux.setns(namespace, linux.CLONE_NEWNET)
    for fd in fds:
        os.close(fd)
    os.chdir(request["cwd"])
    node, local = request["node"], request["local"]
    os.environ.clear()
    os.environ.update(request["env"])
    ranks: dict[int, int] = {}
    for local_rank in range(local):
        pid = os.fork()
        if not pid:
            os.environ.update(_torchrun_variables(request, local_rank))
            _in_fork(_run_rank, request["script"])
        ranks[pid] = local_rank
    return _wait_for(ranks, first_rank=node * local, node=node)


def _torchrun_variables(request: dict[str, Any], local_rank: int) -> dict[str, str]:
    """The variables that torchrun gives a rank."""
    node, local, nodes = request["node"], request["local"], request["nodes"]
    rank, world_size = node * local + local_rank, nodes * local
    values = {
        "RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node, "ROLE_RANK": rank, "ROLE_NAME": "default",
        "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local, "GROUP_WORLD_SIZE": nodes, "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": request["address"], "MASTER_PORT": request["port"],
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def _run_rank(script: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    linux.die_with_parent()
    _limit_threads()
    sys.argv[:] = [worker.__file__, *script]
    try:
        worker.main()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def _limit_threads() -> None:
    """Let torch read OMP_NUM_THREADS again, which its library has read when the warm process imported it."""
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _wait_for(ranks: dict[int, int], *, first_rank: int, node: int) -> int:
    """Wait for the ranks. After the first failure end the others, as torchrun does."""
    failed = 0
    while ranks:
        pid, status = os.wait()
        local_rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            place = {"rank": first_rank + local_rank, "node": node, "local_rank": local_rank}
            worker.send_event("ended", **place, pid=pid, exit_code=code)
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return 1 if failed else 0


def main() -> None:
    """Import the modules of the command line, and serve the keeper at the other end of a socket until it ends."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    for name in sys.argv[2:]:
        try:
            importlib.import_module(name)
        except ImportError:  # whoever needs it says so
            continue
    gc.collect()
    gc.freeze()  # a rank's collector would write into all objects, and so copy them
    _serve(channel)


if __name__ == "__main__":
    main()
