"""AdamW whose two moments take 8 bits each."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from laconic.codec import tiles
from laconic.codec.tiles import Grid, Tiling
from laconic.layout.bucket import DerivedLayout, row_block
from laconic.ragged.tensor import RaggedSpec, RaggedTensor

_MIN_8BIT_SIZE = 4096


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with its moments stored in 8 bits: about 2.01 bytes of state per parameter instead of 8.

    For each parameter of `min_8bit_size` elements or more, the moments are kept as codes with one scale per block of
    the global tensor, 32 x 32 tiles of a matrix (`laconic.codec.tiles`); each step decodes them, does AdamW's maths in
    fp32, and codes them again, a few MiB at a time. Smaller parameters keep fp32 moments. Given equal gradients, the
    results do not depend on the number of ranks, to the bit, and no rank tells another anything.

    Blocks must not be cut: shard with `fully_shard(..., granularity=AdamW8bit.granularity)`, or rows of 32
    (`laconic.rows(32)`) where no vector is as long as `min_8bit_size`.

    State of a parameter: `step`; `exp_avg` and `exp_avg_sq`, cut like the parameter; and, for 8 bits,
    `exp_avg_scale` and `exp_avg_sq_scale`, one fp32 number per block.

    Args:
        params: RaggedTensors (after `fully_shard`), plain tensors, or groups of them.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        block: which elements share a scale.
        min_8bit_size: *global* number of elements from which a parameter's moments take 8 bits.

    Raises:
        ValueError: a parameter is cut inside a block, or sharded by something else than laconic.

    Reference: tests/reference/adamw8bit.py, bit-equal. Source: arXiv 2110.02861; tiles as in arXiv 2602.22437.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        block: Tiling | None = None,
        min_8bit_size: int = _MIN_8BIT_SIZE,
    ) -> None:
        self.block = block or Tiling()
        self.min_8bit_size = min_8bit_size
        if min_8bit_size < 0:
            raise ValueError(f"min_8bit_size={min_8bit_size} must not be negative (0: all moments take 8 bits)")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @staticmethod
    def granularity(
        name: str, parameter: Tensor, *, block: Tiling | None = None, min_8bit_size: int = _MIN_8BIT_SIZE
    ) -> int:
        """Elements of `parameter` that must stay together: for `fully_shard(granularity=AdamW8bit.granularity)`, or
        with other blocks `functools.partial(AdamW8bit.granularity, block=...)`."""
        shape = tuple(parameter.shape)
        if parameter.numel() < max(1, min_8bit_size):
            return max(1, min(row_block(shape), parameter.numel()))
        return (block or Tiling()).grid(shape).uncut

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; refuses hyper-parameters and cuts that cannot work."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check(group)
            for parameter in group["params"]:
                self._check_cut(parameter)
        except ValueError:
            self.param_groups.pop()
            raise

    def init_state(self, parameter: Tensor) -> None:
        """Give `parameter` the state it has before the first step."""
        state: dict[str, Tensor] = {"step": torch.zeros((), dtype=torch.float32)}
        if parameter.numel() < max(1, self.min_8bit_size):
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        else:
            grid = self.block.grid(tuple(parameter.shape))
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
                state[f"{moment}_scale"] = _zero_scales(parameter, grid)
        self.state[parameter] = state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step with the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise ValueError("AdamW8bit takes dense gradients; set sparse=False in the embedding")
                if not self.state[parameter]:
                    self.init_state(parameter)
                self._step_parameter(parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep their own dtypes: torch would cast codes and scales to the parameter's."""
        super().load_state_dict({**state_dict, "state": {}})
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(ids, parameters, strict=True):
            if index in state_dict["state"]:
                saved = state_dict["state"][index]
                self.state[parameter] = {
                    key: value.detach().clone() if key == "step" else value.to(parameter.device, copy=True)
                    for key, value in saved.items()
                }

    def _step_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        rule = _Rule.of(group, step=int(state["step"].item()))
        local, gradient = _flat(parameter), _flat(parameter.grad)  # type: ignore[arg-type]
        moments = [_flat(state[key]) for key in ("exp_avg", "exp_avg_sq")]
        if "exp_avg_scale" in state:
            scales = [_flat(state[key]) for key in ("exp_avg_scale", "exp_avg_sq_scale")]
            grid = self.block.grid(tuple(parameter.shape))
            kernel = _kernel() if local.is_cuda else None
            if kernel is not None and kernel.takes(grid):
                kernel.step_8bit(rule, grid, local, gradient, moments, scales)
            else:
                _step_8bit(rule, grid, local, gradient, moments, scales)
        else:
            values = local.to(torch.float32)
            rule.apply_(values, gradient.to(torch.float32), *moments)
            if values is not local:
                local.copy_(values)
        if isinstance(parameter, RaggedTensor) and parameter._bump is not None:
            parameter._bump()  # on ranks with an empty part too: [Note: Versions] in ragged/tensor.py

    def _check_cut(self, parameter: Tensor) -> None:
        if not isinstance(parameter, RaggedTensor):
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"AdamW8bit got a DTensor of shape {tuple(parameter.shape)}: cut as it is, its "
                    "blocks could lie on two ranks; shard the model with laconic.fully_shard"
                )
            if not parameter.is_contiguous():
                raise ValueError(
                    f"AdamW8bit got a parameter of shape {tuple(parameter.shape)} that is not contiguous; use "
                    "nn.Parameter(parameter.contiguous())"
                )
        elif parameter.numel() >= max(1, self.min_8bit_size):
            outer = parameter.spec.outer
            if outer is not None and outer.local_shape != outer.shape:
                raise ValueError(
                    f"AdamW8bit got a parameter of shape {tuple(parameter.shape)} that another mesh axis cuts as well "
                    f"({outer.placement}), so blocks of the global tensor could lie on two ranks; use "
                    "torch.optim.AdamW for it"
                )
            _spec_of_scales(parameter.spec, self.block.grid(tuple(parameter.shape)))


class _Rule(NamedTuple):
    """AdamW's maths at one step of one group: the numbers that tensors are multiplied with, and eps.

    [Note: One rounding per operation] The result must not depend on how many elements a rank holds, or where in memory
    they begin. Kernels treat the elements that do not fill a vector register apart, and where an operation rounds
    twice, as `addcmul_`, `lerp_` or `add_(alpha=...)` do, a fused multiply-add in one of the two ways changes the last
    bit. So every operation here is one that IEEE 754 defines: product, sum, quotient or root. Roots of fp32 are taken
    by way of fp64: torch leaves them to a vector library on CPU, which on some processors is off by one bit in a fifth
    of the cases, while an fp64 root, off by one bit or not, rounds to the right fp32 one.
    """

    beta1: float
    rest1: float
    """1 - beta1."""
    beta2: float
    rest2: float
    keep: float
    """What weight decay leaves of a parameter."""
    step_size: float
    """Learning rate over the first moment's bias correction."""
    root_factor: float
    """One over the root of the second moment's."""
    eps: float
    step: int

    @classmethod
    def of(cls, group: dict[str, Any], *, step: int) -> _Rule:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return cls(
            beta1=beta1,
            rest1=1 - beta1,
            beta2=beta2,
            rest2=1 - beta2,
            keep=1 - lr * group["weight_decay"],
            step_size=lr / (1 - beta1**step),
            root_factor=1 / math.sqrt(1 - beta2**step),
            eps=group["eps"],
            step=step,
        )

    def apply_(self, values: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """One step in place; all fp32."""
        exp_avg.mul_(self.beta1).add_(gradient * self.rest1)
        exp_avg_sq.mul_(self.beta2).add_((gradient * gradient).mul_(self.rest2))
        denominator = exp_avg_sq.double().sqrt_().float().mul_(self.root_factor).add_(self.eps)
        values.mul_(self.keep).sub_(torch.div(exp_avg, denominator, out=denominator).mul_(self.step_size))


def _step_8bit(
    rule: _Rule, grid: Grid, values: Tensor, gradient: Tensor, moments: list[Tensor], scales: list[Tensor]
) -> None:
    """One step of a rank's flat part, panel by panel: decode, step, code again."""
    codes = [tiles.dynamic_code(values.device, signed=signed) for signed in (True, False)]
    values, gradient, *moments = (grid.matrix(tensor) for tensor in (values, gradient, *moments))
    scales = [grid.matrix_of_scales(tensor) for tensor in scales]
    for panel in grid.panels(scales[0]):
        decoded = [
            tiles.dequantize(panel.read(moment, fill=code.zero), scale[panel.scales], code)
            for moment, scale, code in zip(moments, scales, codes, strict=True)
        ]
        stepped = panel.read(values).to(torch.float32)
        rule.apply_(stepped, panel.read(gradient).to(torch.float32), *decoded)
        panel.write(values, stepped)
        for moment, scale, code, new in zip(moments, scales, codes, decoded, strict=True):
            coded, scale[panel.scales] = tiles.quantize(new, code, step=rule.step)
            panel.write(moment, coded)


@cache
def _kernel() -> ModuleType | None:
    """The fused step, where triton is installed."""
    try:
        from laconic.optim import adamw8bit_cuda
    except ImportError:
        return None
    return adamw8bit_cuda


def _flat(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, RaggedTensor) else tensor.detach().reshape(-1)


def _zero_scales(parameter: Tensor, grid: Grid) -> Tensor:
    if not isinstance(parameter, RaggedTensor):
        return torch.zeros(grid.scales_shape, device=parameter.device)
    spec = _spec_of_scales(parameter.spec, grid)
    extent = spec.extent
    return RaggedTensor(torch.zeros(extent.numel if extent else 0, device=parameter.device), spec)


def _spec_of_scales(spec: RaggedSpec, grid: Grid) -> RaggedSpec:
    layout = DerivedLayout(
        base=spec.layout,
        index=spec.index,
        shape=grid.scales_shape,
        elements=grid.uncut,
        items=grid.scales_per_run,
    )
    return RaggedSpec(cluster=spec.cluster, layout=layout, index=0)  # type: ignore[arg-type]  # all that a spec asks of a layout


def _check(group: dict[str, Any]) -> None:
    if not group["lr"] >= 0:
        raise ValueError(f"AdamW8bit: lr={group['lr']} must not be negative")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"AdamW8bit: betas={group['betas']} must both lie in [0, 1)")
    if not group["eps"] >= 0:
        raise ValueError(f"AdamW8bit: eps={group['eps']} must not be negative")
    if not group["weight_decay"] >= 0:
        raise ValueError(f"AdamW8bit: weight_decay={group['weight_decay']} must not be negative")
