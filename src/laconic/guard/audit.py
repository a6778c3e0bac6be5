"""The audit: every rank computes its neighbour's gradients once more, and the two compare them to the bit.

[Note: What an audit sees]
A device may compute wrong numbers without an error, and a sum over the ranks hides them. In an audit rank r + 1 gets
the micro-batch of rank r, with the state of its random generators and its buffers, and repeats forward and backward on
its own device and with its own copy of the gathered weights. Where kernels are deterministic and devices alike, the
gradients before they are summed must have equal bits. So an audit sees a device that computes wrongly, and damage of
gathered weights, activations and gradients on one of the two ranks while it runs. It does not see damage that both
compute with, as of a shard, which all ranks gather alike, nor of the optimizer's states, which exist once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster
from laconic.comm.collectives import pass_on
from laconic.guard.checksum import checksum_of
from laconic.guard.reporting import CorruptionError, shard_at
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.bucket import Bucket
from laconic.shard.hooks import map_tensors, tensors_in
from laconic.shard.sharded_module import ShardedModule, reshard_all

LossFunction = Callable[[Any, Any], Tensor]


def audit(module: nn.Module, batch: Any, loss_fn: LossFunction) -> None:
    """Compare every rank's gradients with those that the next rank computes: [Note: What an audit sees].

    Collective over the mesh's node and local axes. Training goes on as if it had not been: weights, gradients, buffers
    and random states are afterwards as before. Call it between optimizer steps.

    Args:
        module: the root of sharded modules.
        batch: a micro-batch of this rank. All its tensors go to the next rank; everything else in it, and the
            structure, must be the same on all ranks.
        loss_fn: a function of the module and a batch that returns the loss, a scalar. It may draw random numbers from
            torch's generators only.

    Cost: two forwards and backwards, and the bytes of a batch and of the module's buffers into each rank.

    Raises:
        ValueError: the module is not sharded, or on one rank only, or ranks have batches of different structures.
        CorruptionError: two ranks computed different bits from the same batch, on all ranks alike. It may mean that
            kernels are not deterministic (torch.use_deterministic_algorithms).
    """
    if not isinstance(module, ShardedModule):
        raise ValueError(f"audit needs a module of laconic.fully_shard, got {type(module).__name__}")
    cluster = module._laconic_unit.cluster
    if cluster.size == 1:
        raise ValueError("audit compares ranks that share a model, but this mesh has one rank in an island")
    reshard_all(module)
    with _as_if_nothing_was(module, cluster.device):
        local = _local_state(module)
        given = [*tensors_in(batch), *local, *_random_states(cluster.device)]
        got = _from_previous(cluster, given)
        wanted = _gradient_checksums(module, batch, loss_fn)
        replayed = iter(got)
        other_batch = map_tensors(lambda own: next(replayed).to(own.device).requires_grad_(own.requires_grad), batch)
        for tensor in local:
            tensor.copy_(next(replayed))
        _set_random_states(cluster.device, list(replayed))
        again = _gradient_checksums(module, other_batch, loss_fn)
    (theirs,) = _from_previous(cluster, [torch.stack(list(wanted.values()))])
    _raise_together(cluster, [name for (name, own), their in zip(again.items(), theirs, strict=True) if own != their])


def _gradient_checksums(module: ShardedModule, batch: Any, loss_fn: LossFunction) -> dict[str, Tensor]:
    """Run forward and backward, and return the checksums of the loss and of this rank's own gradients, by name."""
    found: dict[Any, Tensor] = {}

    def keep(bucket: Bucket, full: Tensor) -> None:
        for parameter, slot in zip(bucket.sharded, bucket.layout.slots, strict=True):
            new = checksum_of(full[slot.offset : slot.offset + slot.numel])
            # several forwards of a unit count in their order
            found[parameter] = 3 * found[parameter] + new if parameter in found else new

    root, plain = module._laconic_unit.root, _plain_parameters(module)
    for parameter in plain:
        parameter.grad = None
    root.probe = keep
    try:
        loss = loss_fn(module, batch)
        loss.backward()
    finally:
        root.probe = None
    found |= {parameter: checksum_of(parameter.grad) for parameter in plain if parameter.grad is not None}
    return {"the loss": checksum_of(loss.detach()).cpu()} | {
        f"the gradient of {name}": found[parameter].cpu() if parameter in found else torch.tensor(0)
        for name, parameter in module.named_parameters()
    }


def _plain_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that no unit has."""
    return [parameter for parameter in module.parameters() if not isinstance(parameter, RaggedTensor)]


def _local_state(module: nn.Module) -> list[Tensor]:
    """The tensors that each rank has of its own: buffers, and parameters that no unit has."""
    return [each.detach() for each in chain(module.buffers(), _plain_parameters(module))]


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _set_random_states(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


@contextmanager
def _as_if_nothing_was(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore random states, buffers and the gradients and values of parameters that no unit has."""
    random, local = _random_states(device), _local_state(module)
    values = [tensor.clone() for tensor in local]
    plain = _plain_parameters(module)
    gradients = [parameter.grad for parameter in plain]
    try:
        yield
    finally:
        _set_random_states(device, random)
        for tensor, value in zip(local, values, strict=True):
            tensor.copy_(value)
        for parameter, gradient in zip(plain, gradients, strict=True):
            parameter.grad = gradient


def _from_previous(cluster: Cluster, given: Sequence[Tensor]) -> list[Tensor]:
    """Give tensors to the next rank of the island, and return those of the rank before, on the host. Collective."""
    held = [tensor.detach().cpu().contiguous() for tensor in given]
    ranks = RankGroup(cluster.flag_group)
    forms = ranks.gather([[str(tensor.dtype).removeprefix("torch."), *tensor.shape] for tensor in held])
    dtypes = [[dtype for dtype, *_ in theirs] for theirs in forms]
    for theirs in dtypes:
        if theirs != dtypes[0]:
            raise ValueError(
                "audit needs batches, and modules, of one structure on all ranks: the first rank's tensors have the "
                f"dtypes {dtypes[0]}, but another one's {theirs}"
            )
    arriving = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, *shape in forms[ranks.rank - 1]]
    pass_on(cluster, held, arriving)
    return arriving


def _raise_together(cluster: Cluster, differing: list[str]) -> None:
    """Raise what any rank has found, on all ranks. Collective over the island."""
    ranks = RankGroup(cluster.flag_group)
    found = ranks.gather([*differing[:1], str(len(differing))])
    for place, (first, *more) in enumerate(found):
        if more:
            owner, replayer = (cluster.global_rank(shard_at(cluster, each % ranks.size)) for each in (place - 1, place))
            raise CorruptionError(
                f"ranks {owner} and {replayer} computed different bits from the same batch: {first}, and {more[0]} "
                "values in all. One of the two devices computes wrongly, or kernels are not deterministic: audit again "
                "under torch.use_deterministic_algorithms(True), and go on from the last checkpoint without the "
                "machine that is named most"
            )
