"""Rows about the numbers of every policy: the same training on ranks that share the GPU, and on ranks on CPU."""

from __future__ import annotations

import gc
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW, Optimizer

import laconic
from benchmarks.gpu.training import BENCHMARK, LOCAL, NODES, Bench, Sizes, device_of
from benchmarks.llama import Llama, decoder_layers, loss_of
from laconic.optim.adamw8bit import AdamW8bit
from laconic.optim.muon import Muon
from laconic.optim.shampoo import Shampoo
from tests.support.record import Row

_STEPS = 6
_EXACT, _ROUNDED = 1e-4, 2e-2
"""The largest relative difference of two losses: of fp32 without TF32, and of policies that round numbers, whose codes
may differ where the last bit of a number does."""
Prepare = Callable[[nn.Module], Any]
Losses = dict[str, list[float] | str]
"""By policy: the losses of a rank, step by step, or the error that ended it."""


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
_FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


def _lossless(name: str, word: str = "lossless", **options: Any) -> Policy:
    options = {"wire": word, "mp_policy": _BF16, **options}
    return Policy(name=f"{word}, {name}", options=options, tolerance=_ROUNDED)


LOSSLESS: tuple[Policy, ...] = (
    _lossless("host", cache="host"),
    _lossless("device", cache="device"),
    _lossless("rank", cache="rank"),
    _lossless("offload, host", cache="host", offload_policy=_OFFLOAD),
    _lossless("fp16, host", cache="host", mp_policy=_FP16),
    replace(
        _lossless("weights in fp8_128x128, device", cache="device"), prepare=_scaled("fp8_128x128").prepare,
    ),
    _lossless("host", "lossless-4bit", cache="host"),
    _lossless("device", "lossless-2bit", cache="device"),
)  # fmt: skip
"""The policies whose weights cross as lossless differences."""
POLICIES: tuple[Policy, ...] = (
    Policy(name="none", options={"cache": "none"}),
    Policy(name="host", options={"cache": "host"}),
    Policy(name="device", options={"cache": "device"}),
    Policy(name="rank", options={"cache": "rank"}),
    Policy(name="auto", options={"cache": "auto"}),
    Policy(name="auto, part on the device", options={"cache": laconic.Cache(where="auto", device_bytes=2**20)}),
    Policy(name="4bit, rank", options={"cache": "rank", "wire": "4bit"}, tolerance=_ROUNDED),
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
    *LOSSLESS,
)  # fmt: skip


def train(policy: Policy, shape: Llama, device: torch.device, *, nodes: int, local: int) -> list[float]:
    """Return the losses of this rank, step by step, under a policy on nodes x local ranks. Local steps have islands."""
    model = shape.build(torch.device("cpu"), torch.float32).to(device)  # the same weights on both devices
    if policy.prepare is not None:
        policy.prepare(model)
    shape_of_mesh = {"islands": nodes} if policy.every else {"nodes": nodes}
    mesh = laconic.init_mesh(device.type, local=local, **shape_of_mesh)
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


def policies_rank(sizes: Sizes, device_type: str) -> Losses:
    """Return the losses of this rank under each policy, or the error that ended it."""
    return losses_by_policy(sizes.loss, device_of(device_type), nodes=NODES, local=LOCAL)


def losses_by_policy(shape: Llama, device: torch.device, *, nodes: int, local: int) -> Losses:
    """Return the losses of this rank under each policy, or the error that ended it: see `train`."""
    found: Losses = {}
    for policy in POLICIES:
        found[policy.name] = _losses_or_error(policy, shape, device, nodes=nodes, local=local)
    return found


def _losses_or_error(
    policy: Policy, shape: Llama, device: torch.device, *, nodes: int, local: int
) -> list[float] | str:
    start_s = time.perf_counter()
    losses: list[float] | str
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = train(policy, shape, device, nodes=nodes, local=local)
    except Exception:  # of any kind: the others are of interest
        losses = traceback.format_exc()
    gc.collect()
    if torch.distributed.get_rank() == 0:
        print(f"  {device.type}: {policy.name}: {time.perf_counter() - start_s:.1f} s", file=sys.stderr, flush=True)
    return losses


def exact_twin(policy: Policy) -> Policy:
    """The same training with weights that cross as they are."""
    wire = replace(laconic.Wire.of(policy.options["wire"]), weights="exact")
    return replace(policy, name=f"{policy.name}, exact", options={**policy.options, "wire": wire})


def lossless_rank(sizes: Sizes, device_type: str) -> Losses:
    """Return the losses of this rank under each lossless policy and its exact twin, all by deterministic kernels.

    The first twin runs twice. If its losses differ, it is the kernels of the model that do not repeat their bits.
    """
    device = device_of(device_type)
    first = exact_twin(LOSSLESS[0])
    runs = [replace(first, name=_AGAIN), *(each for one in LOSSLESS for each in (one, exact_twin(one)))]
    with sdpa_kernel(SDPBackend.MATH):  # the backward passes of others add in any order
        return {run.name: _losses_or_error(run, sizes.loss, device, nodes=NODES, local=LOCAL) for run in runs}


_AGAIN = "exact, again"


def differences(on_device: Sequence[Losses], on_cpu: Sequence[Losses]) -> Iterator[tuple[Policy, float | str]]:
    """Yield the largest relative difference of a loss under each policy, or an error. The losses are those of ranks."""
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
    found = list(differences(bench.launch(policies_rank), bench.launch(policies_rank, device_type="cpu")))
    ranks = f"{NODES} x {LOCAL} ranks that share the device, over Gloo"
    return policies_row(found, bench.sizes.loss, ranks, bench.device_type.upper())


@BENCHMARK.row("lossless-equal")
def lossless_equal(bench: Bench) -> Row:
    """Training with lossless differences has the losses of training with exact weights, to the bit, on one device."""
    by_rank = bench.launch(lossless_rank)

    def outcome(name: str, twin: str) -> str:
        errors = [each[key] for each in by_rank for key in (name, twin) if isinstance(each[key], str)]
        if errors:
            return str(errors[0])
        pairs = [pair for each in by_rank for pair in zip(each[name], each[twin], strict=True)]
        unequal = sum(one != other for one, other in pairs)
        return f"{unequal} of {len(pairs)} losses differ" if unequal else "equal"

    found = {policy.name: outcome(policy.name, exact_twin(policy).name) for policy in LOSSLESS}
    good = sum(text == "equal" for text in found.values())
    return Row(
        claim=f"lossless policies whose losses on {bench.device_type.upper()} are those of exact weights to the bit",
        measured=f"{good} of {len(found)}",
        note=(
            f"{bench.sizes.loss}, bf16 or fp16 compute, attention by plain matrix products, {_STEPS} AdamW steps on "
            f"{NODES} x {LOCAL} ranks that share the device, over Gloo: "
            f"{'; '.join(f'{name} {text}' for name, text in found.items())}. A second run with exact weights: "
            f"{outcome(_AGAIN, exact_twin(LOSSLESS[0]).name)}."
        ),
    )


def policies_row(found: Sequence[tuple[Policy, float | str]], shape: Llama, ranks: str, device: str) -> Row:
    """Return the row of some differences, measured with `shape` on ranks that `ranks` describes."""
    good = [policy.name for policy, value in found if isinstance(value, float) and value <= policy.tolerance]
    texts = [f"{policy.name} {value if isinstance(value, str) else f'{value:.0e}'}" for policy, value in found]
    return Row(
        claim=f"policies whose losses on {device} are those on CPU",
        measured=f"{len(good)} of {len(found)}",
        note=(
            f"{shape}, fp32 without TF32, {_STEPS} steps on {ranks}; largest relative difference of a loss, at most "
            f"{_EXACT:.0e}, or {_ROUNDED:.0e} where numbers are rounded: {'; '.join(texts)}."
        ),
    )
