"""Parameters that convert themselves before the gather, such as torchao's float8 weights.

[Note: Conversion]
FSDP2 asks the tensor of a sharded parameter for two methods. `fsdp_pre_all_gather` returns the tensors to gather, such
as one in float8, and metadata, such as its scale. `fsdp_post_all_gather` makes the parameter that forward uses out of
the gathered tensors and the metadata. laconic calls both alike. It converts before the first level of a gather, so the
network, the node and the cache carry the converted elements. A rank holds a run of the parameter's elements, so the
first method gets a flat tensor of the parameter's class, and must convert element by element.

The elements that train stay in the bucket's shard, as for all parameters. A tensor of the parameter's class holds a
view of them, in the attribute that `__tensor_flatten__` names. Converting parameters have buckets of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from laconic.ragged.dtensor import is_torch_dtensor


def converts(parameter: Tensor) -> bool:
    """True if a parameter converts itself before FSDP2's gather."""
    held = parameter._local_tensor if is_torch_dtensor(parameter) else parameter
    return hasattr(held, "fsdp_pre_all_gather")


def check_convertible(parameter: Tensor, name: str) -> None:
    """Refuse a parameter whose conversion laconic cannot run.

    Raises:
        NotImplementedError: a converting parameter is a DTensor, or does not wrap one tensor of its own shape.
    """
    if not converts(parameter):
        return
    if is_torch_dtensor(parameter):
        raise NotImplementedError(
            f"{name} converts itself before the gather (fsdp_pre_all_gather) and is cut by another parallelism as "
            "well; laconic does one or the other. Turn the conversion off (torchao: enable_fsdp_float8_all_gather="
            "False), or do not cut this parameter over another mesh axis"
        )
    inner = _inner_names(parameter)
    if len(inner) != 1 or getattr(parameter, inner[0]).shape != parameter.shape:
        raise NotImplementedError(
            f"{name} is a {type(parameter).__name__} with fsdp_pre_all_gather, and consists of {len(inner)} tensors "
            f"({', '.join(inner) or 'no __tensor_flatten__'}); laconic converts parameters that wrap one tensor of "
            "their own shape. Give it in ignored_params"
        )


def plain_elements(parameter: Tensor) -> Tensor:
    """The tensor that a converting parameter wraps."""
    return getattr(parameter, _inner_names(parameter)[0]).detach()


def _inner_names(parameter: Tensor) -> Sequence[str]:
    flatten = getattr(parameter, "__tensor_flatten__", None)
    return () if flatten is None else flatten()[0]


class Conversion:
    """The conversion of one parameter: [Note: Conversion]."""

    def __init__(
        self, parameter: Tensor, name: str, module: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy
    ) -> None:
        """Convert `parameter`, whose owner is `module`, between the ranks of `mesh`, which has one axis."""
        self._name, self._module, self._mesh, self._precision = name, module, mesh, precision
        self._shape, self._stride = parameter.shape, parameter.stride()
        self._attribute = _inner_names(parameter)[0]
        self._prototype = parameter.detach().reshape(-1)[:1].clone()
        self._part: Tensor | None = None  # of the parameter's class: holds a view of this rank's elements
        parameters = inspect.signature(parameter.fsdp_pre_all_gather).parameters  # type: ignore[attr-defined]
        self._takes_mesh_only = len(parameters) == 1
        self._metadata: Any = None
        self._gathered: nn.Parameter | None = None
        self._buffers: list[tuple[torch.UntypedStorage, int]] = []  # that the gathered parameter needs besides

    @torch.no_grad()
    def encode(self, local: Tensor) -> Tensor:
        """Convert this rank's elements, (n,), and keep the metadata for `decode`. Collective over the mesh.

        Raises:
            NotImplementedError: the result is not one tensor with as many elements.
        """
        part = self._bind(local)
        rest = () if self._takes_mesh_only else (self._shape, self._stride, self._module, self._precision)
        tensors, self._metadata = part.fsdp_pre_all_gather(self._mesh, *rest)  # type: ignore[attr-defined]
        tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        if len(tensors) != 1 or tensors[0].numel() != part.numel():
            raise NotImplementedError(
                f"fsdp_pre_all_gather of {self._name} made tensors of {[tuple(each.shape) for each in tensors]} out of "
                f"{tuple(part.shape)}; laconic gathers one tensor with as many elements. Give the parameter in "
                "ignored_params"
            )
        return tensors[0].reshape(-1)[: local.numel()]

    def _bind(self, local: Tensor) -> Tensor:
        """Make a tensor of the parameter's class hold `local`. An empty one holds a zero, as encoding may reduce."""
        held = local if local.numel() else local.new_zeros(1)
        part = self._part
        if part is None or (part.shape, part.dtype, part.device) != (held.shape, held.dtype, held.device):
            part = self._part = self._prototype.new_zeros(held.shape, dtype=held.dtype, device=held.device)
        setattr(part, self._attribute, held)
        return part

    @torch.no_grad()
    def decode(self, gathered: Tensor, dtype: torch.dtype) -> nn.Parameter:
        """Return the parameter for forward, the same object each time, from the converted elements of all ranks.

        Shapes: gathered (the parameter's shape), a view that stays. `dtype` is that of the parameter in forward.
        """
        assert self._part is not None, "the elements of a parameter were decoded before any were encoded"
        if self._gathered is not None:
            for storage, nbytes in self._buffers:
                storage.resize_(nbytes)
            self._part.fsdp_post_all_gather((gathered,), self._metadata, dtype, out=self._gathered)  # type: ignore[attr-defined]
            return self._gathered
        decoded, inner = self._part.fsdp_post_all_gather((gathered,), self._metadata, dtype)  # type: ignore[attr-defined]
        own = gathered.untyped_storage().data_ptr()
        storages = [each.untyped_storage() for each in inner]
        self._buffers = [(each, each.nbytes()) for each in storages if each.data_ptr() != own]
        self._gathered = nn.Parameter(decoded, requires_grad=decoded.is_floating_point())
        return self._gathered

    @property
    def buffer_bytes(self) -> int:
        """The bytes that the decoded parameter takes besides the gathered elements."""
        return sum(nbytes for _, nbytes in self._buffers)

    def forget(self) -> None:
        """Forget the decoded parameter: the buffer that it was made from is gone."""
        self._gathered, self._buffers = None, []

    def free(self) -> None:
        """Free the memory that the decoded parameter takes besides the gathered elements."""
        for storage, _ in self._buffers:
            storage.resize_(0)
