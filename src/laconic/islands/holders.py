"""The number of islands that train each parameter of a model with partial updates.

Each coordinate of a pseudo-gradient is averaged over the islands that train it, not over all islands. A slice may lose
all its holders. Its parameters and their outer momentum then stay as they are until an island trains the slice again.
"""

from collections.abc import Iterable

from torch import nn

from laconic.comm.cluster import Cluster
from laconic.islands.all_reduce import sum_over_islands
from laconic.ragged.parts import slice_of_parameters


class Holders:
    """The islands that train each part of a sliced parameter, counted once. All islands train all other parameters."""

    def __init__(self, model: nn.Module, cluster: Cluster) -> None:
        """Count the holders of each part. Collective over islands."""
        self._num_islands = cluster.num_islands
        slices = slice_of_parameters(model)
        trained = {name: p.requires_grad for name, p in model.named_parameters() if slices[name] is not None}
        self._holders = dict(zip(trained, sum_over_islands(cluster, list(trained.values())), strict=True))

    def is_synced(self, name: str, parameter: nn.Parameter) -> bool:
        """True if an island may train the parameter."""
        return parameter.requires_grad or name in self._holders

    def counts(self, names: Iterable[str]) -> dict[str, int] | None:
        """Return the number of islands that train each parameter; None if all islands train all of them."""
        counts = {name: self._holders.get(name, self._num_islands) for name in names}
        return counts if any(count != self._num_islands for count in counts.values()) else None
