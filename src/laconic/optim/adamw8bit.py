"""AdamW whose two moments take 8 bits each.

[Note: One rounding per operation]
The result must depend neither on how many elements a rank holds nor on where in memory they begin. But kernels treat
the elements that do not fill a vector register in another way than the others. For some elements only, an operation
that rounds twice (`addcmul_`, `lerp_`, `add_(alpha=...)`) becomes a fused multiply-add, which rounds once. Their last
bit then differs. So the step uses only operations that IEEE 754 defines: sums, products, quotients and roots. It takes
fp32 roots by way of fp64. On CPU, torch leaves roots to a vector library, which on some processors is wrong by one bit
in a fifth of all cases. An fp64 root, even if it is wrong by one bit, rounds to the correct fp32 root.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from laconic.codec.tiles import Grid, Tiling
from laconic.layout.bucket import BucketLayout, derived, row_block
from laconic.optim.base import Group, RaggedOptimizer, check_range, local_of, zeros_beside
from laconic.optim.dynamic_map import dequantize, dynamic_map, quantize
from laconic.ragged.dtensor import DTensorShard
from laconic.ragged.spec import RaggedSpec
from laconic.ragged.tensor import RaggedTensor

MIN_8BIT_SIZE = 4096
"""The elements from which a parameter's moments take 8 bits, unless the user says otherwise."""


class AdamW8bit(RaggedOptimizer):
    """AdamW with its moments stored in 8 bits: about 2.01 bytes of state per parameter instead of 8.

    A parameter of `min_8bit_size` elements or more keeps its moments as codes, with one scale per `block` of the global
    tensor, such as a 32 x 32 tile of a matrix (`laconic.optim.Tiling`). Each step decodes the moments, computes AdamW
    in fp32 and encodes them again, a few MiB at a time. Smaller parameters keep fp32 moments. Given equal gradients,
    the results are equal to the bit on any number of ranks. Ranks exchange no message.

    Borders between ranks must not cut blocks. Shard with `fully_shard(..., granularity=AdamW8bit.granularity)`, or with
    rows of 32 (`laconic.rows(32)`) if no vector has `min_8bit_size` elements. Tensor and expert parallelism may cut a
    parameter, too, at borders of blocks.

    The state of a parameter is `step`; `exp_avg` and `exp_avg_sq`, cut like the parameter; and, for 8 bits,
    `exp_avg_scale` and `exp_avg_sq_scale`, one fp32 number per block.

    Args:
        params: RaggedTensors (after `fully_shard`), plain tensors, or groups of them.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        block: the blocks that share a scale. Default: `Tiling()`.
        min_8bit_size: the *global* number of elements from which a parameter's moments take 8 bits; 0 for all.

    Raises:
        ValueError: a setting is out of range; a border cuts a block, also one of another mesh axis, with the cuts that
            are accepted; a parameter is a DTensor of torch's own sharding, or not contiguous.

    Reference: tests/reference/adamw8bit.py, bit-equal. Source: arXiv 2110.02861; tiles as in arXiv 2602.22437.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        block: Tiling | None = None,
        min_8bit_size: int = MIN_8BIT_SIZE,
    ) -> None:
        self.block = block or Tiling()
        self.min_8bit_size = min_8bit_size
        check_range({"min_8bit_size": min_8bit_size}, "min_8bit_size")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @staticmethod
    def granularity(
        name: str, parameter: Tensor, *, block: Tiling | None = None, min_8bit_size: int = MIN_8BIT_SIZE
    ) -> int:
        """The elements of `parameter` that must stay together, for `fully_shard(granularity=AdamW8bit.granularity)`.

        With other blocks than the default, pass `functools.partial(AdamW8bit.granularity, block=...)`.
        """
        shape = tuple(parameter.shape)
        if parameter.numel() < max(1, min_8bit_size):
            return max(1, min(row_block(shape), parameter.numel()))
        return (block or Tiling()).grid(shape).uncut

    @property
    def table_nbytes(self) -> int:
        """The bytes of the tables with which moments are encoded. All optimizers of a device share them."""
        devices = {parameter.device for group in self.param_groups for parameter in group["params"]}
        return sum(dynamic_map(device, signed=signed).nbytes for device in devices for signed in (True, False))

    def _check_settings(self, group: Group) -> None:
        check_range(group, "betas", high=1)
        check_range(group, "eps")

    def _needs_whole(self, parameter: Tensor, group: Group) -> bool:
        return parameter.numel() >= max(1, self.min_8bit_size)

    def _check_parameter(self, parameter: Tensor, name: str, group: Group) -> None:
        super()._check_parameter(parameter, name, group)
        if isinstance(parameter, RaggedTensor):
            if self._needs_whole(parameter, group):
                if parameter.spec.dtensor is not None:
                    check_outer_cut(parameter.spec.dtensor, self.block, name)
                self._spec_of_scales(parameter)
        elif not parameter.is_contiguous():
            raise ValueError(
                f"{name} of shape {tuple(parameter.shape)} is not contiguous, as AdamW8bit needs it; use "
                "nn.Parameter(parameter.contiguous())"
            )

    def _init_state(self, parameter: Tensor, group: Group) -> None:
        state = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32)
        is_8bit = self._needs_whole(parameter, group)
        for moment in ("exp_avg", "exp_avg_sq"):
            dtype = torch.uint8 if is_8bit else torch.float32
            state[moment] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            if is_8bit:
                shape = self._grid(parameter).scales_shape
                state[f"{moment}_scale"] = zeros_beside(parameter, shape, torch.float32, self._spec_of_scales)

    def _step(self) -> None:
        for group in self.param_groups:
            later: dict[int, list[Any]] = {}
            for parameter in self._with_gradient(group):
                self._step_parameter(parameter, group, later)
                if isinstance(parameter, RaggedTensor):
                    parameter.note_change()  # on ranks with an empty part too: [Note: Versions] in ragged/tensor.py
            for step, parts in later.items():
                _kernels().step_8bit(_Rule(group, step=step), parts)  # type: ignore[union-attr]

    def _step_parameter(self, parameter: Tensor, group: Group, later: dict[int, list[Any]]) -> None:
        """Step one parameter, or append it to those that a kernel steps together, by their number of steps."""
        state = self.state[parameter]
        state["step"] += 1
        rule = _Rule(group, step=int(state["step"].item()))
        local, gradient = local_of(parameter), local_of(parameter.grad)  # type: ignore[arg-type]
        moments = [local_of(state[key]) for key in ("exp_avg", "exp_avg_sq")]
        if not local.numel():
            return
        if "exp_avg_scale" in state:
            scales = [local_of(state[key]) for key in ("exp_avg_scale", "exp_avg_sq_scale")]
            grid = self._grid(parameter)
            kernels = _kernels() if local.is_cuda else None
            if kernels is not None and kernels.supports(grid):
                later.setdefault(rule.step, []).append(kernels.ParameterStep(grid, local, gradient, moments, scales))
            else:
                _step_8bit(rule, grid, local, gradient, moments, scales)
        else:
            values = local.to(torch.float32)
            rule.apply_(values, gradient.to(torch.float32), *moments)
            if values is not local:
                local.copy_(values)

    def _grid(self, parameter: Tensor) -> Grid:
        """The blocks of the parameter, or of the shard that other mesh axes leave to this rank."""
        return self.block.grid(parameter.spec.slot.shape if isinstance(parameter, RaggedTensor) else parameter.shape)

    def _spec_of_scales(self, parameter: RaggedTensor) -> RaggedSpec:
        spec, grid = parameter.spec, self._grid(parameter)
        assert isinstance(spec.layout, BucketLayout)  # parameters lie in buckets
        layout = derived(
            spec.layout, spec.index, shape=grid.scales_shape, elements=grid.uncut, items=grid.scales_per_run
        )
        place = None if spec.dtensor is None else shard_of_scales(spec.dtensor, self.block)
        return RaggedSpec(cluster=spec.cluster, layout=layout, index=0, dtensor=place)


def shard_of_scales(shard: DTensorShard, block: Tiling) -> DTensorShard:
    """The scales of this rank's shard of a parameter, as a shard of all scales. Other mesh axes cut no block."""
    along = block.scales_along(shard.shape)
    shape = block.grid(shard.shape).scales_shape
    offset = [0] * len(shape)
    for start, each in zip(shard.offset, along, strict=True):
        if each is not None:
            offset[each.dim] = each.first(start)
    placements: list[Placement] = []
    for placement in shard.placements:
        each = along[placement.dim] if isinstance(placement, Shard) else None
        placements.append(Replicate() if each is None else Shard(each.dim))
    local_shape = block.grid(shard.local_shape).scales_shape
    return replace(shard, placements=tuple(placements), shape=shape, offset=tuple(offset), local_shape=local_shape)


def check_outer_cut(shard: DTensorShard, block: Tiling, name: str) -> None:
    """Check that other mesh axes cut a parameter between blocks. All ranks judge alike, as they see all shards.

    Raises:
        ValueError: a border is inside a block. The message names cuts that are accepted.
    """
    dim = _badly_cut_dim(shard, block)
    if dim is None:
        return
    each, axes = block.scales_along(shard.shape)[dim], shard.axes_that_cut((dim,))
    num_shards = math.prod(shard.mesh.size(axis) for axis in axes)
    accepted = []
    for other in range(len(shard.shape)):
        moved = [Shard(other) if axis in axes else placement for axis, placement in enumerate(shard.placements)]
        if _badly_cut_dim(replace(shard, placements=tuple(moved)), block) is None:
            accepted.append(f"Shard({other})")
    if (unit := block.tile if each is None else each.unit) is not None:
        accepted.append(f"a size of dim {dim} that is a multiple of {num_shards} x {unit}")
    if smaller := _smaller_blocks(shard, block):
        accepted.append(f"block={smaller}")
    borders = [run.start for run in shard.runs_along(dim, shard.shape[dim])[1:]]
    raise ValueError(
        f"{name} of shape {shard.shape} is cut over another mesh axis as well {shard.placements}, at {borders} of dim "
        f"{dim}, and AdamW8bit's scales, one for each block of {block}, cannot be cut there. It accepts "
        f"{', or '.join(accepted) or 'no cut of this parameter'}; or use torch.optim.AdamW for it"
    )


def _badly_cut_dim(shard: DTensorShard, block: Tiling) -> int | None:
    """The first dim that other mesh axes cut inside a block; None if every block is whole in one shard."""
    scales_shape = block.grid(shard.shape).scales_shape
    for dim, each in enumerate(block.scales_along(shard.shape)):
        if not shard.axes_that_cut((dim,)):
            continue
        runs = shard.runs_along(dim, shard.shape[dim])
        if each is None or any(run.start % each.unit for run in runs):
            return dim
        # The scales are a DTensor as well: its shards, by torch's rule, must be those of the parameter's blocks.
        scales = [range(each.first(run.start), each.first(run.stop)) for run in runs]
        if scales != shard.runs_along(dim, scales_shape[each.dim]):
            return dim
    return None


def _smaller_blocks(shard: DTensorShard, block: Tiling) -> Tiling | None:
    """Blocks of a half, a quarter or an eighth of the side, which the cut leaves whole; None if none is left whole."""
    is_flat = block.tile is None or len(shard.shape) < 2
    side = block.flat if is_flat else block.tile
    assert side is not None
    for smaller in (side // 2, side // 4, side // 8):
        blocks = replace(block, flat=smaller) if is_flat else replace(block, tile=smaller)
        if smaller and _badly_cut_dim(shard, blocks) is None:
            return blocks
    return None


class _Rule:
    """AdamW at one step of one group: the numbers by which it multiplies tensors, and eps."""

    def __init__(self, group: Group, *, step: int) -> None:
        lr, (self.beta1, self.beta2) = float(group["lr"]), group["betas"]
        self.eps, self.step = group["eps"], step
        self.keep = 1 - lr * group["weight_decay"]  # the part of a parameter that weight decay leaves
        self.step_size = lr / (1 - self.beta1**step)  # the bias correction of the first moment is in it
        self.root_factor = 1 / math.sqrt(1 - self.beta2**step)  # the bias correction of the second moment's root

    def apply_(self, values: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Take one step in place; all tensors are fp32. See [Note: One rounding per operation]."""
        exp_avg.mul_(self.beta1).add_(gradient * (1 - self.beta1))
        exp_avg_sq.mul_(self.beta2).add_((gradient * gradient).mul_(1 - self.beta2))
        denominator = exp_avg_sq.double().sqrt_().float().mul_(self.root_factor).add_(self.eps)
        values.mul_(self.keep).sub_(torch.div(exp_avg, denominator, out=denominator).mul_(self.step_size))


def _step_8bit(
    rule: _Rule, grid: Grid, values: Tensor, gradient: Tensor, moments: list[Tensor], scales: list[Tensor]
) -> None:
    """Take one step on a rank's flat part, panel by panel: decode the moments, step, and encode them again."""
    maps = [dynamic_map(values.device, signed=signed) for signed in (True, False)]
    values, gradient, *moments = (grid.matrix(tensor) for tensor in (values, gradient, *moments))
    scales = [grid.matrix_of_scales(tensor) for tensor in scales]
    for panel in grid.panels(scales[0]):
        decoded = [
            dequantize(panel.read(moment, fill=codebook.zero), scale[panel.scales], codebook)
            for moment, scale, codebook in zip(moments, scales, maps, strict=True)
        ]
        stepped = panel.read(values).to(torch.float32)
        rule.apply_(stepped, panel.read(gradient).to(torch.float32), *decoded)
        panel.write(values, stepped)
        for moment, scale, codebook, new in zip(moments, scales, maps, decoded, strict=True):
            codes, scale[panel.scales] = quantize(new, codebook, step=rule.step)
            panel.write(moment, codes)


@cache
def _kernels() -> ModuleType | None:
    """The module of the fused step; None if triton is not installed."""
    try:
        from laconic.optim import adamw8bit_triton
    except ImportError:
        return None
    return adamw8bit_triton
