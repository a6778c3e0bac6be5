"""DeepSpeed's forms of ZeRO-3."""

from laconic.registry import Limit, Strategy
from laconic.strategies.known.engine import LIMITS
from laconic.strategies.known.pytorch import several_per_node

_TAKES = (
    ("model.dtype", "float32", "keeps master weights and optimizer states in float32; set model.dtype = 'float32' and, "
     "for fewer bits in forward and backward, shard.param_dtype"),
    ("lora.quantize", None, "cuts no weights in blocks of few bits; leave it out"),
    ("train.compile", False, "gathers inside the layers that would be compiled; leave it out"),
)  # fmt: skip
_REFUSES = (
    ("shard.param_dtype", "float16", "scales the loss by its own rule; use 'bfloat16'"),
    ("train.rows", "by-speed", "gathers inside the layers, where no compute can be timed alone; give the rows of each "
     "rank as a list"),
)  # fmt: skip
"""Keys with the value that DeepSpeed takes alone, or does not take: why, and what to do."""


def _limit(key: str, value: object, reason: str, *, is_only: bool) -> Limit:
    message = f"{key} = {{value!r}} and shard.strategy = {{strategy!r}}: DeepSpeed {reason}"
    return Limit(key=key, holds=lambda given: (given == value) is is_only, message=message)


_DEEPSPEED = Strategy(
    name="deepspeed",
    label="DeepSpeed ZeRO-3",
    note="DeepSpeed's ZeRO-3, its sizes set for the model as FSDP2's are, and with the same ring reduce-scatter. What "
    "it has gathered ahead when forward ends, stays for backward, so its last layers cross once less.",
    source="ZeRO, arXiv 1910.02054; ZeRO-Infinity, arXiv 2104.07857; DeepSpeed 0.19's runtime/zero",
    maker="DeepSpeed",
    colour="#2f7f6f",
    shard={"strategy": "deepspeed"},
    package="deepspeed",
    limits=(
        *LIMITS,
        *(_limit(*each, is_only=True) for each in _TAKES),
        *(_limit(*each, is_only=False) for each in _REFUSES),
    ),
    reduces_always=True,
    saves=False,
    stepper="laconic.contestants.deepspeed:DeepSpeedStepper",
    in_plan=False,
)
_HPZ = _DEEPSPEED.variant(
    name="deepspeed-hpz",
    label="DeepSpeed hpZ",
    note="DeepSpeed's ZeRO-3 with zero_hpz_partition_size: after forward each node keeps a copy of the weights on its "
    "devices.",
    source="ZeRO++, arXiv 2306.10209, section 4.2; DeepSpeed 0.19's runtime/zero",
    colour="#8cc5b8",
    shard={"strategy": "deepspeed-hpz"},
    limits=(*_DEEPSPEED.limits, several_per_node("deepspeed")),
)

STRATEGIES = (
    _DEEPSPEED,
    _HPZ,
    _HPZ.variant(
        name="deepspeed-zero++",
        label="DeepSpeed ZeRO++",
        note="DeepSpeed's ZeRO-3 with hpZ, weights in 8 bits and gradients in 4. It runs on CUDA only.",
        source="ZeRO++, arXiv 2306.10209; DeepSpeed 0.19's runtime/zero",
        shard={"strategy": "deepspeed-zero++"},
        inexact="weights are gathered in 8 bits and gradients summed in 4, and nothing feeds the error back",
        limits=(
            *_HPZ.limits,
            Limit(
                key="launch.device",
                holds=lambda value: value != "cpu",
                message="shard.strategy = {strategy!r} quantises weights and gradients with CUDA kernels (DeepSpeed's "
                "QuantizerBuilder), which DeepSpeed does not have for CPU: 'This op had not been implemented on CPU "
                "backend'. Use 'deepspeed-hpz', or 'zero++', the same algorithm on laconic's engine",
            ),
        ),
        in_compare=False,  # the lab has no CUDA
    ),
)
