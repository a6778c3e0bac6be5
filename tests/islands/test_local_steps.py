"""Local steps, around plain and sharded models, compared with the oracle and with plain training."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.codec import CODECS, Codec
from laconic.errors import JobError
from laconic.islands.fragments import fragment_of
from laconic.islands.local_steps import LocalSteps
from tests.reference.local_steps import Islands
from tests.support.launch import on_ranks, run_ranks
from tests.support.partial_models import partial_net
from tests.support.sharded_net import Net, build, shard, squared_error

Job = dict[str, Any]


def make() -> nn.Module:
    return Net(3, 9, 11)


def batch(step: int, island: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * island + rank)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def coarse(values: Tensor) -> Tensor:
    return (values * 256).round() / 256


class Coarse(Codec):
    """Values rounded one by one, as in the oracle, which codes a parameter where a fragment codes its flat buffer."""

    name, max_relative_error = "coarse", 1.0

    def payload_bytes(self, numel: int) -> int:
        return numel

    def _encode(self, values: Tensor) -> Tensor:
        return (values * 256).round().to(torch.int8).view(torch.uint8)

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        return payload.view(torch.int8).to(torch.float32) / 256


ENDS_WHOLE: Job = {"codec": Coarse(), "error_feedback": 0.5, "last_codec": "fp32"}
ENDED_WHOLE: Job = {"code": coarse, "feedback": 0.5, "last_code": torch.clone}


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, laconic.RaggedTensor) else parameter.detach()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], **tolerance: Any) -> None:
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def job_trajectory(islands: int, local: int, sharded: bool, options: Job, oracle_options: Job) -> None:
    """Take eight or more steps and compare every step with the oracle."""
    mesh = laconic.init_mesh("cpu", islands=islands, nodes=1, local=local)
    island, rank = dist.get_rank() // local, dist.get_rank() % local
    model = shard(build(make), mesh=mesh, cache="host") if sharded else build(make)
    local_steps = LocalSteps(model, adamw(model), mesh=mesh, **{"codec": "fp32", **options})
    names = dict(model.named_parameters())
    fragments = fragment_of(names, options.get("fragments", 1))
    oracle = Islands(build(make), islands, adamw, every=options["every"], fragments=fragments, **oracle_options)

    def losses(own: nn.Module, which: int, step: int) -> Tensor:
        return torch.stack([squared_error(own, batch(step, which, r)) for r in range(local)]).mean()

    for step in range(2 * options["every"] + 1):
        squared_error(model, batch(step, island, rank)).backward()
        local_steps.step()
        local_steps.zero_grad()
        oracle.step(partial(losses, step=step))
        assert_equal(values(model), values(oracle.models[island]), atol=2e-5, rtol=1e-4)
        for report in local_steps.reports:
            assert report.step == step + 1
            assert 0 < report.mean_norm <= report.drift_norm * islands**0.5 * 1.01
            assert -1.001 <= report.cosine <= 1.001
    with local_steps.outer_parameters():
        assert_equal(values(model), oracle.outer, atol=2e-5, rtol=1e-4)
        digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in values(model).values())).hexdigest()
    assert_equal(values(model), values(oracle.models[island]), atol=2e-5, rtol=1e-4)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    assert len(set(digests)) == 1, "islands hold equal outer parameters, to the bit"


@pytest.mark.parametrize(
    ("islands", "local", "sharded", "options", "oracle"),
    [
        (3, 1, False, {"every": 4}, {}),
        (2, 2, True, {"every": 6, "fragments": 3, "overlap": 1, "mixing": 0.5}, {"overlap": 1, "mixing": 0.5}),
        (2, 1, False, {"every": 3, "overlap": 2, "mixing": 0.25}, {"overlap": 2, "mixing": 0.25}),
        (3, 1, False, {"every": 2, "codec": Coarse(), "error_feedback": 0.5}, {"code": coarse, "feedback": 0.5}),
        (3, 1, False, {"every": 2, **ENDS_WHOLE, "total_steps": 5}, {**ENDED_WHOLE, "total_steps": 5}),
        (
            2,
            1,
            True,
            {"every": 4, "fragments": 2, "overlap": 1, **ENDS_WHOLE, "total_steps": 9},
            {"overlap": 1, **ENDED_WHOLE, "total_steps": 9},
        ),
    ],
)
def test_islands_move_as_in_one_process(islands: int, local: int, sharded: bool, options: Job, oracle: Job) -> None:
    run_ranks(job_trajectory, islands * local, islands, local, sharded, options, oracle, local=local)


@on_ranks(2, local=2)
def test_local_steps_equal_plain_training_in_the_limits() -> None:
    rank = dist.get_rank()
    # One island, outer lr 1, no momentum: plain training, to rounding.
    mesh = laconic.init_mesh("cpu", islands=1, nodes=1, local=2)
    model, plain = shard(build(make), mesh=mesh), build(make)
    alone = LocalSteps(model, adamw(model), mesh=mesh, every=2, outer=partial(torch.optim.SGD, lr=1.0))
    optimizer = adamw(plain)
    for step in range(4):
        squared_error(model, batch(step, 0, rank)).backward()
        torch.stack([squared_error(plain, batch(step, 0, r)) for r in range(2)]).mean().backward()
        for stepper in (alone, optimizer):
            stepper.step()
            stepper.zero_grad()
        assert_equal(values(model), values(plain), atol=1e-5, rtol=1e-5)

    # every = 1 with SGD inside, outer lr 1 and no momentum: data-parallel SGD, to rounding.
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=1)
    model, plain = build(make), build(make)
    local = LocalSteps(model, sgd(model), mesh=mesh, every=1, codec="fp32", outer=partial(torch.optim.SGD, lr=1.0))
    optimizer = sgd(plain)
    for step in range(4):
        squared_error(model, batch(step, rank)).backward()
        torch.stack([squared_error(plain, batch(step, island)) for island in range(2)]).mean().backward()
        for stepper in (local, optimizer):
            stepper.step()
            stepper.zero_grad()
        assert_equal(values(model), values(plain), atol=1e-6, rtol=1e-5)


@on_ranks(3, local=1)
def test_every_codec_keeps_islands_equal_and_its_bytes() -> None:
    mesh = laconic.init_mesh("cpu", islands=3, nodes=1, local=1)
    for name, codec in CODECS.items():
        # Islands build their models with different seeds, and all start from island 0's parameters.
        model = build(make, seed=dist.get_rank())
        local = LocalSteps(
            model, adamw(model), mesh=mesh, every=2, codec=name, error_feedback=name in ("e3m0", "top64")
        )
        first = build(make, seed=0)
        assert_equal(values(model), values(first), atol=0, rtol=0)
        counter = laconic.Cluster.of(mesh).traffic
        before = counter.snapshot()
        for step in range(6):
            squared_error(model, batch(step, dist.get_rank())).backward()
            local.step()
            local.zero_grad()
        numel = sum(p.numel() for p in model.parameters())
        trips = codec.payload_bytes(numel) if codec.is_sparse else 2 * codec.payload_bytes(-(-numel // 3))
        want = 3 * 2 * trips  # syncs, other islands
        assert (counter.snapshot() - before).total("island", "outer", "sent") == want
        (report,) = local.reports
        assert report.codec_error <= codec.max_relative_error
        assert (report.codec_error == 0) == (name == "fp32")
        digests: list[Any] = [None] * 3
        flat = torch.cat([value.view(-1) for value in values(model).values()])
        dist.all_gather_object(digests, hashlib.sha256(flat.numpy().tobytes()).hexdigest())
        assert len(set(digests)) == 1, "equal to the bit, whatever the codec loses"


@on_ranks(3, local=1)
def test_the_mean_of_islands_that_stay_weighs_by_tokens() -> None:
    """Islands that stay, with other numbers of tokens: the mean weighs by all tokens since the last sync."""
    mesh = laconic.init_mesh("cpu", islands=3, nodes=1, local=1)
    island = dist.get_rank()
    model = build(make)
    plain = partial(torch.optim.SGD, lr=1.0)  # the outer step is the mean
    local = LocalSteps(model, adamw(model), mesh=mesh, every=2, outer=plain, codec="fp32")
    for round_ in range(2):
        before = values(model)
        for step in range(2):
            squared_error(model, batch(2 * round_ + step, island)).backward()
            if step == 1:
                local.optimizer.step()
                own = values(model)
                local.advance(tokens=10 ** (2 - island))
            else:
                local.step(tokens=island)
            local.zero_grad()
        everywhere: list[Any] = [None] * 3
        dist.all_gather_object(everywhere, own)
        tokens = [100 + 0, 10 + 1, 1 + 2]
        for name, start in before.items():
            drifts = [weight * (start - each[name]) for weight, each in zip(tokens, everywhere, strict=True)]
            want = start - torch.stack(drifts).sum(0) / sum(tokens)
            torch.testing.assert_close(values(model)[name], want, atol=1e-6, rtol=1e-5, msg=name)


@on_ranks(4, local=2)
def test_a_resumed_run_equals_the_unbroken_one() -> None:
    options: Job = {"every": 4, "fragments": 2, "overlap": 1, "codec": "e3m0", "error_feedback": True}
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=2)
    rank, island = dist.get_rank() % 2, dist.get_rank() // 2

    def start(seed: int) -> tuple[Any, LocalSteps]:
        model = shard(build(make, seed=seed), mesh=mesh)
        return model, LocalSteps(model, adamw(model), mesh=mesh, **options)

    def run(model: Any, local: LocalSteps, steps: range) -> None:
        for step in steps:
            squared_error(model, batch(step, island, rank)).backward()
            local.step(tokens=1 + (2 + 3 * island) * step)  # the next sync weighs by all of them
            local.zero_grad()

    model, unbroken = start(0)
    run(model, unbroken, range(7))
    saved = {
        k: v.to_local().clone() if isinstance(v, laconic.RaggedTensor) else v for k, v in unbroken.state_dict().items()
    }
    inner = {name: p.to_local().clone() for name, p in model.named_parameters()}
    states = [
        {key: value.to_local().clone() if isinstance(value, laconic.RaggedTensor) else value.clone()
         for key, value in unbroken.optimizer.state[p].items()}
        for p in model.parameters()
    ]  # fmt: skip
    run(model, unbroken, range(7, 11))
    want = values(model)
    unbroken.finish()  # what is in flight, before another exchange begins

    again, resumed = start(1)
    run(again, resumed, range(1))  # creates the optimizer state that is filled below
    live = resumed.state_dict()
    resumed.load_state_dict(
        {
            k: live[k].like(v) if isinstance(live.get(k), laconic.RaggedTensor) else _like(again, k, v)
            for k, v in saved.items()
        }
    )
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            parameter.to_local().copy_(inner[name])
    for parameter, state in zip(again.parameters(), states, strict=True):
        for key, value in state.items():
            live_state = resumed.optimizer.state[parameter][key]
            (live_state.to_local() if isinstance(live_state, laconic.RaggedTensor) else live_state).copy_(value)
    run(again, resumed, range(7, 11))
    assert resumed.steps == unbroken.steps == 11
    assert_equal(values(again), want, atol=0, rtol=0)
    resumed.finish()
    with pytest.raises(ValueError, match="it is another model's"):
        resumed.load_state_dict({"steps": 1})


def _like(model: Any, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    name = key.split(".", 1)[1].removesuffix(".momentum_buffer")
    return model.get_parameter(name).like(value)


@on_ranks(1, local=1)
def test_bad_input_is_refused_by_name() -> None:
    mesh = laconic.init_mesh("cpu")
    model = build(make)
    with pytest.raises(ValueError, match=r"mixing=1.0\) must lie in \[0, 1\)"):
        LocalSteps(model, adamw(model), mesh=mesh, mixing=1.0)
    with pytest.raises(ValueError, match=r"error_feedback=1.5\) must be true, false or in \[0, 1\]"):
        LocalSteps(model, adamw(model), mesh=mesh, error_feedback=1.5)
    with pytest.raises(ValueError, match=r"last_codec='int4' needs total_steps, the inner steps of the whole run"):
        LocalSteps(model, adamw(model), mesh=mesh, last_codec="int4")
    meets = laconic.Membership(islands=2, rendezvous="127.0.0.1:1")
    with pytest.raises(ValueError, match=r"last_codec='int4' does not go with a rendezvous.*leave last_codec out"):
        LocalSteps(model, adamw(model), mesh=mesh, last_codec="int4", total_steps=9, membership=meets)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model is trainable"):
        LocalSteps(model, sgd(model), mesh=mesh)
    sliced = partial_net(0)
    adapters = nn.ModuleList([sliced.requires_grad_(False), nn.Linear(2, 2)])  # as peft adds them
    with pytest.raises(ValueError, match="no slice is trainable"):
        LocalSteps(adapters, sgd(adapters), mesh=mesh)
    model.requires_grad_(True)
    local = LocalSteps(model, adamw(model), mesh=mesh, every=1)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="training has diverged"):
        local.advance()


def job_diverged(values: list[float]) -> list[str]:
    """One element of one shard of island 1 is not a number, in the second fragment; return what each rank raises."""
    mesh = laconic.init_mesh("cpu", islands=2, nodes=1, local=2)
    messages = []
    for value in values:
        model = shard(build(make), mesh=mesh)
        local = LocalSteps(model, sgd(model), mesh=mesh, every=4, fragments=2, overlap=1)
        if dist.get_rank() == 3:
            inner = max((p for p in local.fragments[1].parameters.values()), key=lambda p: p.to_local().numel())
            inner.to_local()[0] = value
        local.advance()
        local.advance()
        with pytest.raises(JobError) as raised:
            local.advance()
        assert local.steps == 3, "sent after step 2, and known when it would be applied"
        assert not any("outer" in key for key in local.cluster.traffic.snapshot().sizes), (
            "nothing has been sent to other islands"
        )
        messages.append(str(raised.value))
    return messages


def test_a_pseudo_gradient_that_is_no_number_ends_all_ranks_of_all_islands_at_one_step() -> None:
    found = run_ranks(job_diverged, 4, [float("nan"), float("inf"), -3e38], local=2)
    assert {message for messages in found for message in messages} == {found[0][0]}
    assert "fragment 1 after step 2 is NaN, infinite or too large on island 1 (of 0 to 1)" in found[0][0]
