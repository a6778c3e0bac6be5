"""One rank of a LoRA fine-tuning by TRL's SFTTrainer that is timed in the lab.

    laconic lab --nodes 2 --local 2 -- -m benchmarks.sft_rank STRATEGY JOB.json OUT.json

STRATEGY is laconic, fsdp2 (through accelerate) or ddp. All train the same adapters on the same rows.

[Note: FSDP2 through accelerate on CPU]
accelerate 1.15 trains by DDP on CPU, whatever FSDP settings it is given, and says nothing. So the benchmark turns FSDP2
on in accelerate's state, after the trainer is built and before it prepares the model. From there on all is accelerate's
own code. FSDP2 then gets the collectives of [Note: The strongest baseline] in laconic/strategies/ring.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.llama import Llama
from laconic.comm.launch import ExitWithoutTeardown
from laconic.hf.tokenizer import transformers_bytes
from laconic.lab.counters import interface_bytes

WARMUP_STEPS = 3
_LAYER = "LlamaDecoderLayer"


class Watch(TrainerCallback):
    """Times the steps, and counts what this node's interface sends in them."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self.ends_s: list[float] = []
        self.sent: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        if self._strategy == "fsdp2":
            _use_rings(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends_s.append(time.perf_counter())
        counted = interface_bytes()
        self.sent.append(counted.sent if counted else 0)


def main(strategy: str, job: Path, out: Path) -> None:
    """Write {"step_s", "sent_bytes" of the first node's interface a step, "loss" of the last step} as JSON."""
    torch.set_num_threads(1)
    options = json.loads(job.read_text())
    steps = WARMUP_STEPS + options["steps"]
    watch = Watch(strategy)
    trainer = build(strategy, Llama(**options["llama"]), steps, out.parent / "trainer", watch)
    trainer.train()
    took_s = (watch.ends_s[-1] - watch.ends_s[WARMUP_STEPS - 1]) / options["steps"]
    mean = torch.tensor([took_s], dtype=torch.float64)
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        sent = (watch.sent[-1] - watch.sent[WARMUP_STEPS - 1]) / options["steps"]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        answer = {"step_s": float(mean[0]) / dist.get_world_size(), "sent_bytes": sent, "loss": losses[-1]}
        out.write_text(json.dumps(answer))
    dist.barrier()


def build(strategy: str, shape: Llama, steps: int, folder: Path, watch: TrainerCallback) -> SFTTrainer:
    """Return a trainer that is ready to train, with adapters on peft's own targets for a Llama."""
    model = shape.build(torch.device("cpu"), torch.float32)
    arguments = {
        "model": model,
        "args": SFTConfig(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=shape.batch, learning_rate=1e-3,
            max_length=shape.sequence, logging_steps=steps, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
            gradient_checkpointing=False, dataloader_pin_memory=False, disable_tqdm=True,
        ),
        "train_dataset": rows(shape, 4 * steps * shape.batch),
        "processing_class": transformers_bytes(),
        "peft_config": LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        "callbacks": [watch],
    }  # fmt: skip
    if strategy == "laconic":
        from laconic.integrations.trl import SFTTrainer as LaconicSFTTrainer

        return LaconicSFTTrainer(**arguments)
    trainer = SFTTrainer(**arguments)
    if strategy == "fsdp2":
        _turn_on_fsdp2(trainer)
    return trainer


def rows(shape: Llama, count: int) -> Dataset:
    """Return documents that are as long as a row, so that all ranks and steps work equally hard."""
    sentence = "{} bottles of beer on the wall, take one down, pass it around. "
    return Dataset.from_list([{"text": (sentence.format(n) * shape.sequence)[: shape.sequence]} for n in range(count)])


def _turn_on_fsdp2(trainer: SFTTrainer) -> None:
    """See [Note: FSDP2 through accelerate on CPU]."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[_LAYER],
        reshard_after_forward=True, cpu_ram_efficient_loading=False,
    )  # fmt: skip
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    trainer.is_fsdp_enabled = True


def _use_rings(model: Any) -> None:
    from torch.distributed.fsdp import FSDPModule

    from laconic.strategies.ring import use_rings

    use_rings([module for module in model.modules() if isinstance(module, FSDPModule)])


if __name__ == "__main__":
    process_exit = ExitWithoutTeardown()
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    process_exit.code = 0
