"""transformers' Trainer, with three lines changed, which are marked. The import of Trainer alone would do.

A tiny Llama learns to count.

python examples/trainer.py                               # one process: as Trainer does
torchrun --nproc-per-node 4 examples/trainer.py          # sharded
laconic lab --nodes 2 --local 2 --rate 200mbit -- examples/trainer.py
"""

import torch
from datasets import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments

from laconic.integrations.transformers import LaconicArguments  # new
from laconic.integrations.transformers import LaconicTrainer as Trainer  # was: from transformers import Trainer


def numbers(rows: int, seed: int, length: int = 32) -> Dataset:
    """Rows that count upwards from a random start."""
    starts = torch.randint(0, 256, (rows, 1), generator=torch.Generator().manual_seed(seed))
    ids = ((starts + torch.arange(length)) % 256).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def main() -> None:
    defaults = {"output_dir": "runs/trainer", "max_steps": 20, "learning_rate": 1e-2, "logging_steps": 5}
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(**defaults, eval_strategy="steps", eval_steps=10, save_steps=10, report_to="none")
    (arguments,) = parser.parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4
        )
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=numbers(512, seed=0),
        eval_dataset=numbers(30, seed=1),
        laconic=LaconicArguments(cache="host"),  # new
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
