"""AdamW8bit against the tile-by-tile reference, and against itself on other numbers of ranks.

test_family.py runs it on several ranks at once.
"""

from __future__ import annotations

import copy
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import laconic.optim
from laconic.codec import tiles
from laconic.codec.tiles import Tiling
from laconic.layout.granularity import elements
from laconic.optim import AdamW8bit, adamw8bit
from laconic.optim.adamw8bit import check_outer_cut
from laconic.ragged.dtensor import DTensorShard
from tests.reference.adamw8bit import ReferenceAdamW8bit
from tests.reference.adamw8bit import blocks as reference_blocks
from tests.support.launch import on_ranks
from tests.support.sharded_net import ragged, whole

SHAPES = [(70, 96), (33, 130), (3, 40, 35), (5000,), (32, 128), (64, 63), (7,), (2, 9, 8), (1, 4097), (4100, 1), ()]
"""Tiles at every kind of edge, stacked matrices, a long vector, and small ones that keep fp32."""
FLAT = Tiling(tile=None)
"""Runs of 256 elements, for which `laconic plan layout` recommends `elements(256)`."""
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def gradient(shape: tuple[int, ...], step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient of very different magnitudes, with some zeros."""
    generator = torch.Generator().manual_seed(1000 * step + math.prod(shape))
    size = 10 ** (-6 * torch.rand(shape, generator=generator))
    return (torch.randn(shape, generator=generator) * size * (size > 1e-5)).to(dtype)


def initial(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def stepped(parameters: list[Any], steps: int = 4, **options: Any) -> AdamW8bit:
    """An optimizer after some steps on plain parameters, with a learning rate that changes."""
    optimizer = AdamW8bit(parameters, **HYPER | options)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = HYPER["lr"] / (step + 1)
        for parameter in parameters:
            parameter.grad = gradient(tuple(parameter.shape), step, parameter.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("dtype", "block", "panel"),
    [
        (torch.bfloat16, Tiling(), 2**18),
        (torch.bfloat16, Tiling(tile=None, flat=60), 500),
        (torch.float32, Tiling(tile=5, flat=17), 1),
    ],
)
def test_equals_the_reference_to_the_bit(
    dtype: torch.dtype, block: Tiling, panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any working memory: `panel` is its elements."""
    monkeypatch.setattr(tiles, "_PANEL_NUMEL", panel)
    shapes = [(40, 35), (3, 8, 9), (300,), (32, 33), (7,), (2, 9, 2), (1, 140), (130, 1), ()]
    parameters = [nn.Parameter(initial(shape).to(dtype)) for shape in shapes]
    optimizer = stepped(parameters, block=block, min_8bit_size=100)
    expected = [initial(shape).to(dtype) for shape in shapes]
    reference = ReferenceAdamW8bit(expected, **HYPER, tile=block.tile, flat=block.flat, min_8bit_size=100)
    for step in range(4):
        reference.lr = HYPER["lr"] / (step + 1)
        reference.step([gradient(shape, step, dtype) for shape in shapes])
    for parameter, value, states in zip(parameters, expected, reference.state, strict=True):
        shape = tuple(parameter.shape)
        assert torch.equal(parameter, value), shape
        state = optimizer.state[parameter]
        if "m" in states:
            assert torch.equal(state["exp_avg"], states["m"]), shape
            assert torch.equal(state["exp_avg_sq"], states["v"]), shape
            continue
        for index, block_ in enumerate(reference_blocks(shape, block.tile, block.flat)):
            for moment, (codes, scale) in zip(("exp_avg", "exp_avg_sq"), states[str(block_)], strict=True):
                view = (-1, shape[-1]) if len(block_) == 2 else (-1,)
                assert torch.equal(state[moment].view(view)[block_], codes), shape
                assert torch.equal(state[f"{moment}_scale"].view(-1)[index], scale), shape


@pytest.mark.parametrize(("num_ranks", "block"), [(3, Tiling()), (7, FLAT)])
def test_the_number_of_ranks_changes_no_bit(num_ranks: int, block: Tiling) -> None:
    """Parameters, codes and scales are equal when they are joined from all ranks, of which some hold nothing.

    Those count the changes, too: all ranks must agree on whether gathered weights are stale.
    """
    for shape in SHAPES[:-1]:
        bumps: list[int] = []
        alone = nn.Parameter(initial(shape))
        expected = stepped([alone], block=block).state[alone]
        uncut = elements(256).numel(shape) if block is FLAT else AdamW8bit.granularity("", alone)
        parts = ragged(initial(shape), num_ranks, block=uncut, bump=lambda bumps=bumps: bumps.append(1))  # type: ignore[misc]
        states = []
        for part in parts:
            optimizer = AdamW8bit([part], **HYPER, block=block)
            for step in range(4):
                optimizer.param_groups[0]["lr"] = HYPER["lr"] / (step + 1)
                part.grad = part.like(part.spec.part_of(gradient(shape, step)).clone())
                optimizer.step()
            states.append(optimizer.state[part])
        assert torch.equal(whole(parts), alone), shape
        assert len(bumps) == 4 * num_ranks, shape
        for key, value in expected.items():
            joined = whole([state[key] for state in states]) if key != "step" else states[-1][key]
            assert torch.equal(joined, value), (shape, key)


def test_state_takes_two_bytes_per_parameter() -> None:
    """On the shapes of a transformer."""
    shapes = [(512, 256), (256, 256), (683, 256), (256, 683), (256,), (1000, 256)]
    optimizer = stepped([nn.Parameter(torch.zeros(shape)) for shape in shapes], steps=1)
    state_bytes = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert state_bytes <= 2.2 * sum(math.prod(shape) for shape in shapes)


def test_a_second_moment_that_is_not_zero_does_not_become_zero() -> None:
    """Otherwise the update would be a first moment divided by eps: 1e4 learning rates for a gradient of 1e-4."""
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamW8bit([weight], lr=1.0, weight_decay=0.0)
    weight.grad = torch.full((64, 64), 1e-4)
    weight.grad[0, 0] = 1.0
    for _ in range(5):
        optimizer.step()
    assert weight.abs().max() < 10


def test_granularity() -> None:
    shapes = {(100, 7): 7, (100, 70): 32 * 70, (20, 300): 20 * 300, (9, 40, 35): 32 * 35, (9,): 1, (5000,): 256}
    for shape, block in {**shapes, (): 1, (0, 4): 1}.items():
        assert AdamW8bit.granularity("", torch.empty(shape)) == block, shape
    assert AdamW8bit.granularity("", torch.empty(100, 70), block=Tiling(tile=None, flat=64)) == 64


@on_ranks(1)
def test_a_cut_block_and_other_sharding_are_refused_with_the_remedy() -> None:
    matrix = ragged(initial((70, 96)), 3, block=96)[0]
    with pytest.raises(ValueError, match=r"t of shape \(70, 96\) is cut .* 3072 .*granularity=laconic\.rows\(32\)"):
        AdamW8bit([matrix])
    vector = ragged(initial((5000,)), 3, block=32)[0]
    with pytest.raises(ValueError, match=r"granularity=laconic\.elements\(256\)"):
        AdamW8bit([vector])
    AdamW8bit([matrix, vector], block=Tiling(tile=None, flat=1))
    AdamW8bit([matrix], min_8bit_size=6721)
    with pytest.raises(ValueError, match="not contiguous"):
        AdamW8bit([nn.Parameter(torch.zeros(4, 4).t()[:, :2])])
    foreign = distribute_tensor(torch.zeros(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(ValueError, match=r"DTensor of shape \(4, 4\).*laconic\.fully_shard"):
        AdamW8bit([nn.Parameter(foreign)])


def shard_of(shape: tuple[int, ...], *axes: tuple[int, int]) -> DTensorShard:
    """The first rank's shard of a tensor; each axis has a number of ranks and cuts a dim."""
    mesh: Any = SimpleNamespace(size=lambda axis: axes[axis][0])
    placements = tuple(Shard(dim) for _, dim in axes)
    nothing = (0,) * len(shape)
    return DTensorShard(mesh, placements, tuple(range(len(axes))), shape, nothing, shape)


ACCEPTED = [
    ((128, 96), (2, 0)),
    ((127, 96), (2, 0)),
    ((7, 63), (2, 1)),
    ((5, 64, 7), (2, 0)),
    ((4, 16, 7), (2, 0)),
    ((5, 64, 7), (2, 1)),
    ((5, 7, 64), (2, 2)),
    ((512,), (2, 0)),
    ((128, 96), (2, 0), (2, 0)),
]
REFUSED = [
    (((86, 128), (2, 0)), r"at \[43\] of dim 0.*Shard\(1\), or a size of dim 0 that is a multiple of 2 x 32; or"),
    (((96, 80), (2, 1)), r"at \[40\] of dim 1.* or block=Tiling\(tile=8, flat=256\)"),
    (((5, 48, 7), (2, 1)), r"at \[24\] of dim 1.* a multiple of 2 x 32"),
    (((5, 16, 7), (2, 0)), r"at \[3\] of dim 0.* a multiple of 2 x 2, or block=Tiling\(tile=16"),
    (((13, 48, 7), (4, 0)), r"at \[4, 8, 12\] of dim 0.*accepts"),  # torch would cut 20 rows of scales otherwise
    (((500,), (2, 0)), r"at \[250\] of dim 0.* a multiple of 2 x 256; or use torch.optim.AdamW for it"),
]


def test_cuts_of_other_axes_between_blocks_are_accepted_and_others_refused() -> None:
    for shape, *axes in ACCEPTED:
        check_outer_cut(shard_of(shape, *axes), Tiling(), "w")  # type: ignore[arg-type]
    for (shape, *axes), message in REFUSED:
        with pytest.raises(ValueError, match=rf"w of shape .* is cut over another mesh axis as well.*{message}"):
            check_outer_cut(shard_of(shape, *axes), Tiling(), "w")  # type: ignore[arg-type]


def test_state_dicts_keep_their_types() -> None:
    """Codes and scales keep their types, where torch takes the parameter's. The loaded state is a copy, and works."""
    parameters = [nn.Parameter(initial(shape).bfloat16()) for shape in SHAPES]
    optimizer = stepped(parameters, steps=2)
    saved = copy.deepcopy(optimizer.state_dict())
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    other = AdamW8bit(twins, lr=1.0)
    other.load_state_dict(saved)
    assert other.param_groups[0]["betas"] == HYPER["betas"]
    for one, two in zip(parameters, twins, strict=True):
        assert optimizer.state[one].keys() == other.state[two].keys()
        for key, value in optimizer.state[one].items():
            assert other.state[two][key].dtype == value.dtype
            assert torch.equal(other.state[two][key], value)
    for instance, own in [(optimizer, parameters), (other, twins)]:
        for parameter in own:
            parameter.grad = gradient(tuple(parameter.shape), 2, torch.bfloat16)
        instance.step()
    assert all(torch.equal(one, two) for one, two in zip(parameters, twins, strict=True))
    assert torch.equal(saved["state"][0]["step"], torch.tensor(2.0))


def test_parameters_without_gradient_do_not_change() -> None:
    one, two = nn.Parameter(initial((70, 96))), nn.Parameter(initial((70, 96)))
    optimizer = AdamW8bit([{"params": [one]}, {"params": [two], "lr": 0.5}], lr=0.1)

    def closure() -> float:
        one.grad = torch.ones_like(one)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert not optimizer.state[two]
    assert torch.equal(two, initial((70, 96)))
    assert not torch.equal(one, initial((70, 96)))


def test_without_triton_a_device_takes_the_torch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, on_device = ([nn.Parameter(initial(shape)) for shape in SHAPES] for _ in range(2))
    stepped(expected)
    monkeypatch.setitem(sys.modules, "laconic.optim.adamw8bit_triton", None)
    monkeypatch.delattr(laconic.optim, "adamw8bit_triton", raising=False)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    adamw8bit._kernels.cache_clear()
    try:
        stepped(on_device)
    finally:
        adamw8bit._kernels.cache_clear()
    assert all(torch.equal(one, two) for one, two in zip(on_device, expected, strict=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_the_torch_version(dtype: torch.dtype) -> None:
    """With triton this tests the fused kernel, without it the torch version on the device."""
    on_cpu = [nn.Parameter(initial(shape).to(dtype)) for shape in SHAPES]
    on_gpu = [nn.Parameter(initial(shape).to(dtype).cuda()) for shape in SHAPES]
    optimizers = [AdamW8bit(on_cpu, **HYPER), AdamW8bit(on_gpu, **HYPER)]
    for step in range(4):
        for optimizer, parameters in zip(optimizers, (on_cpu, on_gpu), strict=True):
            for parameter in parameters:
                parameter.grad = gradient(tuple(parameter.shape), step, dtype).to(parameter.device)
            optimizer.step()
    for one, two in zip(on_cpu, on_gpu, strict=True):
        assert torch.equal(one, two.cpu()), tuple(one.shape)
        for key, value in optimizers[0].state[one].items():
            assert torch.equal(value, optimizers[1].state[two][key].cpu()), (tuple(one.shape), key)
