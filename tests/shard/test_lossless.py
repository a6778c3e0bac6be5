"""Weights that cross in few bits without loss: training has the bits of training with exact crossings."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
import laconic.optim
from laconic.checkpoint import load_checkpoint, save_checkpoint
from laconic.shard.crossing import CopyState, LosslessDifferences
from laconic.shard.policies import Precision, ShardPolicy
from tests.shard.test_crossing import FailsInBackward
from tests.shard.test_scaled import converted
from tests.shard.test_scaled import make as make_wide
from tests.shard.wire_helpers import computed_weights, crossings, states
from tests.support.launch import on_ranks, run_ranks
from tests.support.partial_models import partial_net
from tests.support.sharded_net import Net, buckets, build, full_parameters, inputs, moved, shard, squared_error

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


def assert_bits(program: Program, *, make_optimizer: Any = adamw, make: Any = Net, **policies: Any) -> Any:
    """Assert that a program yields the same bits with lossless crossings, and return the model that had them."""
    seen = {}
    predicted = laconic.Wire(weights="lossless", prediction=True)
    for name, wire in {"exact": "exact", "predicted": predicted, "lossless": "lossless"}.items():
        model = shard(build(make), **{"cache": "host", "mp_policy": HALF, **policies, "wire": wire})
        seen[name] = list(program(model, make_optimizer(model)))
    for number, (want, *others) in enumerate(zip(*seen.values(), strict=True)):
        for got in others:
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


def train(model: Any, optimizer: torch.optim.Optimizer, *, steps: int = 4) -> Iterator[Any]:
    for seed in range(steps):
        yield step(model, optimizer, seed)
        yield computed_weights(model)
    assert all(each.number >= steps - 1 for each in crossings(model)), "all but the first crossing are differences"


@pytest.mark.heavy
@on_ranks(4, local=2)
def test_every_placement_has_the_bits_of_exact_crossings() -> None:
    assert_bits(train, cache="device")
    assert_bits(train, cache="rank")
    assert_bits(train, cache=laconic.Cache(where="host", device_budget_bytes=2048))
    assert_bits(train, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_bits(train, reshard_after_forward=False)
    assert_bits(train, shares=[3.0, 1.0, 2.5, 2.0])
    assert_bits(train, cache=laconic.Cache(where="auto", device_bytes=9_000, host_bytes=3_000))
    assert_bits(train, checks=laconic.Checks(interval=2, on_damage="regather"))


@pytest.mark.heavy
@on_ranks(3, local=1)
def test_every_optimizer_has_the_bits_of_exact_crossings() -> None:
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return laconic.optim.Muon(laconic.optim.matrices_and_rest(model), lr=1e-2)

    def eight_bits(model: nn.Module) -> torch.optim.Optimizer:
        return laconic.optim.AdamW8bit(model.parameters(), lr=1e-2)

    assert_bits(train, make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    assert_bits(train, make_optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-5))
    assert_bits(train, make_optimizer=muon)
    assert_bits(train, make_optimizer=eight_bits, granularity=laconic.optim.AdamW8bit.granularity)
    for param_dtype, reduce_dtype in (
        (torch.float16, torch.float32), (torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16),
    ):  # fmt: skip
        assert_bits(train, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype))
    assert_bits(train, make=lambda: Net().to(torch.bfloat16))


ODD_VALUES = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-40, -1e-40, 3e38, 1.0])


def walk(model: Any, optimizer: torch.optim.Optimizer, *, steps: int) -> Iterator[Any]:
    """Events in a random order, the same on all ranks."""
    draw = random.Random(1)
    good = {name: value.clone() for name, value in model.state_dict().items()}

    def edit(change: Callable[[Tensor], Any]) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                change(parameter.to_local())

    def write_odd_values(local: Tensor) -> None:
        places = torch.arange(0, local.numel(), 5)
        local.view(-1)[places] = ODD_VALUES[places % len(ODD_VALUES)]

    for seed in range(steps):
        event = draw.choice(["step"] * 6 + ["skip", "accumulate", "fail", "edit", "odd", "state", "look", "forget"])
        if event == "accumulate":
            yield backward(model, seed + 1000, 0.5)
        if event == "skip":
            yield backward(model, seed)
            optimizer.zero_grad()
        elif event == "fail":
            x, y = inputs(seed, dist.get_rank())
            with pytest.raises(RuntimeError, match="on purpose"):
                squared_error(model, (FailsInBackward.apply(x.requires_grad_()), y)).backward()
            optimizer.zero_grad()
        elif event == "edit":
            edit(lambda local: local.mul_(1.25))
            yield computed_weights(model)
        elif event == "odd":
            edit(write_odd_values)
            yield computed_weights(model)
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
        assert is_exact_in_bf16(model), (seed, event)


def is_exact_in_bf16(model: Any) -> bool:
    exact = full_parameters(model)
    return all(torch.equal(value, exact[name].bfloat16()) for name, value in computed_weights(model).items())


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", [(2, 2), (3, 1)], ids=str)
def test_whatever_happens_between_steps_the_bits_are_the_same(mesh: tuple[int, int]) -> None:
    run_ranks(job_walk, mesh[0] * mesh[1], 24, local=mesh[1])


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_the_bits_are_the_same_for_500_steps() -> None:
    run_ranks(job_walk, 4, 500, local=2, timeout_s=500)


def job_walk(steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an edit is as good as a step: nothing warns of it
        assert_bits(partial(walk, steps=steps), make=lambda: Net(2))


@pytest.mark.heavy
@on_ranks(4, local=1)
def test_replicas_islands_and_partial_updates_have_the_bits_of_exact_crossings() -> None:
    mesh = laconic.init_mesh("cpu", islands=2, nodes=2, local=1)

    def between_syncs(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        local = laconic.LocalSteps(model, optimizer, mesh=mesh, every=3)
        for seed in range(8):
            yield backward(model, seed)
            local.step()
            optimizer.zero_grad()
            yield computed_weights(model)

    assert_bits(train, mesh=mesh)
    assert_bits(between_syncs, mesh=mesh)
    assert_bits(train, make=lambda: partial_net(slice_index=1, num_slices=2))


class RunsOften(nn.Module):
    """A unit that runs several times, so that sums of one bucket are under way together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = (nn.Linear(40, 40) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            x = torch.tanh(self.block(x))
        return self.last(x)


@pytest.mark.parametrize("axes", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_sums_of_one_bucket_that_are_under_way_together_have_the_bits_of_exact_ones(axes: tuple[int, int]) -> None:
    run_ranks(job_sums_together, math.prod(axes), axes, local=1)


def job_sums_together(axes: tuple[int, int]) -> None:
    mesh = laconic.init_mesh("cpu", islands=axes[0], nodes=axes[1], local=1)
    seen = []
    for gradients in ("exact", "lossless"):
        net = build(RunsOften)
        units = [net.first, net.block, net.last]
        model = shard(net, units=units, mesh=mesh, wire=laconic.Wire(gradients=gradients))  # type: ignore[arg-type]
        draw = torch.Generator().manual_seed(dist.get_rank())
        for number in range(6):
            model.set_is_last_backward(number % 3 == 2)
            model(torch.randn(8, 40, generator=draw)).square().mean().backward()
        seen.append({name: each.grad.to_local().clone() for name, each in model.named_parameters()})
    assert_equal(seen[1], seen[0], "gradients")


@on_ranks(2, local=1)
def test_weights_in_scaled_formats_cross_without_loss() -> None:
    """Bytes of float8 and of nibbles with their scales, and tensors that convert themselves in chunks."""
    for weight_format in ("mxfp8", "nvfp4"):
        model = assert_bits(train_alone, make=lambda f=weight_format: converted(make_wide(), f))
        packed = [each for each in crossings(model) if each.bucket.form.is_packed]
        assert packed
        assert all(each.number == 3 for each in packed)


def train_alone(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for seed in range(4):
        yield step(model, optimizer, seed)


@on_ranks(2, local=1)
def test_it_sends_fewer_bytes_the_smaller_the_steps_are() -> None:
    """Of a net with matrices that are large enough for tables and scales to be few."""
    bits = {lr: bits_of_a_step("lossless", lr, seeds=range(5)) for lr in (1e-3, 1e-4, 1e-6)}
    assert bits[1e-3] < 7
    assert bits[1e-4] < 0.7 * bits[1e-3]
    assert bits[1e-6] < 0.4 * bits[1e-4]


@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32], ids=str)
@on_ranks(3, local=1)
def test_gradients_cross_without_loss_in_fewer_bits_and_need_no_cache(reduce_dtype: torch.dtype) -> None:
    """Weights may be of 32 bits, too."""
    seen = {}
    for gradients in ("exact", "lossless"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(96, 320), nn.Tanh(), nn.Linear(320, 96))
        wire = laconic.Wire(gradients=gradients)  # type: ignore[arg-type]
        model = shard(net, units=[], mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype), wire=wire)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            with moved(model) as m:
                model(torch.randn(16, 96, generator=draw)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen[gradients] = m.snapshot.total("node", "gradients", "sent"), full_parameters(model)
    (exact_bytes, exact_weights), (coded_bytes, weights) = seen.values()
    assert_equal(weights, exact_weights, "weights")
    assert coded_bytes < {torch.bfloat16: 0.75, torch.float32: 0.88}[reduce_dtype] * exact_bytes


@on_ranks(2, local=1)
def test_the_last_differences_predict_the_next_ones() -> None:
    """Of a batch that comes again and again, so that steps are alike."""
    plain, predicted = (
        bits_of_a_step(laconic.Wire(weights="lossless", prediction=is_on), 3e-3, seeds=[0] * 8)
        for is_on in (False, True)
    )
    assert predicted < plain - 1


def bits_of_a_step(wire: Any, lr: float, *, seeds: Sequence[int]) -> float:
    """The bits that a weight takes in the last of some steps."""
    model = shard(build(lambda: Net(2, 96, 384)), cache="host", mp_policy=HALF, wire=wire)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    *before, last = seeds
    for seed in before:
        step(model, optimizer, seed)
    with moved(model) as m:
        step(model, optimizer, last)
    numel = sum(bucket.layout.shard_numel for bucket in buckets(model))
    return 8 * m.snapshot.total("node", "weights", "sent") / numel


@on_ranks(2, local=1)
def test_an_evaluation_in_inference_mode_takes_nothing_from_later_steps() -> None:
    """Also where it comes first, and where it brings new weights."""
    assert_bits(evaluate_between_steps)


def evaluate_between_steps(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    for seed in range(4):
        with torch.inference_mode():
            yield squared_error(model, inputs(seed, dist.get_rank())).clone()
        yield step(model, optimizer, seed)


@pytest.mark.parametrize("prediction", [False, True])
@on_ranks(2, local=1)
def test_a_copy_that_is_lost_or_damaged_crosses_exactly(prediction: bool) -> None:
    wire = laconic.Wire(weights="lossless", prediction=prediction, exact_every=3)
    model = shard(build(), cache="host", mp_policy=HALF, wire=wire)
    optimizer = adamw(model)
    for seed in range(2):
        step(model, optimizer, seed)
    by_name = {each.bucket.unit_name: each for each in crossings(model)}
    lost, damaged = by_name["blocks.0"], by_name["blocks.1"]
    if dist.get_rank() == 1:
        lost.forget()
        damaged.bucket.node_shard.buffer().view(torch.int16)[0] ^= 1  # by an ulp, which no size tells
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step(model, optimizer, 2)
        assert lost.number == 0
        assert damaged.number == 2
        step(model, optimizer, 3)
    assert any("different copies of 1 buckets" in str(each.message) for each in seen)
    assert is_exact_in_bf16(model)


@on_ranks(2, local=1)
def test_a_message_that_did_not_fit_is_told_before_a_run_is_saved() -> None:
    """A device finds out, and the host reads it later: with the next message, or when a state dict is taken."""
    model = shard(build(), units=[], cache="host", mp_policy=HALF, wire="lossless")
    optimizer = adamw(model)
    for seed in range(3):
        step(model, optimizer, seed)
    (victim,) = crossings(model)
    assert isinstance(victim, LosslessDifferences)
    for fails in (model.state_dict, model.unshard):
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)  # so that the weights cross
        victim._faults.append(torch.ones(1, dtype=torch.int32))
        with pytest.raises(ValueError, match="does not fit the held values"):
            fails()
        assert victim.state is CopyState.LOST
        model.reshard()
        model.state_dict()  # a fault raises once, and not again
        step(model, optimizer, 3)
        assert victim.number == 0, "the weights crossed exactly"
        step(model, optimizer, 4)
        assert is_exact_in_bf16(model)


@pytest.mark.machine
@pytest.mark.parametrize("prediction", [False, True])
@on_ranks(2, local=1)
def test_a_difference_that_is_read_in_part_is_never_a_base(prediction: bool) -> None:
    """One rank is interrupted while it reads a difference. All ranks begin anew with an exact crossing."""
    wire = laconic.Wire(weights="lossless", prediction=prediction)
    model = shard(build(), units=[], cache="host", mp_policy=HALF, wire=wire)
    optimizer = adamw(model)
    for seed in range(3):
        step(model, optimizer, seed)
    (victim,) = crossings(model)
    if dist.get_rank() == 0:
        reading = mock.patch("laconic.shard.crossing.decode_in_pieces", side_effect=KeyboardInterrupt)
        with reading, pytest.raises(KeyboardInterrupt):
            model.unshard()
        assert victim.state is CopyState.LOST
    else:
        model.unshard()
    model.reshard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert is_exact_in_bf16(model)
    assert victim.number == 0
    for seed in range(3, 5):
        step(model, optimizer, seed)
    assert is_exact_in_bf16(model)
    assert victim.number > 0


@on_ranks(4, local=2)
def test_a_resumed_run_has_the_bits_of_the_one_that_saved(tmp_path: Path) -> None:
    model = shard(build(), cache="host", mp_policy=HALF, wire="lossless-4bit")
    optimizer = adamw(model)
    for seed in range(3):
        step(model, optimizer, seed)
    save_checkpoint(tmp_path, 3, model=model, optimizer=optimizer, extra={})
    resumed = shard(build(seed=7), cache="host", mp_policy=HALF, wire="lossless-4bit")
    again = adamw(resumed)
    assert load_checkpoint(tmp_path, model=resumed, optimizer=again) is not None
    for seed in range(3, 6):
        assert torch.equal(step(model, optimizer, seed), step(resumed, again, seed))
    for name, value in full_parameters(model).items():
        assert torch.equal(full_parameters(resumed)[name], value)


@on_ranks(2, local=1)
def test_refusals_name_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"is gathered in torch\.float32.*mp_policy=MixedPrecisionPolicy"):
        shard(build(), cache="host", wire="lossless")
    with pytest.raises(ValueError, match=r"sends differences to the copies.*cache='none' keeps none; use cache='host'"):
        shard(build(), mp_policy=HALF, wire="lossless")
    frozen = build().requires_grad_(False)
    frozen.out.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"out\.weight is gathered in torch\.float32"):
        shard(frozen, cache="host", wire="lossless")
    with pytest.raises(ValueError, match=r"is reduced in torch.float64; pass mp_policy=MixedPrecisionPolicy\(reduce_"):
        shard(build(lambda: Net().double()), wire=laconic.Wire(gradients="lossless"))
    replicas = laconic.init_mesh("cpu", islands=2, nodes=1, local=1)
    with pytest.raises(ValueError, match=r"is reduced in torch.float64"):
        shard(build(lambda: Net().double()), mesh=replicas, wire=laconic.Wire(gradients="lossless"))
    with pytest.raises(ValueError, match=r"prediction=True\) needs weights='lossless', whose differences it predicts"):
        laconic.Wire(weights="int4", prediction=True)


def test_a_job_that_gathers_32_bits_is_refused() -> None:
    keys: dict[str, Any] = {"cache": laconic.Cache(where="host"), "wire": laconic.Wire.of("lossless")}
    with pytest.raises(ValueError, match=r"patterns of 16 bits or fewer, but param_dtype='float32'"):
        ShardPolicy(**keys, precision=Precision(param_dtype="float32"))
    assert laconic.Wire.of("lossless-2bit").for_optimizer("muon").gradients == "int8"
    assert laconic.Wire.of("lossless-2bit").for_optimizer("adamw").gradients == "int2"
