"""A LightningModule and a Trainer's run, with DDP and with laconic."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor
from torch.utils.data import DataLoader

from laconic.integrations.lightning import LaconicStrategy
from tests.support.language_model import decay_groups, loss_of, make_model, make_rows

MICRO_BATCHES = 2


class LightningModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = loss_of(self.model, batch)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", loss_of(self.model, batch), sync_dist=True)

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("test_loss", loss_of(self.model, batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(decay_groups(self), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Records(Callback):
    """The mean loss over all ranks of each step, and the norm of its gradient before clipping."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._micro: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self._micro.append(module.all_gather(outputs["loss"].detach()).float().mean())
        if len(self._micro) == MICRO_BATCHES:
            self.losses.append(torch.stack(self._micro).mean().item())  # Lightning divides by the number itself
            self._micro = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(module, 2)["grad_2.0_norm_total"]))


def make_trainer(strategy: str | LaconicStrategy, steps: int, folder: Path | str = ".", **settings: Any) -> Trainer:
    """Return a Trainer with `Records` as its first callback, as torchrun would start it."""
    os.environ.update(TORCHELASTIC_RUN_ID="job", OMP_NUM_THREADS="1")  # torchrun sets both
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    seed_everything(3, verbose=False)
    callbacks = [Records(), *settings.pop("callbacks", [])]
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return Trainer(
        strategy={"ddp": DDPStrategy, "laconic": LaconicStrategy}[strategy]()
        if isinstance(strategy, str)
        else strategy,
        accelerator="cpu",
        devices=local,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local,
        max_steps=steps,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=0.5,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        **({"enable_checkpointing": False} | settings),
    )


def loader(seed: int, rows: int = 24, shuffle: bool = False) -> DataLoader:
    return DataLoader(make_rows(rows, seed), batch_size=3, shuffle=shuffle)  # type: ignore[arg-type]


def records(trainer: Trainer) -> dict[str, list[float]]:
    found = next(callback for callback in trainer.callbacks if isinstance(callback, Records))
    return {"losses": found.losses, "norms": found.norms}


def train(strategy: str, steps: int) -> dict[str, list[float]]:
    """Train with "ddp" or "laconic"; call it on every rank."""
    trainer = make_trainer(strategy, steps)
    trainer.fit(LightningModel(), loader(seed=0, rows=48, shuffle=True))
    return records(trainer)
