"""The layout of elements that an index or a mask has selected from a tensor, and that stay where they are."""

from dataclasses import dataclass

from laconic.layout.bucket import Extent, Slot


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
