"""States in proportion to the memory of unequal ranks, and losses beside one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

import laconic
from benchmarks.llama import Llama, decoder_layers
from benchmarks.wire.bench import BENCHMARK, HOME, Bench
from tests.support.launch import launch
from tests.support.record import Row

_SHARES = (24.0, 24.0, 12.0, 12.0)
_LLAMA = Llama(hidden=512, intermediate=1024, layers=8, heads=8, kv_heads=2, vocab=259, batch=1, sequence=64)
_RANKS = HOME.nodes * HOME.local
_TIMEOUT_S = 900.0


@BENCHMARK.row("shares", section="placement")
def shares(bench: Bench) -> Row:
    """The optimizer's states by rank; and losses, each rank with rows of its own."""
    steps = 4 if bench.quick else 12
    ranks = launch(_train, _SHARES, steps, num_ranks=_RANKS, num_local=HOME.local, timeout_s=_TIMEOUT_S)
    (alone,) = launch(_train, None, steps, num_ranks=1, timeout_s=_TIMEOUT_S)
    states = [each["state_bytes"] for each in ranks]
    ideal = [sum(states) * share / sum(_SHARES) for share in _SHARES]
    off = max(abs(found / wanted - 1) for found, wanted in zip(states, ideal, strict=True))
    losses = [sum(each) / _RANKS for each in zip(*(each["losses"] for each in ranks), strict=True)]
    apart = max(abs(one / other - 1) for one, other in zip(losses, alone["losses"], strict=True))
    return Row(
        claim=f"optimizer states by rank on {HOME}, shares 2 : 2 : 1 : 1; losses over {steps} steps",
        required="within 3 % of the shares; equal to one process within 1e-5",
        measured=f"within {off:.2%}; within {apart:.1e}",
        is_met=off <= 0.03 and apart <= 1e-5,
        note=f"{_LLAMA}; {', '.join(f'{nbytes / 1e6:.2f} MB' for nbytes in states)} of AdamW's states; cache=host. One "
        "process takes the rows of all ranks one after the other, so it adds up gradients in another order.",
    )


def _train(shares: tuple[float, ...] | None, steps: int) -> dict[str, Any]:
    """Train; one process takes the rows of all ranks. Returns its mean loss of each step, and the bytes of states."""
    mesh, cpu = laconic.init_mesh("cpu"), torch.device("cpu")
    model: Any = _LLAMA.build(cpu, torch.float32)
    fully_shard = functools.partial(laconic.fully_shard, mesh=mesh, cache="host", shares=shares)
    for layer in decoder_layers(model):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    rows = range(_RANKS) if dist.get_world_size() == 1 else [dist.get_rank()]
    losses = []
    for step in range(steps):
        found = []
        for number, row in enumerate(rows):
            model.set_requires_gradient_sync(number == len(rows) - 1)
            tokens = _LLAMA.tokens(cpu, seed=_RANKS * step + row)
            logits = model(tokens).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) / len(rows)
            loss.backward()
            found.append(float(loss.detach()))
        losses.append(sum(found))
        optimizer.step()
        optimizer.zero_grad()
    states = [each for state in optimizer.state.values() for each in state.values() if hasattr(each, "to_local")]
    return {"losses": losses, "state_bytes": sum(each.to_local().nbytes for each in states)}
