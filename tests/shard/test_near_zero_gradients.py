"""T5 under sharding: its gradients are right to rounding, and AdamW enlarges rounding where a gradient is near zero.

The encoder's output goes into every layer of the decoder, and a position bias into every layer of a stack, so gradients
of T5 are sums over units, whose last bits depend on the order. Those of Llama have no such sums, and do not differ at
all on two ranks. AdamW divides a gradient by its own size, plus eps (1e-8). Where a gradient is not larger than its
rounding, a step of AdamW is rounding too, up to 2 lr wide. A plain model differs from itself in the same way if the
rows of its batches change places. With SGD, or with a larger eps, the weights agree to 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn

import laconic
from tests.support.launch import on_ranks

NUM_STEPS, LR = 4, 1e-3
EPS = {"AdamW": 1e-8, "AdamW, large eps": 1e-4, "SGD": None}


def build() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(vocab_size=128, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(config).train()


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    eps = EPS[name]
    return (
        torch.optim.SGD(model.parameters(), lr=0.1)
        if eps is None
        else torch.optim.AdamW(model.parameters(), lr=LR, eps=eps)
    )


def train(model: Any, name: str, backward: Callable[[int], None]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The whole weights after some steps, and the gradients of each step."""
    optimizer, gradients = optimizer_of(model, name), []
    for step in range(NUM_STEPS):
        backward(step)
        gradients.append({key: whole(p.grad) for key, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return {key: whole(p.detach()) for key, p in model.named_parameters()}, gradients


def whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def rows(step: int, rank: int) -> Tensor:
    return torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


@on_ranks(2, local=1, timeout_s=110)
def test_weights_differ_only_where_adamw_divides_rounding_by_rounding() -> None:
    mesh, rank, size = laconic.init_mesh("cpu"), dist.get_rank(), dist.get_world_size()
    for name in EPS:
        model, plain = build(), build()
        for unit in (*model.encoder.block, *model.decoder.block):
            laconic.fully_shard(unit, mesh=mesh)
        laconic.fully_shard(model, mesh=mesh)
        got, got_gradients = train(model, name, lambda step, model=model: loss(model, rows(step, rank)).backward())  # type: ignore[misc]

        def whole_batch(step: int, plain: Any = plain) -> None:
            for other in range(size):
                (loss(plain, rows(step, other)) / size).backward()

        want, want_gradients = train(plain, name, whole_batch)
        noise = max((got_gradients[0][key] - value).abs().max().item() for key, value in want_gradients[0].items())
        assert noise < 1e-6, "before the first step, all gradients agree to rounding"
        for key, value in want.items():
            distance = (got[key] - value).abs()
            if name != "AdamW":
                assert distance.max() <= 1e-6, f"{name}: {key}"
                continue
            assert distance.max() <= 2 * LR * NUM_STEPS, key
            smallest = torch.stack([gradients[key].abs() for gradients in want_gradients]).amin(0)
            assert (smallest[distance > 1e-6] < 100 * noise).all(), f"{key}: a gradient that is not near zero"
