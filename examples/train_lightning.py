"""Lightning's Trainer with laconic: a small Llama on the bytes of Python's own standard library.

torchrun --nproc-per-node 2 examples/train_lightning.py --steps 50

The LightningModule is as for DDP. Without laconic the line with `strategy=` would say `strategy="ddp"`.
"""

import argparse
import os
import pathlib
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from laconic.integrations.lightning import LaconicStrategy

CONTEXT, ROWS = 128, 4


class ByteModel(LightningModule):
    """A language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", self.model(input_ids=batch[0], labels=batch[0]).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def read_rows(number: int) -> Tensor:
    """Return `number` rows of bytes, (number, CONTEXT)."""
    files = sorted(pathlib.Path(pathlib.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: number * CONTEXT]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unflatten(0, (number, CONTEXT))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", default="runs/lightning")
    options = parser.parse_args()

    seed_everything(0)
    rows = read_rows(4000)
    training = DataLoader(TensorDataset(rows[:-80]), batch_size=ROWS, shuffle=True)
    validation = DataLoader(TensorDataset(rows[-80:]), batch_size=ROWS)
    trainer = Trainer(
        strategy=LaconicStrategy(),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),  # torchrun's --nproc-per-node
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),  # and its --nnodes
        max_steps=options.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=2 * options.steps,
        limit_val_batches=5,
        callbacks=[ModelCheckpoint(options.folder, filename="{step}", monitor="val_loss")],
        logger=False,
    )
    module = ByteModel()
    trainer.fit(module, training, validation)
    trainer.validate(module, validation, ckpt_path="best")


if __name__ == "__main__":
    main()
