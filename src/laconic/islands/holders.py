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

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from laconic.comm.cluster import Cluster
from laconic.islands.all_reduce import sum_over_islands
from laconic.ragged.parts import slice_of_parameters


def check_slices(holders: Sequence[int], *, may_join: bool, numel: Sequence[int] | None = None) -> None:
    """Refuse slices that no island trains, or warn of them in one line where islands may join.

    Args:
        holders: the number of islands that train each slice.
        may_join: whether islands may join later. They take the slices that fewest islands train.
        numel: the number of weights in each slice, if the model is known.

    Raises:
        ValueError: a slice has no holder, and no island may join.
    """
    idle = [index for index, count in enumerate(holders) if not count]
    if not idle:
        return
    weights = "" if numel is None else f", so {sum(numel[index] for index in idle):,} weights never change"
    trained = len(holders) - len(idle)
    problem = f"no island trains slice {', '.join(map(str, idle))} of {len(holders)}{weights}"
    if not may_join:
        raise ValueError(
            f"{problem}; use at most as many slices as islands, and give every slice to an island "
            f"({trained} of the slices have one)"
        )
    warnings.warn(f"{problem} until an island joins", stacklevel=3)


class Holders:
    """The islands that train each part of a sliced parameter, counted once. All islands train all other parameters."""

    def __init__(self, model: nn.Module, cluster: Cluster) -> None:
        """Count the holders of each part. Collective over islands."""
        self.num_islands = cluster.num_islands
        slices = slice_of_parameters(model)
        self._slices = {name: index for name, index in slices.items() if index is not None}
        parts = {name: p for name, p in model.named_parameters() if name in self._slices}
        trained = {name: part.requires_grad for name, part in parts.items()}
        self._numel = {name: part.numel() for name, part in parts.items()}
        self._holders = dict(zip(trained, sum_over_islands(cluster, list(trained.values())), strict=True))

    def is_synced(self, name: str, parameter: nn.Parameter) -> bool:
        """True if an island may train the parameter."""
        return parameter.requires_grad or name in self._holders

    def check(self, *, may_join: bool) -> None:
        """See `check_slices`."""
        num_slices = max(self._slices.values(), default=-1) + 1
        numel: Counter[int] = Counter()
        holders = dict.fromkeys(range(num_slices), self.num_islands)
        for name, index in self._slices.items():
            numel[index] += self._numel[name]
            holders[index] = min(holders[index], self._holders[name])
        check_slices(list(holders.values()), may_join=may_join, numel=[numel[index] for index in holders])

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
