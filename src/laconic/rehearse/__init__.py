"""Programs that run, unchanged, as one rank of a cluster that is not there, and what a run of one shows.

`ranks` runs all ranks of a job in this process, with real values: in_process.py. The rest plays one rank. `run` writes
the tape of a program; `rehearsal` is the same for code that wants more than one. Readers of a tape are in the files of
their names. docs/races.md says what the order of a tape proves.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from laconic.rehearse.in_process import Kill, RankError, ranks
from laconic.rehearse.machine import Machine
from laconic.rehearse.modes import accelerator
from laconic.rehearse.order import Beside, Race, overlap, races
from laconic.rehearse.rings import Places
from laconic.rehearse.tape import Tape
from laconic.rehearse.turns import DeadlockError
from laconic.rehearse.world import World, one_rank

__all__ = [
    "Beside", "DeadlockError", "Kill", "Machine", "Race", "RankError", "Tape", "mark", "overlap", "races", "ranks",
    "rehearsal", "run", "without_collector",
]  # fmt: skip

_machines: list[Machine] = []


@contextmanager
def rehearsal(
    *,
    nodes: int = 1,
    local: int = 1,
    islands: int = 1,
    rank: int = 0,
    backend: str = "nccl",
    has_values: bool = False,
    device_type: str = "cuda",
    cost_of: Callable[[Any, Any, Any, Any], Any] | None = None,
) -> Iterator[Machine]:
    """Let this process be one rank of a cluster with accelerators; yield its machine, which records nothing yet.

    In the body, "cuda" is an accelerator that is not there, and torch.distributed has a process group of all ranks, in
    place of the process's own. torchrun's environment is set. `laconic.init_mesh("cuda", ...)` and torch's
    `init_device_mesh` make meshes. Collectives give each rank what this one has.

    Args:
        nodes: the number of nodes in one island.
        local: the number of ranks on a node.
        islands: the number of islands.
        rank: this process.
        backend: of tensors on the accelerator: "nccl", or "gloo", with which waiting blocks the host.
        has_values: False for tensors that have shapes and places only, of any size:
            [Note: Data without values] in operations.py. With values, tensors lie in host memory.
        device_type: "cpu" for ranks without accelerators, whose only stream is the program; the backend is Gloo.
        cost_of: says what an operation costs, without values: `Machine.cost_of`.
    """
    _forget_constants()
    with accelerator(has_values=has_values, device_type=device_type, cost_of=cost_of) as machine:
        backend = "gloo" if device_type == "cpu" else backend
        places = Places(nodes=nodes, local=local, islands=islands)
        world = World(machine=machine, places=places, rank=rank, backend=backend)
        _machines.append(machine)
        hook = sys.excepthook  # torch's process group puts "[rank0]" before each line of an exception, for good
        try:
            with one_rank(world), without_collector():
                yield machine
        finally:
            _machines.pop()
            sys.excepthook = hook
            _forget_constants()


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python's garbage collector away.

    Memory that it frees would be on a tape wherever it happened to run, and it searches all objects of torch in vain.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _forget_constants() -> None:
    """Let `codec` make its tables anew: those of a rehearsal are on no device, and others are not on its device."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("laconic.codec.", "laconic.optim.")):
            for function in vars(module).values():
                if not isinstance(function, ModuleType) and hasattr(function, "cache_clear"):  # torch would look it up
                    function.cache_clear()


def run(program: Callable[[], Any], **cluster: Any) -> Tape:
    """Run a program as one rank of a cluster, from beginning to end, and return its tape.

    `cluster` is what `rehearsal` takes. The program gets no arguments: it makes its mesh as it would on the cluster.
    """
    with rehearsal(**cluster) as machine, machine.recording() as tape:
        program()
    return tape


def mark(label: Any) -> None:
    """Give a name to this place in the program, on the tape. Outside of a rehearsal this does nothing."""
    if _machines:
        _machines[-1].mark(label)
