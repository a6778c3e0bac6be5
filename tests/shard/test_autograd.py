"""Autograd as FSDP2's users use it: several forwards, gradients of inputs, hooks; unused and recomputed units."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import laconic
from laconic.ragged.tensor import RaggedTensor
from laconic.shard.hooks import map_tensors
from tests.support import sharded_net
from tests.support.launch import on_ranks
from tests.support.scenario import Scenario, assert_equals_oracle, sgd
from tests.support.sharded_net import (
    Net,
    accumulate,
    assert_gradients,
    build,
    full_gradients,
    inputs,
    micro_batches,
    moved,
    oracle_of,
    shard,
    squared_error,
)  # fmt: skip


def assert_mean_gradients(model: nn.Module, plain: nn.Module, backward: Callable[[nn.Module, int], Any]) -> None:
    """Compare with an unsharded model whose backward runs for each rank."""
    for rank in range(dist.get_world_size()):
        backward(plain, rank)
    got = full_gradients(model)
    for name, parameter in plain.named_parameters():
        assert (name in got) == (parameter.grad is not None), name
        if parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad / dist.get_world_size(), msg=name)


def after_a_gradient_of_the_input(module: Any, x: Tensor) -> None:
    """`autograd.grad` of an input leaves no gradient behind, and sends none."""
    with moved(module) if hasattr(module, "traffic") else torch.enable_grad() as sent:
        torch.autograd.grad(module(x).sum(), x)
    assert sent is None or sent.gradients == 0
    assert sent is None or all(parameter.grad is None for parameter in module.parameters())
    module(x).square().sum().backward()


def in_forward_mode(module: nn.Module, x: Tensor) -> None:
    value, slope = torch.func.jvp(module, (x,), (torch.ones_like(x),))
    (value.sum() + slope.square().sum()).backward()


@pytest.mark.parametrize(
    ("world", "use"),
    [
        (3, after_a_gradient_of_the_input),
        (1, in_forward_mode),
        pytest.param(2, in_forward_mode, marks=pytest.mark.machine),
    ],
)
@on_ranks("world", local=1)
def test_gradients_are_those_of_an_unsharded_model(use: Callable[[nn.Module, Tensor], None]) -> None:
    """Random trees have other uses: penalties, inference, several forwards."""
    model = shard(build(), cache="host")

    def backward(module: nn.Module, rank: int) -> None:
        use(module, inputs(0, rank)[0].requires_grad_())

    backward(model, dist.get_rank())
    sharded_net.assert_nothing_gathered(model)
    assert_mean_gradients(model, build(), backward)


def _error(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "grad": lambda module, x: torch.func.grad(partial(_error, module))(x),
    "vjp": lambda module, x: torch.func.vjp(module, x)[1](torch.ones(2, 3))[0],
    "jacrev": lambda module, x: torch.func.jacrev(module)(x),
    "vmap": lambda module, x: torch.func.vmap(module)(x),
    "by row": lambda module, x: torch.func.vmap(torch.func.grad(partial(_error, module)))(x),
    "twice": lambda module, x: torch.func.jacrev(torch.func.grad(partial(_error, module)))(x),
}


@pytest.mark.parametrize("cache", ["none", "host", "rank"])
@on_ranks(3, local=1)
def test_transforms_by_the_input_are_those_of_an_unsharded_model(cache: Any) -> None:
    model, plain, x = shard(build(), cache=cache), build(), inputs(0, 0)[0][:2]
    for name, transform in TRANSFORMS.items():
        got, wanted = transform(model, x), transform(plain, x)
        torch.testing.assert_close(got, wanted, msg=lambda text, name=name: f"{name}: {text}")
    assert all(parameter.grad is None for parameter in model.parameters())
    for module in (model, plain):
        _error(module, x).backward()
    gradients = full_gradients(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.parametrize("is_first", [True, False])
@on_ranks(3, local=1)
def test_derivatives_by_sharded_parameters_are_refused(is_first: bool) -> None:
    """And nothing is lost. After a forward without a backward the root is gathered."""
    model, x = shard(build()), inputs(0, 0)[0]
    if not is_first:
        model(x)
    parameters = dict(model.named_parameters())
    transform = torch.func.grad(lambda new: torch.func.functional_call(model, new, (x,)).sum())
    with pytest.raises(RuntimeError, match=r"was replaced|cannot differentiate by .*, a sharded parameter"):
        transform(parameters)
    accumulate(model, micro_batches(1))
    assert_gradients(model, oracle_of(model), micro_batches(1))


def wide_net() -> nn.Module:
    """Blocks whose weights are much larger than their activations."""
    return Net(num_blocks=5, d=32, h=2080)


@on_ranks(2, local=1)
def test_several_forwards_take_the_memory_of_one() -> None:
    """The engine's memory has no activations. FSDP2 frees and reduces after the backward of each forward, too."""
    peak_bytes, reduced_bytes = {}, {}
    batches = micro_batches(3)
    for order in ("one by one", "together", "reduced once"):
        model = shard(build(wide_net), reshard_after_forward=True)
        model.set_reduce_once_per_backward(order == "reduced once")
        for _ in range(2):  # the second step prefetches
            model.zero_grad()
            model.reset_peak_memory()
            with moved(model) as sent:
                losses = (squared_error(model, batch[dist.get_rank()]) for batch in batches)
                if order == "one by one":
                    for loss in losses:
                        loss.backward()
                else:
                    sum(losses).backward()  # type: ignore[union-attr]
        assert_mean_gradients(
            model,
            build(wide_net),
            lambda plain, rank: [squared_error(plain, batch[rank]).backward() for batch in batches],
        )
        sharded_net.assert_nothing_gathered(model)
        peak_bytes[order], reduced_bytes[order] = model.memory().device_peak_bytes, sent.gradients
    alone = reduced_bytes["one by one"]
    assert peak_bytes["together"] <= peak_bytes["one by one"] < peak_bytes["reduced once"]
    assert alone / 3 < reduced_bytes["together"] <= alone
    assert reduced_bytes["reduced once"] == alone / 3


@pytest.mark.parametrize("raises", [False, True])
@on_ranks(2, local=1)
def test_a_unit_that_is_reduced_once_is_freed_at_its_first_input(raises: bool) -> None:
    """Before backward goes on below it, though its graph lives on; and so after a backward that raised."""
    first, twice, last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
    model: Any = nn.Sequential(first, twice, twice, last)
    shard(model, [first, twice, last], reshard_after_forward=True)
    model.set_reduce_once_per_backward(True)
    seen: list[bool] = []

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    if raises:
        raising = twice.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        loss = model(torch.ones(2, 5)).sum()  # keeps its graph
        with pytest.raises(ArithmeticError):
            loss.backward()
        raising.remove()
    first.register_full_backward_pre_hook(lambda *_: seen.append(isinstance(twice.weight, RaggedTensor)))
    model(torch.ones(2, 5)).sum().backward()
    assert seen == [True]


class WithAside(nn.Module):
    """Two layers and one aside, whose output nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.aside, self.first, self.last = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, kept: list[Tensor] | None) -> Tensor:
        if kept is not None:
            kept.append(self.aside(x))
        return self.last(self.first(x))


@on_ranks(2, local=1)
def test_a_unit_whose_output_was_left_unused_is_not_gathered_in_the_next_backward() -> None:
    model: Any = WithAside()
    shard(model, [*model.children()], reshard_after_forward=True)
    x, kept = torch.ones(2, 5), list[Tensor]()
    model(x, kept).sum().backward()
    model(x, None).sum().backward()  # from now on no forward expects it
    with moved(model) as with_graph:
        model(x, None).sum().backward()
    kept.clear()
    with moved(model) as without:
        model(x, None).sum().backward()
    assert with_graph.weights == without.weights


@on_ranks(2, local=1)
def test_micro_batches_keep_what_they_have_used() -> None:
    """Micro-batches without synchronisation neither run hooks nor forget which parameters were used."""
    model: Any = shard(build())
    oracle, batches, rank = sharded_net.oracle_of(model), micro_batches(2), dist.get_rank()
    seen: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    model.set_requires_gradient_sync(False)
    squared_error(model, batches[0][rank]).backward()
    assert not seen
    model.set_requires_gradient_sync(True)
    x = batches[1][rank][0].clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)  # sends the partial sums
    squared_error(model, batches[1][rank]).backward()
    sharded_net.assert_gradients(model, oracle, batches)
    assert len(seen) == 2 * len(list(model.parameters()))


@pytest.mark.parametrize("nodes", [1, 3])
def test_hooks_run_when_the_reduced_gradient_is_in_place(nodes: int) -> None:
    """Each hook sees the reduced gradient, takes a step, and frees the gradient."""
    seen: Counter[str] = Counter()

    def step(name: str, optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        seen[name] += 1
        optimizer.step()
        parameter.grad = None

    def register(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(step, name, sgd([parameter])))

    scenario = Scenario(nodes=nodes, events={0: register})
    assert_equals_oracle(scenario, scenario.run())
    assert seen == {name: 2 * nodes for name, _ in Net().named_parameters()}


@on_ranks(4, local=2)
def test_sums_in_half_precision_do_not_overflow() -> None:
    """The sum of 4 gradients of 30,000 exceeds the largest float16, 65,504; their mean does not."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    model = laconic.fully_shard(nn.Linear(1, 1, bias=False), mp_policy=policy)
    model(torch.full((1, 1), 30_000.0)).sum().backward()
    assert model.weight.grad.full_tensor().item() == pytest.approx(30_000, rel=1e-3)  # type: ignore[union-attr]


# -- unusual graphs ---------------------------------------------------------------------------------------------------


@on_ranks(2, local=1)
def test_unused_units_send_nothing() -> None:
    """An unused unit sends nothing, and its parameters get no gradient; one whose output is unused is gathered."""
    net: Any = build(partial(Net, 4))
    net.blocks[0].idle = nn.Linear(3, 3)
    model, first, unused, last, aside = shard(net, cache="host"), *net.blocks

    def forward(x: Tensor) -> Tensor:
        x = last(first(net.inp(x)))
        aside(x)
        return net.out(x)

    model.forward = forward
    with moved(model) as m:
        squared_error(model, inputs(0, dist.get_rank())).backward()
    used = sharded_net.buckets(first, last) + model._laconic_unit.buckets
    assert m.gradients == sharded_net.reduce_bytes("node", used)
    assert m.weights == sharded_net.gather_bytes("node", used + sharded_net.buckets(aside))
    assert all(p.grad is None for p in (*unused.parameters(), *aside.parameters(), *first.idle.parameters()))


@on_ranks(4, local=2)
def test_two_models_share_a_mesh() -> None:
    """A teacher without a graph, then both in one loss."""
    mesh, batches = laconic.init_mesh("cpu"), [inputs(0, rank)[0] for rank in range(4)]
    plain = build(), build(seed=1)
    student = shard(build(), mesh=mesh, cache="host")
    teacher = shard(build(seed=1), mesh=mesh)
    assert student.traffic is teacher.traffic, "one mesh has one set of counters"

    def distilled(one: Any, two: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = two(x)
        return (one(x) - target).square().mean()

    for loss in (distilled, lambda one, two, x: (one(x) * two(x)).mean()):
        loss(student, teacher, batches[dist.get_rank()]).backward()
        for x in batches:
            (loss(*plain, x) / 4).backward()
        for model, whole in zip((student, teacher), plain, strict=True):
            for name, gradient in full_gradients(model).items():
                torch.testing.assert_close(gradient, whole.get_parameter(name).grad, msg=name)
            sharded_net.assert_nothing_gathered(model)
            model.zero_grad()
            whole.zero_grad()


class Checkpointed(Net):
    """Blocks are recomputed: each in a checkpoint, or two in one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        runs = [lambda h: second(first(h)), third] if self.kind == "pair" else list(self.blocks)
        x = self.inp(x)
        for run in runs:
            x = checkpoint(run, x, use_reentrant=self.kind == "reentrant")
        return self.out(x)


class InnerCheckpoint(sharded_net.Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda h: self.down(torch.relu(self.up(h))), x, use_reentrant=False)


class CheckpointedInside(Net):
    make_block = InnerCheckpoint


@pytest.mark.parametrize(
    ("make", "cache"),
    [
        (partial(Checkpointed, "reentrant"), "host"),
        (partial(Checkpointed, "pair"), "none"),
        (CheckpointedInside, "device"),
    ],
)
def test_activation_checkpointing_gathers_no_more_often(make: Callable[[], nn.Module], cache: str) -> None:
    scenario = Scenario(make=make, cache=cache, micro_batches=2)
    runs, (plain, _) = scenario.run(), replace(scenario, make=Net).run()
    assert_equals_oracle(scenario, runs)
    for step in range(scenario.steps):
        recomputed, other = runs[0].sent[step], plain.sent[step]
        assert (recomputed.weights, recomputed.gradients) == (other.weights, other.gradients)
        assert runs[0].memory[step].device_peak_bytes <= plain.memory[step].device_peak_bytes


@dataclass(frozen=True)
class Pair:
    value: Tensor
    name: str = "one"


def test_tensors_are_replaced_in_containers_of_all_kinds() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    tree = {"a": [Pair(one), (one, None)], "b": OrderedDict(c=Pair(one))}
    found = map_tensors(lambda tensor: two, tree)
    assert [found["a"][0].value, *found["a"][1], found["b"]["c"].value] == [two, two, None, two]
    assert (type(found["a"][0]), found["a"][0].name, type(found["b"])) == (Pair, "one", OrderedDict)
    assert [tree["a"][0].value, tree["b"]["c"].value] == [one, one]
    assert map_tensors(lambda tensor: tensor, tree["a"][0]) is tree["a"][0]
