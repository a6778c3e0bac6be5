"""Any transformers causal LM: built on the meta device, then sharded by the caller, then filled with values.

[Note: Equal initialisation]
A run must start from the same numbers under every strategy and on any number of ranks. Otherwise the results of
`laconic compare` mean nothing. So `materialize` takes one layer after the other, in the order in which transformers
initialises. It replaces the layer's parameters by plain ones of full size in host memory, lets transformers' own
`_initialize_weights` fill them with the job's seed, and keeps this rank's part of each. Memory peaks at one layer.
Modules outside the layers (embeddings, the output layer) go one by one. Tied parameters are drawn in every place, as
transformers does before it ties them, and the first draw counts. Parameters that partial updates slice are drawn whole.
Weights that rest in few bits are drawn as the others and then encoded, so they are those of the plain model, rounded.
A rank of a pipeline holds some stages only. It draws the others, too, and drops what it draws.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.config import JobError, LoraConfig, ModelConfig
from laconic.hf.folder import ModelFolder
from laconic.hf.layers import base_model, layers_to_shard
from laconic.hf.lora import (
    adapted_layers,
    adapter_modules,
    adapters_put_aside,
    add_adapters,
    is_dora,
    reset_adapters,
    row_norms,
)
from laconic.hf.weights import Whole, is_held, load_folder, parameter_ids, whole_tensors, write_whole
from laconic.layers.linear import quantize_

META = torch.device("meta")
# Configuration files have these keys and transformers reads them, although some classes of configurations lack them.
_READ_KEYS = {
    "rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "architectures", "vocab_size", "head_dim",
}  # fmt: skip


def build_model(config: ModelConfig, lora: LoraConfig | None = None, *, device: torch.device | str = META) -> nn.Module:
    """Build the model of a job, with adapters if `lora` enables them.

    On meta, the default, it has shapes only: shard it, then call `materialize`. On another device it has values too.

    Raises:
        JobError: the configuration or the model folder is wrong; the message says where.
    """
    import transformers

    model_config = _transformers_config(config)
    if type(model_config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise JobError(
            f"model_type {model_config.model_type!r} is no causal language model in transformers; "
            "laconic train takes only those; shard other models with laconic.fully_shard in a script of your own"
        )
    dtype = getattr(torch, config.dtype)
    try:
        with META:
            model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    except Exception as error:  # each model class fails on absurd values in its own way
        raise JobError(
            f"transformers cannot build a causal language model of model_type {model_config.model_type!r} "
            f"from this configuration: {error}"
        ) from error
    if config.path is not None:
        model.name_or_path = config.path  # peft writes it into adapter_config.json
    if config.activation_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if lora is not None and lora.quantize is not None:
        try:
            quantize_(model, lora.quantize, skip=lora.quantize_skip)
        except ValueError as error:
            raise JobError(f"lora.quantize = {lora.quantize!r}: {error}") from error
    if lora is not None and lora.enabled:
        model = add_adapters(model, lora)
    model.train()
    if torch.device(device) != META:
        materialize(model, config, device)
    return model


@torch.no_grad()
def materialize(
    model: nn.Module, config: ModelConfig, device: torch.device | str, *, part: HeldPart | None = None
) -> int:
    """Give a model from `build_model`, sharded or not, its values on `device`. Every rank calls it.

    With `model.path` each rank reads its own part from the folder. Otherwise the values are drawn, equal for equal
    seeds under every sharding: [Note: Equal initialisation]. With `part`, all else stays on the meta device. Returns
    the bytes that this rank has read.

    Raises:
        ModelFolderError: the folder does not fit the model; the message lists the tensors.
    """
    base = base_model(model)
    layers = layers_to_shard(model)
    for module in part.stages if part else [model]:
        module.to_empty(device=device)
    bytes_read = 0
    loaded: set[int] = set()
    with torch.random.fork_rng(devices=[]), adapters_put_aside(model):
        torch.manual_seed(config.init_seed)
        if part:
            part.tie_again()
        else:
            base.tie_weights()  # to_empty makes two of each tied parameter
        if config.path is not None:
            folder = ModelFolder(config.path)
            loaded = load_folder(base, folder)
            bytes_read = folder.bytes_read
        _initialise(base, layers, loaded)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.init_seed + 1)  # adapters are equal whether the base was loaded or drawn
        for _, _, layer in adapted_layers(model):
            is_elsewhere = next(layer.parameters()).is_meta
            norms = row_norms(layer) if is_dora(layer) and not is_elsewhere else None
            with _full_size(adapter_modules(layer), loaded=set(), drawn=set()):
                reset_adapters(layer, norms)
    return bytes_read


@dataclass
class HeldPart:
    """The part of a model that a rank of a pipeline holds: [Note: A model held in part] in checkpoint/state.py."""

    stages: Sequence[nn.Module]
    """The stages of the rank, whose modules are the model's."""
    ties: list[list[tuple[nn.Module, str]]]
    """The places of each parameter that the whole model has in several: (module, name in it)."""

    @staticmethod
    def ties_of(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
        """The places of each tied parameter of a model, before it is cut."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module, name))
        return [each for each in places.values() if len(each) > 1]

    def tie_again(self) -> None:
        """Show a tied parameter in all its places: the copy that this rank holds, if it holds one."""
        for places in self.ties:
            found = [module._parameters[name] for module, name in places]
            shown = next((each for each in found if each is not None and not each.is_meta), found[0])
            for module, name in places:
                module._parameters[name] = shown

    @contextmanager
    def without_further_copies(self) -> Iterator[None]:
        """In the block, show a tied parameter on the ranks alone that hold the first of its copies."""
        own = {module for stage in self.stages for module in stage.modules()}
        hidden = [places for places in self.ties if places[0][0] not in own]
        shown = [[(module, name, module._parameters[name]) for module, name in places] for places in hidden]
        for places in shown:
            like = places[0][2]
            assert like is not None
            stand_in = nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device=META), like.requires_grad)
            for module, name, _ in places:
                module._parameters[name] = stand_in
        try:
            yield
        finally:
            for module, name, parameter in (each for places in shown for each in places):
                module._parameters[name] = parameter


def _initialise(base: Any, layers: list[nn.Module], loaded: set[int]) -> None:
    """Let transformers initialise all computed buffers, and the parameters whose ids are not in `loaded`."""
    from transformers import PreTrainedModel

    layer_ids = {id(layer) for layer in layers}
    drawn: set[int] = set()

    # The order of PreTrainedModel.initialize_weights: children first, and an inner model by its own rule.
    def visit(module: nn.Module, initialise: Callable[[nn.Module], None], *, swap: bool) -> None:
        if swap and id(module) in layer_ids:
            with _full_size(module.modules(), loaded=loaded, drawn=drawn):
                visit(module, initialise, swap=False)
            return
        for child in module.children():
            visit(child, child._initialize_weights if isinstance(child, PreTrainedModel) else initialise, swap=swap)
        with _full_size([module] if swap else [], loaded=loaded, drawn=drawn):
            initialise(module)

    visit(base, base._initialize_weights, swap=True)


@contextmanager
def _full_size(modules: Iterable[nn.Module], *, loaded: set[int], drawn: set[int]) -> Iterator[None]:
    """Replace the modules' own parameters by plain tensors of full size; afterwards keep this rank's part of each.

    Parameters in `loaded` or `drawn` keep their values. For those in `loaded` the tensors are on meta: drawing is free.
    """
    before = [(module, dict(module._parameters)) for module in modules]
    swapped: list[tuple[nn.Module, str, Whole]] = []
    for module, own in before:
        wholes = whole_tensors(module)
        shown: dict[str, nn.Parameter | None] = {name: None for name, parameter in own.items() if parameter is None}
        for name, parameter in wholes.items():
            device = META if parameter_ids(parameter) & loaded else torch.device("cpu")
            fill = float("nan") if parameter.dtype.is_floating_point else 0
            stand_in = torch.full(parameter.shape, fill, dtype=parameter.dtype, device=device)
            shown[name] = nn.Parameter(stand_in, requires_grad=False)
            swapped.append((module, name, parameter))
        module._parameters = shown
    stand_ins: list[Tensor] = []
    try:
        yield
        stand_ins = [module._parameters[name] for module, name, _ in swapped]  # type: ignore[misc]
    finally:
        for module, own in before:
            module._parameters = own
    for (module, name, parameter), stand_in in zip(swapped, stand_ins, strict=True):
        if parameter_ids(parameter) & (loaded | drawn) or not is_held(parameter):
            continue
        if parameter.dtype.is_floating_point and stand_in.isnan().any():
            raise JobError(f"transformers does not initialise {name} of {type(module).__name__}; set model.path")
        write_whole(parameter, stand_in)
        drawn |= parameter_ids(parameter)


def _transformers_config(config: ModelConfig) -> Any:
    import transformers

    source = config.path if config.path is not None else config.config
    if source is None:
        raise JobError("no model is given; set model.config (a table with model_type, or a config.json) or model.path")
    if isinstance(source, dict):
        return _from_table(source)
    path = Path(source)
    if config.path is not None:
        ModelFolder(path)  # raises ModelFolderError, with a remedy, if it is no model folder
        path = path / "config.json"
    try:
        table = json.loads(path.read_text())
        return transformers.AutoConfig.for_model(**table)
    except Exception as error:  # each configuration class checks its values in its own way
        raise JobError(f"{path} is not a readable transformers configuration: {error}") from error


def _from_table(table: dict[str, Any]) -> Any:
    import transformers

    kind = table.get("model_type")
    known = sorted(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
    if kind not in known:
        near = difflib.get_close_matches(str(kind), known, n=3, cutoff=0.4)
        raise JobError(
            f"model.config.model_type = {kind!r} is unknown to transformers; near it are {', '.join(near) or 'none'}"
        )
    try:
        default = transformers.AutoConfig.for_model(kind)
        built = transformers.AutoConfig.for_model(**table)
    except Exception as error:  # each configuration class checks its values in its own way
        raise JobError(f"model.config is not a valid {kind} configuration: {error}") from error
    valid = set(default.to_dict()) | set(default.attribute_map) | set(vars(default)) | _READ_KEYS
    for key in table:
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)
            raise JobError(
                f"unknown key `model.config.{key}` for model_type {kind!r}; the nearest valid key is `{near[0]}`"
            )
    return built
