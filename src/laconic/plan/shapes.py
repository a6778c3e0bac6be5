"""The shapes of a model's units: one layer of known large models, or all units of a transformers configuration."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class UnitShapes:
    """The names and shapes of a unit's tensors, in the order of definition."""

    name: str
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    count: int = 1
    """The number of equal units in the model."""

    @property
    def numel(self) -> int:
        """The number of elements of one such unit."""
        return sum(map(math.prod, self.shapes))


def _layer(name: str, count: int, **shapes: Shape) -> UnitShapes:
    return UnitShapes(name=name, names=tuple(shapes), shapes=tuple(shapes.values()), count=count)


LLAMA_3_70B = _layer(
    "layer", 80,
    q_proj=(8192, 8192), k_proj=(1024, 8192), v_proj=(1024, 8192), o_proj=(8192, 8192), gate_proj=(28672, 8192),
    up_proj=(28672, 8192), down_proj=(8192, 28672), input_norm=(8192,), post_attention_norm=(8192,),
)  # fmt: skip

GPT_OSS_120B = _layer(
    "layer", 36,
    q_proj=(4096, 2880), k_proj=(512, 2880), v_proj=(512, 2880), o_proj=(2880, 4096), q_bias=(4096,), k_bias=(512,),
    v_bias=(512,), o_bias=(2880,), sinks=(64,), input_norm=(2880,), post_attention_norm=(2880,), router=(128, 2880),
    router_bias=(128,), gate_up_proj=(128, 2880, 5760), gate_up_bias=(128, 5760), down_proj=(128, 2880, 2880),
    down_bias=(128, 2880),
)  # fmt: skip

DEEPSEEK_V3 = _layer(
    "MoE layer", 58,
    q_a=(1536, 7168), q_a_norm=(1536,), q_b=(24576, 1536), kv_a=(576, 7168), kv_a_norm=(512,), kv_b=(32768, 512),
    o_proj=(7168, 16384), input_norm=(7168,), post_attention_norm=(7168,), router=(256, 7168), router_bias=(256,),
    **{
        f"expert_{index}.{name}": shape
        for index in range(257)  # 256 routed, 1 shared
        for name, shape in {"gate": (2048, 7168), "up": (2048, 7168), "down": (7168, 2048)}.items()
    },
)  # fmt: skip

KNOWN: dict[str, tuple[UnitShapes, ...]] = {
    "llama-3-70b": (LLAMA_3_70B,),
    "gpt-oss-120b": (GPT_OSS_120B,),
    "deepseek-v3": (DEEPSEEK_V3,),
}
"""The name of each known model -> its units: one typical layer."""


def units_of(model: str) -> tuple[UnitShapes, ...]:
    """Return the different units into which `laconic train` shards a model: its layers, and the rest of the model.

    Args:
        model: a key of `KNOWN`, the path of a transformers config.json, or the path of a folder with a config.json.

    Raises:
        ValueError: there is no such name or file.
        JobError: transformers cannot build a causal language model from the file.
    """
    if model in KNOWN:
        return KNOWN[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"there is no model {model!r}: give {', '.join(KNOWN)}, a transformers config.json, or a folder that has it"
        )
    return _units_of_config(path)


def _units_of_config(path: Path) -> tuple[UnitShapes, ...]:
    from laconic.config import ModelConfig
    from laconic.hf.layers import layers_to_shard
    from laconic.hf.models import build_model

    model = build_model(ModelConfig(config=str(path)))
    layers = layers_to_shard(model)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    rest = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in inside]
    units = [(type(layer).__name__, list(layer.named_parameters())) for layer in layers]
    keys = [
        (tuple((key, tuple(parameter.shape)) for key, parameter in parameters), name)
        for name, parameters in [*units, ("rest", rest)]
        if parameters
    ]
    first_names = dict(reversed(keys))
    return tuple(
        UnitShapes(name=first_names[unit], names=tuple(dict(unit)), shapes=tuple(dict(unit).values()), count=count)
        for unit, count in Counter(unit for unit, _ in keys).items()
    )
