"""Parameters that took the place of sharded ones: the sharded parameters take their values, and go on to train.

`load_state_dict(assign=True)` replaces parameters, and so does code such as `module.weight = nn.Parameter(...)`.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from laconic.shard.bucket import Bucket


@torch.no_grad()
def take_values(bucket: Bucket) -> list[str]:
    """Copy from the parameters that replaced sharded ones, and show the sharded ones again. Returns their names.

    Collective if a replacement is a DTensor.

    Raises:
        RuntimeError: a replacement has another shape or dtype; or the shard is on the meta device, and some parameters
            of the bucket have no replacement. The sharded parameters are shown.
    """
    new = _replacements(bucket)
    for places, sharded in zip(bucket.places, bucket.sharded, strict=True):
        for module, name in places:
            if module._parameters.get(name) is not None:
                module._parameters[name] = sharded
    names = {index: bucket.layout.slots[index].name for index in new}
    for index, parameter in new.items():
        shape = bucket.sharded[index].shape
        if parameter.dtype != bucket.dtype or parameter.shape != shape:
            raise RuntimeError(
                f"{names[index]}, {bucket.dtype} of shape {tuple(shape)}, cannot become {parameter.dtype} of shape "
                f"{tuple(parameter.shape)} after fully_shard; convert the state dict"
            )
    new = {index: parameter for index, parameter in new.items() if not parameter.is_meta}
    if new and bucket.shard.is_meta:
        missing = [slot.name for index, slot in enumerate(bucket.layout.slots) if index not in new]
        if missing:
            raise RuntimeError(
                f"{', '.join(names.values())} got values, but not {', '.join(missing)}, which share a bucket on the "
                "meta device; call to_empty first, or load or assign them all at once"
            )
        bucket.convert(lambda shard: torch.zeros_like(shard, device=bucket.cluster.device))
    for index, parameter in new.items():
        bucket.sharded[index].copy_(parameter)
    return list(names.values())


def take_loaded_values(buckets: Iterable[Bucket]) -> None:
    """Take the values that `load_state_dict(assign=True)` has put in place of sharded parameters.

    Raises:
        RuntimeError: see `take_values`.
    """
    for bucket in buckets:
        take_values(bucket)


def take_values_and_warn(bucket: Bucket) -> None:
    """Take the values of replacements that came without `load_state_dict`, and warn.

    Raises:
        RuntimeError: see `take_values`.
    """
    names = take_values(bucket)
    if names:
        warnings.warn(
            f"{', '.join(names)} replaced sharded parameters after fully_shard: their values were taken, and the "
            "sharded parameters train. An optimizer that holds the replacements trains nothing: build it from "
            "model.parameters() now, or copy with param.copy_(value) instead of replacing",
            stacklevel=2,
        )


def _replacements(bucket: Bucket) -> dict[int, nn.Parameter]:
    """The parameters that modules show in place of sharded ones, by index."""
    found = {}
    for index, (places, sharded) in enumerate(zip(bucket.places, bucket.sharded, strict=True)):
        shown = (module._parameters.get(name) for module, name in places)
        other = next((parameter for parameter in shown if parameter is not None and parameter is not sharded), None)
        if other is not None:
            found[index] = other
    return found
