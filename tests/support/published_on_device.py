"""Versions that a rank publishes from an accelerator that is not there, and the device memory that they add.

The trainer's program runs, unchanged, on the machine of `laconic.rehearse`, with values, since `publish` looks for what
has changed. The machine's tensors say that they are on "cuda", so the publisher compares them as there. The tape has
each allocation of device memory and each free. Memory that a kernel takes for itself, such as that of `nonzero`, is on
no tape.

The other ranks are not there. A model that is cut over all ranks has one holder of each element, so this rank's shares
are what it holds. Its files are written; rank 0 commits no version, as the others' files are missing. A rank alone
commits its versions, and a reader has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from laconic.publish import Publisher, publisher
from laconic.publish.holdings import Share, Told
from laconic.rehearse import Tape, rehearsal
from laconic.rehearse.tape import Free, Step
from laconic.shard.unit import unit_of

_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model that computes in bf16, and how it trains."""

    build: Callable[[torch.device], nn.Module]
    units: Callable[[nn.Module], Sequence[nn.Module]]
    """The modules that become units, besides the model itself."""
    loss: Callable[[nn.Module, int], Tensor]
    """The loss of a step."""
    learning_rate: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class AddedMemory:
    """The device memory of versions, on one rank."""

    unit: int
    """The bytes of the largest unit's shard."""
    peaks: list[int]
    """The most bytes that each version takes at once, besides all that was there when it began."""
    left: int
    """The bytes that are still taken when the last version is written."""
    weights: dict[str, Tensor]
    """This rank's part of each parameter in the last version, in bf16; of a rank alone the whole parameter."""


def publish_on_device(
    trained: Trained, folder: Path, *, versions: int, nodes: int = 2, local: int = 2, **keys: Any
) -> AddedMemory:
    """Train and publish as one rank of a cluster. `keys` are those of `Publisher`.

    The first version has all values. In the second one all elements have changed.
    """
    with rehearsal(nodes=nodes, local=local, has_values=True) as machine, _alone(nodes * local):
        torch.manual_seed(0)
        model: Any = trained.build(torch.device("cuda"))
        mesh = laconic.init_mesh("cuda", nodes=nodes, local=local)
        for module in (*trained.units(model), model):
            laconic.fully_shard(module, mesh=mesh, mp_policy=_POLICY)
        optimizer = torch.optim.AdamW(model.parameters(), lr=trained.learning_rate)
        peaks, left = [], 0
        with Publisher(model, folder, group=dist.new_group([dist.get_rank()]), **keys) as own:
            for version in range(versions):
                trained.loss(model, version).backward()
                optimizer.step()
                optimizer.zero_grad()
                if version == 1:
                    _change_all(model)
                begin = len(machine.tape.entries)
                with machine.recording() as tape:
                    own.publish(step=version)
                    own.wait()
                peak, remains = _taken(tape, begin)
                peaks.append(peak)
                left += remains
        unit = max(
            sum(bucket.shard.nbytes for bucket in unit.buckets) for each in model.modules() if (unit := unit_of(each))
        )
        weights = {
            name: (parameter.full_tensor() if nodes * local == 1 else parameter.to_local()).detach().cpu().bfloat16()
            for name, parameter in model.named_parameters()
        }
        del model, optimizer, own  # now, while the machine is there
    return AddedMemory(unit=unit, peaks=peaks, left=left, weights=weights)


@torch.no_grad()
def _change_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


def _taken(tape: Tape, begin: int) -> tuple[int, int]:
    """The most bytes of device memory that entries from `begin` on hold at once, of what they allocate; and the last.

    Memory that was there before is left out, also where it is freed: training may have that back at any time.
    """
    held: dict[int, int] = {}
    most = 0
    for entry in tape.entries[begin:]:
        if isinstance(entry, Step) and entry.allocates is not None and tape.memories[entry.allocates].is_device:
            held[entry.allocates] = tape.memories[entry.allocates].nbytes
            most = max(most, sum(held.values()))
        elif isinstance(entry, Free):
            held.pop(entry.memory, None)
    return most, sum(held.values())


@contextmanager
def _alone(num_ranks: int) -> Iterator[None]:
    """Let a publisher do without ranks that are not there."""
    if num_ranks == 1:
        yield
        return
    with (
        mock.patch.object(publisher, "shares_of", _own_shares),
        mock.patch.object(Publisher, "_commit", return_value=None),
    ):
        yield


def _own_shares(told: Sequence[Told], tensors: object, rank: int) -> dict[str, list[Share]]:
    """All that this rank holds, as nobody else does: [Note: Who publishes an element] in holdings.py."""
    return {
        name: [Share(number, 0, math.prod(sizes), (tuple(s), tuple(sizes))) for number, (s, sizes) in enumerate(places)]
        for name, places in told[rank].items()
    }
