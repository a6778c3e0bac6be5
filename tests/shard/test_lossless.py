"""Weights that cross in few bits without loss: training has the bits of training with exact crossings."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
import laconic.optim
from laconic.codec import kernels
from laconic.codec.lossless import Ulps
from laconic.shard.crossing import CopyState
from laconic.shard.policies import Precision, ShardPolicy
from tests.shard.test_scaled import converted
from tests.shard.test_scaled import make as make_wide
from tests.shard.wire_helpers import computed_weights, crossings, is_exact, states
from tests.support.launch import on_ranks
from tests.support.partial_models import partial_net
from tests.support.sharded_net import (
    FailsInBackward,
    Net,
    buckets,
    build,
    full_parameters,
    inputs,
    moved,
    shard,
    squared_error,
)

FLOAT16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Program = Callable[[Any, torch.optim.Optimizer], Iterator[Any]]
"""Trains a model, and yields what must be equal: losses, and weights with which it computes."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def backward(model: Any, seed: int, scale: float = 1.0) -> Tensor:
    loss = squared_error(model, inputs(seed, dist.get_rank())) * scale
    loss.backward()
    return loss.detach()


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    loss = backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()
    return loss


Small = partial(Net, 1)
WEIGHTS = laconic.Wire(weights="lossless")


def assert_bits(
    program: Program,
    *,
    make_optimizer: Any = adamw,
    make: Any = Small,
    wire: Any = WEIGHTS,
    islands: int = 1,
    **policies: Any,
) -> Any:
    """Assert that a program yields the same bits with lossless crossings, and return the model that had them."""
    seen = []
    for each in ("exact", wire):
        mesh = laconic.init_mesh("cpu", islands=islands)
        model = shard(build(make), **{"mesh": mesh, "cache": "host", "mp_policy": HALF, **policies, "wire": each})
        seen.append(list(program(model, make_optimizer(model))))
    for number, (want, got) in enumerate(zip(*seen, strict=True)):
        assert_equal(got, want, str(number))
    assert states(model) == {CopyState.EXACT}
    return model


def assert_equal(got: Any, want: Any, where: str) -> None:
    if isinstance(want, dict):
        for name, value in want.items():
            assert_equal(got[name], value, f"{where}: {name}")
    else:
        got, want = (each.contiguous().view(-1).view(torch.uint8) for each in (got, want))
        assert torch.equal(got, want), where


def train(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """An evaluation in inference mode comes first, and where it brings new weights."""
    for seed in range(3):
        with torch.inference_mode():
            yield squared_error(model, inputs(seed, dist.get_rank())).clone()
        yield step(model, optimizer, seed)
        yield computed_weights(model)
    assert all(each.number >= 2 for each in crossings(model)), "all but the first crossing are differences"


def train_alone(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for seed in range(3):
        yield step(model, optimizer, seed)
    assert any(each.bucket.form.is_packed for each in crossings(model)) or not crossings(model)
    assert all(each.number == 2 for each in crossings(model))


def between_syncs(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    local = laconic.LocalSteps(model, optimizer, mesh=laconic.init_mesh("cpu", islands=2), every=2)
    for seed in range(3):
        yield backward(model, seed)
        local.step()
        optimizer.zero_grad()
        yield computed_weights(model)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return laconic.optim.Muon(laconic.optim.matrices_and_rest(model), lr=1e-2)


def eight_bits(model: nn.Module) -> torch.optim.Optimizer:
    return laconic.optim.AdamW8bit(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("world", "program", "options"),
    [
        (2, train, {"cache": "rank", "offload_policy": CPUOffloadPolicy(pin_memory=False), "shares": [3.0, 1.0]}),
        (2, train, {"cache": "device", "wire": "lossless", "make_optimizer": muon, "mp_policy": FLOAT16}),
        (2, train, {"make_optimizer": eight_bits, "granularity": laconic.optim.AdamW8bit.granularity}),
        (2, train, {"make": partial(partial_net, slice_index=1, num_slices=2)}),
        (2, train_alone, {"make": lambda: converted(make_wide(), "nvfp4")}),
        (4, between_syncs, {"islands": 2}),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
@on_ranks("world", local=1)
def test_training_has_the_bits_of_exact_crossings(program: Program, options: dict[str, Any]) -> None:
    """Scaled formats cross as bytes of nibbles with their scales, and tensors that convert themselves in chunks."""
    assert_bits(program, **options)


ODD_VALUES = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, -1e-40, 3e38, 1.0])


@on_ranks(4, local=2)
def test_weights_that_crossed_into_whole_buffers_may_rest_elsewhere() -> None:
    """The coder's arrays leave the buffers' memory free to go."""
    model, exact = (shard(build(), cache="rank", wire=wire, mp_policy=HALF) for wire in ("lossless", "exact"))
    optimizers = [adamw(each) for each in (model, exact)]
    places: tuple[Any, ...] = ("rank", "device", "host", "rank")
    for place in places:
        for each, optimizer in zip((model, exact), optimizers, strict=True):
            each.set_placements({"blocks.0": laconic.Placement(weights=place)})
            for seed in range(2):
                step(each, optimizer, seed)
    assert_equal(full_parameters(model), full_parameters(exact), "after all placements")


def write_odd_values(local: Tensor) -> None:
    places = torch.arange(0, local.numel(), 5)
    local.view(-1)[places] = ODD_VALUES[places % len(ODD_VALUES)]


def walk(model: Any, optimizer: torch.optim.Optimizer, *, steps: int) -> Iterator[Any]:
    """Events in a random order, the same on all ranks."""
    draw = random.Random(1)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    for seed in range(steps):
        event = draw.choice(["step"] * 6 + ["skip", "accumulate", "fail", "edit", "odd", "state", "look", "forget"])
        if event == "accumulate":
            yield backward(model, seed + 1000, 0.5)
        elif event == "skip":
            yield backward(model, seed)
            optimizer.zero_grad()
        elif event == "fail":
            x, y = inputs(seed, dist.get_rank())
            with pytest.raises(ZeroDivisionError):
                squared_error(model, (FailsInBackward.apply(x.requires_grad_()), y)).backward()
            optimizer.zero_grad()
        elif event in ("edit", "odd"):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().mul_(1.25) if event == "edit" else write_odd_values(parameter.to_local())
            yield computed_weights(model)
            if event == "odd":
                model.load_state_dict(good)
        elif event == "state":
            good = {name: value.clone() for name, value in model.state_dict().items()}
        elif event == "look":
            with torch.no_grad():
                yield model(inputs(seed, 0)[0])
        elif event == "forget":
            model.forget_copies()
        yield step(model, optimizer, seed)
        yield computed_weights(model)
        assert is_exact(model, torch.bfloat16), (seed, event)


@pytest.mark.parametrize(
    ("world", "local", "steps"), [(2, 1, 7), pytest.param(4, 2, 500, marks=pytest.mark.campaign(seconds=200))]
)
@on_ranks("world", local="local")
def test_whatever_happens_between_steps_the_bits_are_the_same(steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an edit is as good as a step: nothing warns of it
        assert_bits(partial(walk, steps=steps))


@on_ranks(2, local=1)
def test_it_sends_fewer_bytes_the_smaller_the_steps_are() -> None:
    """Of a net with matrices that are large enough for tables and scales to be few."""

    def bits_of_a_step(lr: float) -> float:
        """The bits that a weight takes in the second step."""
        model = shard(build(lambda: Net(1, 96, 384)), cache="host", mp_policy=HALF, wire="lossless")
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for seed in range(2):
            with moved(model) as m:
                step(model, optimizer, seed)
        return (
            8
            * m.snapshot.total("node", "weights", "sent")
            / sum(bucket.layout.shard_numel for bucket in buckets(model))
        )

    bits = {lr: bits_of_a_step(lr) for lr in (1e-3, 1e-6)}
    assert bits[1e-3] < 7
    assert bits[1e-6] < 0.28 * bits[1e-3]


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32], ids=str)
@on_ranks(3, local=1)
def test_gradients_cross_without_loss_in_fewer_bits_and_need_no_cache(reduce_dtype: torch.dtype) -> None:
    """Weights may be of 32 bits, too. The unit runs twice, so that sums of one bucket are under way together."""
    seen = {}
    for gradients in ("exact", "lossless"):
        net: Any = build(lambda: nn.Sequential(nn.Linear(96, 320), nn.Tanh(), nn.Linear(320, 96)))
        net.forward = lambda x, net=net: net[2](net[1](net[0](net[2](net[1](net[0](x))))))
        wire = laconic.Wire(gradients=gradients)  # type: ignore[arg-type]
        model = shard(net, units=list(net), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype), wire=wire)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            with moved(model) as m:
                for is_last in (False, True):
                    model.set_is_last_backward(is_last)
                    model(torch.randn(16, 96, generator=draw)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen[gradients] = m.snapshot.total("node", "gradients", "sent"), full_parameters(model)
    (exact_bytes, exact_weights), (coded_bytes, weights) = seen.values()
    assert_equal(weights, exact_weights, "weights")
    assert coded_bytes < {torch.bfloat16: 0.75, torch.float32: 0.88}[reduce_dtype] * exact_bytes


@on_ranks(2, local=1)
def test_a_message_that_did_not_fit_is_told_before_a_run_is_saved() -> None:
    """A device finds out, and the host reads it later: with the next message, or when a state dict is taken."""
    model = shard(build(), units=[], cache="host", mp_policy=HALF, wire="lossless")
    optimizer = adamw(model)
    for seed in range(3):
        step(model, optimizer, seed)
    (victim,) = crossings(model)
    assert isinstance(victim.coding, Ulps)
    for fails in (model.state_dict, model.unshard):
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)  # so that the weights cross
        victim.coding.faults.append(torch.ones(1, dtype=torch.int32))
        with pytest.raises(ValueError, match="does not fit the held values"):
            fails()
        assert victim.state is CopyState.LOST
        model.reshard()
        model.state_dict()  # a fault raises once, and not again
        step(model, optimizer, 3)
        assert victim.number == 0, "the weights crossed exactly"
        step(model, optimizer, 4)
        assert is_exact(model, torch.bfloat16)


@on_ranks(2, local=1)
def test_refusals_name_the_remedy() -> None:
    frozen = build().requires_grad_(False)
    frozen.out.requires_grad_(True)  # type: ignore[union-attr]
    replicas = laconic.init_mesh("cpu", islands=2, nodes=1, local=1)
    double = {"wire": laconic.Wire(gradients="lossless")}
    for model, options, message in (
        (build(), {"cache": "host"}, r"is gathered in torch\.float32.*mp_policy=MixedPrecisionPolicy"),
        (frozen, {"cache": "host"}, r"out\.weight is gathered in torch\.float32"),
        (build().double(), double, r"is reduced in torch.float64; pass mp_policy=MixedPrecisionPolicy\(reduce_"),
        (build().double(), {"mesh": replicas, **double}, r"is reduced in torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            shard(model, **{"wire": "lossless", **options})  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_kernels", lambda name: None)
        for wire in ("lossless", laconic.Wire(gradients="lossless")):
            with pytest.raises(ModuleNotFoundError, match=r"numba is not installed.*pip install numba; or use wire="):
                shard(build(), cache="host", mp_policy=HALF, wire=wire)


def test_a_job_that_gathers_32_bits_is_refused() -> None:
    keys: dict[str, Any] = {"cache": laconic.Cache(where="host"), "wire": laconic.Wire.of("lossless")}
    with pytest.raises(ValueError, match=r"patterns of 16 bits or fewer, but param_dtype='float32'"):
        ShardPolicy(**keys, precision=Precision(param_dtype="float32"))
    assert laconic.Wire.of("lossless-2bit").for_optimizer("muon").gradients == "int8"
    assert laconic.Wire.of("lossless-2bit").for_optimizer("adamw").gradients == "int2"
