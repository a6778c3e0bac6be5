"""Real architectures on every kind of mesh: forward, gradients and two clipped AdamW steps equal one process's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.support.scenario import Scenario, assert_equals_oracle
from tests.support.sharded_net import buckets, reduce_bytes

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


def adapted_llama() -> nn.Module:
    """A frozen base. The parameters train that a low-rank adapter would replace, and norms and biases."""
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.ndim == 1 or "q_proj" in name)
    return model


def batch_of(number: int, rank: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 * number + rank))
    return {"input_ids": ids, "labels": ids}


def units_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that users would wrap: those that transformers does not split."""
    names = getattr(model, "_no_split_modules", None) or []
    found = [module for module in model.modules() if type(module).__name__ in names]
    return found or list(model.blocks)  # type: ignore[arg-type]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def reduced(model: nn.Module) -> int:
    return reduce_bytes("node", buckets(model))


HEAVY = pytest.mark.heavy


@pytest.mark.parametrize(
    ("nodes", "local", "make", "cache"),
    [
        (2, 1, llama, "host"),
        (2, 1, mixtral, "device"),
        (2, 1, t5, "rank"),
        (2, 1, adapted_llama, "none"),
        pytest.param(1, 3, mixtral, "none", marks=HEAVY),
        pytest.param(3, 2, gpt2, "device", marks=HEAVY),
        pytest.param(3, 2, qwen2, "host", marks=HEAVY),
    ],
)
def test_models_train_as_in_one_process(nodes: int, local: int, make: Callable[[], nn.Module], cache: str) -> None:
    model = make()
    names = {module: name for name, module in model.named_modules()}
    scenario = Scenario(
        nodes=nodes, local=local, make=make, units=[names[unit] for unit in units_of(model)], cache=cache, steps=2,
        optimizer=adamw, micro_batches=2, max_norm=0.5, batch=batch_of, loss=loss_of, look=reduced,
        prepare=nn.Module.train,
    )  # fmt: skip
    runs = scenario.run()
    assert_equals_oracle(scenario, runs, rtol=2e-4, atol=2e-5)
    for one in runs:
        assert [sent.gradients for sent in one.sent] == one.looks[1:]
