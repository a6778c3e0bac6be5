"""Islands that come and go: each is a torchrun of its own. Stop one, or start a third: the others train on.

laconic rendezvous --port 29400
torchrun --nproc-per-node 2 --rdzv-endpoint localhost:0 --rdzv-backend c10d examples/come_and_go.py localhost:29400
torchrun --nproc-per-node 2 --rdzv-endpoint localhost:0 --rdzv-backend c10d examples/come_and_go.py localhost:29400
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import laconic

WIDTH, STEPS, ROWS = 64, 100, 32


def main(rendezvous: str, steps: int = STEPS) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = laconic.init_mesh(device)  # of this island alone
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(device)
    laconic.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    membership = laconic.Membership(rendezvous=rendezvous, islands=2)
    local = laconic.LocalSteps(model, optimizer, mesh=mesh, every=10, run_id="come-and-go", membership=membership)
    step = local.enter()  # after loading a checkpoint, before the first forward
    while step < steps:
        torch.manual_seed(hash((step, local.slot, dist.get_rank())))  # every rank of every island draws other data
        x = torch.randn(ROWS, WIDTH, device=device)
        loss = (model(x).squeeze(1) - x.sin().mean(1)).square().mean()
        loss.backward()
        local.step(tokens=ROWS * dist.get_world_size())  # the island's, by which means weigh
        local.zero_grad()
        step = local.steps
        for report in local.reports:
            if dist.get_rank() == 0:
                print(f"step {step:3d}  loss {loss.item():.4f}  synced with {report.num_islands - 1} other islands")
    local.leave()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ or len(sys.argv) != 2:
        print("start this script with torchrun and the rendezvous, as its first lines say", file=sys.stderr)
        sys.exit(2)
    main(sys.argv[1])
