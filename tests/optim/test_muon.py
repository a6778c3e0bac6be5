"""Muon against torch.optim.Muon and the naive reference; test_owners.py and test_family.py have it on ranks."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from laconic.optim import AdamW8bit
from laconic.optim.matrix import matrices_and_rest
from laconic.optim.muon import COEFFICIENTS, Muon, orthogonalize
from laconic.optim.shampoo import Shampoo
from tests.optim.matrices import random_tensors
from tests.reference import muon as reference
from tests.support.sharded_net import Net

STACKS = [(4, 5, 6), (5, 6, 4)]
MATRICES = [*STACKS, (7, 5), (12, 33), (33, 12), (20, 20), (1, 9), (9, 1)]
VECTORS = [(3,), (40,), (), (2, 3, 4, 5)]


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.02, "nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"},
    ],
)
def test_same_bits_as_torch_and_as_the_reference(settings: dict[str, Any]) -> None:
    """Through a schedule, and a step in which some parameters have no gradient; test_owners.py has the ranks."""
    values = random_tensors(MATRICES + VECTORS, seed=0)
    num = len(MATRICES)
    params = [nn.Parameter(value.clone()) for value in values]
    naive = reference.Muon([value.clone() for value in values[:num]], **settings)
    flat = [nn.Parameter(value.clone()) for value in values[len(STACKS) : num]]
    rest = [nn.Parameter(value.clone()) for value in values[num:]]
    optimizers = [
        Muon([{"params": params[:num]}, {"params": params[num:], "algorithm": "adamw"}], **settings),
        torch.optim.Muon(flat, **settings),
        torch.optim.AdamW(rest, lr=settings["lr"], weight_decay=settings.get("weight_decay", 0.1), foreach=True),
    ]
    for step in range(4):
        grads: list[Any] = list(random_tensors(MATRICES + VECTORS, seed=10 + step))
        if step == 2:
            grads[1] = grads[4] = grads[9] = None
        for tensors, own in ((params, grads), (flat, grads[len(STACKS) : num]), (rest, grads[num:])):
            for parameter, grad in zip(tensors, own, strict=True):
                parameter.grad = grad
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings["lr"] / (1 + step)
            optimizer.step()
        naive.lr = settings["lr"] / (1 + step)
        naive.step_some({index: grads[index] for index in range(num) if grads[index] is not None})
    for expected, begin in (([*naive.parameters, *rest], 0), (flat, len(STACKS))):
        for parameter, value in zip(params[begin:], expected, strict=False):
            assert torch.equal(parameter, value), tuple(value.shape)


def test_the_signature_is_that_of_torch() -> None:
    laconic_parameters = inspect.signature(Muon.__init__).parameters
    torch_parameters = inspect.signature(torch.optim.Muon.__init__).parameters
    assert list(laconic_parameters) == list(torch_parameters)[: len(laconic_parameters)], "later releases may have more"
    assert [p.default for p in laconic_parameters.values()] == [
        torch_parameters[name].default for name in laconic_parameters
    ]


@pytest.mark.parametrize("shape", [(6, 6), (3, 17), (17, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_orthogonalize_equals_torch_and_leaves_its_input_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    (matrix,) = random_tensors([shape], seed=3, dtype=dtype)
    before = matrix.clone()
    result = orthogonalize(matrix)
    assert torch.equal(matrix, before)
    assert torch.equal(result, reference.orthogonalize(matrix))
    assert torch.equal(result, _zeropower_via_newtonschulz(matrix.clone(), COEFFICIENTS, 5, 1e-7))
    singular = torch.linalg.svdvals(result.float())
    assert singular.max() < 1.3
    assert singular.min() > 0.3
    assert torch.equal(orthogonalize(torch.zeros(shape)), torch.zeros(shape, dtype=torch.bfloat16))


def test_a_bfloat16_momentum_buffer_is_not_normalised() -> None:
    """torch.optim.Muon normalises it in place without Nesterov; then momentum forgets its size."""
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 8.0)
    optimizer = Muon([parameter], nesterov=False, momentum=0.5)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full((2, 2), 4.0).bfloat16())


@pytest.mark.parametrize(
    ("how", "factor"), [("original", 1.0), ("match_rms_adamw", 0.6), ("spectral_unclamped", 2 / 3)]
)
def test_the_learning_rate_depends_on_the_shape(how: str, factor: float) -> None:
    start, grad = torch.zeros(4, 9), random_tensors([(4, 9)], seed=5)[0]
    parameter = nn.Parameter(start.clone())
    parameter.grad = grad
    Muon([parameter], lr=0.5, weight_decay=0.0, adjust_lr_fn=how).step()
    direction = reference.orthogonalize(grad.lerp(torch.zeros(4, 9).lerp_(grad, 0.05), 0.95))
    torch.testing.assert_close(parameter.detach(), -0.5 * factor * direction.float())


def test_a_vector_is_refused_by_name() -> None:
    vector = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r'norm\.weight has shape \(3,\).*algorithm="adamw".*matrices_and_rest'):
        Muon([("up.weight", nn.Parameter(torch.zeros(3, 3))), ("norm.weight", vector)])
    with pytest.raises(ValueError, match="parameter 0 of its group"):
        Muon([vector])
    with pytest.raises(ValueError, match="shape"):
        Muon([nn.Parameter(torch.zeros(2, 2, 2, 2))])


WRONG: list[tuple[type[torch.optim.Optimizer], dict[str, Any], str]] = [
    *(
        (each, settings, message)
        for each in (Muon, Shampoo, AdamW8bit)
        for settings, message in (
            ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
            ({"weight_decay": -0.1}, "weight_decay"),
        )
    ),
    (Muon, {"momentum": -0.1}, "momentum"),
    (Muon, {"eps": 0.0}, "eps must be above 0, got 0.0"),
    (Muon, {"ns_steps": 100}, "ns_steps must be at least 0 and below 100"),
    (Muon, {"ns_coefficients": (1.0, 2.0)}, "three numbers"),
    (Muon, {"adjust_lr_fn": "spectral"}, "match_rms_adamw.*got 'spectral'"),
    (Shampoo, {"block_size": 0}, "block_size must be at least 1, got 0"),
    (Shampoo, {"update_every": 0}, "update_every"),
    (Shampoo, {"start_step": 0}, "start_step"),
    (Shampoo, {"betas": (0.9, 1.0)}, r"betas must be at least 0 and below 1, got \(0.9, 1.0\)"),
    (Shampoo, {"eps": 0.0}, "eps must be above 0, got 0.0"),
    (Shampoo, {"exponent": -0.5}, "exponent"),
    (Shampoo, {"grafting": "adamw"}, "grafting must be one of.*rmsprop.*got 'adamw'"),
    (AdamW8bit, {"betas": (0.9, 1.0)}, r"betas must be at least 0 and below 1, got \(0.9, 1.0\)"),
    (AdamW8bit, {"eps": -1e-8}, "eps"),
]


def test_settings_out_of_range_for_all_or_for_a_group() -> None:
    parameter = nn.Parameter(torch.zeros(3, 3))
    for make, settings, message in WRONG:
        optimizer: Any = make([parameter])  # type: ignore[call-arg]
        with pytest.raises(ValueError, match=message):
            make([parameter], **settings)
        with pytest.raises(ValueError, match=message):
            make([{"params": [parameter], **settings}])  # type: ignore[call-arg]
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], **settings})
        assert len(optimizer.param_groups) == 1, "a refused group leaves no trace"
    with pytest.raises(ValueError, match=r'algorithm must be "muon" or "adamw", got \'adam\''):
        Muon([{"params": [parameter], "algorithm": "adam"}])
    with pytest.raises(ValueError, match="min_8bit_size"):
        AdamW8bit([parameter], min_8bit_size=-1)


def test_defaults_of_an_adamw_group() -> None:
    vector = nn.Parameter(torch.zeros(3))
    group = {"params": [vector], "algorithm": "adamw"}
    (kept,) = Muon([dict(group)], lr=0.3, weight_decay=0.2, eps=1e-3).param_groups
    assert (kept["lr"], kept["weight_decay"], kept["betas"], kept["eps"]) == (0.3, 0.2, (0.9, 0.999), 1e-8)
    (kept,) = Muon([group | {"lr": 0.1, "eps": 1e-6, "betas": (0.8, 0.9)}]).param_groups
    assert (kept["lr"], kept["betas"], kept["eps"]) == (0.1, (0.8, 0.9), 1e-6)
    with pytest.raises(ValueError, match="eps must be above 0, got 0"):
        Muon([group | {"eps": 0}])


def test_groups_can_serve_several_optimizers_and_optimizers_be_copied() -> None:
    model = Net()
    groups = matrices_and_rest(model)
    muon, _ = Muon(groups, lr=0.1), Shampoo(groups)
    with pytest.raises(ValueError, match="not one of this optimizer's parameters"):
        muon.init_state(nn.Parameter(torch.ones(2, 3)))
    assert "algorithm" not in groups[0]
    twin = copy.deepcopy(muon)
    for optimizer in (muon, twin):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    copies = [p for group in twin.param_groups for p in group["params"]]
    for original, copied in zip((p for group in muon.param_groups for p in group["params"]), copies, strict=True):
        assert original is not copied
        assert torch.equal(original, copied)


class Sorted(nn.Module):
    """One parameter of each kind. The head is untied, and recognised as the last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(4, 4, 2)
        self.up = nn.Linear(4, 6)
        self.experts = nn.Parameter(torch.zeros(3, 6, 4))
        self.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.head = nn.Linear(4, 5, bias=False)


def test_matrices_and_rest() -> None:
    model = Sorted()
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices, rest = matrices_and_rest(model)
    assert {names[p] for p in matrices["params"]} == {"up.weight", "experts"}
    assert {names[p] for p in rest["params"]} == {"embed.weight", "conv.weight", "conv.bias", "up.bias", "head.weight"}
    assert rest["algorithm"] == "adamw"
    model.get_output_embeddings = lambda: model.up  # type: ignore[assignment]
    matrices, _ = matrices_and_rest(model)
    assert {names[p] for p in matrices["params"]} == {"experts", "head.weight"}
    Muon(matrices_and_rest(Net()))
