"""The time of forward and backward of a job without communication, on the same ranks of the same lab.

    laconic lab --nodes 2 --local 2 -- -m benchmarks.compute_alone JOB.toml STEPS OUT.json

Every rank has a whole model and the optimizer of its shard. So each rank does the same arithmetic as in the sharded
job, on the same cores at the same time. The ranks only wait for each other before each step.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from laconic.config import load
from laconic.hf.models import build_model

_WARMUP_STEPS = 2


def main(job: str, steps: int, out: Path) -> None:
    """Write {"forward_s", "backward_s"} as JSON: mean over ranks, median over steps. Backward has the optimizer."""
    dist.init_process_group("gloo")
    config = load(job)
    model = build_model(config.model, config.lora, device="cpu")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shard = nn.Parameter(torch.zeros(-(-sum(p.numel() for p in trainable) // dist.get_world_size())))
    shard.grad = torch.full_like(shard, 1e-3)
    optimizer = torch.optim.AdamW([shard], lr=1e-4, fused=config.optimizer.fused)
    torch.manual_seed(dist.get_rank())
    vocab_size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    rows = torch.randint(vocab_size, (config.train.micro_batch_size, config.data.sequence_length))
    times = []
    for _ in range(steps):
        dist.barrier()
        start_s = time.perf_counter()
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        middle_s = time.perf_counter()
        loss.backward()
        nn.utils.clip_grad_norm_([shard], config.optimizer.max_grad_norm)
        optimizer.step()
        for parameter in trainable:
            parameter.grad = None
        times.append((middle_s - start_s, time.perf_counter() - middle_s))
    mean = torch.tensor(times[_WARMUP_STEPS:], dtype=torch.float64)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    if dist.get_rank() == 0:
        forward_s, backward_s = (statistics.median(column) for column in mean.T.tolist())
        out.write_text(json.dumps({"forward_s": forward_s, "backward_s": backward_s}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
