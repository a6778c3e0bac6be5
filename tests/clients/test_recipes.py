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
from tests.support.language_model import LanguageModel, decay_groups, loss_of, make_model, make_rows
from tests.support.launch import on_ranks


def make_pair(seed: int = 0, dtype: torch.dtype = torch.float32, **policies: Any) -> tuple[Any, LanguageModel]:
    """A sharded model and an unsharded one with the same weights."""
    plain, model = make_model(seed).to(dtype), make_model(seed).to(dtype)
    for layer in model.layers:
        fully_shard(layer, **policies)
    return fully_shard(model, **policies), plain


def rows(seed: int, rank: int) -> Tensor:
    return make_rows(3, seed=100 * seed + rank)


def assert_same_parameters(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor()  # type: ignore[attr-defined]
        torch.testing.assert_close(
            whole, plain.get_parameter(name).detach(), msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2, local=1)
def test_a_pretraining_loop(fused: bool) -> None:
    """As in nanoGPT: micro-batches, clipping, decay groups; the learning rate changes every step."""
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
            (loss_of(model, rows(seed, rank)) / 2).backward()
            for other in range(world):
                (loss_of(plain, rows(seed, other)) / 2 / world).backward()
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
                    loss = loss_of(each, rows(step, rank)) / len(ranks)
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

    def preference(model: nn.Module, frozen: nn.Module, rank: int) -> Tensor:
        margins = []
        for seed in (0, 1):  # chosen and rejected
            ids = rows(seed, rank)
            with torch.no_grad():
                base = frozen(ids).log_softmax(-1).gather(-1, ids[..., None]).sum((1, 2))
            margins.append(model(ids).log_softmax(-1).gather(-1, ids[..., None]).sum((1, 2)) - base)
        return -functional.logsigmoid(0.1 * (margins[0] - margins[1])).mean()

    preference(policy, reference, dist.get_rank()).backward()
    for rank in range(dist.get_world_size()):
        (preference(plain, plain_reference, rank) / dist.get_world_size()).backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, msg=name)  # type: ignore[union-attr]
    assert all(parameter.grad is None for parameter in reference.parameters())


@on_ranks(2, local=1)
def test_an_average_of_weights() -> None:
    """An average of weights: the copy is made before fully_shard, and sharded like the model."""
    model, plain = make_model(), make_model()
    average, plain_average = (AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for each in (model, plain))
    for each in (model, average.module):
        for layer in each.layers:
            fully_shard(layer)
        fully_shard(each)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    for step in range(3):
        for each, mean, optimizer in zip((model, plain), (average, plain_average), optimizers, strict=True):
            loss_of(each, rows(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(each)
    assert_same_parameters(average.module, plain_average.module)
    with torch.no_grad():
        torch.testing.assert_close(average(rows(9, 0)), plain_average(rows(9, 0)))


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
