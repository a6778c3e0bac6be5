"""What `LaconicStrategy` must do as Lightning's DDP does: accumulation, precision, and checkpoints both ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import laconic
from laconic.integrations import LaconicArguments
from laconic.integrations.lightning import LaconicFabricStrategy, LaconicStrategy
from laconic.integrations.options import ArgumentError
from tests.support.language_model import LENGTH, VOCABULARY, loss_of, make_model, make_rows
from tests.support.lightning_jobs import LightningModel, loader, make_trainer, records
from tests.support.sharded_net import full_parameters

Check = Callable[[Path], None]


def assert_equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def fit(trainer: Trainer, ckpt_path: Path | None = None, module: LightningModule | None = None) -> LightningModule:
    """Train in epochs of two steps. Each rank has rows of its own in a fixed order; the sampler's is not resumed."""
    module = module or LightningModel()
    rank = dist.get_rank()
    trainer.fit(module, loader(seed=rank, rows=12), loader(seed=rank + 9, rows=7), ckpt_path=ckpt_path)
    return module


def accumulation(folder: Path) -> None:
    """The first of two micro-batches sends no gradient."""
    sent: list[int] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
            sent.append(module.model.traffic.snapshot().total("node", "gradients", "sent"))

        on_train_batch_end = on_train_batch_start

    module = fit(make_trainer("laconic", 2, callbacks=[Look()]))
    assert isinstance(module.model, laconic.ShardedModule)
    assert all(isinstance(layer, laconic.ShardedModule) for layer in module.model.layers)
    of_batches = [after - before for before, after in zip(sent[0::2], sent[1::2], strict=True)]
    assert of_batches[0::2] == [0, 0]
    assert min(of_batches[1::2]) > 0


def trained_in_epochs(strategy: Any, folder: Path) -> tuple[Trainer, LightningModule]:
    """Train two epochs, each of which is saved."""
    saving = ModelCheckpoint(folder, filename="{step}", monitor="val_loss", save_top_k=-1)
    trainer = make_trainer(strategy, 4, use_distributed_sampler=False, callbacks=[saving], enable_checkpointing=True)
    return trainer, fit(trainer)


def sharded_checkpoints(folder: Path) -> None:
    """ModelCheckpoint writes folders, and a resumed run is equal to the bit. `test` loads the best one."""
    trainer, module = trained_in_epochs("laconic", folder)
    resumed = make_trainer("laconic", 4, use_distributed_sampler=False)
    again = fit(resumed, folder / "step=2.ckpt")
    assert (folder / "step=2.ckpt").is_dir()
    assert_equal((records(resumed), full_parameters(again)), (last_epoch(trainer), full_parameters(module)))
    assert "test_loss" in trainer.test(module, loader(seed=2), ckpt_path="best", verbose=False)[0]


def last_epoch(trainer: Trainer) -> dict[str, list[float]]:
    return {key: values[2:] for key, values in records(trainer).items()}


def whole_checkpoints(folder: Path) -> None:
    """One file: to resume, to go on with DDP, to begin from DDP, and to load without a Trainer."""
    strategies = {"laconic": lambda: LaconicStrategy(save_distributed_checkpoint=False), "ddp": DDPStrategy}
    wants = {}
    for name, strategy in strategies.items():
        trainer, module = trained_in_epochs(strategy(), folder / name)
        wants[name] = last_epoch(trainer), full_parameters(module)
    for writer, reader, tolerance in (("laconic", "laconic", 0), ("laconic", "ddp", 1e-5), ("ddp", "laconic", 1e-5)):
        trainer = make_trainer(strategies[reader](), 4, use_distributed_sampler=False)
        module = fit(trainer, folder / writer / "step=2.ckpt")
        found = records(trainer), full_parameters(module)
        torch.testing.assert_close(found, wants[writer], rtol=tolerance, atol=tolerance)
    plain = LightningModel.load_from_checkpoint(folder / "laconic" / "step=4.ckpt", weights_only=False)
    assert_equal(full_parameters(plain), wants["laconic"][1])


def precision(folder: Path) -> None:
    """With bf16-true the weights are bfloat16, with bf16-mixed the wire; both near DDP's."""
    for name, dtype in (("bf16-true", torch.bfloat16), ("bf16-mixed", torch.float32)):
        trainers = [make_trainer(strategy, 2, precision=name) for strategy in ("laconic", "ddp")]
        module, _ = (fit(trainer) for trainer in trainers)
        assert {parameter.dtype for parameter in module.parameters()} == {dtype}
        assert module.model._laconic_unit.buckets[0].form.compute_dtype is torch.bfloat16
        torch.testing.assert_close(*map(records, trainers), rtol=0.1, atol=0.05)


class ShardsItself(LightningModel):
    """A module that calls `fully_shard` in Lightning's hook for it, and has layers of two parts, one without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.ModuleList([nn.Linear(3, 2)])

    def configure_model(self) -> None:
        if not isinstance(self.model, laconic.ShardedModule):
            for module in (*self.model.layers[1:], self.model):
                laconic.fully_shard(module, mesh=self.device_mesh)


def configured_by_the_user(folder: Path) -> None:
    trainer, want = make_trainer("laconic", 2), make_trainer("laconic", 2)
    module = fit(trainer, module=ShardsItself())
    assert not isinstance(module.model.layers[0], laconic.ShardedModule)
    assert isinstance(module.unused[0], laconic.ShardedModule)
    fit(want)
    torch.testing.assert_close(records(trainer), records(want), rtol=1e-5, atol=1e-5)


def on_meta(folder: Path) -> None:
    """A model that is made on the meta device is initialised after sharding, by its modules' `reset_parameters`."""
    trainer = make_trainer("laconic", 1)
    with trainer.init_module(empty_init=True):
        module = LightningModel()
    assert module.model.head.weight.is_meta
    module.model.reset_parameters = lambda: (nn.init.ones_(module.model.temperature), module.model.scale.fill_(0.5))
    fit(trainer, module=module)
    assert all(torch.isfinite(tensor).all() for tensor in full_parameters(module).values())


class FabricLoop:
    """Fabric's loop, as its users write it."""

    def __init__(self, strategy: Any) -> None:
        make_trainer("ddp", 1)  # sets what torchrun sets, and seeds
        self.fabric = Fabric(accelerator="cpu", strategy=strategy, devices=1, num_nodes=dist.get_world_size())
        self.fabric.launch()
        self.model = self.fabric.setup_module(make_model())
        self.optimizer = self.fabric.setup_optimizers(torch.optim.AdamW(self.model.parameters(), lr=1e-2))

    def run(self, steps: int) -> list[tuple[float, float]]:
        numbers = []
        for step in range(steps):
            for micro in range(2):
                rows = make_rows(3, seed=10 * step + 2 * micro + dist.get_rank())
                with self.fabric.no_backward_sync(self.model, enabled=micro == 0):
                    loss = loss_of(self.model, rows)
                    self.fabric.backward(loss / 2)
            norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
            numbers.append((self.fabric.all_reduce(loss.detach()).item(), float(norm)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return numbers


def fabric(folder: Path) -> None:
    """A Fabric loop trains as with DDP, sends no gradient without sync, and resumes to the bit from both kinds."""
    want = FabricLoop("ddp").run(2)
    for is_sharded in (True, False):
        loop = FabricLoop(LaconicFabricStrategy(save_distributed_checkpoint=is_sharded))
        torch.testing.assert_close(loop.run(2), want, rtol=1e-5, atol=1e-5)
        path = folder / f"sharded={is_sharded}"
        loop.fabric.save(path, {"model": loop.model, "optimizer": loop.optimizer, "step": 3})
        resumed = FabricLoop(LaconicFabricStrategy(save_distributed_checkpoint=is_sharded))
        state = {"model": resumed.model, "optimizer": resumed.optimizer, "step": 0}
        resumed.fabric.load(path, state)
        assert state["step"] == 3
        assert resumed.run(1) == loop.run(1)
    before = loop.model.traffic.snapshot()
    with loop.fabric.no_backward_sync(loop.model):
        loop.fabric.backward(loss_of(loop.model, make_rows(3)))
    assert (loop.model.traffic.snapshot() - before).wire(purpose="gradients") == 0


def batch_norm(folder: Path) -> None:
    """The loss of a validation equals DDP's, whose ranks share buffers; without them it differs, as is said."""
    losses = {}
    apart = LaconicStrategy(LaconicArguments(broadcast_buffers=False))
    for name, strategy in (("ddp", "ddp"), ("laconic", "laconic"), ("apart", apart)):
        trainer, module = make_trainer(strategy, 3), cast(Any, LightningModel())
        torch.manual_seed(0)
        module.model = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.BatchNorm1d(LENGTH), nn.Linear(4, VOCABULARY))
        module.configure_optimizers = lambda module=module: torch.optim.SGD(module.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(trainer, module=module)
        losses[name] = trainer.callback_metrics["val_loss"]
        is_said = any("broadcast_buffers=True" in str(each.message) for each in caught)
        assert is_said == (name == "apart" and dist.get_rank() == 0)
    torch.testing.assert_close(losses["laconic"], losses["ddp"], rtol=1e-5, atol=1e-6)
    assert (losses["apart"] - losses["ddp"]).abs() > 1e-5 * losses["ddp"]


def refusals(folder: Path) -> None:
    module = LightningModel()
    module.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"parameters of its own \(bias\)"):
        fit(make_trainer("laconic", 1), module=module)
    strategy = LaconicStrategy()
    make_trainer(strategy, 1)
    strategy.num_nodes, strategy.cluster_environment = 2, mock.Mock(**{"world_size.return_value": 1})
    with pytest.raises(ArgumentError, match="make 2 ranks, but the launch has 1"):
        strategy.setup_environment()


SAMPLE = (accumulation, sharded_checkpoints, refusals)
OTHERS = (whole_checkpoints, precision, configured_by_the_user, on_meta, fabric, batch_norm)
