"""Real architectures on every kind of mesh: forward, gradients and two clipped AdamW steps equal one process's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.support.scenario import Scenario, assert_equals_oracle
from tests.support.sharded_net import Block, buckets, reduce_bytes

VOCAB, LENGTH, ROWS = 37, 6, 2
TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = TEXT | {
    "hidden_size": 16,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def qwen2() -> nn.Module:
    """Grouped queries, biases on them, tied embeddings."""
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER | {"tie_word_embeddings": True}))


def gpt2() -> nn.Module:
    """Embeddings tied to the head; matrices stored the other way round."""
    config = transformers.GPT2Config(
        **TEXT, n_embd=20, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> nn.Module:
    """A mixture of experts, of which a small batch misses some."""
    options = DECODER | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 12}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))


def t5() -> nn.Module:
    """Encoder and decoder; a position bias made in the first block goes through all of them."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 28, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=VOCAB, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


class OddMLP(nn.Module):
    """Sizes that divide nothing, a scalar, an empty parameter and one layer smaller than most meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(11, 23), Block(11, 1), nn.Linear(11, 11)])
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.out = nn.Linear(11, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        logits = self.out(x * self.scale) + self.empty.sum()
        return transformers.modeling_outputs.SequenceClassifierOutput(
            loss=nn.functional.cross_entropy(logits, labels), logits=logits
        )


def adapted_llama() -> nn.Module:
    """A frozen base. The parameters train that a low-rank adapter would replace, and norms and biases."""
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.ndim == 1 or "q_proj" in name)
    return model


def text_batch(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def vector_batch(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(ROWS, 11, generator=generator)
    return {"x": x, "labels": torch.randint(0, 3, (ROWS,), generator=generator)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], dict[str, Tensor]]]] = {
    "llama": (llama, text_batch),
    "qwen2": (qwen2, text_batch),
    "gpt2": (gpt2, text_batch),
    "mixtral": (mixtral, text_batch),
    "t5": (t5, text_batch),
    "odd": (OddMLP, vector_batch),
    "adapted": (adapted_llama, text_batch),
}
COVER = """
1x1  llama:none qwen2:host gpt2:none mixtral:host t5:device odd:host adapted:device
2x1  llama:host odd:none mixtral:device t5:rank
1x3  llama:rank odd:host mixtral:none
2x2  llama:device gpt2:none t5:host mixtral:rank adapted:rank
3x2  gpt2:device mixtral:none qwen2:device adapted:host
"""
"""The (model, cache) pairs for each mesh (nodes x local ranks)."""
RUNS = {
    tuple(map(int, mesh.split("x"))): [run.split(":") for run in runs]
    for mesh, *runs in (line.split() for line in COVER.strip().splitlines())
}


def units_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that users would wrap: those that transformers does not split."""
    names = getattr(model, "_no_split_modules", None) or []
    found = [module for module in model.modules() if type(module).__name__ in names]
    return found or list(model.blocks)  # type: ignore[arg-type]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def batch_of(name: str, number: int, rank: int) -> dict[str, Tensor]:
    return MODELS[name][1](torch.Generator().manual_seed(10 * number + rank))


def training(name: str) -> nn.Module:
    return MODELS[name][0]().train()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def reduced(model: nn.Module) -> int:
    return reduce_bytes("node", buckets(model))


def scenario_of(mesh: tuple[int, int], name: str, cache: str) -> Scenario:
    model = training(name)
    names = {module: found for found, module in model.named_modules()}
    return Scenario(
        nodes=mesh[0], local=mesh[1], make=partial(training, name), units=[names[unit] for unit in units_of(model)],
        cache=cache, optimizer=adamw, micro_batches=1 + (len(name) + sum(mesh)) % 2, max_norm=0.5,
        batch=partial(batch_of, name), loss=loss_of, look=reduced,
    )  # fmt: skip


MARKS = {(2, 1): (), (1, 3): pytest.mark.heavy, (3, 2): pytest.mark.heavy}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param((mesh, *run), marks=MARKS.get(mesh, pytest.mark.campaign))  # type: ignore[arg-type]
        for mesh in RUNS
        for run in RUNS[mesh]
    ],
    ids=lambda run: f"{run[0][0]}x{run[0][1]}-{run[1]}",
)
def test_models_train_as_in_one_process(run: tuple[tuple[int, int], str, str]) -> None:
    scenario = scenario_of(*run)
    runs = scenario.run()
    assert_equals_oracle(scenario, runs, rtol=2e-4, atol=2e-5)
    for one in runs:
        assert [sent.gradients for sent in one.sent] == one.looks[1:]
