"""RaggedTensor. Tests without communication make and check the parts of all ranks in one process."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import laconic
from laconic.comm import collectives
from laconic.layout.bucket import Extent
from laconic.ragged.tensor import RaggedTensor, admit_edits, delay_edits, withdraw
from tests.support.launch import on_ranks, run_ranks
from tests.support.sharded_net import build, moved, ragged, shard, whole

RANKS = 4


def random(shape: tuple[int, ...] = (5, 3), seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- how it looks ------------------------------------------------------------------------------------------------------


def test_it_has_the_global_shape_and_holds_its_extent() -> None:
    value = random()
    parts = ragged(value, RANKS, block=3)
    for part in parts:
        assert part.shape == value.shape
        assert part.dtype == value.dtype
        assert part.device_mesh == "the mesh"
        assert part.to_local().ndim == 1
    held = [part.extent for part in parts]
    assert held == [Extent(0, 6), Extent(6, 12), Extent(12, 15), None]
    assert parts[3].to_local().numel() == 0
    assert torch.equal(whole(parts), value)
    a, b, other = (ragged(random(shape), RANKS)[0] for shape in ((5, 3), (5, 3), (3, 5)))
    assert a.spec == a.clone().spec == a.detach().spec
    assert a.spec != b.spec, "another cluster object is another cluster"
    assert a.spec != other.spec


# -- operations on parts -----------------------------------------------------------------------------------------------

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "radd": lambda x, y: 1 - x,
    "mul_scalar_tensor": lambda x, y: x * torch.tensor(2.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, y.abs() + 1, value=0.5),
    "where": lambda x, y: torch.where(x > y, x, y),
    "nan_to_num": lambda x, y: torch.nan_to_num(x),
    "zeros_like": lambda x, y: torch.zeros_like(x),
    "full_like": lambda x, y: torch.full_like(x, 3.0),
    "to_double": lambda x, y: x.to(torch.float64),
    "new_zeros": lambda x, y: x.new_zeros(x.shape),
    "in_place_chain": lambda x, y: x.clone().mul_(0.9).add_(y, alpha=0.1).div_(2),
    "copy_": lambda x, y: torch.empty_like(x).copy_(y),
    "foreach_add": lambda x, y: torch._foreach_add([x], [y], alpha=2)[0],
    "foreach_lerp": lambda x, y: torch._foreach_lerp([x], [y], 0.2)[0],
    "foreach_addcmul_scalars": lambda x, y: torch._foreach_addcmul([x], [y], [y], [0.5])[0],
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operations_act_on_parts(name: str) -> None:
    x, y = random(seed=1), random(seed=2)
    want = ELEMENTWISE[name](x, y)
    xs = ragged(x, RANKS, block=3)
    ys = [part.like(part.spec.part_of(y).clone()) for part in xs]
    got = [ELEMENTWISE[name](a, b) for a, b in zip(xs, ys, strict=True)]
    assert all(isinstance(part, RaggedTensor) for part in got)
    assert got[0].dtype == want.dtype
    assert torch.equal(whole(got), want)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), max_size=3).map(tuple), st.integers(1, 6), st.booleans())
def test_plain_operands_of_the_global_shape_are_cut(shape: tuple[int, ...], num_ranks: int, in_place: bool) -> None:
    x, y = random(shape, 1), random(shape, 2)
    parts = ragged(x, num_ranks)
    got = [part.copy_(y) if in_place else part - y for part in parts]
    assert torch.equal(whole(got), y if in_place else x - y)


def test_lists_may_mix_layouts() -> None:
    a, b = random((5, 3), 1), random((7,), 2)
    parts = list(zip(ragged(a, RANKS, block=3), ragged(b, RANKS), strict=True))
    sums = [torch._foreach_mul(list(pair), [2.0, 3.0]) for pair in parts]
    assert torch.equal(whole([s[0] for s in sums]), a * 2)
    assert torch.equal(whole([s[1] for s in sums]), b * 3)


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.argmax(),
        lambda x: x.max(0),
        lambda x: x.prod(),
        lambda x: x @ x.new_zeros(3, 2),
        lambda x: x.view(-1),
        lambda x: x.t(),
        lambda x: torch.cat([x, x]),
        lambda x: nn.functional.linear(torch.zeros(2, 3), x),
        lambda x: torch.zeros(5, 3).copy_(x),
        lambda x: x[:, 1],
        lambda x: x[::2],
        lambda x: torch.linalg.vector_norm(x, 0),
        lambda x: nn.init.orthogonal_(x),
    ],
)
def test_other_operations_raise_and_say_what_to_call(operation: Callable[[Tensor], Any]) -> None:
    part = ragged(random(), RANKS)[0]
    with pytest.raises(NotImplementedError, match=r"to_local|full_tensor|dim 0|positive order|before fully_shard"):
        operation(part)


def test_operands_of_other_shapes_and_layouts_and_pickles_are_refused() -> None:
    part, other = ragged(random((5, 3)), RANKS)[0], ragged(random((3, 5)), RANKS)[0]
    with pytest.raises(ValueError, match=r"would repeat a RaggedTensor of shape \(5, 3\) to \(1, 5, 3\)"):
        _ = part + torch.zeros(1, 1, 1)
    with pytest.raises(RuntimeError, match="broadcastable to"):
        _ = part + torch.zeros(5)
    with pytest.raises(ValueError, match=r"cut differently.*full_tensor"):
        _ = part + other
    with pytest.raises(TypeError, match=r"cannot be pickled.*torch.distributed.checkpoint.*full_tensor"):
        pickle.dumps(part)


def test_copies_share_no_memory() -> None:
    edits: list[int] = []
    parts = ragged(random(), RANKS, bump=lambda: edits.append(1))
    parameter = nn.Parameter(parts[0])
    for twin in (copy.deepcopy(parameter), parameter.clone(), parameter.detach().clone()):
        assert isinstance(twin, RaggedTensor)
        with torch.no_grad():
            twin.zero_()
    assert isinstance(copy.deepcopy(parameter), nn.Parameter)
    assert copy.deepcopy(parameter).requires_grad
    assert torch.equal(parameter.to_local(), parameter.spec.part_of(random()))  # type: ignore[attr-defined]
    assert not edits


def test_edits_through_any_alias_are_reported() -> None:
    edits: list[int] = []
    part = ragged(random(), RANKS, bump=lambda: edits.append(1))[0]
    parameter = nn.Parameter(part)
    twin = copy.copy(parameter)
    assert isinstance(twin, nn.Parameter)
    aliases = parameter.data, parameter.detach(), parameter.detach()[1:3], parameter.data[0], twin.data
    for count, alias in enumerate(aliases, 1):
        alias.fill_(count)
        assert len(edits) == count
    assert (parameter.to_local() == len(aliases)).all()  # type: ignore[attr-defined]
    _ = parameter * 2, parameter.norm
    assert len(edits) == len(aliases)


# -- random numbers ----------------------------------------------------------------------------------------------------

FILLS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda t: t.normal_(0.5, 2),
    "uniform_": lambda t: t.uniform_(-1, 3),
    "random_": lambda t: t.random_(0, 100),
    "generator": lambda t: t.normal_(generator=torch.Generator().manual_seed(7)),
}
ARGUMENTS = {"constant_": (0.3,), "sparse_": (0.5,), "kaiming_uniform_": (math.sqrt(5),)}
for each in dir(nn.init):
    if each.endswith("_") and each[0] != "_" and each != "trunc_normal_":  # which asks all ranks: see below
        FILLS[f"init.{each}"] = lambda t, name=each: getattr(nn.init, name)(t, *ARGUMENTS.get(name, ()))  # type: ignore[misc]


@pytest.mark.parametrize("name", FILLS)
def test_fills_equal_the_unsharded_ones_or_say_what_to_do(name: str) -> None:
    for shape in ((5, 3, 2),) if name == "init.dirac_" else ((5, 3), (37, 11)):  # long enough for vectorised sampling
        want, follow_up = torch.empty(shape), torch.empty(4)
        torch.manual_seed(3)
        FILLS[name](want)
        follow_up.normal_()
        parts = ragged(torch.zeros(shape), RANKS, block=shape[1])
        if name in ("init.orthogonal_", "init.eye_", "init.sparse_"):
            with pytest.raises(NotImplementedError, match=f"nn.{name} needs the whole tensor.*before fully_shard"):
                FILLS[name](parts[0])
            return
        for part in parts:
            torch.manual_seed(3)
            assert FILLS[name](part) is part
            assert torch.equal(torch.empty(4).normal_(), follow_up), "the generator ends where it would have ended"
        assert torch.equal(whole(parts), want)


# -- over ranks --------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Parameters of every awkward kind: a scalar, one element, none, a vector, a matrix, a cube, one left whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.single = nn.Parameter(torch.randn(1))
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.vector = nn.Parameter(torch.randn(13))
        self.matrix = nn.Parameter(torch.randn(7, 5))
        self.cube = nn.Parameter(torch.randn(3, 2, 5))
        self.ignored = nn.Parameter(torch.randn(4))


def make_odd() -> Any:
    model = build(Odd)
    return shard(model, [], ignored_params=[model.ignored])


def whole_of(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, RaggedTensor) else tensor.detach()


def with_gradients(model: nn.Module, scale: float = 1.0, seed: int = 5) -> None:
    """Give sharded and plain parameters the same gradients."""
    for index, parameter in enumerate(model.parameters()):
        value = random(tuple(parameter.shape), seed + index) * scale
        parameter.grad = torch.zeros_like(parameter).copy_(value)


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [{"foreach": True}, {"fused": True}, {"foreach": False}, {"amsgrad": True, "maximize": True}],
    "SGD": [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.9, "fused": True}],
    "Adagrad": [{"fused": True}],
}


@on_ranks(3, local=1)
def test_every_optimizer_of_torch_steps_as_without_sharding_or_says_what_to_use() -> None:
    refused, others = set(), (torch.optim.Optimizer, torch.optim.SparseAdam)  # this one takes sparse gradients only
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass):
        if not issubclass(kind, torch.optim.Optimizer) or kind in others:
            continue
        for options in SETTINGS.get(name, [{}]):
            models = [build(Odd), make_odd()]
            if name not in SETTINGS:  # of a matrix, since some take nothing else
                models = [nn.ParameterList([model.matrix]) for model in models]
            optimizers: list[Any] = [kind(model.parameters(), lr=1e-2, **options) for model in models]  # type: ignore[call-arg]
            try:
                for step in range(2):
                    for model, optimizer in zip(models, optimizers, strict=True):
                        with_gradients(model, seed=10 * step)
                        optimizer.step(lambda: torch.zeros(()))
            except NotImplementedError as error:
                assert f"{name} needs whole tensors" in str(error)  # noqa: PT017
                assert "full_tensor" in str(error)  # noqa: PT017
                refused.add(name)
                continue
            for (key, want), got in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(whole_of(got), want.detach(), rtol=1e-6, atol=1e-6, msg=f"{name}: {key}")
    assert "LBFGS" in refused
    assert not refused & {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"}


@on_ranks(2, local=1)
def test_a_scaler_of_gradients_sees_what_other_ranks_hold() -> None:
    for poisoned in (False, True):
        model, plain = make_odd(), build(Odd)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        with_gradients(model, 4.0)
        if poisoned and dist.get_rank() == 1:
            held = next(p for p in model.parameters() if isinstance(p, RaggedTensor) and p.extent is not None)
            held.grad.to_local()[0] = float("nan")  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        if not poisoned:
            with_gradients(plain)
            torch.optim.SGD(plain.parameters(), lr=1.0).step()
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole_of(got), want.detach())
        assert scaler.get_scale() == (2.0 if poisoned else 4.0)


@on_ranks(4, local=2)
def test_norms_and_clipping_use_the_whole_tensors() -> None:
    plain, sharded = build(Odd), make_odd()
    ragged_parameters = [p for p in sharded.parameters() if p.numel()]  # torch has no infinity norm of an empty tensor
    parameters = [p for p in plain.parameters() if p.numel()]
    for order in (2.0, 1.0, 3.0, float("inf")):
        for scale in (1.0, 0.01):
            for model in (plain, sharded):
                with_gradients(model, scale)
            want = nn.utils.clip_grad_norm_(parameters, 1.5, norm_type=order)
            got = nn.utils.clip_grad_norm_(ragged_parameters, 1.5, norm_type=order)
            assert type(got) is Tensor
            torch.testing.assert_close(got, want)
            for p, q in zip(parameters, ragged_parameters, strict=True):
                torch.testing.assert_close(whole_of(q.grad), p.grad)
        many = torch._foreach_norm([q.grad for q in ragged_parameters], order)
        for norm, p, q in zip(many, parameters, ragged_parameters, strict=True):
            want = torch.linalg.vector_norm(p.grad, order)  # type: ignore[arg-type]
            torch.testing.assert_close(norm, want)
            torch.testing.assert_close(torch.linalg.vector_norm(q.grad, order) + 0, want)
    torch.testing.assert_close(sharded.matrix.norm() * 2, plain.matrix.detach().norm() * 2)
    assert torch._foreach_norm([sharded.matrix], dtype=torch.float64)[0].dtype is torch.float64


@on_ranks(2, local=1)
def test_norms_of_half_precision_do_not_overflow() -> None:
    """fp16 cannot hold the square of 640; bf16 would add squares with eight bits."""
    for dtype in (torch.float16, torch.bfloat16):
        model = laconic.fully_shard(nn.Linear(64, 64, bias=False).to(dtype), mesh=laconic.init_mesh("cpu"))
        model.weight.grad = torch.zeros_like(model.weight).fill_(10.0)
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)) == 640.0


def test_clipping_costs_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[int] = []
    send = collectives.start_to_all

    def counting(group: Any, ticket: Any, arriving: Tensor, rows: Tensor) -> Any:
        messages.append(arriving.nbytes)
        return send(group, ticket, arriving, rows)

    monkeypatch.setattr(collectives, "start_to_all", counting)
    run_ranks(job_clip, 4, local=2)
    assert messages == 4 * [4 * NORMS_BYTES], "one trip, with the norms of all ranks"


NORMS_BYTES = 4 * 6


def job_clip() -> None:
    model = make_odd()
    with_gradients(model)
    with moved(model) as m:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for level, peers in (("local", 1), ("node", 2)):
        assert m.sent(level, "control") == peers * NORMS_BYTES  # type: ignore[arg-type]


@on_ranks(4, local=2)
def test_full_tensor_moves_each_element_once() -> None:
    model = make_odd()
    with moved(model) as m:
        gathered = model.matrix.full_tensor()
    assert torch.equal(gathered, build(Odd).matrix)
    spec = model.matrix.spec
    extents = [extent.numel if (extent := spec.layout.extent(spec.index, shard)) else 0 for shard in range(4)]
    assert len(set(extents)) > 1, "no padding is to be seen if all ranks hold equally much"
    node, local = model._laconic_unit.cluster.node_rank, model._laconic_unit.cluster.local_rank
    own, other = extents[2 * local + node], extents[2 * local + 1 - node]
    for level, sent, received in (("node", own, other), ("local", own + other, sum(extents) - own - other)):
        assert m.snapshot.total(level, "control", "sent") == 4 * sent  # type: ignore[arg-type]
        assert m.snapshot.total(level, "control", "received") == 4 * received  # type: ignore[arg-type]


@on_ranks(4, local=2)
def test_truncated_normals_equal_the_unsharded_ones() -> None:
    for bounds in ((-2.0, 2.0), (0.5, 4.0), (2.0, 5.0)):
        want = torch.empty(37, 11)
        torch.manual_seed(1)
        nn.init.trunc_normal_(want, 0.0, 1.0, *bounds)
        model = laconic.fully_shard(nn.Linear(11, 37), mesh=laconic.init_mesh("cpu"))
        torch.manual_seed(1)
        nn.init.trunc_normal_(model.weight, 0.0, 1.0, *bounds)
        assert torch.equal(model.weight.full_tensor(), want), bounds


# -- edits and modes --------------------------------------------------------------------------------------------------


def test_an_edit_makes_each_wait_once_but_those_that_were_withdrawn() -> None:
    made: list[str] = []
    kept, dropped = partial(made.append, "kept"), partial(made.append, "dropped")
    for wait in (kept, dropped):
        delay_edits(wait)
    withdraw(dropped)
    withdraw(dropped)
    for _ in range(2):
        admit_edits()
    assert made == ["kept"]


@on_ranks(3, local=1)
def test_inference_mode_changes_no_operation_and_asking_for_a_view_is_no_error() -> None:
    """There torch hands over functions whole that it otherwise writes in terms of others."""
    weight = shard(build()).inp.weight
    for call in (lambda w: w.to("cpu"), lambda w: w.square().sum().item(), lambda w: w.to(torch.float64), Tensor.size):
        with torch.no_grad():
            want = call(weight)
        with torch.inference_mode():
            got = call(weight)
        assert type(got) is type(want)
        assert torch.equal(got.full_tensor(), want.full_tensor()) if isinstance(got, Tensor) else got == want
    assert not any(hasattr(weight, name) for name in ("T", "H", "mT", "mH"))
    with pytest.raises(NotImplementedError, match=r"aten.permute.*inp.weight.*full_tensor"):
        _ = weight.T
