"""A transformers causal language model as a sequence of blocks: embedding, layers, head.

[Note: Cutting somebody else's forward]
What a layer needs besides the hidden states (masks, positions, rotary angles) is for the model's own code to say, and
no two models agree. So the first block runs that code, with stand-ins in place of the layers: they return the hidden
states as they are and write down what else they were given. Those tensors are carried from stage to stage. The last
block runs the model's own code around its body, with the body replaced by what follows its layers. Nothing of this is
certain for a model not seen before, so the blocks are run once beside the model, and a model whose logits they do not
repeat to the bit is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and by name."""

_EXAMPLE_TOKENS = 128
_INPUTS = ("input_ids", "attention_mask", "position_ids")
"""Of a language model, when an example gives them by position."""


def blocks_of(model: nn.Module, example: Any) -> tuple[list[Any], tuple[Tensor, ...]]:
    """The blocks of a causal language model, and the inputs of the first: the tensors of `example`.

    Raises:
        ValueError: the model has no list of layers, or is not the sequence of its parts.
    """
    inputs = _named_inputs(model, example)
    anatomy = _examine(model, inputs)
    front = _Front(anatomy, inputs)
    layers = [
        _Layer(f"{anatomy.layers_path}.{index}", layer, call)
        for index, (layer, call) in enumerate(zip(anatomy.layers, front.calls, strict=True))
    ]
    blocks = [front, *layers, _Tail(model, anatomy)]
    _refuse_unfaithful(model, blocks, inputs)
    return blocks, tuple(inputs.values())


def _named_inputs(model: nn.Module, example: Any) -> dict[str, Tensor]:
    if example is None:
        vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
        if vocab_size is None:
            raise _unknown(model)
        example = torch.arange(_EXAMPLE_TOKENS, device=next(model.parameters()).device)[None] % vocab_size
    if isinstance(example, Mapping):
        return dict(example)
    values = (example,) if isinstance(example, Tensor) else tuple(example)
    if len(values) > len(_INPUTS):
        raise ValueError(f"the example has {len(values)} inputs; give those of a language model by name, as a dict")
    return dict(zip(_INPUTS, values, strict=False))


def _unknown(model: nn.Module) -> ValueError:
    return ValueError(
        f"{type(model).__name__} is neither a sequence of modules nor a transformers causal language model (a body "
        "with a list of layers, and a head); give a list of its modules, or an nn.Sequential"
    )


# ------------------------------------------------------------------------------------------------ anatomy


@dataclass(frozen=True, kw_only=True)
class _Anatomy:
    """The parts of a model and their names in it."""

    body: nn.Module
    body_path: str
    layers: nn.ModuleList
    layers_path: str
    before: dict[str, nn.Module]
    """Children of the body that run before its layers or beside them: embeddings, rotary angles."""
    after: dict[str, nn.Module]
    """Children of the body that run after its layers, in order: the last norm."""
    outside: dict[str, nn.Module]
    """Modules with parameters outside the body: the head."""
    output_type: Callable[..., Any]
    """Of the body."""
    layers_return_tuples: bool


def _examine(model: nn.Module, inputs: Mapping[str, Tensor]) -> _Anatomy:
    """Run the model once and watch what it calls."""
    layers_path, layers = _find_layers(model)
    body_path, _, layers_name = layers_path.rpartition(".")
    body = model.get_submodule(body_path)
    order: list[nn.Module] = []
    outputs: list[Any] = []
    handles = [child.register_forward_hook(lambda module, *_: order.append(module)) for child in body.children()]
    handles += [layer.register_forward_hook(lambda *_: order.append(layers)) for layer in layers]
    handles += [
        module.register_forward_hook(lambda _module, _args, output: outputs.append(output))
        for module in (layers[0], body)
    ]
    try:
        with torch.no_grad(), torch.random.fork_rng(_cuda_devices(inputs)):
            model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if body is model or order.count(layers) != len(layers) or not hasattr(outputs[-1], "last_hidden_state"):
        raise _unknown(model)
    first = order.index(layers)
    children = {name: child for name, child in body.named_children() if name != layers_name}
    late = [child for child in order if child not in order[:first] and child is not layers]
    after = dict(sorted(((n, c) for n, c in children.items() if c in late), key=lambda item: late.index(item[1])))
    covered = {module for module in model.modules() if body in set(module.modules())} | set(body.modules())
    return _Anatomy(
        body=body,
        body_path=body_path,
        layers=layers,
        layers_path=layers_path,
        before={name: child for name, child in children.items() if name not in after},
        after=after,
        outside={
            name: module
            for name, module in model.named_modules()
            if module not in covered and next(module.parameters(recurse=False), None) is not None
        },
        output_type=type(outputs[-1]),
        layers_return_tuples=isinstance(outputs[0], tuple),
    )


def _find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The longest list of modules that is in no other list."""
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    if not found:
        raise _unknown(model)
    path = max(found, key=lambda name: len(found[name]))
    return path, found[path]


# ------------------------------------------------------------------------------------------------ blocks


@dataclass(frozen=True)
class _Slot:
    """In a layer's arguments, one of the carried tensors."""

    index: int


class _Front:
    """Everything before the layers: inputs of the model -> hidden states and what is carried."""

    def __init__(self, anatomy: _Anatomy, inputs: Mapping[str, Tensor]) -> None:
        self.modules = {f"{anatomy.body_path}.{name}": child for name, child in anatomy.before.items()}
        self._names = tuple(inputs)
        self._given: list[_Arguments] = []
        noting = _Noting(self._given, anatomy.layers_return_tuples)
        stand_ins = nn.ModuleList(_stand_in(layer, noting) for layer in anatomy.layers)
        skipped = {name: nn.Identity() for name in anatomy.after}
        self._body = _shell(anatomy.body, **{anatomy.layers_path.rpartition(".")[2]: stand_ins}, **skipped)
        self.shells = (self._body,)
        with torch.no_grad(), torch.random.fork_rng(_cuda_devices(inputs)):
            self._run(tuple(inputs.values()))
        slots: dict[int, _Slot] = {}
        self.calls = [
            tree_map_only(Tensor, lambda value: slots.setdefault(id(value), _Slot(len(slots))), arguments)
            for arguments in self._given
        ]
        """Arguments of the layers beside the hidden states."""
        self._given.clear()

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        try:
            hidden = self._run(values)
            return hidden, *self._carried(hidden)
        finally:
            self._given.clear()

    def _run(self, values: tuple[Tensor, ...]) -> Tensor:
        if len(values) != len(self._names):
            raise ValueError(f"the model was cut for the inputs {self._names}, and is given {len(values)} tensors")
        return self._body(**dict(zip(self._names, values, strict=True)), use_cache=False).last_hidden_state

    def _carried(self, hidden: Tensor) -> list[Tensor]:
        """What the layers were given now, in the slots of the first time."""
        found: dict[int, Tensor | None] = {}
        for arguments, call in zip(self._given, self.calls, strict=True):
            leaves, known = tree_leaves(arguments), tree_leaves(call)
            is_as_known = len(leaves) == len(known) and all(
                found.setdefault(expected.index, leaf) is leaf
                if isinstance(expected, _Slot)
                else leaf is expected or (not isinstance(leaf, Tensor) and leaf == expected)
                for leaf, expected in zip(leaves, known, strict=True)
            )
            if not is_as_known:
                raise ValueError(
                    "layers are given other arguments than on the example that the model was cut with; cut it with an "
                    "example like the batches (if they are padded, with an attention_mask that masks something)"
                )
        nothing = torch.empty(0, dtype=torch.bool, device=hidden.device)
        return [nothing if value is None else value for _, value in sorted(found.items())]


class _Layer:
    """One layer: (hidden states, carried) -> the same, the carried as they were."""

    def __init__(self, name: str, layer: nn.Module, call: _Arguments) -> None:
        self.modules, self.shells = {name: layer}, ()
        self._layer, self._call = layer, call

    def __call__(self, hidden: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        given = [None if _is_nothing(value) else value for value in carried]
        args, kwargs = tree_map_only(_Slot, lambda slot: given[slot.index], self._call)
        output = self._layer(hidden, *args, **kwargs)
        return (output[0] if isinstance(output, tuple) else output, *carried)


class _Tail:
    """Everything after the layers: hidden states -> logits."""

    def __init__(self, model: nn.Module, anatomy: _Anatomy) -> None:
        self.modules = {f"{anatomy.body_path}.{name}": child for name, child in anatomy.after.items()}
        self.modules |= anatomy.outside
        names = anatomy.body_path.split(".")
        self._model: nn.Module = _BodyAfterLayers(anatomy)
        self.shells: list[nn.Module] = [self._model]
        for depth in reversed(range(len(names))):
            self._model = _shell(model.get_submodule(".".join(names[:depth])), **{names[depth]: self._model})
            self.shells.append(self._model)

    def __call__(self, hidden: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
        return (self._model(inputs_embeds=hidden, use_cache=False).logits,)


class _BodyAfterLayers(nn.Module):
    """Called as the body is, by the model's own code, with hidden states in place of embeddings."""

    def __init__(self, anatomy: _Anatomy) -> None:
        super().__init__()
        self._after, self._output_type = list(anatomy.after.values()), anatomy.output_type

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        for module in self._after:
            inputs_embeds = module(inputs_embeds)
        return self._output_type(last_hidden_state=inputs_embeds)


def _is_nothing(value: Tensor) -> bool:
    """Whether it is the empty tensor that is carried for None, such as the mask of a batch without padding."""
    return value.dtype == torch.bool and value.numel() == 0


def _shell(module: nn.Module, **children: nn.Module) -> Any:
    """The same module, sharing everything, but with some children replaced."""
    shell = copy.copy(module)
    shell.__dict__["_modules"] = {**module._modules, **children}
    return shell


def _stand_in(layer: nn.Module, forward: _Noting) -> Any:
    """A layer with the attributes of `layer`, which models look at, without its parts; see [Note: Cutting ...]."""
    stand_in: Any = copy.copy(layer)
    for parts in ("_modules", "_parameters", "_buffers"):
        stand_in.__dict__[parts] = {}
    stand_in.forward = forward
    return stand_in


class _Noting:
    """A forward that returns the hidden states and notes the rest of its arguments."""

    def __init__(self, given: list[_Arguments], returns_tuple: bool) -> None:
        self._given, self._returns_tuple = given, returns_tuple

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        self._given.append((args, kwargs))
        return (hidden,) if self._returns_tuple else hidden


def _refuse_unfaithful(model: nn.Module, blocks: Sequence[Any], inputs: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the blocks have all parameters, and give the model's logits."""
    known = {id(p) for block in blocks for module in block.modules.values() for p in module.parameters()}
    left = [name for name, p in model.named_parameters() if id(p) not in known]
    if left:
        raise ValueError(
            f"{type(model).__name__} has parameters that belong to no layer, nor to what is before or after: "
            f"{', '.join(left)}; give a list of its modules"
        )
    with torch.no_grad(), torch.random.fork_rng(_cuda_devices(inputs)):
        random = torch.get_rng_state()
        logits = model(**inputs, use_cache=False).logits
        torch.set_rng_state(random)  # the same dropout
        values = tuple(inputs.values())
        for block in blocks:
            values = block(*values)
    if not torch.equal(logits, values[0]):
        raise ValueError(
            f"{type(model).__name__} is not the sequence of its embedding, layers and head: cut into blocks it gives "
            f"other logits on the example, by up to {(logits - values[0]).abs().max():.1e}; give a list of its modules"
        )


def _cuda_devices(inputs: Mapping[str, Tensor]) -> set[torch.device]:
    return {value.device for value in inputs.values() if value.is_cuda}
