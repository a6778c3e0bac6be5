"""The host memory that local steps take, counted while the real code syncs some zeros.

Between syncs host memory holds vectors of each fragment: the outer parameters, their momentum, and the errors of the
codec. A sync allocates more vectors. Every vector is as long as the rank's part of the fragment. So one small sync, in
one process, shows the bytes per element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor, nn

from laconic.codec import CODECS
from laconic.comm.collectives import NOTHING, Pending
from laconic.comm.traffic import Traffic
from laconic.config import SyncConfig
from laconic.islands.all_reduce import IslandGroup, Mean, mean_over_islands
from laconic.islands.outer_optimizer import Holders, OuterFragment
from laconic.islands.policies import OuterSGD
from laconic.plan.recorder import Recorder

_ELEMENTS = 1 << 18
"""Whole blocks of every codec, and so many that a codec's tables are next to nothing."""
_MOST_ISLANDS = 8
"""With more islands a vector has more and smaller parts, in as much memory."""


@dataclass(frozen=True, kw_only=True)
class SyncMemory:
    """The host memory of local steps, in bytes for each element of a rank's part."""

    resting: float
    """Of all fragments, between syncs."""
    working: float
    """Of the fragment that syncs, besides."""


def sync_memory(sync: SyncConfig, islands: int) -> SyncMemory:
    """The host memory of `LocalSteps` with these settings."""
    coding, few = sync.policy.coding, min(islands, _MOST_ISLANDS)
    feedback, codec = float(coding.error_feedback), CODECS[coding.codec]
    memory = _sync_memory(coding.codec, few, sync.policy.outer.momentum, feedback, is_sliced=sync.slices > 1)
    if codec.is_sparse:  # every island sends its whole vector
        memory = replace(memory, working=memory.working + (islands - few) * codec.payload_bytes(_ELEMENTS) / _ELEMENTS)
    return memory


@cache
def _sync_memory(codec: str, islands: int, momentum: float, feedback: float, *, is_sliced: bool) -> SyncMemory:
    recorder, half = Recorder("cpu"), _ELEMENTS // 2
    parameters = {"whole": nn.Parameter(torch.zeros(_ELEMENTS - half)), "slice": nn.Parameter(torch.zeros(half))}
    parameters["slice"].requires_grad = not is_sliced
    for parameter in parameters.values():
        recorder.exclude(parameter)
    mean_of = partial(mean_over_islands, islands=_Alone(islands), codec=CODECS[codec], traffic=Traffic())
    with torch.no_grad(), recorder:
        recorder.begin(0, is_backward=False)
        fragment = OuterFragment(parameters, OuterSGD(momentum=momentum), _Holders(islands, is_sliced=is_sliced))
        residual = torch.zeros_like(fragment.flat) if feedback else None
        residual = _sync(fragment, mean_of, residual, feedback)  # makes the momentum
        recorder.begin(1, is_backward=False)
        residual = _sync(fragment, mean_of, residual, feedback)
        recorder.end()
    (_, _, first), (_, _, second) = recorder.phases
    return SyncMemory(resting=first.end_bytes / _ELEMENTS, working=second.peak_bytes / _ELEMENTS)


def _sync(
    fragment: OuterFragment, mean_of: Callable[..., Mean], residual: Tensor | None, feedback: float
) -> Tensor | None:
    """Do what `LocalSteps._send` and `LocalSteps._apply` do. Returns what the codec has lost."""
    message = fragment.pseudo_gradient()
    if residual is not None:
        message = message + feedback * residual
    mean = mean_of(message, divisor=fragment.divisor)
    if residual is not None:
        residual = message - mean.sent
    with torch.enable_grad():
        fragment.step(mean.value)
    fragment.write_inner(fragment.flat)
    error = message - mean.sent
    torch.stack([message @ message, error @ error])
    return residual


class _Alone(IslandGroup):
    """A group of islands of which one is there: the others send what this one sends."""

    def __init__(self, size: int) -> None:
        super().__init__(None, 0, size)

    def start_all_to_all(self, landings: Tensor, messages: Tensor) -> Pending:
        """See `IslandGroup.start_all_to_all`."""
        landings.copy_(messages)
        return NOTHING


class _Holders(Holders):
    """Islands that all train "whole", and of which one trains "slice" if the model is sliced."""

    def __init__(self, islands: int, *, is_sliced: bool) -> None:
        self.num_islands = islands
        self._slices = {"slice": 0} if is_sliced else {}
        self._holders = {"slice": 1} if is_sliced else {}
