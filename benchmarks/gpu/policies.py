"""Rows about the numbers of every policy: the same training on ranks that share the GPU, and on ranks on CPU."""

from __future__ import annotations

import gc
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.optim import AdamW, Optimizer

import laconic
from benchmarks.gpu.training import BENCHMARK, LOCAL, NODES, Bench, Sizes, device_of
from benchmarks.llama import decoder_layers, loss_of
from laconic.optim.adamw8bit import AdamW8bit
from laconic.optim.muon import Muon
from laconic.optim.shampoo import Shampoo
from tests.support.record import Row

_STEPS = 6
_EXACT, _ROUNDED = 1e-4, 2e-2
"""The largest relative difference of two losses: of fp32 without TF32, and of policies that round numbers, whose codes
may differ where the last bit of a number does."""
Prepare = Callable[[nn.Module], Any]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A way to train."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    """The arguments of `fully_shard`."""
    prepare: Prepare | None = None
    """Changes the model before it is sharded."""
    optimizer: Callable[..., Optimizer] = AdamW
    every: int = 0
    """The steps between syncs of two islands; 0 if the nodes are one island."""
    tolerance: float = _EXACT


def _scaled(weight_format: str) -> Policy:
    def prepare(model: nn.Module) -> Any:
        return laconic.convert_to_scaled_training(model, weight_format)

    return Policy(name=f"weights in {weight_format}", options={"cache": "device"}, prepare=prepare, tolerance=_ROUNDED)


def _compile_blocks(model: nn.Module) -> None:
    if next(model.parameters()).device.type != "cpu":  # the oracle on CPU is not compiled
        for layer in decoder_layers(model):
            layer.compile()


def _quantise(model: nn.Module) -> None:
    laconic.quantize_(model, "int8")


_OFFLOAD = CPUOffloadPolicy()
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES: tuple[Policy, ...] = (
    Policy(name="none", options={"cache": "none"}),
    Policy(name="host", options={"cache": "host"}),
    Policy(name="device", options={"cache": "device"}),
    Policy(name="host, part on the device", options={"cache": laconic.Cache(where="host", device_budget_bytes=2**20)}),
    Policy(name="host until backward", options={"cache": laconic.Cache(where="host", until="backward")}),
    Policy(name="gathered until backward", options={"reshard_after_forward": False}),
    Policy(name="offload", options={"offload_policy": _OFFLOAD}),
    Policy(name="offload, host", options={"offload_policy": _OFFLOAD, "cache": "host"}),
    Policy(name="checks", options={"cache": "host", "checks": laconic.Checks(interval=1)}),
    Policy(name="bf16", options={"cache": "host", "mp_policy": _BF16}, tolerance=_ROUNDED),
    Policy(name="bf16, offload", options={"offload_policy": _OFFLOAD, "mp_policy": _BF16}, tolerance=_ROUNDED),
    Policy(name="8bit", options={"cache": "host", "wire": "8bit"}, tolerance=_ROUNDED),
    Policy(name="4bit, host", options={"cache": "host", "wire": "4bit"}, tolerance=_ROUNDED),
    Policy(name="4bit, device", options={"cache": "device", "wire": "4bit"}, tolerance=_ROUNDED),
    Policy(
        name="4bit, bf16, offload",
        options={"cache": "host", "wire": "4bit", "mp_policy": _BF16, "offload_policy": _OFFLOAD},
        tolerance=_ROUNDED,
    ),
    Policy(
        name="2-bit gradients with feedback",
        options={"cache": "device", "wire": laconic.Wire(weights="int4", gradients="int2", feedback=True)},
        tolerance=_ROUNDED,
    ),
    Policy(
        name="bf16 values, e2m1 gradients",
        options={"wire": laconic.Wire(weights="bf16", as_values=True, gradients="e2m1")},
        tolerance=_ROUNDED,
    ),
    *(_scaled(name) for name in ("fp8_128x128", "fp8_1x128", "mxfp8", "nvfp4")),
    Policy(name="quantised linear layers", options={"cache": "host"}, prepare=_quantise, tolerance=_ROUNDED),
    Policy(
        name="AdamW8bit", options={"cache": "host"}, optimizer=AdamW8bit,
    ),
    Policy(name="Muon", options={"cache": "host"}, optimizer=Muon, tolerance=_ROUNDED),
    Policy(name="Shampoo", options={"cache": "host"}, optimizer=Shampoo, tolerance=_ROUNDED),
    Policy(name="local steps", every=2, tolerance=_ROUNDED),
    Policy(name="compiled blocks", options={"cache": "host"}, prepare=_compile_blocks, tolerance=_ROUNDED),
)  # fmt: skip


def _train(policy: Policy, sizes: Sizes, device: torch.device) -> list[float]:
    shape = sizes.loss
    model = shape.build(torch.device("cpu"), torch.float32).to(device)  # the same weights on both devices
    if policy.prepare is not None:
        policy.prepare(model)
    shape_of_mesh = {"islands": NODES, "local": LOCAL} if policy.every else {"nodes": NODES, "local": LOCAL}
    mesh = laconic.init_mesh(device.type, **shape_of_mesh)
    options = dict(policy.options)
    if hasattr(policy.optimizer, "granularity"):
        options["granularity"] = policy.optimizer.granularity
    for module in (*decoder_layers(model), model):
        laconic.fully_shard(module, mesh=mesh, **options)
    trained: Any = [each for each in model.parameters() if each.requires_grad]
    if policy.optimizer in (Muon, Shampoo):
        trained = laconic.optim.matrices_and_rest(model)
    optimizer = policy.optimizer(trained, lr=1e-3)
    stepper: Any = laconic.LocalSteps(model, optimizer, mesh=mesh, every=policy.every) if policy.every else optimizer
    losses = []
    for step in range(_STEPS):
        tokens = shape.tokens(device, seed=1000 * step + torch.distributed.get_rank())
        loss = loss_of(model, tokens)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(float(loss))
    return losses


def policies_rank(sizes: Sizes, device_type: str) -> dict[str, list[float] | str]:
    """Return the losses of this rank under each policy, or the error that ended it."""
    found: dict[str, list[float] | str] = {}
    for policy in POLICIES:
        start_s = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[policy.name] = _train(policy, sizes, device_of(device_type))
        except Exception:  # of any kind: the others are of interest
            found[policy.name] = traceback.format_exc()
        gc.collect()
        if torch.distributed.get_rank() == 0:
            print(f"  {device_type}: {policy.name}: {time.perf_counter() - start_s:.1f} s", file=sys.stderr, flush=True)
    return found


def _differences(bench: Bench) -> Iterator[tuple[Policy, float | str]]:
    on_device = bench.launch(policies_rank)
    on_cpu = bench.launch(policies_rank, device_type="cpu")
    for policy in POLICIES:
        pairs = [(here[policy.name], there[policy.name]) for here, there in zip(on_device, on_cpu, strict=True)]
        errors = [each for pair in pairs for each in pair if isinstance(each, str)]
        if errors:
            yield policy, errors[0]
            continue
        yield policy, max(abs(a - b) / abs(b) for here, there in pairs for a, b in zip(here, there, strict=True))  # type: ignore[arg-type]


@BENCHMARK.row("policies")
def policies(bench: Bench) -> Row:
    """Every policy trains on the device as it does on CPU."""
    found = list(_differences(bench))
    good = [policy.name for policy, value in found if isinstance(value, float) and value <= policy.tolerance]
    texts = [f"{policy.name} {value if isinstance(value, str) else f'{value:.0e}'}" for policy, value in found]
    return Row(
        claim=f"policies whose losses on {bench.device_type.upper()} are those on CPU",
        required=f"{len(found)} of {len(found)}",
        measured=f"{len(good)} of {len(found)}",
        is_met=len(good) == len(found),
        note=(
            f"{bench.sizes.loss}, fp32 without TF32, {_STEPS} steps on {NODES} x {LOCAL} ranks that share the device, "
            f"over Gloo; largest relative difference of a loss, at most {_EXACT:.0e}, or {_ROUNDED:.0e} where numbers "
            f"are rounded: {'; '.join(texts)}."
        ),
    )
