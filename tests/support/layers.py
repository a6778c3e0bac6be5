"""Typical layers of published models as their checkpoints have them: each expert apart, and short names."""

from __future__ import annotations

from laconic.plan.padding import Shape, UnitShapes


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
