"""`convert_to_scaled_training`: linear layers and experts whose weights are gathered and multiplied in few bits.

[Note: Weights that lose their format]
Something that comes between the conversion and the first step may take a weight's format away: a cut of tensor
parallelism, a slice, a parametrization, a kernel that asks for numbers. The layer would go on with exact weights, and
nobody would know. So each converted module is looked at in its first forward: its weights must still be scaled, and if
they were decoded, they must have been multiplied in their format, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from laconic.layers.linear import output_layer, tied_parameters
from laconic.layers.scaled import ScaledFormat, ScaledName, scaled_format_named
from laconic.layers.scaled_linear import ScaledTensor, ScaledWeight, uses


def convert_to_scaled_training(
    model: nn.Module,
    weight_format: ScaledName | ScaledFormat,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    scales_input: bool = True,
    shares_blocks: bool = False,
) -> nn.Module:
    """Let the linear layers and the experts of `model` train with weights in few bits, in place, and return it.

    Call it before `fully_shard`, as torchao's `convert_to_float8_training`. Weights train in their own dtype. Each step
    multiplies them in few bits, in which they also cross the wire and rest in the cache: [Note: Scaled weights]. The
    layers keep their classes. The model may be on the meta device. Experts are stacks of matrices, (e, m, n), in one
    parameter each; under expert parallelism a DTensor that is cut between matrices.

    Args:
        model: the model.
        weight_format: "fp8_128x128", "fp8_1x128", "fp8_1x128_e8m0", "mxfp8", "nvfp4", or a `ScaledFormat`.
        module_filter_fn: torchao's: of a linear layer, or of a module that holds stacks, and its name: True to convert
            it. Default: the experts of transformers models, and all linear layers but the output layer of a
            transformers model, and those whose weight is tied to another module's.
        scales_input: encode inputs, too, in blocks of one row, which lets the device multiply codes. False leaves them
            exact, and multiplies by the decoded weight everywhere.
        shares_blocks: let ranks cut blocks of several rows, such as 128 x 128, where so many whole rows are more than a
            rank's share: on a thousand ranks and more. Before each gather ranks then agree on scales, by an all-reduce
            of four bytes per block. Bits are the same: [Note: Shared blocks] in layers/scaled.py.

    Raises:
        ValueError: `weight_format` is unknown; `shares_blocks` is asked for and blocks have one row; no layer is left
            to convert; the model is sharded already; or a layer's weight is tied, is cut by another parallelism,
            converts itself already, or has no blocks of the format. The first forward of a layer raises it if its
            weight has lost its format since, or is multiplied otherwise.
    """
    chosen_format, tied = scaled_format_named(weight_format), tied_parameters(model)
    chosen_format = replace(chosen_format, scales_input=chosen_format.scales_input and scales_input,
                            shares_blocks=chosen_format.shares_blocks or shares_blocks)  # fmt: skip
    holders = {name: found for name, module in model.named_modules() if (found := _Holder.of(module, name)) is not None}
    if module_filter_fn is None:
        last = output_layer(model)
        holders = {
            name: each for name, each in holders.items()
            if each.is_known and each.module is not last and tied.isdisjoint(each.weights.values())
        }  # fmt: skip
    else:
        holders = {name: each for name, each in holders.items() if module_filter_fn(each.module, name)}
    if not holders:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to convert; module_filter_fn is {module_filter_fn!r}"
        )
    converted = [
        (holder, key, holder.convert(key, chosen_format, tied)) for holder in holders.values() for key in holder.weights
    ]
    held = [weight.data.to_local() if isinstance(weight.data, DTensor) else weight for *_, weight in converted]
    if chosen_format.shares_blocks and not any(each.weight_format.agrees_on_scales for each in held):  # type: ignore[attr-defined]
        raise ValueError(
            f"shares_blocks=True, but a block of {chosen_format.name} has one row, which one rank holds whole anyway; "
            "leave it out"
        )
    for holder, key, weight in converted:
        holder.module.register_parameter(key, weight)
    for holder in holders.values():
        holder.watch(chosen_format)
    return model


@dataclass(frozen=True, kw_only=True, eq=False)
class _Holder:
    """A module with weights that can be converted."""

    module: nn.Module
    name: str
    weights: Mapping[str, Tensor]
    is_known: bool
    """True of a linear layer, and of the experts of a transformers model."""

    @classmethod
    def of(cls, module: nn.Module, name: str) -> _Holder | None:
        if type(module) is nn.Linear:
            return cls(module=module, name=name, weights={"weight": module.weight}, is_known=True)
        own = {key: each for key, each in module._parameters.items() if each is not None}
        stacks = {key: each for key, each in own.items() if each.ndim == 3 and each.is_floating_point()}
        is_known = hasattr(module, "has_gate") and hasattr(module, "is_transposed")
        return cls(module=module, name=name, weights=stacks, is_known=is_known) if stacks else None

    def convert(self, key: str, weight_format: ScaledFormat, tied: set[nn.Parameter]) -> nn.Parameter:
        """The parameter that trains in few bits.

        Raises:
            ValueError: see `convert_to_scaled_training`.
        """
        parameter, name = self.weights[key], self.name if key == "weight" else f"{self.name}.{key}"
        if parameter in tied:
            raise ValueError(f"the weight of {name} is tied to another module's; leave it out with module_filter_fn")
        data = parameter.data
        is_stack_in_parts = type(data) is DTensor and data.ndim == 3 and all(
            each.is_replicate() or each == Shard(0) for each in data.placements
        )  # fmt: skip
        if hasattr(data, "to_local") and not is_stack_in_parts:
            raise ValueError(
                f"the weight of {name} is cut over ranks already; call convert_to_scaled_training before fully_shard, "
                "and leave out with module_filter_fn what another parallelism cuts"
            )
        elements = data.to_local() if isinstance(data, DTensor) else data
        if type(parameter) not in (nn.Parameter, DTensor) or type(elements) is not Tensor:
            raise ValueError(
                f"the weight of {name} is a {type(elements).__name__}, not a plain tensor; leave it out with "
                "module_filter_fn"
            )
        try:
            own_format = weight_format.for_rows if getattr(self.module, "is_transposed", False) else weight_format
            own_format.check_shape(data.shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}; leave it out with module_filter_fn") from error
        weight: Tensor = ScaledWeight(elements.detach(), own_format)
        if isinstance(data, DTensor):
            weight = DTensor.from_local(
                weight, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride()
            )
        return nn.Parameter(weight, requires_grad=parameter.requires_grad)

    def watch(self, weight_format: ScaledFormat) -> None:
        """Look at the first forward: [Note: Weights that lose their format]."""
        look = _FirstForward(self.name, weight_format.name, tuple(self.weights))
        self.module.register_forward_pre_hook(look.begin)
        self.module.register_forward_hook(look.end)


@dataclass
class _FirstForward:
    """A look at the first forward of one converted module: [Note: Weights that lose their format]."""

    name: str
    weight_format: str
    keys: tuple[str, ...]
    before: tuple[int, int] = field(default=(0, 0))
    """The products and the decodings of this thread before the forward."""

    def begin(self, module: nn.Module, _: Any) -> None:
        """Refuse weights that have lost their format.

        Raises:
            ValueError: one has.
        """
        if torch.compiler.is_compiling():  # what is compiled has no first forward to look at
            return
        self.before = uses.products, uses.decodings
        for key in self.keys:
            weight = getattr(module, key)
            held = weight.to_local() if isinstance(weight, DTensor) else weight
            if not isinstance(held, ScaledWeight | ScaledTensor):
                self._refuse(f"its {key} is a {type(held).__name__} by now, without that format")

    def end(self, module: nn.Module, _: Any, output: Any) -> None:
        """Refuse weights that were decoded and not multiplied in their format.

        Raises:
            ValueError: they were.
        """
        if torch.compiler.is_compiling():
            return
        products, decodings = uses.products - self.before[0], uses.decodings - self.before[1]
        if decodings and not products:
            self._refuse("its forward decodes the weight, and multiplies it otherwise")
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in self._own(hooks) if products else ():
                del hooks[number]

    def _own(self, hooks: dict[int, Any]) -> Iterator[int]:
        yield from [number for number, hook in hooks.items() if getattr(hook, "__self__", None) is self]

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"{self.name} was converted to train in {self.weight_format}, but {what}. Leave the layer out of "
            "convert_to_scaled_training with module_filter_fn, or what changes it"
        )
