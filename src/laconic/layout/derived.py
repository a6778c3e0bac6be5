"""Layouts that follow from a parameter's: of a tensor that an optimizer keeps beside it, and of selected elements."""

import math
from dataclasses import dataclass

from laconic.layout.bucket import BucketLayout, Extent, Slot, row_block


@dataclass(frozen=True, kw_only=True)
class DerivedLayout:
    """A tensor with `items` entries per run of `elements` elements of a parameter, cut where the parameter is cut.

    Every rank derives this layout from the parameter's layout, without a message. The tensor has no place in a bucket,
    so shards may hold different numbers of its entries. The parameter is slot `index` of `base`, its bucket.

    Raises:
        ValueError: a border between shards cuts a run of the parameter. The message names the granularity to ask for.
    """

    base: BucketLayout
    index: int
    shape: tuple[int, ...]
    """The global shape of the derived tensor: a shorter run at the parameter's end has `items` entries too."""
    elements: int
    items: int

    def __post_init__(self) -> None:
        slot = self.base.slots[self.index]
        assert math.prod(self.shape) == -(-slot.numel // self.elements) * self.items
        for shard in self.base.holders(self.index):
            extent = self.base.extent(self.index, shard)
            if extent is not None and extent.stop % self.elements and extent.stop != slot.numel:
                raise ValueError(
                    f"{slot.name} of shape {slot.shape} is cut after element {extent.stop}, inside a block of "
                    f"{self.elements} elements that must stay together; shard it with "
                    f"granularity={_granularity_of(self.elements, slot.shape)}"
                )

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The derived tensor alone, as slot 0."""
        return (Slot(name=self.base.slots[self.index].name, shape=self.shape, block=self.items, offset=0),)

    @property
    def num_shards(self) -> int:
        """The number of shards of the parameter's bucket."""
        return self.base.num_shards

    def extent(self, index: int, shard: int) -> Extent | None:
        """The entries that belong to the parameter's elements in `shard`; None if there are none."""
        extent = self.base.extent(self.index, shard)
        if extent is None:
            return None
        first, last = extent.start // self.elements, -(-extent.stop // self.elements)
        return Extent(first * self.items, last * self.items)

    def holders(self, index: int) -> range:
        """See `BucketLayout.holders`."""
        return self.base.holders(self.index)


def _granularity_of(elements: int, shape: tuple[int, ...]) -> str:
    rows, rest = divmod(elements, row_block(shape))
    return f"laconic.elements({elements})" if rest or len(shape) < 2 else f"laconic.rows({rows})"


@dataclass(frozen=True, kw_only=True)
class SelectedLayout:
    """Elements of one tensor, of which shard s holds the run that ends at `stops[s]`. Runs come in order of shards."""

    name: str
    shape: tuple[int, ...]
    """The shape of the selection."""
    stops: tuple[int, ...]

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The selection alone, as slot 0."""
        return (Slot(name=self.name, shape=self.shape, block=1, offset=0),)

    @property
    def num_shards(self) -> int:
        """The number of shards that the elements come from."""
        return len(self.stops)

    def extent(self, index: int, shard: int) -> Extent | None:
        """The run that lies in `shard`; None if no element does."""
        start = self.stops[shard - 1] if shard else 0
        return Extent(start, self.stops[shard]) if start < self.stops[shard] else None

    def holders(self, index: int) -> range:
        """See `BucketLayout.holders`."""
        return range(self.num_shards)
