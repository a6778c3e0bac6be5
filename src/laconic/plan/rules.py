"""The sizes of units in other systems, for comparison with laconic's planner."""

import math
from collections.abc import Sequence

from laconic.layout.packing import round_up


def fsdp2_numel(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> int:
    """Return the elements that PyTorch FSDP2 gathers. It cuts each tensor's first dimension in equal parts, rounded up.

    Source: torch.distributed.fsdp, `Shard(0)` with padding to ceil(shape[0] / ranks).
    """
    return sum(num_ranks * -(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in shapes if shape)


def lcm_numel(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> int:
    """Return a lower bound on the elements of Megatron-FSDP's buffer.

    A shard is a multiple of the least common multiple of all rows; a row has prod(shape[1:]) elements. The real buffer
    may be larger, because it also aligns the start of each tensor.
    """
    shard = math.lcm(*(max(1, math.prod(shape[1:])) for shape in shapes))
    return round_up(sum(map(math.prod, shapes)), shard * num_ranks)
