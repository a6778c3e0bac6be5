"""Rows about the losses on the GPU, against the same training on CPU."""

from __future__ import annotations

import torch

import laconic
from benchmarks.gpu.training import LOCAL, NODES, Bench, Sizes, Training, device_of
from tests.support.record import Row

NUM_STEPS = 20
CACHES = ("none", "host", "device")


def loss_rank(sizes: Sizes, device_type: str) -> dict[str, list[float]]:
    """Return the losses of this rank, step by step, by cache, in fp32 without TF32."""
    mesh = laconic.init_mesh(device_type)
    device = device_of(device_type)
    losses = {}
    for cache in CACHES:
        model = sizes.loss.build(torch.device("cpu"), torch.float32).to(device)  # the same weights on both devices
        training = Training(cache, model, sizes.loss, mesh, learning_rate=1e-3)
        losses[cache] = [float(training.step()) for _ in range(NUM_STEPS)]
    return losses


def loss(bench: Bench, cache: str) -> Row:
    differences = [
        abs(on_device - on_cpu) / abs(on_cpu)
        for device_losses, cpu_losses in zip(bench.losses_on_device, bench.losses_on_cpu, strict=True)
        for on_device, on_cpu in zip(device_losses[cache], cpu_losses[cache], strict=True)
    ]
    return Row(
        key=f"loss-{cache}",
        claim=f"loss on {bench.device_type.upper()} against CPU, cache={cache}, largest relative difference",
        required="<= 1e-4",
        measured=f"{max(differences):.1e}",
        is_met=max(differences) <= 1e-4,
        note=f"{bench.sizes.loss}, fp32, {NUM_STEPS} AdamW steps on {NODES} x {LOCAL} ranks",
    )
