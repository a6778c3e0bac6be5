"""The state of the last sync, which every rank keeps on its own machine to survive the loss of an island.

[Note: Re-forming]
When a machine is lost, torchelastic (`torchrun --nnodes MIN:MAX`) ends all workers and starts them again on the
remaining machines; it does so again when a machine joins. The program starts from its first line, with another number
of islands and empty memory. So after each sync every rank writes the state to a file on its machine. At the start the
islands compare their files. All islands that took part in the newest sync have the same outer state. The first of these
islands broadcasts it to all. An island that has the newest file also restores its inner optimizer; an island that joins
starts without inner optimizer state. All islands lose the steps since that sync.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.cluster import Cluster
from laconic.comm.collectives import all_reduce
from laconic.files import replacing
from laconic.islands.all_reduce import gather_from_islands
from laconic.islands.outer_optimizer import OuterFragment, flat_local
from laconic.ragged.tensor import RaggedTensor


@dataclass(frozen=True, kw_only=True)
class _SavedState:
    steps: int
    vectors: list[Tensor]
    inner: list[dict[str, Any]]


class Recovery:
    """One rank's file of the last sync, in a folder of its machine. A folder in memory, such as /dev/shm, is best."""

    def __init__(self, folder: str | Path, cluster: Cluster) -> None:
        self._cluster = cluster
        self._file = Path(folder) / f"island-state-{cluster.node_rank}-{cluster.local_rank}.pt"
        self._file.parent.mkdir(parents=True, exist_ok=True)

    def save(self, steps: int, fragments: Sequence[OuterFragment], optimizer: torch.optim.Optimizer) -> None:
        """Save the state after inner step `steps`. A kill at any moment leaves this state or the previous one."""
        with replacing(self._file, durable=False) as new:
            torch.save({"steps": steps, "vectors": _vectors(fragments), "inner": _inner_state(optimizer)}, new)

    def restore(self, fragments: Sequence[OuterFragment], optimizer: torch.optim.Optimizer) -> int:
        """Restore the newest state of any island. Returns its step, or 0 without a state. Collective over all ranks."""
        for fragment in fragments:
            fragment.create_state()
        vectors = _vectors(fragments)
        saved = self._read(vectors)
        own = torch.tensor(saved.steps if saved else 0, device=self._cluster.device)
        all_reduce(self._cluster, own, dist.ReduceOp.MIN)  # an island has a state if all of its ranks have it
        steps = gather_from_islands(self._cluster, int(own))
        newest = max(steps)
        if newest == 0:
            return 0
        if saved is not None and int(own) == newest:
            for vector, value in zip(vectors, saved.vectors, strict=True):
                vector.copy_(value)
            _restore_inner(optimizer, saved.inner)
        if self._cluster.island_group is not None:
            for vector in vectors:
                dist.broadcast(vector, group=self._cluster.island_group, group_src=steps.index(newest))
        return newest

    def _read(self, like: list[Tensor]) -> _SavedState | None:
        """Read this rank's file. None if it is missing, damaged, or of another model or another sharding."""
        with contextlib.suppress(OSError, RuntimeError, EOFError, KeyError, TypeError, UnpicklingError):
            saved = _SavedState(**torch.load(self._file, weights_only=True))
            if [vector.shape for vector in saved.vectors] == [vector.shape for vector in like]:
                return saved
        return None


def _vectors(fragments: Sequence[OuterFragment]) -> list[Tensor]:
    return [vector for fragment in fragments for vector in fragment.vectors()]


def _inner_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _inner_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return this rank's part of the inner optimizer's state, parameter by parameter."""
    return [
        {
            key: flat_local(value).clone() if isinstance(value, RaggedTensor) else value
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        for parameter in _inner_parameters(optimizer)
    ]


def _restore_inner(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]]) -> None:
    init_state = getattr(optimizer, "init_state", None)
    for parameter, state in zip(_inner_parameters(optimizer), saved, strict=True):
        if not state:
            continue
        if init_state is not None:  # an optimizer of laconic.optim may shard state unlike its parameter
            init_state(parameter)
            for key, value in state.items():
                flat_local(optimizer.state[parameter][key]).copy_(value.view(-1))
        else:
            optimizer.state[parameter] = {key: _like(parameter, value) for key, value in state.items()}


def _like(parameter: Tensor, value: Any) -> Any:
    """Shard a tensor of a torch optimizer's state as its parameter is sharded; a number stays as it is."""
    if isinstance(parameter, RaggedTensor) and isinstance(value, Tensor) and value.ndim == 1:
        return parameter.like(value.to(parameter.to_local().device))
    return value
