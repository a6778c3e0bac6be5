"""The padding of other systems, with which laconic's planner is compared."""

import math
from collections.abc import Sequence

from laconic.layout.packing import round_up


def fsdp2_numel(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> int:
    """Return the elements that PyTorch FSDP2 gathers: it cuts each tensor's first dimension in equal parts, rounded up.

    Source: torch.distributed.fsdp, `Shard(0)` with padding to ceil(shape[0] / ranks).
    """
    return sum(num_ranks * -(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in shapes if shape)


def lcm_numel(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> int:
    """Return the least elements of Megatron-FSDP's buffer: shards are multiples of all rows' least common multiple.

    A row is shape[1:] here. The alignment of each tensor's start adds gaps, which are left out.
    """
    shard = math.lcm(*(max(1, math.prod(shape[1:])) for shape in shapes))
    return round_up(sum(map(math.prod, shapes)), shard * num_ranks)
