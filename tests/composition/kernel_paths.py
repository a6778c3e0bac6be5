"""Kernel paths of transformers under every strategy that computes products itself, against the unsharded model.

The paths are those of transformers' own registries, on models that use them, and models of other forms: tied weights,
an encoder with a decoder, a state space. So a path that transformers adds is tried, too. Whether a path can run on this
machine is asked of the library: the unsharded model runs it. A path that fails there must fail for a known reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.t5.modeling_t5 import T5Attention, T5DenseActDense

import laconic
from laconic.hf.causal_lm import cut_causal_lm
from laconic.partial.patterns import sliced_layer
from tests.support.partial_models import unslice

LIMIT = 1e-4
"""The largest relative difference of a gradient in fp32."""
CACHES = ("cache none", "cache host", "cache device")
PARTIAL = tuple(f"partial updates, slice {part}, {place}" for part in (0, 1) for place in (*CACHES, "unsharded"))
STRATEGIES = (*CACHES, *PARTIAL, "local steps", "partial updates, local steps", "cyclic")

UNAVAILABLE = {
    "deepgemm": r"requires bfloat16",
    "sonicmoe": r"requires the `kernels` package",
    "flash_attention_[234]": r"package for FlashAttention\d doesn't seem to be installed",
    "flex_attention": r"does not support backward on CPU",
    r"paged\|eager": r"without a paged attention cache",
}
"""Why the library itself cannot train with a path on this machine, by patterns of its name and of the error."""
NO_LAYER = "no attention and no mlp layer of MambaForCausalLM is known; declare its class with patterns="
REFUSED = {
    ("partial updates", "state space"): NO_LAYER,
    ("cyclic", "bart|encoder and"): r"is neither a sequence of modules nor a transformers causal language model",
    ("cyclic", "tied"): r"are one parameter.* untie them \(transformers: tie_word_embeddings=False\), or cut so",
}
"""What laconic refuses by name before the first step, by patterns of the strategy and the path."""

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_NUM_MICRO_BATCHES = 2
T5_LAYERS = [
    sliced_layer(T5DenseActDense, kind="mlp", rows=["wi"], columns=["wo"]),
    sliced_layer(T5Attention, kind="attention", rows=["q", "k", "v"], columns=["o"], units=lambda layer: layer.n_heads),  # type: ignore[arg-type, return-value]
]


@dataclass(frozen=True)
class Path:
    """A model that computes with one implementation of a registry, or a model of another form."""

    model: str
    registry: str = ""
    """The part of the configuration that chooses: "attn" or "experts"; empty for the default of the library."""
    implementation: str = ""

    def __str__(self) -> str:
        return f"{self.model}, {self.registry} {self.implementation}" if self.registry else self.model


def paths() -> list[Path]:
    """Every implementation of the registries, on two models each, and the other forms."""
    experts, attentions = ["eager", *ALL_EXPERTS_FUNCTIONS], ["eager", *ALL_ATTENTION_FUNCTIONS]  # eager is in neither
    found = [Path(model, "experts", name) for model in ("mixtral", "gpt-oss") for name in experts]
    found += [Path(model, "attn", name) for model in ("llama", "bart") for name in attentions]
    return [*found, *map(Path, ("tied weights", "encoder and decoder", "state space"))]


_HALF = {"layers": 2, "attention_heads": 8, "ffn_dim": 48}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (hf.MixtralForCausalLM, {**_SIZES, **_EXPERTS}),
    # transposed weights, biases, and gates that alternate with up projections
    "gpt-oss": (
        hf.GptOssForCausalLM,
        {**_SIZES, **_EXPERTS, "head_dim": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "llama": (hf.LlamaForCausalLM, _SIZES),
    "bart": (
        hf.BartForConditionalGeneration,
        {
            **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _HALF.items()},
            **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
            **_TOKENS, "d_model": 32, "vocab_size": 50, "max_position_embeddings": 64,
        },
    ),
    "tied weights": (hf.Qwen2ForCausalLM, {**_SIZES, "tie_word_embeddings": True}),
    "encoder and decoder": (
        hf.T5ForConditionalGeneration,
        {"d_model": 32, "d_kv": 4, "d_ff": 48, "num_layers": 2, "num_heads": 8, "vocab_size": 50, "dropout_rate": 0.0,
         "decoder_start_token_id": 0},
    ),
    "state space": (
        hf.MambaForCausalLM,
        {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "conv_kernel": 3, "vocab_size": 50,
         "tie_word_embeddings": False},
    ),
}  # fmt: skip


def build(path: Path) -> Any:
    """The path's model with random weights; equal on every call.

    Raises:
        AssertionError: transformers took another implementation than the one asked for.
    """
    torch.manual_seed(0)
    kind, sizes = _MODELS[path.model]
    options = {f"{path.registry}_implementation": path.implementation} if path.registry else {}
    model = kind(kind.config_class(**sizes, **options))
    assert not path.registry or getattr(model.config, f"_{path.registry}_implementation") == path.implementation, path
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.train()


def batch(number: int) -> Tensor:
    return torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(number))


def error(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def loss(model: Any, tokens: Tensor) -> Tensor:
    options = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    return error(model(input_ids=tokens, **options).logits, tokens)


@functools.cache
def expected(path: Path, number: int) -> dict[str, Tensor]:
    """The unsharded model's gradients for one batch."""
    model = build(path)
    with torch.compiler.set_stance("force_eager"):  # a path that compiles takes half a minute to say that it cannot run
        loss(model, batch(number)).backward()
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}


def reason_against(path: Path) -> str:
    """Why the library itself cannot train with the path here; empty if it can."""
    try:
        expected(path, 0)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return ""


# -- one cell ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a path under a strategy on one rank."""

    path: Path
    strategy: str
    difference: float = 0.0
    """The largest relative difference of a parameter's gradient."""
    parameter: str = ""
    """The parameter with this difference."""
    refusal: str = ""

    def fault(self) -> str:
        """What is wrong; empty if the gradients are right, or if laconic may refuse the cell."""
        if self.refusal:
            is_known = any(
                re.search(strategy, self.strategy) and re.search(path, str(self.path)) and re.search(text, self.refusal)
                for (strategy, path), text in REFUSED.items()
            )
            return "" if is_known else f"{self.strategy}, {self.path}: refused: {self.refusal}"
        if self.difference <= LIMIT:
            return ""
        return f"{self.strategy}, {self.path}: {self.parameter} differs by {self.difference:.2g}"


def job(chosen: list[Path], strategies: tuple[str, ...]) -> list[Outcome]:
    """Try the paths under the strategies. Collective over all ranks, each of which is a node."""
    return [_try(path, strategy) for path in chosen for strategy in strategies]


def _try(path: Path, strategy: str) -> Outcome:
    try:
        got, want = (_cyclic if strategy == "cyclic" else _hooked)(path, strategy)
    except ValueError as refusal:
        return Outcome(path=path, strategy=strategy, refusal=str(refusal))
    floor = 1e-3 * sum(value.square().sum() for value in want.values()).sqrt().item()  # type: ignore[union-attr]
    assert got.keys() <= want.keys()
    assert floor > 0
    # A gradient that is zero but for rounding (that of a key's bias is) is measured by the whole model's.
    differences = {
        name: ((got[name] - want[name]).norm() / max(want[name].norm().item(), floor)).nan_to_num(torch.inf).item()
        for name in got
    }
    worst = max(differences, key=lambda name: differences[name])
    return Outcome(path=path, strategy=strategy, difference=differences[worst], parameter=worst)


def _mean(path: Path, numbers: Iterable[int]) -> dict[str, Tensor]:
    each = [expected(path, number) for number in numbers]
    return {name: torch.stack([values[name] for values in each]).mean(0) for name in each[0]}


def _hooked(path: Path, strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients of micro-batches under `fully_shard`, partial updates or local steps, and those expected."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model: Any = build(path)
    if "partial" in strategy:
        part = rank % 2 if "local" in strategy else int(strategy.split("slice ")[1][0])
        laconic.partial_updates(model, slice_index=part, num_slices=2, include=("mlp", "attention"), patterns=T5_LAYERS)
    is_local, is_sharded = "local steps" in strategy, "unsharded" not in strategy
    if is_sharded:
        mesh = laconic.init_mesh("cpu", islands=size, nodes=1, local=1) if is_local else laconic.init_mesh("cpu")
        cache: Any = strategy.split("cache ")[1] if "cache" in strategy else "host"
        names = model._no_split_modules
        for unit in [module for module in model.modules() if type(module).__name__ in names]:
            laconic.fully_shard(unit, mesh=mesh, cache=cache)
        laconic.fully_shard(model, mesh=mesh, cache=cache)
    batches = [[a * size + r for r in range(size)] for a in range(_NUM_MICRO_BATCHES)]
    own = [rank] if is_local or not is_sharded else range(size)
    num_steps = 1
    if is_local:  # weights stay as they are at this rate, so the gradients after a sync are those before it
        num_steps = 2
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        steps = laconic.LocalSteps(model, optimizer, mesh=mesh, every=1, codec="fp32")
    for step in range(num_steps):
        for numbers in batches:
            if is_sharded:
                model.set_requires_gradient_sync(numbers is batches[-1])
            (loss(model, batch(numbers[rank])) / _NUM_MICRO_BATCHES).backward()
        if step < num_steps - 1:
            steps.step()
            steps.zero_grad()
    want = _mean(path, [numbers[r] for numbers in batches for r in own])
    masks = unslice(model, lambda p: torch.full(p.shape, p.requires_grad))
    return unslice(model, _gradient), {name: value * masks[name] for name, value in want.items()}


def _gradient(parameter: Any) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.shape)
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


class Recorder(torch.optim.SGD):
    """An optimizer that moves nothing and keeps the gradients of its last step."""

    gradients: dict[Tensor, Tensor]

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0)
        self.gradients = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.gradients[parameter] = parameter.grad.clone()


def _cyclic(path: Path, strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients that this worker's stages were stepped with in a cyclic run, and those expected."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build(path)
    stages = cut_causal_lm(model, size, example=batch(0), by="parameters")
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    run = laconic.CyclicDataParallel(stages, error, Recorder, mesh)
    run.step((batch(rank), batch(rank)))
    run.drain()
    gradients = {p: g for optimizer in run.optimizer.by_stage for p, g in optimizer.gradients.items()}
    run.close()
    want = _mean(path, range(size))
    return {name: gradients[p] for name, p in model.named_parameters() if p in gradients}, want


# -- all cells ---------------------------------------------------------------------------------------------------------


def sort_out(found: Iterable[Path]) -> tuple[list[Path], dict[Path, str], list[str]]:
    """The paths that run here, the reasons against the others, and the faults: reasons that nobody has listed."""
    reasons = {path: reason_against(path) for path in found}
    runs = [path for path, reason in reasons.items() if not reason]
    against = {path: reason for path, reason in reasons.items() if reason}
    return runs, against, [f"{path}: {reason}" for path, reason in against.items() if not _is_known(path, reason)]


def _is_known(path: Path, reason: str) -> bool:
    return any(re.fullmatch(n, path.implementation) and re.search(r, reason) for n, r in UNAVAILABLE.items())


def faults(by_rank: Iterable[Iterable[Outcome]]) -> Iterator[str]:
    """What is wrong on any rank."""
    for rank, outcomes in enumerate(by_rank):
        yield from (f"rank {rank}: {fault}" for each in outcomes if (fault := each.fault()))
