"""The training loop of an accelerate user, with DDP and with laconic."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from laconic.integrations import LaconicArguments
from laconic.integrations.accelerate import LaconicAccelerator
from tests.support.language_model import decay_groups, loss_of, make_model, make_rows

MICRO_BATCHES = 2


class Loop:
    """A model, an optimizer with two groups, data and a scheduler, all prepared; `run` takes steps."""

    def __init__(self, strategy: str, options: LaconicArguments | None = None, **settings: Any) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # or accelerate counts the cores, and warns
        AcceleratorState._reset_state(reset_partial_state=True)  # a process has one state; here are several loops
        GradientState._reset_state()
        settings["gradient_accumulation_steps"] = MICRO_BATCHES
        settings["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator: Accelerator = (
            Accelerator(cpu=True, **settings) if strategy == "ddp" else LaconicAccelerator(options, **settings)
        )
        set_seed(5)
        model = make_model()
        optimizer = torch.optim.AdamW(decay_groups(model), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, gamma=0.8)
        loader = DataLoader(make_rows(72), batch_size=3, shuffle=True)  # type: ignore[arg-type]  # a tensor has items
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.records: dict[str, list[float]] = {"losses": [], "norms": []}

    def run(self, steps: int) -> dict[str, list[float]]:
        """Take `steps` optimizer steps, and return the mean loss over all ranks and the norm of each."""
        accelerator, losses = self.accelerator, []
        while True:
            for rows in self.loader:
                with accelerator.accumulate(self.model):
                    loss = loss_of(self.model, rows)
                    losses.append(accelerator.gather(loss.detach()[None]).mean().item())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                        self.records["norms"].append(norm.item())
                        self.records["losses"].append(sum(losses) / len(losses))
                        losses = []
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if accelerator.sync_gradients:
                    steps -= 1
                    if not steps:
                        return self.records


def train(strategy: str, steps: int) -> dict[str, list[float]]:
    """Train with "ddp" or "laconic"; call it on every rank."""
    return Loop(strategy).run(steps)
