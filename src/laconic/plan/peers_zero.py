"""DeepSpeed's peers: ZeRO-3, hpZ and ZeRO++."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import get_args

from laconic.config import Config, JobError
from laconic.config.sections import Strategy
from laconic.plan.buckets import Shape
from laconic.plan.candidate import Candidate
from laconic.plan.machine import Machine
from laconic.plan.peers_deepspeed import Deepspeed, DeepspeedOptions
from laconic.plan.peers_torch import refuse_unfit
from laconic.plan.program import Program, StepWork


def _deepspeed(
    machine: Machine,
    config: Config,
    work: StepWork,
    shape: Shape,
    *,
    name: str,
    hpz: bool = False,
    quantizes: bool = False,
) -> Program:
    plain = dataclasses.replace(config, shard=dataclasses.replace(config.shard, strategy="fsdp2"))
    refuse_unfit(plain, shape)
    refusals = {
        "model.dtype": config.model.dtype != "float32" and "keeps master weights and states in float32",
        "shard.param_dtype": config.shard.param_dtype == "float16" and "scales the loss by its own rule",
        "lora.quantize": config.lora.quantize is not None and "cuts no weights in blocks of few bits",
    }
    for key, reason in refusals.items():
        if reason:
            section, field = key.split(".")
            raise JobError(f"{key} = {getattr(getattr(config, section), field)!r}, but DeepSpeed {reason}")
    if hpz and shape.local < 2:
        raise JobError(
            f"{name!r} keeps parameters on the ranks of one node, so it needs at least 2 ranks per node, got "
            f"{shape.local}; use 'deepspeed' or more ranks per node"
        )
    if quantizes and machine.device_type == "cpu":
        raise JobError(f"{name!r} quantises with CUDA kernels, which DeepSpeed does not have for CPU; use 'zero++'")
    options = DeepspeedOptions(hpz=hpz, quantizes=quantizes, reshards=config.shard.reshard_after_forward is not False)
    return Deepspeed(machine, work, shape, options)


_ROUNDED = "weights are gathered in 8 bits and gradients summed in 4, and nothing feeds the error back"


def _of_deepspeed(name: str, label: str, source: str, *, hpz: bool = False, quantizes: bool = False) -> Candidate:
    return Candidate(
        name=name, label=label, make=partial(_deepspeed, name=name, hpz=hpz, quantizes=quantizes), is_peer=True,
        source=f"{source}; DeepSpeed 0.19's runtime/zero",
        keys={"strategy": name} if name in get_args(Strategy) else None, inexact=_ROUNDED if quantizes else "",
    )  # fmt: skip


ZERO_PEERS = (
    _of_deepspeed("deepspeed", "DeepSpeed ZeRO-3", "ZeRO, arXiv 1910.02054; ZeRO-Infinity, arXiv 2104.07857"),
    _of_deepspeed("deepspeed-hpz", "DeepSpeed hpZ", "ZeRO++, arXiv 2306.10209, section 4.2", hpz=True),
    _of_deepspeed("deepspeed-zero++", "DeepSpeed ZeRO++", "ZeRO++, arXiv 2306.10209", hpz=True, quantizes=True),
)
"""DeepSpeed's forms of ZeRO-3."""
