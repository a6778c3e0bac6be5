"""The number of islands that train each parameter of a model with partial updates.

Each coordinate of a pseudo-gradient is averaged over the islands that train it, not over all islands. A slice may lose
all its holders. Its parameters and their outer momentum then stay as they are until an island trains the slice again.
"""

from collections import Counter
from collections.abc import Iterable

from torch import nn

from laconic.comm.cluster import Cluster
from laconic.islands.all_reduce import gather_from_islands
from laconic.ragged.parts import slice_of_parameters

_NO_SLICE = -1  # the value that an island without slices sends


class Holders:
    """The islands that train each slice, counted once. Without partial updates all islands train all parameters."""

    def __init__(self, model: nn.Module, cluster: Cluster) -> None:
        """Count the holders of each slice. Collective over islands."""
        self._num_islands = cluster.num_islands
        self._slices = {name: index for name, index in slice_of_parameters(model).items() if index is not None}
        trained = {self._slices[n] for n, p in model.named_parameters() if n in self._slices and p.requires_grad}
        own = trained.pop() if len(trained) == 1 else _NO_SLICE
        self._holders = Counter(gather_from_islands(cluster, own))

    def is_synced(self, name: str, parameter: nn.Parameter) -> bool:
        """True if an island may train the parameter."""
        return parameter.requires_grad or name in self._slices

    def counts(self, names: Iterable[str]) -> dict[str, int] | None:
        """Return the number of islands that train each parameter; None if all islands train all of them."""
        counts = {
            name: self._holders[self._slices[name]] if name in self._slices else self._num_islands for name in names
        }
        return counts if any(count != self._num_islands for count in counts.values()) else None
