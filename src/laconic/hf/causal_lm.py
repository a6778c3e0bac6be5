"""A transformers causal language model as a sequence of blocks: embedding, layers, head.

[Note: Cutting a model's own forward]
A layer needs more than the hidden states: masks, positions, rotary angles. Every model computes them in its own code,
and no two models do it alike. So the blocks run the model's code instead of repeating it.
  - The first block runs the model's body with a stand-in for each layer. A stand-in returns the hidden states unchanged
    and records its other arguments. Tensors among these arguments are carried from stage to stage.
  - Each layer is called with the arguments that its stand-in has recorded.
  - The last block runs the whole model with its body replaced by the modules after the layers.
No test covers every model. So `blocks_of` runs both the blocks and the model, and refuses a model whose logits the
blocks do not reproduce to the bit. A model is recognised by its parts, without an import of transformers.

[Note: Constants of a pipeline]
Stages of a pipeline are on different machines, and none holds the whole model. So `blocks_for_stages` cuts a model on
the meta device, and compares what its blocks call with what it calls: [Note: Equal dataflow] in dataflow.py. What
layers take beside hidden states (masks, positions, rotary angles) depends on the shape of a batch alone, in most
models. Then it need not cross with every micro-batch: the first stage makes it, and others are told once for a shape.
A model whose layers take more is refused.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from laconic.cyclic.stages import cut
from laconic.hf.dataflow import Dataflow, played
from laconic.hf.layers import without_packed_rows
from laconic.pipeline.stages import (
    Criterion,
    Example,
    ModelBlock,
    Stage,
    Values,
    refuse_meta,
    restoring_random_states,
)

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_EXAMPLE_TOKENS = 128  # the length of the example if none is given
_PARTS = ("_modules", "_parameters", "_buffers")
_INPUTS = ("input_ids", "attention_mask", "position_ids")  # the names of inputs that an example gives by position


def cut_causal_lm(
    model: nn.Module,
    num_stages: int,
    *,
    example: Example | None = None,
    by: Criterion | Sequence[float] | None = None,
) -> list[Stage]:
    """Cut a causal language model of transformers into stages of equal cost: see `laconic.cyclic.cut`.

    Its blocks are the embedding, each layer and the head. The stages take the inputs of `example`, by position or by
    name, and return logits. Default: 128 tokens, as `input_ids` alone.

    Raises:
        ValueError: see `laconic.cyclic.cut`; or the model is not the sequence of its layers.
    """
    refuse_meta(model.parameters())
    blocks, values = blocks_of(model, example)
    return cut(blocks, num_stages, example=values, by=by)


def blocks_of(model: nn.Module, example: Any) -> tuple[Sequence[ModelBlock], Values]:
    """The blocks of a causal language model, and the inputs of the first block: the tensors of `example`.

    Raises:
        ValueError: the model has no list of layers, or its logits are not those of its parts in sequence.
    """
    inputs = _inputs_by_name(model, example)
    anatomy = _examine(model, inputs)
    front = _Front(anatomy, inputs)
    layers = [
        _Layer(f"{anatomy.layers_path}.{index}", layer, call)
        for index, (layer, call) in enumerate(zip(anatomy.layers, front.calls, strict=True))
    ]
    blocks: list[ModelBlock] = [front, *layers, _Tail(model, anatomy)]
    _refuse_unfaithful(model, blocks, inputs)
    return blocks, tuple(inputs.values())


@dataclass(frozen=True, kw_only=True)
class StageBlocks:
    """A causal language model in blocks that hand on hidden states alone: [Note: Constants of a pipeline]."""

    blocks: list[ModelBlock]
    """The embedding, each layer and the head."""
    constants: dict[torch.Size, Values]
    """The tensors that layers take beside hidden states, by rows and tokens. The first block fills it."""


def blocks_for_stages(model: nn.Module, rows: int, tokens: int) -> StageBlocks:
    """The blocks of a causal language model on the meta device, for micro-batches of so many rows and tokens.

    Raises:
        ValueError: see `blocks_of`; or layers take tensors that differ from batch to batch.
    """
    inputs = {"input_ids": torch.empty((rows, tokens), dtype=torch.int64, device="meta")}

    def run() -> None:
        with _dry_run(inputs):
            model(**inputs, use_cache=False)

    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise _unknown(model)
    try:
        with without_packed_rows(reads=False), played(_find_layers(model)[1], run):
            blocks, values = blocks_of(model, inputs)
            with _dry_run(inputs), Dataflow(values) as flow:
                carried = blocks[0](*values)[1:]
    except (RuntimeError, TypeError) as error:  # code that reads values, which the meta device does not have
        raise ValueError(
            f"{type(model).__name__} cannot be cut into stages: on tensors without values its code ends with "
            f"{type(error).__name__}: {str(error).splitlines()[0]}; train this model without [pipeline]"
        ) from error
    varying = [list(value.shape) for value in carried if not flow.is_constant(value)]
    if varying:
        raise ValueError(
            f"{type(model).__name__} hands its layers a tensor of shape {varying[0]} beside the hidden states that "
            "depends on the tokens or on parameters, so it would cross between all stages; train this model without "
            "[pipeline]"
        )
    constants: dict[torch.Size, Values] = {}
    return StageBlocks(blocks=[_Alone(block, constants) for block in blocks], constants=constants)


class _Alone:
    """A block that takes one tensor and returns one; the rest is in `constants`: [Note: Constants of a pipeline]."""

    def __init__(self, block: ModelBlock, constants: dict[torch.Size, Values]) -> None:
        self.modules, self.shells = block.modules, block.shells
        self._block, self._constants = block, constants

    def __call__(self, *values: Tensor) -> Values:
        shape = values[0].shape[:2]
        if not isinstance(self._block, _Front):
            return self._block(values[0], *self._constants[shape])[:1]
        hidden, *carried = self._block(*values)
        self._constants.setdefault(shape, tuple(value.detach() for value in carried))
        return (hidden,)


def _inputs_by_name(model: nn.Module, example: Any) -> dict[str, Tensor]:
    if example is None:
        vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
        if vocab_size is None:
            raise _unknown(model)
        example = torch.arange(_EXAMPLE_TOKENS, device=next(model.parameters()).device)[None] % vocab_size
    if isinstance(example, Mapping):
        return dict(example)
    values = (example,) if isinstance(example, Tensor) else tuple(example)
    if len(values) > len(_INPUTS):
        raise ValueError(f"the example has {len(values)} inputs; give a language model's inputs by name, as a dict")
    return dict(zip(_INPUTS, values, strict=False))


def _unknown(model: nn.Module) -> ValueError:
    return ValueError(
        f"{type(model).__name__} is neither a sequence of modules nor a transformers causal language model (a body "
        "with a list of layers, and a head); give a list of its modules, or an nn.Sequential"
    )


@contextmanager
def _dry_run(inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, there are no gradients; afterwards, random states are as before."""
    with torch.no_grad(), restoring_random_states(inputs.values()):
        yield


@dataclass(frozen=True, kw_only=True)
class _Anatomy:
    """The parts of a model, and their names in the model."""

    body: nn.Module
    body_path: str
    layers: nn.ModuleList
    layers_path: str
    before: dict[str, nn.Module]  # children of the body that run before or beside its layers: embeddings, rotary angles
    after: dict[str, nn.Module]  # children of the body that run after its layers, in order: the last norm
    outside: dict[str, nn.Module]  # modules with parameters outside the body: the head
    output_type: Callable[..., Any]
    layers_return_tuples: bool


def _examine(model: nn.Module, inputs: Mapping[str, Tensor]) -> _Anatomy:
    """Run the model once and record the order in which it calls its modules."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise _unknown(model)
    layers_path, layers = _find_layers(model)
    body_path, _, layers_name = layers_path.rpartition(".")
    body = model.get_submodule(body_path)
    order: list[nn.Module] = []
    outputs: list[Any] = []
    handles = [child.register_forward_hook(lambda module, *_: order.append(module)) for child in body.children()]
    handles += [layer.register_forward_hook(lambda *_: order.append(layers)) for layer in layers]
    handles += [m.register_forward_hook(lambda *call: outputs.append(call[-1])) for m in (layers[0], body)]
    try:
        with _dry_run(inputs):
            model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if body is model or order.count(layers) != len(layers) or not hasattr(outputs[-1], "last_hidden_state"):
        raise _unknown(model)
    children = {name: child for name, child in body.named_children() if name != layers_name}
    first = order.index(layers)
    late = [child for child in order[first:] if child not in order[:first] and child is not layers]
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
    """The longest list of modules that is not inside another list."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outermost = [name for name in lists if not any(name.startswith(f"{outer}.") for outer in lists)]
    if not outermost:
        raise _unknown(model)
    path = max(outermost, key=lambda name: len(lists[name]))
    return path, lists[path]


@dataclass(frozen=True)
class _Slot:
    """The place of a carried tensor in a layer's arguments."""

    index: int


class _Recorder:
    """The forward of stand-ins, which returns the hidden states and records the other arguments."""

    def __init__(self, returns_tuple: bool) -> None:
        self.calls: list[_Arguments] = []
        self._returns_tuple = returns_tuple

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        self.calls.append((args, kwargs))
        return (hidden,) if self._returns_tuple else hidden


class _Front:
    """The block before the layers. It maps the model's inputs to hidden states and carried tensors."""

    def __init__(self, anatomy: _Anatomy, inputs: Mapping[str, Tensor]) -> None:
        self.modules = {f"{anatomy.body_path}.{name}": child for name, child in anatomy.before.items()}
        self._names = tuple(inputs)
        self._recorder = _Recorder(anatomy.layers_return_tuples)
        stand_ins = nn.ModuleList(_stand_in(layer, self._recorder) for layer in anatomy.layers)
        skipped = {name: nn.Identity() for name in anatomy.after}
        self._body = _shell(anatomy.body, **{anatomy.layers_path.rpartition(".")[2]: stand_ins}, **skipped)
        self.shells: Sequence[nn.Module] = [self._body]
        with _dry_run(inputs):
            _, calls = self._run(tuple(inputs.values()))
        slots: dict[int, _Slot] = {}
        self.calls = [
            tree_map_only(Tensor, lambda value: slots.setdefault(id(value), _Slot(len(slots))), arguments)
            for arguments in calls
        ]  # the arguments of each layer beside the hidden states, with a slot in place of each tensor

    def __call__(self, *values: Tensor) -> Values:
        hidden, calls = self._run(values)
        return hidden, *self._carried(hidden, calls)

    def _run(self, values: Values) -> tuple[Tensor, list[_Arguments]]:
        if len(values) != len(self._names):
            raise ValueError(f"the model was cut for the inputs {self._names}, and is given {len(values)} tensors")
        self._recorder.calls = []
        hidden = self._body(**dict(zip(self._names, values, strict=True)), use_cache=False).last_hidden_state
        calls, self._recorder.calls = self._recorder.calls, []
        return hidden, calls

    def _carried(self, hidden: Tensor, calls: Sequence[_Arguments]) -> list[Tensor]:
        """The tensors of these calls, in the order of their slots. Refuses calls unlike those of the example."""
        found: dict[int, Tensor | None] = {}
        for arguments, call in zip(calls, self.calls, strict=True):
            leaves, known = tree_leaves(arguments), tree_leaves(call)
            is_as_known = len(leaves) == len(known) and all(
                found.setdefault(expected.index, leaf) is leaf
                if isinstance(expected, _Slot)
                else leaf is expected or (not isinstance(leaf, Tensor) and leaf == expected)
                for leaf, expected in zip(leaves, known, strict=True)
            )
            if not is_as_known:
                raise ValueError(
                    "layers are given other arguments than on the example that the model was cut with; cut the model "
                    "with an example like the batches (padded batches: with an attention_mask that masks something)"
                )
        absent = torch.empty(0, dtype=torch.bool, device=hidden.device)
        return [absent if value is None else value for _, value in sorted(found.items())]


class _Layer:
    """The block of one layer. It maps hidden states and carried tensors to new hidden states and the same tensors."""

    shells: Sequence[nn.Module] = ()

    def __init__(self, name: str, layer: nn.Module, call: _Arguments) -> None:
        self.modules = {name: layer}
        self._layer, self._call = layer, call

    def __call__(self, *values: Tensor) -> Values:
        hidden, *carried = values
        # An empty tensor of bool stands for None, for example for the mask of a batch without padding.
        given = [None if value.dtype == torch.bool and value.numel() == 0 else value for value in carried]
        args, kwargs = tree_map_only(_Slot, lambda slot: given[slot.index], self._call)
        output = self._layer(hidden, *args, **kwargs)
        return (output[0] if isinstance(output, tuple) else output, *carried)


class _Tail:
    """The block after the layers. It maps hidden states to logits."""

    def __init__(self, model: nn.Module, anatomy: _Anatomy) -> None:
        self.modules = {f"{anatomy.body_path}.{name}": child for name, child in anatomy.after.items()}
        self.modules |= anatomy.outside
        names = anatomy.body_path.split(".")
        self._model: nn.Module = _BodyAfterLayers(anatomy)
        shells: list[nn.Module] = [self._model]
        for depth in reversed(range(len(names))):
            self._model = _shell(model.get_submodule(".".join(names[:depth])), **{names[depth]: self._model})
            shells.append(self._model)
        self.shells: Sequence[nn.Module] = shells

    def __call__(self, *values: Tensor) -> Values:
        return (self._model(inputs_embeds=values[0], use_cache=False).logits,)


class _BodyAfterLayers(nn.Module):
    """Takes the place of the body in the model's code, and gets the hidden states as if they were embeddings."""

    def __init__(self, anatomy: _Anatomy) -> None:
        super().__init__()
        self._after, self._output_type = list(anatomy.after.values()), anatomy.output_type

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        for module in self._after:
            inputs_embeds = module(inputs_embeds)
        return self._output_type(last_hidden_state=inputs_embeds)


def _shell(module: nn.Module, **children: nn.Module) -> Any:
    """A copy of a module that shares all its state, with some children replaced."""
    shell = copy.copy(module)
    shell.__dict__["_modules"] = {**module._modules, **children}
    return shell


def _stand_in(layer: nn.Module, forward: _Recorder) -> Any:
    """A module with the attributes of a layer, which models look at, but without its parameters, submodules and hooks.

    `fully_shard` adds hooks to the layer later, and a copy would share the dicts of its hooks.
    """
    stand_in: Any = copy.copy(layer)
    for parts in [name for name in vars(layer) if name in _PARTS or "_hooks" in name]:
        stand_in.__dict__[parts] = {}
    stand_in.forward = forward
    return stand_in


def _refuse_unfaithful(model: nn.Module, blocks: Sequence[ModelBlock], inputs: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the blocks have all parameters of the model and compute its logits."""
    covered = {id(p) for block in blocks for module in block.modules.values() for p in module.parameters()}
    uncovered = [name for name, p in model.named_parameters() if id(p) not in covered]
    if uncovered:
        raise ValueError(
            f"{type(model).__name__} has parameters that belong to no layer, nor to a module before or after the "
            f"layers: {', '.join(uncovered)}; give a list of its modules"
        )
    given = tuple(inputs.values())
    if given[0].is_meta:
        names = []
        for run in (lambda: model(**inputs, use_cache=False).logits, lambda: _run_all(blocks, given)[0]):
            with _dry_run(inputs), Dataflow(given) as flow:
                names.append(flow.name(run()))
        if names[0] != names[1]:
            raise ValueError(
                f"{type(model).__name__} is not the sequence of its embedding, layers and head: cut into blocks it "
                "calls other operations; give a list of its modules"
            )
        return
    with _dry_run(inputs):
        random_state = torch.get_rng_state()
        logits = model(**inputs, use_cache=False).logits
        torch.set_rng_state(random_state)  # so that the blocks drop the same elements out
        values = _run_all(blocks, given)
    if not torch.equal(logits, values[0]):
        raise ValueError(
            f"{type(model).__name__} is not the sequence of its embedding, layers and head: cut into blocks it gives "
            f"other logits on the example, by up to {(logits - values[0]).abs().max():.1e}; give a list of its modules"
        )


def _run_all(blocks: Sequence[ModelBlock], values: Values) -> Values:
    for block in blocks:
        values = block(*values)
    return values
