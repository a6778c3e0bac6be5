"""A small GPT on the bytes of Python's own standard library: `train_gpt_ddp.py` with DDP, `train_gpt.py` with laconic.

torchrun --nproc-per-node 2 examples/train_gpt.py --steps 50
diff examples/train_gpt_ddp.py examples/train_gpt.py
"""

import argparse
import os
import pathlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional

import laconic

CONTEXT, WIDTH, HEADS, DEPTH = 128, 128, 4, 4
ROWS, MICRO_BATCHES = 4, 2  # rows of a micro-batch on each rank; micro-batches of an optimizer step


class Block(nn.Module):
    """Causal attention and an MLP, each beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model of bytes; the embedding and the head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def read_bytes() -> Tensor:
    files = sorted(pathlib.Path(pathlib.__file__).parent.glob("*.py"))[:100]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random rows of the text, and the byte that comes next at every place."""
    starts = torch.randint(len(data) - CONTEXT, (ROWS,), generator=generator)
    rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--save", default="gpt.pt")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start this script with torchrun, as its first lines say")

    dist.init_process_group()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    torch.manual_seed(0)
    data, generator = read_bytes(), torch.Generator().manual_seed(dist.get_rank())  # every rank draws other rows

    model = GPT().to(device)
    for module in (*model.layers, model):
        laconic.fully_shard(module, cache="host")
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    for step in range(options.steps):
        total = torch.zeros((), device=device)
        for micro in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            ids, targets = (rows.to(device) for rows in draw(data, generator))
            loss = functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten()) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {total.item() / dist.get_world_size():.6f}  grad norm {norm.item():.6f}")

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(state, options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
