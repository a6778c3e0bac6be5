"""The row about a small byte-level Llama on the trainer's corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cyclic.accuracy import WORKERS, Batch, Setting, Study, Task, measure_study
from benchmarks.cyclic.bench import BENCHMARK, Bench
from tests.support.record import Row


@BENCHMARK.row("language")
def language(bench: Bench) -> Row:
    return measure_study(
        study(**bench.language, folder=bench.out / "tokens"),
        "eval loss on the trainer's corpus, a small Llama",
        tried=(
            "500 steps, all under the rule: dp 2.2264 ± 0.0182, v1 2.5328 ± 0.0408, v2 2.3576 ± 0.1042, lag2 "
            "2.5179 ± 0.0329, which is not within the noise."
        ),
    )


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of every token but the first."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def study(
    *, seeds: int, tuning_seeds: int, plain_steps: int, steps: int, settings: Sequence[Setting], folder: Path
) -> Study:
    """Return the study: the sources of Python's standard library, with files held out to validate and to test."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from laconic.config import DataConfig
    from laconic.data.tokens import open_tokens, prepare, rows_at
    from laconic.hf.tokenizer import ByteTokenizer

    length, rows = 64, 1
    data = DataConfig(kind="python-stdlib", tokenizer="bytes", sequence_length=length, eval_fraction=0.05)
    tokenizer = ByteTokenizer()
    files = open_tokens(prepare(data, tokenizer, folder), data)
    held = torch.as_tensor(rows_at(files.evaluation, _spread(len(files.evaluation) - length, 512), length))

    def task(seed: int) -> Task:
        generator = torch.Generator().manual_seed(seed)

        def batches(steps: int) -> Iterator[Batch]:
            for _ in range(steps):
                where = torch.randint(len(files.train) - length, (WORKERS, rows), generator=generator)
                yield [(part, part) for part in torch.as_tensor(rows_at(files.train, where.numpy(), length))]

        def evaluate(predict: Callable[[Tensor], Tensor]) -> tuple[float, float]:
            # Every second row, so that validation and test have rows of all files.
            validation, test = (float(next_token_loss(predict(held[k::2]), held[k::2])) for k in range(2))
            return validation, test

        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=tokenizer.vocab_size, max_position_embeddings=length,
                tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
            )
        )  # fmt: skip
        return Task(
            model=model,
            example=held[:1],
            loss=next_token_loss,
            optimizer=_adam,
            batches=batches,
            evaluate=evaluate,
        )

    return Study(
        name="Llama on the trainer's corpus", measure="eval loss", is_loss=True, settings=tuple(settings), seeds=seeds,
        tuning_seeds=tuning_seeds, plain_steps=plain_steps, steps=steps, task=task,
    )  # fmt: skip


def _adam(parameters: list[nn.Parameter], setting: Setting) -> torch.optim.Optimizer:
    common = {"lr": setting.lr, "betas": (setting.momentum, 0.95), "weight_decay": 0.1}
    if not setting.nesterov:
        return torch.optim.AdamW(parameters, **common)
    # With this momentum_decay the momentum reaches its full value in some dozens of steps, not in tens of thousands.
    return torch.optim.NAdam(parameters, **common, decoupled_weight_decay=True, momentum_decay=1.0)


def _spread(last: int, count: int) -> Any:
    """The offsets of `count` rows at equal distances, from 0 to `last`."""
    import numpy as np

    return np.linspace(0, last, count).astype(np.int64)
