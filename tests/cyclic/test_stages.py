"""The places where models are cut, the equality of stages and model, and the models that are refused."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from laconic.cyclic import stages as cyclic_stages
from laconic.cyclic.stages import cut
from laconic.hf.causal_lm import cut_causal_lm
from laconic.pipeline import stages as timed_stages
from laconic.pipeline.stages import partition, restoring_random_states, synchronize, unstage
from tests.support.launch import on_ranks

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "max_position_embeddings": 256,
}  # fmt: skip
GROUPED = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma3_text": {
        **GROUPED, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granite": {**GROUPED, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "gpt_neox": {**COMMON, "intermediate_size": 48},
    "bloom": COMMON,
    "opt": {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "gpt2": {
        "vocab_size": VOCAB, "n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 256, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
"""gemma3 gives its layers two kinds of mask, granite scales logits, bloom's layers return tuples, opt projects the
output of its layers, gpt2 has dropout."""


def causal_lm(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(kind, **{**MODELS[kind], **changes})
    return hf.AutoModelForCausalLM.from_config(config)


def chain(stages: list[Any], *values: Tensor) -> Tensor:
    for stage in stages:
        outputs = stage(*values)
        values = outputs if isinstance(outputs, tuple) else (outputs,)
    (output,) = values
    return output


def tokens(rows: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------ partition


def rating(costs: list[float], borders: tuple[int, ...], tolerance: float = 0.05) -> tuple[float, float]:
    """The shortfall of the prefixes, and the largest stage."""
    runs = [sum(costs[a:b]) / sum(costs) for a, b in itertools.pairwise(borders)]
    count, prefixes = len(runs), itertools.accumulate(runs[:-1])
    short = max((max((j - tolerance) / count - c, 0.0) for j, c in enumerate(prefixes, 1)), default=0.0)
    return round(short, 9), round(max(runs), 9)


@pytest.mark.parametrize("seed", range(12))
def test_a_partition_is_front_heavy_and_then_as_even_as_possible(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_blocks, num_stages = 5 + seed % 5, 2 + seed % 4
    costs = (torch.rand(num_blocks, generator=generator) ** 2 + 0.01).tolist()
    every = itertools.combinations(range(1, num_blocks), num_stages - 1)
    best = min(rating(costs, (0, *inner, num_blocks)) for inner in every)
    borders = partition(costs, num_stages)
    assert (borders[0], borders[-1], len(set(borders))) == (0, num_blocks, num_stages + 1)
    assert rating(costs, tuple(borders)) == best


@pytest.mark.parametrize(
    ("costs", "num_stages", "borders"),
    [
        ([1.0] * 8, 4, [0, 2, 4, 6, 8]),
        ([1.0] * 10, 4, [0, 3, 6, 8, 10]),  # no prefix below its share, none larger than it must be
        ([1.02, 0.98, 0.99, 1.01], 4, [0, 1, 2, 3, 4]),
        ([0.98, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.02], 4, [0, 2, 4, 6, 8]),  # noise does not push a block forward
        ([1.0, 1.0, 10.0], 2, [0, 2, 3]),  # short by as little as possible
        ([0.0, 0.0, 0.0], 3, [0, 1, 2, 3]),
        ([5.0], 1, [0, 1]),
    ],
)  # fmt: skip
def test_partitions_worked_out_by_hand(costs: list[float], num_stages: int, borders: list[int]) -> None:
    assert partition(costs, num_stages) == borders


# ------------------------------------------------------------------------------------------------ language models


@pytest.mark.parametrize("kind", MODELS)
def test_stages_of_a_language_model_repeat_it_to_the_bit(kind: str) -> None:
    model, twin = causal_lm(kind), causal_lm(kind)
    stages = cut_causal_lm(model, 3, by="parameters")
    torch.manual_seed(1)
    logits = chain(stages, tokens())
    logits.square().mean().backward()
    torch.manual_seed(1)
    expected = twin(tokens(), use_cache=False).logits
    expected.square().mean().backward()
    assert torch.equal(logits, expected)
    gradients = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    assert gradients.keys() == {name for name, _ in twin.named_parameters()}
    for name, parameter in twin.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


@pytest.mark.parametrize("kind", MODELS)
def test_masks_and_positions_are_carried(kind: str) -> None:
    masks = torch.ones(3, 2, 12, dtype=torch.long)  # some models make no mask of the last one
    masks[0, 0, :5] = masks[1, 1, :2] = 0
    model = causal_lm(kind).eval()
    stages = cut_causal_lm(model, 3, by="parameters", example={"input_ids": tokens(), "attention_mask": masks[0]})
    for mask in masks:
        assert torch.equal(chain(stages, tokens(), mask), model(tokens(), attention_mask=mask).logits)


def test_an_example_gives_up_to_three_inputs_by_position() -> None:
    mask, places = torch.ones(2, 12, dtype=torch.long), torch.arange(12)[None]
    mask[0, :5] = 0
    model = causal_lm("llama").eval()
    stages = cut_causal_lm(model, 3, by="parameters", example=(tokens(), mask, places))
    expected = model(tokens(), attention_mask=mask, position_ids=places).logits
    assert torch.equal(chain(stages, tokens(), mask, places), expected)
    with pytest.raises(ValueError, match="the example has 4 inputs; give a language model's inputs by name"):
        cut_causal_lm(model, 3, by="parameters", example=(tokens(), mask, places, mask))


def test_a_mask_that_the_example_did_not_have_is_refused() -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    stages = cut_causal_lm(causal_lm("llama"), 2, by="parameters", example=(tokens(), mask))
    mask[0, :5] = 0
    with pytest.raises(ValueError, match=r"other arguments than on the example.*attention_mask that masks something"):
        chain(stages, tokens(), mask)
    with pytest.raises(ValueError, match=r"cut for the inputs \('input_ids', 'attention_mask'\), and is given 1"):
        stages[0](tokens())


def test_the_model_lives_on_in_its_stages() -> None:
    model = causal_lm("llama")
    stages = cut_causal_lm(model, 4)
    state = unstage(stages)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    copies = copy.deepcopy(stages)
    with torch.no_grad():
        next(iter(stages[0].parameters())).add_(1)
    assert torch.equal(chain(stages, tokens()), model(tokens()).logits)
    assert not torch.equal(chain(copies, tokens()), model(tokens()).logits)
    assert sum(p.numel() for stage in copies for p in stage.parameters()) == sum(p.numel() for p in model.parameters())


class DropsLogits(hf.GPT2LMHeadModel):
    """Looks at its own `training` flag, not at that of a submodule."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        output.logits = nn.functional.dropout(output.logits, 0.5, self.training)
        return output


def test_stages_train_and_evaluate_as_the_model_does() -> None:
    torch.manual_seed(0)
    model = DropsLogits(hf.AutoConfig.for_model("gpt2", **MODELS["gpt2"]))
    stages = cut_causal_lm(model.train(), 2, by="parameters")
    for stage in stages:
        stage.eval()
    assert torch.equal(chain(stages, tokens()), model.eval()(tokens()).logits)
    for stage in stages:
        stage.train()
    assert (chain(stages, tokens()) == 0).float().mean() == pytest.approx(0.5, abs=0.1)


class ChangesLogits(hf.LlamaForCausalLM):
    """Changes its logits in its own forward, outside of any module."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        if input_ids is not None:
            output.logits = output.logits + 1e-3
        return output


# ------------------------------------------------------------------------------------------------ sequences


def layers(*widths: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]


def test_a_sequential_keeps_its_names_and_values() -> None:
    first, second, third = layers(6, 12, 12, 4)
    model = nn.Sequential(OrderedDict(first=first, second=second, third=third, flat=nn.Flatten(), head=nn.Linear(4, 2)))
    stages = cut(model, 3, by="parameters")
    assert unstage(stages).keys() == model.state_dict().keys()
    x = torch.randn(5, 6)
    assert torch.equal(chain(stages, x), model(x))
    assert all(any(p.requires_grad for p in stage.parameters()) for stage in stages)


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


class Sum(nn.Linear):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(pair[0]) + pair[1]


class Masked(nn.Linear):
    def forward(self, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).masked_fill(mask, 0.0) * scale


def test_a_sequential_passes_tuples_on_whole() -> None:
    model = nn.Sequential(Twice(3, 3), Sum(3, 3))
    stages = cut(model, 2, by="parameters")
    x = torch.randn(2, 3)
    assert isinstance(stages[0](x), tuple)
    assert torch.equal(chain(stages, x), model(x))


def test_carried_inputs_reach_every_module_of_a_list() -> None:
    modules = [Masked(3, 3) for _ in range(4)]
    stages = cut(modules, 2, by="parameters", carry=2)
    x, mask, scale = torch.randn(2, 3), torch.tensor([[True, False, False]]), torch.tensor(2.0)
    hidden, *carried = stages[0](x, mask, scale)
    assert [value.requires_grad for value in (hidden, *carried)] == [True, False, False]
    expected = x
    for module in modules:
        expected = module(expected, mask, scale)
    assert torch.equal(chain(stages, x, mask, scale), expected)
    assert list(unstage(stages)) == [f"{i}.{part}" for i in range(4) for part in ("weight", "bias")]


def test_by_memory_and_by_costs() -> None:
    wide = layers(4, 4, 4, 256, 4, 4, 4)
    by_memory = cut(wide, 2, example=torch.randn(16, 4))  # as one device does by itself
    assert by_memory[0].num_blocks == 3  # up to the layer that makes the wide output
    by_costs = cut(wide, 3, by=[1, 1, 1, 1, 4, 4])
    assert [stage.num_blocks for stage in by_costs] == [4, 1, 1]


def test_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several ranks. Only layers advance the clock. Stages take the same time, or the first stage takes more."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(timed_stages, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    monkeypatch.setattr(cyclic_stages, "RankGroup", lambda: SimpleNamespace(size=2, broadcast=lambda costs: costs))

    class Busy(nn.Linear):
        def __init__(self, seconds: float) -> None:
            super().__init__(4, 4)
            self.seconds = seconds

        def forward(self, x: Tensor) -> Tensor:
            clock.now_s += self.seconds
            return super().forward(x)

    for seconds, borders in (([1, 1, 1, 9, 1], [4, 1]), ([2, 2, 2, 2, 4, 4], [4, 2]), ([1, 1, 1, 1, 1], [3, 2])):
        stages = cut(nn.Sequential(*map(Busy, seconds)), 2, example=torch.randn(2, 4))
        assert [stage.num_blocks for stage in stages] == borders


def test_measuring_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    for by in ("time", "memory"):
        cut(model, 2, by=by, example=torch.randn(16, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_accelerators_of_any_kind_are_waited_for_and_keep_their_random_states(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("xpu", 1)
    values: Any = [torch.ones(1), SimpleNamespace(device=device)]
    events: list[Any] = []
    monkeypatch.setattr("torch.accelerator.synchronize", events.append)
    monkeypatch.setattr("torch.xpu.get_rng_state", lambda of: f"state of {of}")
    monkeypatch.setattr("torch.xpu.set_rng_state", lambda state, of: events.append((state, of)))
    synchronize(values)
    with restoring_random_states(values):
        events.append("body")
    assert events == [device, "body", ("state of xpu:1", device)]


def test_every_stage_has_a_trainable_parameter() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    stages = cut(model, 2, by=[5, 1, 1, 1, 1])
    assert [sum(p.numel() for p in stage.parameters()) for stage in stages] == [20, 20]


def with_parameters_of_its_own() -> nn.Module:
    model = causal_lm("llama")
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return model


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def sequence() -> nn.Module:
    return nn.Sequential(*layers(4, 4, 4))


def changing_logits() -> nn.Module:
    return ChangesLogits(hf.AutoConfig.for_model("llama", **GROUPED))


LINEAR, FROZEN = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)


def tied() -> nn.Module:
    return causal_lm("llama", tie_word_embeddings=True)


X = torch.randn(2, 4)
BY_SIZE = {"by": "parameters"}


@pytest.mark.parametrize(
    ("make", "count", "options", "words"),
    [
        (changing_logits, 2, {}, r"ChangesLogits is not the sequence of .*by up to 1\.0e-03"),
        (with_parameters_of_its_own, 2, {}, r"belong to no layer.*scale"),
        (lambda: nn.Bilinear(2, 2, 1), 1, {}, "Bilinear is neither a sequence of modules nor a transformers causal"),
        (lambda: nn.Bilinear(2, 2, 1), 1, {"example": torch.ones(1, 2)}, "Bilinear is neither a sequence"),
        (tied, 2, {}, r"model.embed_tokens.weight in stage 0 and lm_head.weight in stage 1 .*tie_word"),
        (
            lambda: [LINEAR, FROZEN, LINEAR],
            2,
            {"by": [2, 1, 2]},
            r"0.weight in stage 0 and 2.weight in stage 1 are one",
        ),
        (lambda: [LINEAR, FROZEN], 2, BY_SIZE, "cannot be cut into 2 stages with a trainable parameter each"),
        (sequence, 3, BY_SIZE, "3 stages need at least as many blocks, and the model has 2"),
        (sequence, 2, {}, "by='memory' measures; give example="),
        (sequence, 2, {"by": "flops"}, "by='flops' is unknown"),
        (sequence, 2, {"by": [1, 2, 3]}, "gives 3 costs, but the model has 2 blocks"),
        (sequence, 2, {"by": [1, -2]}, "none may be negative"),
        (sequence, 0, {}, "num_stages=0"),
        (sequence, 2, {"example": {"x": X}}, "takes its inputs by position"),
        (sequence, 2, {"example": X, "carry": 1}, "has no carried inputs"),
        (lambda: on_meta(sequence), 2, BY_SIZE, "meta device"),
        (lambda: on_meta(tied), 2, {}, "meta device"),
    ],
)
def test_models_and_cuts_that_are_impossible_are_refused(make: Any, count: int, options: Any, words: str) -> None:
    model = make()
    with pytest.raises(ValueError, match=words):
        (cut if isinstance(model, nn.Sequential | list) else cut_causal_lm)(model, count, **options)


def test_a_model_that_is_no_sequence_is_told_where_it_is_cut() -> None:
    with pytest.raises(ValueError, match=r"Bilinear is no sequence .* laconic\.hf\.causal_lm\.cut_causal_lm"):
        cut(nn.Bilinear(2, 2, 1), 1)


def test_tied_embeddings_fit_into_one_stage() -> None:
    (whole,) = cut_causal_lm(tied(), 1)
    assert chain([whole], tokens()).shape == (2, 12, VOCAB)


@on_ranks(2)
def test_all_ranks_cut_alike() -> None:
    """Costs that differ between ranks, as measured costs do."""
    import torch.distributed as dist

    costs = [[1, 1, 1, 3], [3, 1, 1, 1]][dist.get_rank()]
    assert [stage.num_blocks for stage in cut([nn.Linear(2, 2) for _ in range(4)], 2, by=costs)] == [3, 1]
