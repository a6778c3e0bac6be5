"""How much others pad: the rules that laconic's planner is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from laconic.layout.packing import round_up


def fsdp2_numel(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> int:
    """Elements gathered by PyTorch FSDP2: each tensor alone, its first dimension in ranks equal parts, rounded up.

    Source: torch.distributed.fsdp, `Shard(0)` with padding to ceil(shape[0] / ranks).
    """
    return sum(num_ranks * -(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in shapes if shape)


def lcm_numel(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> int:
    """Elements of Megatron-FSDP's flat buffer, at the least: shards are multiples of all rows' least common multiple.

    A row is shape[1:] here. The gaps that its aligned tensor starts add are left out.
    """
    shard = math.lcm(*(max(1, math.prod(shape[1:])) for shape in shapes))
    return round_up(sum(map(math.prod, shapes)), shard * num_ranks)
