"""The row about a frozen base in few bits: its bytes at rest, its losses, and its share of real models."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.clients.bench import BENCHMARK, TIMEOUT_S, Bench
from benchmarks.llama import Llama, decoder_layers, loss_of
from tests.support.launch import launch
from tests.support.record import Row

LIMIT = 0.32
TOLERANCE = 1e-5
_NODES, _LOCAL = 2, 2
_REAL = {
    "Llama 2 7B": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "Llama 3 8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
"""The sizes of models that people fine-tune, for their shares of embeddings."""


@BENCHMARK.row("base")
def base(bench: Bench) -> Row:
    ranks = {"num_ranks": _NODES * _LOCAL, "num_local": _LOCAL, "timeout_s": TIMEOUT_S}
    plain, nf4 = (launch(resting_bytes, bench.llama, coded, **ranks) for coded in (False, True))
    ratios = {
        place: max(few[index] for few in nf4) / max(many[index] for many in plain)
        for index, place in enumerate(("device", "host", "wire"))
    }
    unsharded, sharded = (
        launch(losses, bench.llama, is_sharded, bench.steps, **ranks)[0] for is_sharded in (False, True)
    )
    gap = max(abs(x - y) for x, y in zip(unsharded, sharded, strict=True))
    shares = [f"{name} {real_ratio(sizes, None):.3f}x, with the output layer {real_ratio(sizes, ()):.3f}x"
              for name, sizes in _REAL.items()]  # fmt: skip
    return Row(
        claim=(
            "frozen base in NF4 on 2 x 2: bytes on the device (cache=none) / on the host (cache=host) against bf16; "
            "losses against the same quantised base unsharded"
        ),
        required=f"<= {LIMIT}x; equal",
        measured=f"{ratios['device']:.3f}x / {ratios['host']:.3f}x; within {gap:.1e}",
        is_met=max(ratios["device"], ratios["host"]) <= LIMIT and gap <= TOLERANCE,
        note=(
            f"{bench.llama}; 4.25 bits a weight, embeddings, norms and the output layer in bf16; bytes at rest of the "
            f"rank that holds most. The base crosses the wire once, in {ratios['wire']:.3f}x the bytes, and never "
            f"again. Losses of {bench.steps} LoRA steps, {sharded[0]:.4f} to {sharded[-1]:.4f}, with DDP on whole "
            f"copies of the quantised base, which adds the gradients in another order. By their sizes: "
            f"{'; '.join(shares)}."
        ),
    )


def resting_bytes(shape: Llama, is_coded: bool) -> tuple[int, int, int]:
    """Return the bytes of a frozen base on this rank: device with cache=none, host with cache=host, and sent bytes."""
    found = []
    for cache in ("none", "host"):
        model: Any = shape.build(torch.device("cpu"), torch.bfloat16).requires_grad_(False)
        if is_coded:
            _quantize(model)
        _shard(model, cache)
        for _ in range(2):
            with torch.no_grad():
                loss_of(model, shape.tokens(torch.device("cpu"), seed=0))
        found.append((model.memory(), model.traffic.snapshot().total("node", "weights", "sent")))
    (on_device, _), (on_host, sent) = found
    return on_device.device_bytes, on_host.host_bytes, sent


def losses(shape: Llama, is_sharded: bool, steps: int) -> list[float]:
    """Train LoRA adapters on a base in NF4, sharded or whole on every rank; return the losses of all ranks together."""
    import torch.distributed as dist

    model: Any = shape.build(torch.device("cpu"), torch.float32)
    _quantize(model)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    model = _shard(model, "host") if is_sharded else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    found = []
    for step in range(steps):
        loss = loss_of(
            model, shape.tokens(torch.device("cpu"), seed=dist.get_world_size() * (step % 4) + dist.get_rank())
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(float(mean) / dist.get_world_size())
    return found


def real_ratio(sizes: dict[str, int], skip: tuple[str, ...] | None) -> float:
    """Return the bytes of a Llama of these sizes with a base in NF4, as a share of its bytes in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import laconic
    from laconic.codec.linear import frozen_bytes

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).to(torch.bfloat16)
    return frozen_bytes(laconic.quantize_(model.requires_grad_(False), "nf4", skip=skip)).ratio


def _quantize(model: nn.Module) -> None:
    import laconic

    laconic.quantize_(model, "nf4")


def _shard(model: nn.Module, cache: Any) -> nn.Module:
    import laconic

    mesh = laconic.init_mesh("cpu")
    for module in (*decoder_layers(model), model):
        laconic.fully_shard(module, mesh=mesh, cache=cache)
    return model
