"""laconic on a Ray cluster.

    python examples/launch/ray_train.py --workers 16 --storage /shared/runs

Change: `build_model` and `batches`; --storage, a folder that all nodes share; NCCL_SOCKET_IFNAME in `main`, the
interface that joins the nodes. Ray starts the process group and sets torchrun's variables, so laconic finds nodes and
ranks by itself.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from torch import Tensor, nn

import laconic
from laconic.checkpoint import load_checkpoint, save_checkpoint


def build_model() -> nn.Sequential:
    """A model of your own; laconic gathers its layers one by one."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)), nn.Linear(256, 1))


def batches(rank: int, steps: int) -> Iterator[Tensor]:
    """This rank's rows of every step."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(32, 256, generator=generator)


def train_loop(config: dict[str, object]) -> None:
    """What every worker runs."""
    folder = Path(str(config["storage"])) / "checkpoints"
    # to the device, and not into DDP
    model = ray.train.torch.prepare_model(build_model(), parallel_strategy=None)
    for layer in model:
        laconic.fully_shard(layer, cache="host")
    laconic.fully_shard(model, cache="host")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = load_checkpoint(folder, model=model, optimizer=optimizer)
    begin = found["step"] if found else 0
    device = ray.train.torch.get_device()
    steps = int(str(config["steps"]))
    for step, x in enumerate(batches(ray.train.get_context().get_world_rank(), steps), 1):
        if step <= begin:
            continue
        x = x.to(device)
        loss = (model(x).squeeze(1) - x.sin().mean(1)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps:
            save_checkpoint(folder, step, model=model, optimizer=optimizer, extra={})
            ray.train.report({"step": step, "loss": loss.item()})  # slow: a message to Ray, not one per step
            print(f"step {step}  loss {loss.item():.4f}  sent so far {model.traffic.snapshot().wire() / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="ranks, on all nodes together")
    parser.add_argument("--storage", default="/tmp/laconic-ray", help="a folder that all nodes share")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    ray.init(runtime_env={"env_vars": {"NCCL_SOCKET_IFNAME": "^lo,docker"}})
    ray.train.torch.TorchTrainer(
        train_loop,
        train_loop_config={"storage": options.storage, "steps": options.steps},
        scaling_config=ray.train.ScalingConfig(
            num_workers=options.workers,
            use_gpu=torch.cuda.is_available(),
            placement_strategy="PACK",  # a node's ranks must have consecutive numbers
        ),
        run_config=ray.train.RunConfig(
            name="laconic", storage_path=options.storage, failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()


if __name__ == "__main__":
    main()
