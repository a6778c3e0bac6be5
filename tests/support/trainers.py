"""Tiny jobs of transformers' and TRL's trainers, each with DDP or with laconic, in this process's ranks.

`make` returns the trainer that a user's script would make, and `log` what it has logged. Model, tokenizer and rows are
made here from seeds; nothing is downloaded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.utils import logging
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from laconic.integrations import LaconicArguments, trl
from laconic.integrations.transformers import LaconicTrainer

os.environ.setdefault("OMP_NUM_THREADS", "1")  # accelerate would let every rank have a thread per core
datasets.disable_progress_bars()
logging.disable_progress_bar()

WORDS = [f"w{index}" for index in range(124)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 128 words."""
    special = ["<pad>", "<eos>", "<unk>", "<bos>"]
    model = models.WordLevel({word: index for index, word in enumerate(special + WORDS)}, unk_token="<unk>")
    plain = Tokenizer(model)
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<bos>"
    )


def llama(cls: type[nn.Module] = LlamaForCausalLM, seed: int = 0, **settings: Any) -> Any:
    """Return a Llama with 2 layers of width 16."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3}
    return cls(LlamaConfig(**{"vocab_size": 128, "max_position_embeddings": 64, **sizes, **ids, **settings}))


def sentences(rows: int, seed: int = 0) -> list[str]:
    """Return rows of unequal lengths, in which a word follows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for _ in range(rows):
        start, step, length = (
            int(torch.randint(low, high, (), generator=generator)) for low, high in ((0, 124), (1, 4), (6, 15))
        )
        lines.append(" ".join(WORDS[(start + step * place) % len(WORDS)] for place in range(length)))
    return lines


def token_rows(rows: int, seed: int = 0, length: int = 10) -> Dataset:
    """Return rows for a plain Trainer: input_ids and labels of equal length."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 124, (rows, 1), generator=generator)
    ids = (4 + (starts + torch.arange(length)) % 124).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def pairs(rows: int, *, prompt: bool) -> Dataset:
    """Return rows of preferences."""
    space = " " if prompt else ""  # the tokenizer separates words by it
    chosen, rejected = ([space + line for line in sentences(rows, seed)] for seed in (1, 2))
    table = {"chosen": chosen, "rejected": rejected}
    return Dataset.from_dict({"prompt": sentences(rows, 3), **table} if prompt else table)


def mean_number(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return a reward that tells almost any two completions apart: the mean of their tokens' numbers, up to 1."""
    return [sum(ids) / len(ids) / 128 for ids in completion_ids]


def reference_folder(folder: Path) -> Path:
    """Return a folder of this rank with another model; `save_pretrained` would write it on the first rank alone."""
    model, own = llama(seed=1), folder / f"reference-{os.environ.get('RANK', '0')}"
    own.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.to_json_file(own / "config.json")
    save_file(model.state_dict(), own / "model.safetensors", {"format": "pt"})
    return own


def settings(folder: str, steps: int, **more: Any) -> dict[str, Any]:
    """Return the arguments that all jobs share."""
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
        "max_grad_norm": 0.5,
        "seed": 3,
        **more,
    }


def make(job: str, folder: str, steps: int, laconic: LaconicArguments | None = None, **more: Any) -> Any:
    """Return the trainer of a job: with laconic's options a sharded one, without them the stock trainer."""
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    kind, _, has_adapter = job.partition("_")
    stock, own, arguments, sizes = {
        "trainer": (Trainer, LaconicTrainer, TrainingArguments, {}),
        "accumulation": (Trainer, LaconicTrainer, TrainingArguments, {"gradient_accumulation_steps": 3}),
        "sft": (SFTTrainer, trl.SFTTrainer, SFTConfig, {"max_length": 16}),
        "dpo": (DPOTrainer, trl.DPOTrainer, DPOConfig, {"max_length": 24}),
        "reward": (RewardTrainer, trl.RewardTrainer, RewardConfig, {"max_length": 16}),
        "grpo": (
            GRPOTrainer, trl.GRPOTrainer, GRPOConfig, {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
        ),
    }[kind]  # fmt: skip
    given: dict[str, Any] = {} if laconic is None else {"laconic": laconic}
    given |= {"peft_config": lora} if has_adapter else {}
    given |= {"processing_class": tokenizer()} if arguments is not TrainingArguments else {}
    model = llama(LlamaForSequenceClassification, num_labels=1) if kind == "reward" else llama()
    if kind in ("trainer", "accumulation"):
        rows, given["eval_dataset"] = token_rows(64), token_rows(7, 1)
    elif kind in ("dpo", "reward"):
        rows = pairs(64, prompt=kind == "dpo")
    else:
        rows = Dataset.from_dict({"text" if kind == "sft" else "prompt": sentences(64)})
    if job == "dpo":
        given["ref_model"] = llama(seed=1)
    if kind == "grpo":
        given["reward_funcs"] = mean_number
    if job == "grpo":  # TRL loads the reference model from where the model came from
        model.config._name_or_path = str(reference_folder(Path(folder)))
    cls: Any = stock if laconic is None else own
    args = arguments(**{**sizes, **settings(folder, steps, **more)})
    trainer = cls(model=model, args=args, train_dataset=rows, **given)
    trainer.remove_callback(PrinterCallback)
    return trainer


def log(trainer: Any) -> dict[str, list[float]]:
    """Return the losses and gradient norms that a trainer has logged, by step."""
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {key: [float(entry[key]) for entry in steps] for key in ("loss", "grad_norm")}
