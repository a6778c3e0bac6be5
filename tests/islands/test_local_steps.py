"""Local steps, around plain and sharded models, compared with the oracle and with plain training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
from tests.support.codec_bounds import BOUNDS
from tests.support.launch import on_ranks, run_ranks
from tests.support.partial_models import partial_net
from tests.support.sharded_net import Net, build, shard, squared_error

PLAIN = partial(torch.optim.SGD, lr=1.0)
"""An outer step that is the mean."""


def make() -> nn.Module:
    return Net(2, 5, 7)


def batch(step: int, island: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * island + rank)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def take(model: nn.Module, stepper: Any, steps: Iterable[int], local: int = 1, tokens: int = 0) -> None:
    """Take these steps, of `LocalSteps` or of an optimizer, on the rows of this rank, one of `local` of its island.

    With `tokens`, step t has trained on 1 + `tokens` t of them.
    """
    for step in steps:
        squared_error(model, batch(step, *divmod(dist.get_rank(), local))).backward()
        stepper.step(**{"tokens": 1 + tokens * step} if tokens else {})
        stepper.zero_grad()


def flat(model: nn.Module) -> Tensor:
    """All parameters, whole, in one vector. Collective where they are sharded."""
    whole = [p.full_tensor() if isinstance(p, laconic.RaggedTensor) else p.detach() for p in model.parameters()]
    return torch.cat([value.reshape(-1) for value in whole])


def assert_same_everywhere(vector: Tensor) -> None:
    everyone = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, vector)
    assert all(torch.equal(theirs, vector) for theirs in everyone)


def coarse(values: Tensor) -> Tensor:
    return (values * 256).round() / 256


class Coarse(Codec):
    """Values rounded one by one, as in the oracle, which codes a parameter where a fragment codes its flat buffer."""

    name = "coarse"

    def payload_bytes(self, numel: int) -> int:
        return numel

    def _encode(self, values: Tensor) -> Tensor:
        return (values * 256).round().to(torch.int8).view(torch.uint8)

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        return payload.view(torch.int8).to(torch.float32) / 256


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of islands; `both` are options of LocalSteps and of the oracle, `own` and `oracle` of one of them."""

    islands: int = 2
    local: int = 1
    sharded: bool = False
    both: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)
    oracle: dict[str, Any] = field(default_factory=dict)
    held: list[set[int]] | None = None
    """The slices that each island trains, of `num_slices`; None if the model has none."""
    num_slices: int = 0
    seed: int = 0
    """Of the values that a model without slices begins with."""

    @property
    def steps(self) -> range:
        return range(2 * self.both["every"] + 1)

    def trains(self, name: str, island: int) -> bool:
        return self.held is None or "_slice" not in name or int(name[-1]) in self.held[island]

    def model(self, island: int) -> nn.Module:
        slices = None if self.held is None else self.held[island]
        model = build(make, seed=self.seed) if slices is None else partial_net(min(slices), self.num_slices)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.trains(name, island))
        return model

    def start(self, **options: Any) -> tuple[nn.Module, LocalSteps]:
        """The model of this rank, and its steps."""
        mesh = laconic.init_mesh("cpu", islands=self.islands, nodes=1, local=self.local)
        model = self.model(dist.get_rank() // self.local)
        if self.sharded:
            shard(model, None if self.held is None else [], mesh=mesh, cache="host")
        return model, LocalSteps(
            model, adamw(model), mesh=mesh, **{"codec": "fp32", **self.both, **self.own, **options}
        )


def job_path(case: Case) -> Tensor:
    """The parameters after each step, and the outer ones after the last."""
    model, local_steps = case.start()
    path = []
    for step in case.steps:
        take(model, local_steps, [step], case.local)
        path.append(flat(model))
        for report in local_steps.reports:
            assert report.step == step + 1
            if case.held is None:
                assert 0 < report.mean_norm <= report.drift_norm * case.islands**0.5 * 1.01
                assert -1.001 <= report.cosine <= 1.001
    with local_steps.outer_parameters():
        outer = flat(model)
    assert torch.equal(flat(model), path[-1])
    assert_same_everywhere(outer)
    return torch.stack([*path, outer])


ROUNDED: dict[str, Any] = {
    "own": {"codec": Coarse(), "error_feedback": 0.5},
    "oracle": {"code": coarse, "feedback": 0.5},
}
ENDS_WHOLE: dict[str, Any] = {
    "own": {**ROUNDED["own"], "last_codec": "fp32"}, "oracle": {**ROUNDED["oracle"], "last_code": torch.clone}
}  # fmt: skip
BY_HOLDERS: dict[str, Any] = {
    "both": {"every": 4, "fragments": 2, "overlap": 1},
    "own": {"outer": laconic.OuterSGD(lr=0.7, momentum=0.9, sliced_lr=0.5, sliced_momentum=0.0)},
    "oracle": {"sliced": lambda held, count: (0.5, 0.0)},
}
BY_DEFAULT: dict[str, Any] = {
    "both": {"every": 4, "fragments": 2, "overlap": 1},
    "oracle": {"sliced": lambda held, count: (0.7, 0.9 * (held / count) ** 0.5)},
}


@pytest.mark.parametrize(
    "case",
    [
        Case(islands=3, both={"every": 4}),
        Case(local=2, sharded=True, both={"every": 4, "fragments": 2, "overlap": 1, "mixing": 0.5}),
        Case(both={"every": 3, "overlap": 2, "mixing": 0.25}),
        Case(islands=3, both={"every": 2}, **ROUNDED),
        Case(islands=3, both={"every": 2, "total_steps": 5}, **ENDS_WHOLE),
        Case(sharded=True, both={"every": 4, "fragments": 2, "overlap": 1, "total_steps": 9}, **ENDS_WHOLE),
        Case(islands=3, held=[{0}, {1}, {1}], num_slices=2, **BY_HOLDERS),
        Case(held=[{0, 1}, {1}], num_slices=2, **BY_HOLDERS),
        Case(local=2, sharded=True, held=[{1, 0, 3}, {3, 2}], num_slices=4, **BY_HOLDERS),
        Case(islands=5, held=[{0}, {1}, {1}, {2, 3}, {3, 0, 1}], num_slices=4, **BY_DEFAULT),
    ],
)
def test_islands_move_as_in_one_process(case: Case) -> None:
    """After every step. Slices take outer steps of their own, by the islands that hold them."""
    names = [name for name, _ in case.model(0).named_parameters()]
    options = {**case.both, **case.oracle, "fragments": fragment_of(names, case.both.get("fragments", 1))}
    oracle = Islands(case.model(0), case.islands, adamw, trains=case.trains, **options)
    expected: list[list[Tensor]] = [[] for _ in range(case.islands)]

    def losses(own: nn.Module, island: int, step: int) -> Tensor:
        """The mean over the rows of the island's ranks."""
        return torch.stack([squared_error(own, batch(step, island, rank)) for rank in range(case.local)]).mean()

    for step in case.steps:
        oracle.step(partial(losses, step=step))
        for island, model in enumerate(oracle.models):
            expected[island].append(flat(model))
    outer = torch.cat([value.reshape(-1) for value in oracle.outer.values()])
    for rank, path in enumerate(run_ranks(job_path, case.islands * case.local, case, local=case.local)):
        want = torch.stack([*expected[rank // case.local], outer])
        torch.testing.assert_close(path, want, atol=2e-5, rtol=1e-4)


@on_ranks(3, local=1)
def test_every_codec_keeps_islands_equal_and_its_bytes() -> None:
    """To the bit, whatever the codec loses, though islands build their models with different seeds."""
    mesh = laconic.init_mesh("cpu", islands=3, nodes=1, local=1)
    counter = laconic.Cluster.of(mesh).traffic
    for name, codec in [*CODECS.items(), ("", CODECS["int4"])]:
        model = build(make, seed=dist.get_rank())
        given: dict[str, Any] = {"codec": name, "error_feedback": name in ("e2m1", "top64")} if name else {}
        local = LocalSteps(model, adamw(model), mesh=mesh, every=2, **given)
        assert torch.equal(flat(model), flat(build(make))), "all start from island 0's parameters"
        before = counter.snapshot()
        take(model, local, range(4))
        numel = flat(model).numel()
        trips = codec.payload_bytes(numel) if codec.is_sparse else 2 * codec.payload_bytes(-(-numel // 3))
        want = 2 * 2 * trips  # syncs, other islands
        assert (counter.snapshot() - before).total("island", "outer", "sent") == want
        (report,) = local.reports
        assert report.codec_error <= BOUNDS[name or "int4"]
        assert (report.codec_error == 0) == (name == "fp32")
        assert_same_everywhere(flat(model))


@on_ranks(3, local=1)
def test_the_mean_of_islands_that_stay_weighs_by_tokens() -> None:
    """By all tokens since the last sync, which differ from island to island."""
    mesh = laconic.init_mesh("cpu", islands=3, nodes=1, local=1)
    island, model = dist.get_rank(), build(make)
    local = LocalSteps(model, adamw(model), mesh=mesh, every=2, outer=PLAIN, codec="fp32")
    tokens = [100 + 0, 10 + 1, 1 + 2]
    for round_ in range(2):
        start = flat(model)
        for step in range(2):
            squared_error(model, batch(2 * round_ + step, island)).backward()
            if step == 1:
                local.optimizer.step()
                own = flat(model)
                local.advance(tokens=10 ** (2 - island))
            else:
                local.step(tokens=island)
            local.zero_grad()
        ends = [torch.empty_like(own) for _ in range(3)]
        dist.all_gather(ends, own)
        drift = torch.stack([weight * (start - end) for weight, end in zip(tokens, ends, strict=True)]).sum(0)
        torch.testing.assert_close(flat(model), start - drift / sum(tokens), atol=1e-6, rtol=1e-5)


@on_ranks(4, local=2)
def test_a_resumed_run_equals_the_unbroken_one() -> None:
    options: dict[str, Any] = {"codec": "e2m1", "error_feedback": True}
    case = Case(local=2, sharded=True, both={"every": 4, "fragments": 2, "overlap": 1}, own=options)
    run = partial(take, local=2, tokens=2 + 3 * (dist.get_rank() // 2))  # the next sync weighs by all of them

    def inner(model: Any, local: LocalSteps) -> list[Tensor]:
        states = [value for p in model.parameters() for value in local.optimizer.state[p].values()]
        return [value.detach() for value in (*model.parameters(), *states)]

    model, unbroken = case.start()
    run(model, unbroken, range(7))
    saved = {k: value.clone() if isinstance(value, Tensor) else value for k, value in unbroken.state_dict().items()}
    kept = [value.clone() for value in inner(model, unbroken)]
    run(model, unbroken, range(7, 11))
    want = flat(model)
    unbroken.finish()  # what is in flight, before another exchange begins

    again, resumed = replace(case, seed=1).start()
    run(again, resumed, range(1))  # creates the optimizer state that is filled below
    resumed.load_state_dict(saved)
    for value, was in zip(inner(again, resumed), kept, strict=True):
        value.copy_(was)
    run(again, resumed, range(7, 11))
    assert resumed.steps == unbroken.steps == 11
    assert torch.equal(flat(again), want)
    resumed.finish()
    with pytest.raises(ValueError, match="it is another model's"):
        resumed.load_state_dict({"steps": 1})


MEETS = laconic.Membership(islands=2, rendezvous="127.0.0.1:1")


@on_ranks(1, local=1)
def test_bad_input_is_refused_by_name() -> None:
    mesh = laconic.init_mesh("cpu")
    model, frozen = build(make), build(make).requires_grad_(False)
    adapters = nn.ModuleList([partial_net(0).requires_grad_(False), nn.Linear(2, 2)])  # as peft adds them
    refusals: list[tuple[nn.Module, dict[str, Any], str]] = [
        (model, {"every": 0}, "must be at least 1"),
        (model, {"overlap": -1}, "must not be negative"),
        (model, {"every": 100, "fragments": 37}, r"fragments=37\) does not divide every=100.*use every=111"),
        (model, {"every": 8, "fragments": 4, "overlap": 2}, r"overlap=2\) must be less than every / fragments = 2"),
        (model, {"mixing": 1.0}, r"mixing=1.0\) must lie in \[0, 1\)"),
        (model, {"error_feedback": 1.5}, r"error_feedback=1.5\) must be true, false or in \[0, 1\]"),
        (model, {"last_codec": "int4"}, "last_codec='int4' needs total_steps, the inner steps of the whole run"),
        (
            model,
            {"last_codec": "int4", "total_steps": 9, "membership": MEETS},
            "last_codec='int4' does not go with a rendezvous.*leave last_codec out",
        ),
        (frozen, {}, "no parameter of the model is trainable"),
        (adapters, {}, "no slice is trainable"),
    ]
    for refused, options, message in refusals:
        with pytest.raises(ValueError, match=message):
            LocalSteps(refused, sgd(refused), mesh=mesh, **options)
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
        assert not any("outer" in key for key in local.cluster.traffic.snapshot().sizes), "nothing has been sent"
        messages.append(str(raised.value))
    return messages


def test_a_pseudo_gradient_that_is_no_number_ends_all_ranks_of_all_islands_at_one_step() -> None:
    found = run_ranks(job_diverged, 4, [float("nan"), float("inf"), -3e38], local=2)
    assert {message for messages in found for message in messages} == {found[0][0]}
    assert "fragment 1 after step 2 is NaN, infinite or too large on island 1 (of 0 to 1)" in found[0][0]
