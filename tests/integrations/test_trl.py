"""TRL's trainers with laconic: DDP's numbers on three ranks, adapters in peft's format, resumption to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader

import laconic
from laconic.integrations import LaconicArguments
from laconic.integrations.options import ArgumentError
from tests.integrations.test_transformers import assert_equal, assert_same_log, trained, whole
from tests.support import trainers
from tests.support.launch import on_ranks

JOBS = ("sft_lora", "dpo_lora", "dpo", "reward", "grpo_lora", "grpo")


@pytest.mark.machine
@on_ranks(3)
def test_trains_as_under_ddp(tmp_path: Path) -> None:
    for job in JOBS:
        stock = trained(job, tmp_path / "ddp", 2)
        trainer = trained(job, tmp_path / "own", 2, LaconicArguments())
        assert_same_log(trainer, stock)
        for model in (trainer.model, *([trainer.ref_model] if job in ("dpo", "grpo") else [])):
            assert isinstance(model, laconic.ShardedModule), job
    for argument, remedy in (
        ("use_vllm", "publish the weights"),
        ("use_transformers_continuous_batching", "rollout_func="),
    ):
        message = f"^{argument}=True does not work with a sharded model: .*{remedy}"
        with pytest.raises(ArgumentError, match=message):
            trainers.make("grpo_lora", str(tmp_path / "refused"), 1, LaconicArguments(), **{argument: True})


@pytest.mark.machine
@on_ranks(3)
def test_adapters_are_saved_resumed_and_reloaded(tmp_path: Path) -> None:
    """Train an adapter, resume it, and load its files in plain peft."""
    more = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    straight = trained("sft_lora", tmp_path / "straight", 3, LaconicArguments(), **more)
    resumed = trainers.make("sft_lora", str(tmp_path / "straight"), 3, LaconicArguments(), **more)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert_equal(whole(resumed.model), whole(straight.model))
    straight.save_model(str(tmp_path / "adapter"))
    dist.barrier()
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118
    plain, rows = PeftModel.from_pretrained(trainers.llama(), tmp_path / "adapter"), torch.arange(4, 24).view(2, 10)
    with torch.no_grad():
        trained_logits, own, base = (
            model.eval()(input_ids=rows).logits for model in (straight.model, plain, trainers.llama())
        )
    assert torch.equal(own, trained_logits)
    assert not torch.equal(own, base)
    shards = FileSystemReader(tmp_path / "straight" / "checkpoint-2" / "laconic" / "step-2")
    weights = [key for key in shards.read_metadata().state_dict_metadata if key.startswith("model.")]
    assert weights
    assert all("lora_" in key for key in weights)  # the frozen base is not in a checkpoint
