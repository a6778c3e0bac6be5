"""The library alone: a small residual network under `laconic.fully_shard`.

torchrun --nproc-per-node 4 examples/minimal.py
laconic lab --nodes 2 --local 2 --rate 200mbit -- examples/minimal.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic

WIDTH, DEPTH, STEPS, ROWS = 256, 6, 20, 32
FACTORS = 4
"""Each row of data is made of so many numbers, and its target, too."""


class Block(nn.Module):
    """Two linear layers beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = laconic.init_mesh(device)  # nodes and ranks per node come from torchrun
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1)).to(device)
    for block in model[:-1]:
        laconic.fully_shard(block, mesh=mesh, cache="host")
    laconic.fully_shard(model, mesh=mesh, cache="host")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    directions = torch.randn(FACTORS, WIDTH, device=device) / 2
    losses = []
    torch.manual_seed(dist.get_rank())  # every rank draws other data
    for step in range(STEPS):
        before = model.traffic.snapshot()
        factors = torch.randn(ROWS, FACTORS, device=device)
        loss = (model(factors @ directions).squeeze(1) - factors.sin().sum(1)).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            wire_mb = (model.traffic.snapshot() - before).wire() / 1e6
            print(f"step {step:2d}  loss {losses[-1]:.4f}  grad norm {norm:.3f}  sent by this rank {wire_mb:.2f} MB")
    assert sum(losses[-5:]) / 5 < losses[0] / 2, f"the model has not learnt: {losses}"
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        print("start this script with torchrun, as its first lines say", file=sys.stderr)
        sys.exit(2)
    main()
