"""Experts that train in scaled formats, against the rounding of whole stacks, in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from laconic.layers.scaled import SCALED_FORMATS
from laconic.layers.scaled_linear import ScaledTensor, ScaledWeight
from laconic.layers.scaled_training import convert_to_scaled_training
from tests.reference.scaled import rounded, stack_products

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 3}
NUM_TOKENS = 9


def experts(kind: str, implementation: str) -> Any:
    torch.manual_seed(0)
    config: Any = {"mixtral": transformers.MixtralConfig, "gpt-oss": transformers.GptOssConfig}[kind](**SIZES)
    config._experts_implementation = implementation
    made = {"mixtral": MixtralExperts, "gpt-oss": GptOssExperts}[kind](config)
    if implementation != "grouped_mm":  # which has no products of doubles
        made.double()  # so no number is rounded otherwise than by hand because of the order of a sum
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
        parameter.data *= torch.randn(3, *[1] * (parameter.ndim - 1)).exp()  # experts of other magnitudes
    return made


def routed(num_experts: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, two experts for each, and their shares. The last expert gets none."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(NUM_TOKENS, 128, generator=generator, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(num_experts - 1, generator=generator) for _ in range(NUM_TOKENS)])
    return tokens, chosen, torch.rand(NUM_TOKENS, 2, generator=generator, dtype=torch.float64)


def by_hand(
    layer: Any, tokens: Tensor, chosen: Tensor, shares: Tensor, weight_format: str, *, together: bool
) -> Tensor:
    """The sum over experts, each with the rows of its tokens."""
    places = [torch.where(chosen == expert) for expert in range(layer.num_experts)]
    rounds = {"weight_format": weight_format, "together": together, "by_columns": layer.is_transposed}
    hidden = stack_products([tokens[token] for token, _ in places], layer.gate_up_proj, **rounds)
    if layer.has_bias:
        hidden = [each + bias for each, bias in zip(hidden, layer.gate_up_proj_bias, strict=True)]
    outputs = stack_products([layer._apply_gate(each) for each in hidden], layer.down_proj, **rounds)
    total = torch.zeros_like(tokens)
    for expert, ((token, place), output) in enumerate(zip(places, outputs, strict=True)):
        if layer.has_bias:
            output = output + layer.down_proj_bias[expert]
        total = total.index_add(0, token, output * shares[token, place, None])
    return total


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("name", SCALED_FORMATS)
def test_experts_train_as_those_that_round(name: str, kind: str, implementation: str) -> None:
    plain, model = experts(kind, implementation), nn.ModuleDict({"mlp": experts(kind, implementation)})
    if kind == "gpt-oss" and name == "nvfp4":
        with pytest.raises(
            ValueError, match=r"mlp.gate_up_proj: nvfp4 packs two elements of a row, and this weight .*filt"
        ):
            convert_to_scaled_training(model, name)
        return
    layer: Any = copy.deepcopy(convert_to_scaled_training(model, name))["mlp"]  # type: ignore[arg-type,index]
    assert isinstance(layer.gate_up_proj, ScaledWeight)
    tokens, chosen, shares = routed()
    tokens, shares = tokens.to(layer.down_proj.dtype), shares.to(layer.down_proj.dtype)
    inputs = [tokens.clone().requires_grad_() for _ in range(2)]
    found = layer(inputs[0], chosen, shares)
    wanted = by_hand(plain, inputs[1], chosen, shares, name, together=implementation != "eager")
    found.square().sum().backward()
    wanted.square().sum().backward()
    pairs = [(found, wanted), (inputs[0].grad, inputs[1].grad)]
    pairs += [(own.grad, other.grad) for own, other in zip(layer.parameters(), plain.parameters(), strict=True)]
    for own, other in pairs:
        most = 1e-6 if own.dtype is torch.float64 else 4e-3  # in fp32 some numbers are; exact weights are 2e-2 away
        assert torch.linalg.vector_norm(own - other) <= most * torch.linalg.vector_norm(other)
    assert not layer._forward_hooks, "it was looked at once"


@pytest.mark.parametrize("name", SCALED_FORMATS)
def test_a_stack_is_rounded_matrix_by_matrix(name: str) -> None:
    stack = experts("mixtral", "eager").down_proj.detach()
    scaled = ScaledWeight(stack, SCALED_FORMATS[name]).scaled()
    wanted = torch.stack([rounded(matrix, name) for matrix in stack])
    index = torch.tensor([2, 0, 2])
    for view, of_wanted in (
        (scaled, wanted),
        (scaled.transpose(1, 2), wanted.mT),
        (scaled.permute(0, 2, 1), wanted.mT),
        (scaled[torch.tensor(1)], wanted[1]),
        (scaled[1].t(), wanted[1].t()),
        (scaled[index], wanted[index]),
        (ScaledWeight(stack, SCALED_FORMATS[name])[1].scaled(), wanted[1]),
        (ScaledWeight(stack, SCALED_FORMATS[name])[index].scaled(), wanted[index]),
        (list(ScaledWeight(stack, SCALED_FORMATS[name]))[2].scaled(), wanted[2]),  # type: ignore[union-attr]
        (list(scaled)[2], wanted[2]),
    ):
        assert isinstance(view, ScaledTensor)
        assert torch.equal(view.dequantize().float(), of_wanted)
    assert torch.equal((scaled[:2] + 0).float(), wanted[:2]), "what multiplies nothing is decoded"
    for cut in (lambda weight: weight.unbind(1), lambda weight: weight.split(64, dim=1)):
        with pytest.raises(ValueError, match=r"weight that trains in few bits is cut by laconic.fully_shard alone"):
            cut(ScaledWeight(stack, SCALED_FORMATS[name]))


class OwnExperts(nn.Module):
    """Experts of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bn,emn->bm", x, self.w1)


def every(*_: Any) -> bool:
    return True


def test_weights_that_lose_their_format_are_refused_at_the_first_forward() -> None:
    with pytest.raises(ValueError, match="Sequential has no linear layer to convert"):
        convert_to_scaled_training(nn.Sequential(OwnExperts()), "mxfp8")
    own: Any = convert_to_scaled_training(nn.Sequential(OwnExperts()), "mxfp8", module_filter_fn=every)
    with pytest.raises(ValueError, match=r"0 was converted to train in mxfp8, but its forward decodes the weight"):
        own(torch.randn(4, 16))
    own = convert_to_scaled_training(nn.Sequential(OwnExperts()), "mxfp8", module_filter_fn=every)
    own[0].forward = lambda x: x @ (own[0].w1 * 1).sum(0).t()
    with pytest.raises(ValueError, match=r"0 was converted to train in mxfp8, but its forward decodes the weight"):
        own(torch.randn(4, 16))
    own = convert_to_scaled_training(nn.Sequential(nn.Linear(16, 16)), "mxfp8")
    own[0].weight = nn.Parameter(own[0].weight.detach() + 0)
    with pytest.raises(
        ValueError, match=r"0 was converted to .* its weight is a Parameter by now, without that format"
    ):
        own(torch.randn(4, 16))
    stack = nn.Parameter(torch.randn(2, 100, 128))
    own = nn.Sequential(OwnExperts())
    own[0].w1 = stack
    with pytest.raises(ValueError, match=r"0.w1: fp8_128x128 needs matrices of a multiple of 128 rows in a stack"):
        convert_to_scaled_training(own, "fp8_128x128", module_filter_fn=every)
