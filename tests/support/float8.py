"""A weight that converts itself before the gather, as torchao's do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter as preserve_version
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

FLOAT8 = torch.float8_e4m3fn


class Float8Weight(torch.Tensor):
    """A weight that crosses the wire in float8, with one scale, and is multiplied in its own dtype."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Float8Weight:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda weight: weight._data, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: MixedPrecisionPolicy
    ) -> tuple[tuple[Tensor, ...], Any]:
        assert mesh.ndim == 1
        assert outer_size == module.weight.shape
        scale = scale_of(all_reduce(self._data.abs().max(), "MAX", mesh.get_group()))
        return ((self._data * scale).to(FLOAT8),), (scale,)

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (data,), (scale,) = all_gather_outputs, metadata
        weight = data.to(param_dtype) / scale.to(param_dtype)
        if out is None:
            return weight, (data, weight)
        with preserve_version(out):
            out.copy_(weight)
        return None


def scale_of(largest: Tensor) -> Tensor:
    return torch.finfo(FLOAT8).max / largest.clamp(min=1e-12)
