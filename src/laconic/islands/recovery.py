"""What survives the death of an island: the last agreement, kept by every rank on its own machine.

[Note: Re-forming]
When a machine is lost, torchelastic (`torchrun --nnodes MIN:MAX`) ends all workers and starts them anew on the machines
that are left, and again when one joins. The program begins at its first line, with another number of islands, and its
memory is gone. So every rank leaves the last agreement in a file on its machine, after each sync. At the start islands
compare what they have: the newest is common to all that took part in it, and the first island that holds it tells the
others, as tensors over the islands' group. Everybody continues from there; those that were there keep their inner
optimizer state, a joiner begins with none. Steps since that sync are lost on all islands alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.comm.cluster import Cluster
from laconic.comm.collectives import all_reduce
from laconic.files import replacing
from laconic.islands.outer_optimizer import OuterFragment, local_of
from laconic.ragged.tensor import RaggedTensor


@dataclass(frozen=True, kw_only=True)
class _Kept:
    steps: int
    vectors: list[Tensor]
    inner: list[dict[str, Any]]


class Recovery:
    """One rank's copy of the last agreement, in a folder of its machine (memory-backed, such as /dev/shm, is best)."""

    def __init__(self, folder: str | Path, cluster: Cluster) -> None:
        self._cluster = cluster
        self._file = Path(folder) / f"island-state-{cluster.node_rank}-{cluster.local_rank}.pt"
        self._file.parent.mkdir(parents=True, exist_ok=True)

    def keep(self, steps: int, fragments: Sequence[OuterFragment], optimizer: torch.optim.Optimizer) -> None:
        """Leave the agreement after inner step `steps`; a kill at any instant leaves it or the one before."""
        with replacing(self._file, durable=False) as new:
            torch.save({"steps": steps, "vectors": _vectors(fragments), "inner": _inner_state(optimizer)}, new)

    def restore(self, fragments: Sequence[OuterFragment], optimizer: torch.optim.Optimizer) -> int:
        """Have the newest agreement in all fragments; returns its step, 0 if nobody has any. Collective over all."""
        for fragment in fragments:
            fragment.have_state()
        kept = self._read(_vectors(fragments))
        held = torch.tensor(kept.steps if kept else 0, device=self._cluster.device)
        all_reduce(self._cluster, held, dist.ReduceOp.MIN)  # an island has what all of its ranks have
        by_island = [torch.zeros(1, dtype=torch.int64) for _ in range(self._cluster.num_islands)]
        own = held.cpu().view(1)
        group = self._cluster.island_group
        if group is None:
            by_island = [own]
        else:
            dist.all_gather(by_island, own, group=group)
        steps = [int(island) for island in by_island]
        newest = max(steps)
        if newest == 0:
            return 0
        if kept is not None and int(own) == newest:
            for vector, value in zip(_vectors(fragments), kept.vectors, strict=True):
                vector.copy_(value)
            _restore_inner(optimizer, kept.inner)
        if group is not None:
            for vector in _vectors(fragments):
                dist.broadcast(vector, group=group, group_src=steps.index(newest))
        return newest

    def _read(self, like: list[Tensor]) -> _Kept | None:
        """What this machine has, if it is of this model and this cut."""
        with contextlib.suppress(OSError, RuntimeError, EOFError, KeyError):
            kept = _Kept(**torch.load(self._file, weights_only=True))
            if [v.shape for v in kept.vectors] == [v.shape for v in like]:
                return kept
        return None


def _vectors(fragments: Sequence[OuterFragment]) -> list[Tensor]:
    """Outer parameters and outer optimizer state, in an order that all islands share."""
    vectors = []
    for fragment in fragments:
        vectors.append(fragment.flat.detach())
        state = fragment.optimizer.state.get(fragment.flat, {})
        vectors += [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
    return vectors


def _inner_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """By parameter: this rank's part of every state tensor."""
    return [
        {
            key: local_of(value).clone() if isinstance(value, RaggedTensor) else value
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def _restore_inner(optimizer: torch.optim.Optimizer, kept: list[dict[str, Any]]) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, state in zip(parameters, kept, strict=True):
        if not state:
            continue
        init_state = getattr(optimizer, "init_state", None)  # laconic.optim's; states need not be cut as parameters are
        if init_state is not None:
            init_state(parameter)
            for key, value in state.items():
                local_of(optimizer.state[parameter][key]).copy_(value.view(-1))
        else:
            optimizer.state[parameter] = {key: _like(parameter, value) for key, value in state.items()}


def _like(parameter: Tensor, value: Any) -> Any:
    """A state as torch's optimizers have it: cut like its parameter, or a number."""
    if isinstance(parameter, RaggedTensor) and isinstance(value, Tensor) and value.ndim == 1:
        return parameter.like(value.to(parameter.to_local().device))
    return value
