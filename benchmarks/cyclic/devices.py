"""The row about the number of devices for model and data parallelism together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from benchmarks.cyclic.bench import BENCHMARK, TIMEOUT_S, Bench
from benchmarks.cyclic.sleeping import WIDTH
from laconic.cyclic import CyclicDataParallel
from laconic.cyclic.schedule.rule import Rule
from laconic.cyclic.schedule.schedule import Schedule, StatePlacement
from tests.support.launch import launch
from tests.support.record import Row


@BENCHMARK.row("devices")
def devices(bench: Bench) -> Row:
    n, batches, rule = 4, 5, "v2"
    schedule = Schedule(Rule.named(rule, n), "shared")
    alone = train(rule, "replicated", n, batches)
    shared, replicated = (
        launch(train, rule, states, n, batches, num_ranks=num_ranks, num_local=1, timeout_s=TIMEOUT_S)
        for states, num_ranks in (("shared", schedule.num_devices), ("replicated", n))
    )
    models = {"shared": stages_of_devices(schedule, shared)}
    models |= {f"worker {worker}": parameters for worker, parameters in enumerate(replicated)}
    differing = [
        name
        for name, parameters in models.items()
        if not all(np.array_equal(a, b) for a, b in zip(parameters, alone, strict=True))
    ]
    return Row(
        claim=f"devices for model and data parallelism, N = {n}",
        required=f"{n * (n + 1) // 2} against {n * n}, same result to the bit",
        measured=f"{schedule.num_devices} against {n * n}, {'equal' if not differing else 'different'} bits",
        is_met=schedule.num_devices == n * (n + 1) // 2 and not differing,
        note=(
            f"parameters after {batches} batches of AdamW, rule {rule}, on {schedule.num_devices} ranks with shared "
            f"stages, on {n} ranks with replicated ones, and in one process"
            f"{': ' + ', '.join(differing) if differing else ''}."
        ),
    )


def stages_of_devices(schedule: Schedule, by_device: Sequence[list[np.ndarray]]) -> list[np.ndarray]:
    """Return the parameters of all stages, each from its first device; all devices of a stage must agree."""
    parameters = []
    for stage in range(schedule.num_stages):
        first, *others = (by_device[device] for device in schedule.devices_of(stage))
        for other in others:
            assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
        parameters += first
    return parameters


def train(rule: str, states: StatePlacement, num_stages: int, batches: int) -> list[np.ndarray]:
    """Train, and return the parameters that this rank's device holds; in a process without ranks, all parameters."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_stages)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    trainer = CyclicDataParallel(
        stages,
        functional.mse_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        mesh,
        rule=rule,
        states=states,
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches):
        micro_batches = [
            (torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator))
            for _ in range(num_stages)
        ]
        has_one_worker = trainer.schedule.states in ("replicated", "sharded")
        trainer.step(micro_batches[dist.get_rank()] if has_one_worker else micro_batches)
    trainer.drain()
    held = trainer.schedule.stages_of(dist.get_rank() if mesh is not None else 0)
    return [parameter.detach().numpy() for stage in held for parameter in stages[stage].parameters()]
