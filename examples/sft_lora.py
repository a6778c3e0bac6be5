"""TRL's SFTTrainer with a LoRA adapter, with one line changed: it is marked. A tiny Llama learns to answer.

python examples/sft_lora.py                              # one process: as SFTTrainer does
torchrun --nproc-per-node 4 examples/sft_lora.py         # sharded
laconic lab --nodes 2 --local 2 --rate 200mbit -- examples/sft_lora.py
"""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from laconic.integrations.trl import SFTTrainer  # was: from trl import SFTTrainer

SENTENCE = "<pad> <eos> what comes after ? zero one two three four five six seven eight nine"
WORDS = SENTENCE.split(" ")


def tokenizer() -> PreTrainedTokenizerFast:
    plain = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def questions() -> Dataset:
    digits = WORDS[6:]
    pairs = [(digits[index], digits[(index + 1) % 10]) for index in range(10)] * 16
    return Dataset.from_dict(
        {
            "prompt": [f"what comes after {digit} ?" for digit, _ in pairs],
            "completion": [f" {following}" for _, following in pairs],
        }
    )


def main() -> None:
    parser = HfArgumentParser(SFTConfig)
    parser.set_defaults(output_dir="runs/sft_lora", max_steps=40, learning_rate=2e-2, logging_steps=10, save_steps=20)
    parser.set_defaults(report_to="none", bf16=False)
    (arguments,) = parser.parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=questions(),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()  # the adapter, in peft's format


if __name__ == "__main__":
    main()
