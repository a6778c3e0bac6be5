"""The bytes that this rank receives in torch's own collectives, counted where DTensor issues them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed.tensor import DTensor, placement_types
from torch.utils._python_dispatch import TorchDispatchMode

_MOVE_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")


class CollectiveBytes(TorchDispatchMode):
    """Counts the bytes that this rank receives in functional collectives, as if each used its best algorithm.

    On R ranks, an all-gather brings R - 1 pieces. A reduce-scatter and an all-to-all bring (R - 1) / R of the input, an
    all-reduce twice as much. On CPU, DTensor gathers instead of an all-to-all; such a gather counts as an all-to-all.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.received_bytes = 0.0
        self.calls: dict[str, int] = {}
        self._num_ranks = num_ranks
        self._in_all_to_all = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again with local tensors and collectives
        moves = func.namespace in ("_c10d_functional", "_dtensor") and func._opname not in _MOVE_NOTHING
        if moves:
            self._count(func._opname, args[0])
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, tensor: Tensor) -> None:
        others = self._num_ranks - 1
        if "all_gather" in name and not self._in_all_to_all:
            received = others * tensor.nbytes
        elif "all_reduce" in name:
            received = 2 * others * tensor.nbytes / self._num_ranks
        elif "reduce_scatter" in name or "all_to_all" in name or "alltoall" in name or self._in_all_to_all:
            received = others * tensor.nbytes / self._num_ranks
        else:
            raise NotImplementedError(f"no rule for the bytes of {name}")
        self.received_bytes += received
        key = "all_to_all" if self._in_all_to_all else name
        self.calls[key] = self.calls.get(key, 0) + 1

    @contextmanager
    def counting(self) -> Iterator[CollectiveBytes]:
        """Count the collectives of the body."""
        exchange = placement_types.shard_dim_alltoall

        def marked_exchange(*args: Any, **kwargs: Any) -> Any:
            self._in_all_to_all = True
            try:
                return exchange(*args, **kwargs)
            finally:
                self._in_all_to_all = False

        with mock.patch.object(placement_types, "shard_dim_alltoall", marked_exchange), self:
            yield self
