"""The number of islands that train each parameter of a model with partial updates.

Each coordinate of a pseudo-gradient is averaged over the islands that train it, not over all islands. A slice may lose
all its holders. Its parameters and their outer momentum then stay as they are until an island trains the slice again.

[Note: Outer parameter groups]
A mean over one holder is noisier than a mean over all islands, and holders of different slices do not see each other's
updates. So slices want other outer steps than parameters that all islands train. The outer optimizer of a fragment gets
torch's parameter groups: one for each number of holders, as {"params": [...], "holders": m, "islands": I}, to which a
function that makes an outer optimizer may add "lr" and whatever else the optimizer takes. A group is sliced if m < I.

A fragment has one outer parameter for all that is not sliced, and one for each slice. They are views of one buffer, in
an order that does not depend on the holders. When islands come or go, an outer parameter may change its group, but its
state stays what it was. Without slices there is one group with one outer parameter.
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
        self.num_islands = cluster.num_islands
        slices = slice_of_parameters(model)
        self._slices = {name: index for name, index in slices.items() if index is not None}
        trained = {name: p.requires_grad for name, p in model.named_parameters() if name in self._slices}
        self._holders = dict(zip(trained, sum_over_islands(cluster, list(trained.values())), strict=True))

    def is_synced(self, name: str, parameter: nn.Parameter) -> bool:
        """True if an island may train the parameter."""
        return parameter.requires_grad or name in self._holders

    def order(self, name: str) -> int:
        """Return the slice of a parameter, from 0; -1 if it is in no slice."""
        return self._slices.get(name, -1)

    def count(self, name: str) -> int:
        """Return the number of islands that train the parameter."""
        return self._holders.get(name, self.num_islands)

    def counts(self, names: Iterable[str]) -> dict[str, int] | None:
        """Return the number of islands that train each parameter; None if all islands train all of them."""
        counts = {name: self.count(name) for name in names}
        return counts if any(count != self.num_islands for count in counts.values()) else None
