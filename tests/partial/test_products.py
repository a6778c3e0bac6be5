"""Outputs and input gradients equal those of the whole layer to the bit; frozen parts cost neither FLOPs nor memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from laconic.partial.sliced import SlicedTensor
from laconic.partial.updates import partial_updates
from laconic.ragged.parts import sliced_parameters
from tests.reference.partial import MaskedTraining
from tests.support.partial_models import BOTH, MLPS, MODELS, Mlp, active_mask, build, lm_loss, tokens, whole_gradients


def partial_mlp(slice_index: int, num_slices: int, **sizes: Any) -> tuple[Mlp, Mlp]:
    """Return a whole MLP and its sliced copy."""
    torch.manual_seed(0)
    whole = Mlp(**sizes)
    return whole, partial_updates(
        copy.deepcopy(whole), slice_index=slice_index, num_slices=num_slices, include=["mlp"], patterns=MLPS
    )  # type: ignore[return-value]


@pytest.mark.parametrize(("kind", "slice_index", "num_slices"), [*((kind, 2, 4) for kind in MODELS), ("phi3", 7, 8)])
def test_active_gradients_are_those_of_the_full_backward(kind: str, slice_index: int, num_slices: int) -> None:
    batches = [tokens(1), tokens(2)]
    model = partial_updates(build(kind), slice_index=slice_index, num_slices=num_slices, include=BOTH)
    oracle = MaskedTraining(build(kind), active_mask(model), lm_loss)
    assert torch.equal(model(batches[0]).logits, oracle.model(batches[0]).logits)
    want = oracle.gradients(batches)
    for batch in batches:
        (lm_loss(model, batch) / len(batches)).backward()
    got = whole_gradients(model)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(
            got[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 16), (3, 5, 16), (16,)])
def test_outputs_and_input_gradients_are_the_whole_layers_to_the_bit(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    whole, sliced = (model.to(dtype) for model in partial_mlp(1, 4, d=16, h=64))
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [model(value) for model, value in zip((whole, sliced), inputs, strict=True)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(sliced.up.weight_slice1.grad, whole.up.weight.grad[16:32])
    torch.testing.assert_close(sliced.down.weight_slice1.grad, whole.down.weight.grad[:, 16:32])
    torch.testing.assert_close(sliced.up.bias_slice1.grad, whole.up.bias.grad[16:32])


def test_one_slice_changes_nothing_and_frozen_layers_stay_as_they_are() -> None:
    plain, model = build("llama"), build("llama")
    assert partial_updates(model, slice_index=0, num_slices=1) is model
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert {name: p.requires_grad for name, p in model.named_parameters()} == dict.fromkeys(plain.state_dict(), True)
    model.model.layers[0].requires_grad_(False)
    partial_updates(model, slice_index=0, num_slices=2)
    assert all(name.startswith("model.layers.1.") for name in sliced_parameters(model))
    assert not any(p.requires_grad for p in model.model.layers[0].parameters())


# -- memory and FLOPs --------------------------------------------------------------------------------------------------


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Return the bytes of all storages that a graph keeps, without those of the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    assert output.requires_grad
    return sum(nbytes for nbytes, _ in kept.values())


def flops(run: Callable[[], Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    return counter.get_total_flops()


def test_frozen_parts_cost_neither_memory_nor_flops() -> None:
    d, h, rows = 8, 64, 5
    matrix = 2 * rows * d * h
    for num_slices in (1, 4):
        model = partial_mlp(num_slices - 1, num_slices, d=d, h=h)[num_slices > 1]
        x = torch.randn(rows, d, requires_grad=True)
        # the input of up, which its rows need; the input of gelu; the columns of its output that down's columns need
        assert saved_bytes(model, lambda model=model, x=x: model(x)) == 4 * rows * (d + h + h // num_slices)  # type: ignore[misc]
        assert flops(lambda model=model, x=x: model(x)) == 4 * matrix + 2 * matrix // num_slices  # type: ignore[misc]
        # one again (the block ends with the other, whose input is all that is wanted), as for the whole layer
        again = flops(lambda model=model, x=x: checkpoint(model, x, use_reentrant=False))  # type: ignore[misc]
        assert again == 5 * matrix + 2 * matrix // num_slices
    model.requires_grad_(False)
    assert saved_bytes(model, lambda: model(x)) == 4 * rows * h  # the input of gelu
    with torch.no_grad():
        assert not model(x).requires_grad


def test_flops_of_a_model_fall_by_the_formula() -> None:
    # torch's counter does not know grouped_mm, so experts are counted in the eager implementation
    batch, num_slices = tokens(), 4
    before = flops(lambda: lm_loss(build("gpt-oss-eager"), batch))
    model = partial_updates(build("gpt-oss-eager"), slice_index=0, num_slices=num_slices, include=BOTH)
    after = flops(lambda: lm_loss(model, batch))
    matrices = {name: s for name, s in sliced_parameters(model).items() if s.is_factor}
    # a token meets a matrix of attention once, and 2 of the 4 experts' (each counted once here, as tokens meet it)
    numel = sum(torch.Size(s.shape).numel() / (2 if len(s.shape) == 3 else 1) for s in matrices.values())
    assert before - after == 2 * batch.numel() * numel * (1 - 1 / num_slices)


# -- checkpointing, autocast, compilation ------------------------------------------------------------------------------


def test_under_activation_checkpointing_autocast_and_compilation() -> None:
    whole, sliced = partial_mlp(1, 4, d=16, h=64)
    x = torch.randn(5, 16)
    want = nn.functional.mse_loss(whole(x), x)
    want.backward()
    expected = whole.up.weight.grad[16:32]

    checkpoint(sliced, x, use_reentrant=False).sub(x).square().mean().backward()
    torch.testing.assert_close(sliced.up.weight_slice1.grad, expected)

    sliced.zero_grad()
    compiled = torch.compile(sliced, backend="aot_eager")
    nn.functional.mse_loss(compiled(x), x).backward()
    torch.testing.assert_close(sliced.up.weight_slice1.grad, expected)

    for model in (whole, sliced):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        output.square().mean().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(whole(x), sliced(x))
    torch.testing.assert_close(sliced.up.weight_slice1.grad, whole.up.weight.grad[16:32], rtol=0.02, atol=1e-4)


def test_other_functions_than_products_are_refused_for_a_weight_and_computed_for_a_bias() -> None:
    _, model = partial_mlp(0, 2)
    weight: Any = model.up.weight
    assert isinstance(weight, SlicedTensor)
    assert weight.shape == (24, 6)
    assert weight.T.shape == weight.t().size() == (6, 24)
    assert (weight.ndim, weight.size(1), weight.dtype, weight.requires_grad) == (2, 6, torch.float32, True)
    with pytest.raises(NotImplementedError, match=r"exp with the sliced weight weight \(24, 6\)"):
        torch.exp(weight)
    with pytest.raises(NotImplementedError, match="indexing with slice"):
        weight[:3]
    with pytest.raises(AttributeError, match=r"with laconic\.unsliced"):
        weight.normal_()
    with pytest.raises(AttributeError, match=r"with laconic\.unsliced"):
        nn.init.zeros_(model.up.bias)
    with pytest.raises(ValueError, match=r"the input is torch\.float64, but weight \(24, 6\) is torch\.float32"):
        model(torch.randn(2, 6, dtype=torch.float64))
    x = torch.randn(3, 24)
    assert torch.equal(x + model.up.bias, x + model.up.bias.whole())  # type: ignore[operator]
    assert torch.equal(x @ weight, x @ weight.whole())
    bias = torch.ones(())
    assert torch.equal(torch.addmm(bias, x, weight), torch.addmm(bias, x, weight.whole()))
    with pytest.raises(NotImplementedError, match="addmm"):  # a scaled one is no product of a layer
        torch.addmm(bias, x, weight, beta=2)
    assert torch.equal(x[:, :6] @ weight.t(), x[:, :6] @ weight.whole().t())


def test_batches_of_products_with_fused_experts() -> None:
    class Experts(nn.Module):
        """The experts of Llama 4: transposed weights, and one product for all experts."""

        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 24))
            self.down_proj = nn.Parameter(torch.randn(3, 12, 8))

        def forward(self, x: Tensor) -> Tensor:
            gate, up = torch.bmm(x, self.gate_up_proj).chunk(2, dim=-1)
            return torch.bmm(up * nn.functional.silu(gate), self.down_proj)

    torch.manual_seed(0)
    whole = Experts()
    model = partial_updates(copy.deepcopy(whole), slice_index=2, num_slices=4, include=["mlp"])
    x = torch.randn(3, 5, 8)
    for each in (whole, model):
        each(x).square().sum().backward()
    for name, gradient in whole_gradients(model).items():
        torch.testing.assert_close(gradient, whole.get_parameter(name).grad * active_mask(model)[name])
