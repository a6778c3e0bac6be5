"""Each refusal that the page of errors lists and that no room's own tests ask for: bad input, and the line it gets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic import registry
from laconic.checkpoint.commit import candidates
from laconic.config import Config, from_dict
from laconic.integrations.options import ArgumentError
from laconic.integrations.sharding import refuse_quantised
from laconic.islands.fragments import SyncSchedule
from laconic.layout.bucket import derived
from laconic.layout.packing import plan_bucket
from laconic.optim import Muon


class Quantised(nn.Linear):
    """A model that says that its weights are quantised."""

    quantization_method = SimpleNamespace(value="awq")


class Adapted(nn.Module):
    """A model with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.Linear(2, 2)


IN_ONE: dict[str, Callable[[], Any]] = {
    "Muon is for matrices, and": lambda: Muon([nn.Parameter(torch.ones(3))]),
    "one fragment at most is in flight": lambda: SyncSchedule(every=4, fragments=2, overlap=2),
    "the model has LoRA adapters: only they train": lambda: laconic.partial_updates(
        Adapted(), slice_index=0, num_slices=2, include=["mlp"]
    ),
    "t of shape .* cut after element 4, inside a block of 3 elements that must stay together": lambda: derived(
        plan_bucket(["t"], [(7,)], [1], num_shards=2, itemsize=4), 0, shape=(3,), elements=3, items=1
    ),
    r"are quantised \(awq\), in a format whose rows cannot be cut": lambda: refuse_quantised(Quantised(2, 2)),
}


@pytest.mark.parametrize("message", IN_ONE)
def test_a_call_refuses(message: str) -> None:
    with pytest.raises((ValueError, ArgumentError), match=message):
        IN_ONE[message]()


def test_islands_and_a_cyclic_schedule_do_not_share_a_job() -> None:
    job = from_dict(Config, {"schedule": {"kind": "cyclic"}, "sync": {"mode": "local"}})
    problem = registry.named("cyclic").problem("sync", vars(job.sync))
    assert problem is not None
    assert problem.endswith("workers of the cyclic schedule exchange every gradient; change one of the two")


def test_a_checkpoint_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step-4")
    (lost,) = candidates(tmp_path)
    assert (lost.folder, lost.problem) == (tmp_path / "step-4", "is missing, but `latest` names it")


def test_a_configuration_that_shards_already_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from laconic.integrations import transformers as integration

    monkeypatch.setattr(integration, "_check_arguments", lambda *_: None)
    monkeypatch.setattr(integration.Trainer, "create_accelerator_and_postprocess", lambda trainer: None)
    trainer: Any = object.__new__(integration.LaconicTrainer)
    trainer.args, trainer.model, trainer.laconic_arguments = SimpleNamespace(world_size=2), None, None
    trainer.is_fsdp_enabled, trainer.is_deepspeed_enabled = True, False
    with pytest.raises(ArgumentError, match="configuration turns on FSDP or DeepSpeed, and laconic takes their place"):
        trainer.create_accelerator_and_postprocess()
