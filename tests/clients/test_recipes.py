"""Recipes of FSDP2's users with only the import changed: training, alignment, averaging, generation, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from laconic import fully_shard
from tests.support.jobs import SMALL_LLAMA
from tests.support.launch import on_ranks


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, 2)
        self.norm2, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 20), nn.GELU(), nn.Linear(20, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model as in nanoGPT: learnt positions, tied embedding and head."""

    def __init__(self, vocabulary: int = 13, width: int = 10, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits, None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_pair(seed: int = 0, dtype: torch.dtype = torch.float32, **policies: Any) -> tuple[GPT, GPT]:
    """A sharded model and an unsharded one with the same weights."""
    torch.manual_seed(seed)
    plain, model = GPT().to(dtype), GPT().to(dtype)
    model.load_state_dict(plain.state_dict())
    for layer in model.layers:
        fully_shard(layer, **policies)
    return fully_shard(model, **policies), plain


def rows(seed: int, rank: int) -> Tensor:
    return torch.randint(13, (3, 9), generator=torch.Generator().manual_seed(100 * seed + rank))


def assert_same_parameters(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(
            whole, plain.get_parameter(name).detach(), msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2, local=1)
def test_a_pretraining_loop(fused: bool) -> None:
    """The loop of nanoGPT: micro-batches, clipping, decay groups; the learning rate changes every step."""
    # float64, as Adam makes steps of the rounding errors of gradients that are zero, such as those of keys' biases
    model, plain = make_pair(dtype=torch.float64, cache="host")
    optimizers = [torch.optim.AdamW(decay_groups(each), lr=1e-2, fused=fused) for each in (model, plain)]
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)  # type: ignore[operator]
            seed = 2 * step + micro
            (model(rows(seed, rank)[:, :-1], rows(seed, rank)[:, 1:])[1] / 2).backward()
            for other in range(world):
                (plain(rows(seed, other)[:, :-1], rows(seed, other)[:, 1:])[1] / 2 / world).backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (model, plain)]
        sharded_norm = norms[0].full_tensor() if hasattr(norms[0], "full_tensor") else norms[0]
        torch.testing.assert_close(sharded_norm, norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert_same_parameters(model, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@on_ranks(2, local=1)
def test_autocast_and_loss_scaling(dtype: torch.dtype) -> None:
    """Autocast, and a GradScaler for float16, whose first step meets an infinite gradient on one rank."""
    model, plain = make_pair()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype is torch.float16) for _ in optimizers]
    for step in range(3):
        factor = float("inf") if step == 0 and dtype is torch.float16 else 1.0
        for index, (each, optimizer, scaler) in enumerate(zip((model, plain), optimizers, scalers, strict=True)):
            ranks = [dist.get_rank()] if index == 0 else range(dist.get_world_size())
            for rank in ranks:
                with torch.autocast("cpu", dtype=dtype):
                    loss = each(rows(step, rank)[:, :-1], rows(step, rank)[:, 1:])[1] / (len(ranks) or 1)
                scaler.scale(loss * (factor if rank == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_same_parameters(model, plain, rtol=0.05, atol=2e-3)


@on_ranks(2, local=1)
def test_a_step_of_preference_optimization() -> None:
    """A step of DPO: two forwards of the policy and two of a frozen reference, then one backward."""
    policy, plain = make_pair()
    reference, plain_reference = make_pair(seed=1, cache="host")
    for each in (reference, plain_reference):
        each.requires_grad_(False)

    def loss_of(model: nn.Module, frozen: nn.Module, rank: int) -> Tensor:
        margins = []
        for seed in (0, 1):  # chosen and rejected
            ids = rows(seed, rank)
            with torch.no_grad():
                base = frozen(ids)[0].log_softmax(-1).gather(-1, ids[..., None]).sum((1, 2))
            margins.append(model(ids)[0].log_softmax(-1).gather(-1, ids[..., None]).sum((1, 2)) - base)
        return -functional.logsigmoid(0.1 * (margins[0] - margins[1])).mean()

    loss_of(policy, reference, dist.get_rank()).backward()
    for rank in range(dist.get_world_size()):
        (loss_of(plain, plain_reference, rank) / dist.get_world_size()).backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, msg=name)  # type: ignore[union-attr]
    assert all(parameter.grad is None for parameter in reference.parameters())


@on_ranks(2, local=1)
def test_an_average_of_weights() -> None:
    """An average of weights: the copy is made before fully_shard, and sharded like the model."""
    torch.manual_seed(0)
    model, plain = GPT(), GPT()
    plain.load_state_dict(model.state_dict())
    average, plain_average = (AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for each in (model, plain))
    for each in (model, average.module):
        for layer in each.layers:
            fully_shard(layer)
        fully_shard(each)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    for step in range(3):
        for each, mean, optimizer in zip((model, plain), (average, plain_average), optimizers, strict=True):
            each(rows(step, 0)[:, :-1], rows(step, 0)[:, 1:])[1].backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(each)
    assert_same_parameters(average.module, plain_average.module)
    with torch.no_grad():
        torch.testing.assert_close(average(rows(9, 0))[0], plain_average(rows(9, 0))[0])


@pytest.mark.parametrize("whole", [False, True])
@on_ranks(2, local=1)
def test_compiled_blocks_and_models(whole: bool) -> None:
    model, plain = make_pair()
    if whole:
        model.compile(backend="aot_eager")
    else:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        model(rows(step, rank)[:, :-1], rows(step, rank)[:, 1:])[1].backward()
        for other in range(world):
            (plain(rows(step, other)[:, :-1], rows(step, other)[:, 1:])[1] / world).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, msg=name)  # type: ignore[union-attr]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=19, **SMALL_LLAMA)).eval()


@on_ranks(2, local=1)
def test_generation_and_saving(tmp_path: Path) -> None:
    """Generate with sharded weights, then save them through the full state dict."""
    plain, model = llama(), llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    register_fsdp_forward_method(model, "generate")
    prompt = torch.tensor([[1, 5, 3]])
    arguments: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **arguments), plain.generate(prompt, **arguments))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path, state_dict=state)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        for name, parameter in plain.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter), name
    else:
        assert state == {}
