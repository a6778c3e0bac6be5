"""One rank of a training job that is timed in the lab.

    laconic lab --nodes 4 -- -m benchmarks.cyclic.lab_rank STRATEGY JOB.json OUT.json

STRATEGY is ddp, fsdp2 (with a true ring: laconic.strategies.ring), or RULE/STATES of the cyclic schedule. All of them
train the same model from the same weights with the same optimizer. Every rank has a micro-batch of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cyclic.accuracy import next_token_loss
from benchmarks.llama import Llama, decoder_layers, loss_of
from laconic.comm.launch import ExitWithoutTeardown

WARMUP_STEPS = 3


def main(strategy: str, job: Path, out: Path) -> None:
    """Write {"step_s": seconds per step, "loss": loss of the last step} as JSON, with means over ranks."""
    dist.init_process_group("gloo")
    options = json.loads(job.read_text())
    shape, steps = Llama(**options["llama"]), options["steps"]
    train, finish = _trainer(strategy, shape)
    tokens = shape.tokens(torch.device("cpu"), seed=dist.get_rank())
    dist.barrier()
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            start_s = time.perf_counter()
        loss = train(tokens)
    step_s = (time.perf_counter() - start_s) / steps
    finish()
    mean = torch.tensor([step_s, loss], dtype=torch.float64)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"step_s": float(mean[0]), "loss": float(mean[1])}))
    # Delete DDP before its group: later, its destructor would wait for a thread of Gloo, which may wait for the GIL.
    del train, finish
    dist.destroy_process_group()


def _trainer(strategy: str, shape: Llama) -> tuple[Callable[[Tensor], float], Callable[[], None]]:
    """A function that takes a step and returns its loss, and a function to call after the last step."""
    model = shape.build(torch.device("cpu"), torch.float32)
    if "/" in strategy:
        return _cyclic(model, shape, *strategy.split("/"))
    wrapped = _wrapped(model, strategy)
    optimizer = _optimizer(model.parameters())

    def step(tokens: Tensor) -> float:
        loss = loss_of(wrapped, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, lambda: None


def _wrapped(model: nn.Module, strategy: str) -> nn.Module:
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard

    from laconic.strategies.ring import use_rings

    mesh, layers = init_device_mesh("cpu", (dist.get_world_size(),)), decoder_layers(model)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    use_rings([model, *layers])
    return model


def _cyclic(model: nn.Module, shape: Llama, rule: str, states: str) -> Any:
    from laconic.cyclic import CyclicDataParallel
    from laconic.cyclic.cut import cut

    tokens = shape.tokens(torch.device("cpu"), seed=0)
    trainer = CyclicDataParallel(
        cut(model, dist.get_world_size(), example=tokens),
        next_token_loss,
        _optimizer,
        init_device_mesh("cpu", (dist.get_world_size(),)),
        rule=rule,
        states=states,  # type: ignore[arg-type]
    )

    def step(tokens: Tensor) -> float:
        loss = trainer.step((tokens, tokens))
        assert loss is not None
        return float(loss)

    return step, trainer.drain


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


if __name__ == "__main__":
    process_exit = ExitWithoutTeardown()
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    process_exit.code = 0
