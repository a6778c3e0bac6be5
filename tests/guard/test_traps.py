"""Mistakes that would train nothing, or something else, and wrappers around sharded modules: named, with the remedy."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.parallel import DataParallel, DistributedDataParallel

import laconic
from laconic.comm.cluster import Cluster
from laconic.errors import RanksDifferError
from laconic.guard.comparison import IssuedProgram, compare
from tests.support import sharded_net
from tests.support.launch import on_ranks

BATCH = torch.zeros(2, 5)
pytestmark = pytest.mark.filterwarnings("error:.*parameters.*")
"""Correct use is quiet."""


def build_apart() -> nn.Module:
    """A model with other weights on each rank."""
    return sharded_net.build(seed=dist.get_rank())


@on_ranks(2, local=1)
def test_an_optimizer_built_before_is_named() -> None:
    plain = sharded_net.build()
    old = list(plain.parameters())
    optimizer = torch.optim.AdamW(old)
    model = sharded_net.shard(plain)
    model(BATCH)
    for _ in range(2):  # it stays refused
        with pytest.raises(RuntimeError, match=r"AdamW holds 16 parameters .* such as inp.weight: it trains nothing"):
            sharded_net.train_step(model, optimizer)
    late = torch.optim.SGD([*old[:3], *model.parameters()])
    with pytest.raises(RuntimeError, match=r"SGD holds 3 parameters .* such as inp.weight: it trains nothing"):
        sharded_net.train_step(model, late)
    late.param_groups[0]["params"] = list(model.parameters())  # a wrapper may exchange them until the first step
    sharded_net.train_step(model, late)


@on_ranks(2, local=1)
def test_a_parameter_added_afterwards_is_named() -> None:
    model: Any = sharded_net.shard(sharded_net.build())
    model.blocks[1].adapter = nn.Linear(3, 3)
    model.blocks[1].frozen = nn.Linear(3, 3).requires_grad_(False)
    with pytest.warns(UserWarning, match=r"2 trainable parameters, such as blocks.1.adapter.weight, were added after"):
        model(BATCH)
    model(BATCH)
    model.blocks[0].late = nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match=r"3 trainable parameters, such as blocks.0.late, were added after"):
        model(BATCH)


@on_ranks(2, local=1)
def test_plain_parameters_beside_sharded_ones_are_named() -> None:
    """The root was forgotten: its own layers are in no unit."""
    model: Any = sharded_net.build()
    for block in model.blocks:
        laconic.fully_shard(block)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.warns(UserWarning, match=r"SGD trains 4 parameters that no unit has, such as one of shape \(17, 5\)"):
        sharded_net.train_step(model, optimizer)
    sharded_net.train_step(model, optimizer)  # once is enough
    named = torch.optim.SGD(list(model.named_parameters()))
    with pytest.warns(UserWarning, match=r"SGD trains 4 .*, such as inp.weight, inp.bias, out.weight, beside"):
        sharded_net.train_step(model, named)


@on_ranks(2, local=1)
def test_a_first_step_without_gradients_is_told() -> None:
    model: Any = sharded_net.shard(sharded_net.build())
    sharded = list(model.parameters())
    optimizer = torch.optim.SGD(sharded)
    sharded_net.squared_error(model, sharded_net.inputs(0, 0)).backward(inputs=sharded)
    with pytest.warns(UserWarning, match=r"the first step of SGD trains nothing.*without inputs="):
        optimizer.step()


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize(("world", "local", "islands"), [(3, 1, 1), (4, 2, 2)])
@on_ranks("world", local="local")
def test_ranks_must_begin_with_equal_weights(broadcast: bool, islands: int) -> None:
    mesh = laconic.init_mesh("cpu", islands=islands)
    model: Any = sharded_net.build(lambda: sharded_net.Net(2), seed=dist.get_rank())
    model.blocks[1].up.weight.requires_grad_(False)
    sharded_net.shard(model, mesh=mesh, broadcast=broadcast)
    if broadcast:
        first = sharded_net.build(lambda: sharded_net.Net(2))
        with torch.no_grad():
            model(BATCH)
        for name, whole in sharded_net.full_parameters(model).items():
            assert torch.equal(whole, first.get_parameter(name)), name
    else:
        with pytest.raises(ValueError, match=r"different weights: rank 1 .*, as of .*manual_seed.*broadcast=True"):
            model(BATCH)
        model.load_state_dict(sharded_net.build(lambda: sharded_net.Net(2)).state_dict())
        model(BATCH)  # the mistake is mended


@on_ranks(3, local=1)
def test_a_broadcast_over_weights_of_each_rank_is_told_where_others_are_equal() -> None:
    def sharded(seeds: Sequence[int]) -> str:
        model: Any = sharded_net.build(lambda: sharded_net.Net(2))
        for block, seed in zip(model.blocks, seeds, strict=True):
            torch.manual_seed(seed)
            torch.nn.init.normal_(block.up.weight)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            laconic.fully_shard(model, broadcast=True)
        return " ".join(str(each.message) for each in told)

    own, is_first = dist.get_rank(), dist.get_rank() == 0
    message = sharded((0, own))
    assert ("1 parameters that differ between ranks, such as blocks.1.up.weight" in message) == is_first
    assert ("give these in ignored_params" in message) == is_first
    assert sharded((0, 1)) == ""  # all are equal


@on_ranks(2, local=1)
def test_correct_use_is_quiet() -> None:
    """No mistake: weights loaded afterwards, ignored parameters, meta, and an optimizer built in time."""
    model: Any = sharded_net.shard(build_apart())
    model.load_state_dict({name: value.clone() for name, value in sharded_net.build().state_dict().items()})
    with torch.device("meta"):
        late: Any = sharded_net.Net()
    sharded_net.shard(late)
    late.to_empty(device="cpu")
    ignoring: Any = sharded_net.build()
    left = ignoring.out.weight
    laconic.fully_shard(ignoring, ignored_params=[left])
    optimizer = torch.optim.SGD([left, *(each for each in ignoring.parameters() if each is not left)])
    for each in (model, late, ignoring):
        each(BATCH)
    optimizer.step()


USE_IT = "cannot wrap a model that laconic.fully_shard has sharded.*se the sharded model as it is"


class Outer(nn.Module):
    """A plain module around a sharded one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.own = nn.Linear(3, 3)


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def ddp_without_sync(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, init_sync=False)


AROUND: list[tuple[Callable[..., Any], str, str]] = [
    *((wrap, USE_IT, USE_IT) for wrap in (DistributedDataParallel, ddp_without_sync, DataParallel, fsdp1)),
    (fsdp2, "fully_shard has already been applied", "fully_shard cannot shard the parameters of laconic.fully_shard"),
    (replicate, "already managed by `fully_shard`", ""),  # around an inner one it replicates the rest, which is right
]
"""A wrapper, its error around a sharded module, and around a plain module with a sharded one inside."""

INSIDE: list[tuple[Callable[[nn.Module], Any], str]] = [
    (DistributedDataParallel, "the module is wrapped in DistributedDataParallel: take the wrapper away"),
    (DataParallel, "the module is wrapped in DataParallel: take the wrapper away"),
    (fsdp1, "the module is wrapped in FullyShardedDataParallel: take the wrapper away"),
    (fsdp2, "the module was sharded by torch's own fully_shard"),
]


@on_ranks(2, local=1)
def test_what_is_wrapped_already_is_refused() -> None:
    for wrap, error in INSIDE[1::2]:  # the others need a group of torch's own
        with pytest.raises(ValueError, match=error):
            laconic.fully_shard(wrap(sharded_net.build()))


@pytest.mark.machine
@on_ranks(2, local=1)
def test_what_cannot_go_together_is_refused() -> None:
    model = sharded_net.shard(sharded_net.build())
    for wrap, error, error_of_outer in AROUND:
        for module, pattern in ((model, error), (Outer(model), error_of_outer)):
            if pattern:
                with pytest.raises((TypeError, AttributeError, AssertionError, RuntimeError), match=pattern):
                    wrap(module)
    for wrap, error in INSIDE:
        with pytest.raises(ValueError, match=error):
            laconic.fully_shard(wrap(sharded_net.build()))
    plain: Any = sharded_net.build()
    fsdp2(plain.blocks[1])
    with pytest.raises(ValueError, match=r"blocks.1, a module of Net, was sharded by torch's own fully_shard"):
        laconic.fully_shard(plain)

    optimizer = torch.optim.AdamW(model.parameters())
    sharded_net.train_step(model, optimizer)  # no refusal has harmed the model
    for value in (model, model.blocks, model.state_dict(), optimizer.state_dict()):
        for save in (lambda each: torch.save(each, io.BytesIO()), pickle.dumps):
            with pytest.raises(TypeError, match=r"cannot be pickled.*checkpoint.save_checkpoint.*save_safetensors"):
                save(value)
    with pytest.raises(AssertionError, match="copy the model before fully_shard"):
        copy.deepcopy(model)


# -- ranks compare what they are and what they issue -------------------------------------------------------------------


@on_ranks(4)
def test_all_ranks_learn_the_first_difference() -> None:
    group = dist.group.WORLD
    rank = dist.get_rank()
    equal = {"a": {"x": "1", "wire of the island": str(rank // 2)}, "b": {}}
    compare(group, "a test", equal, island=rank // 2)
    odd = {"a": {"x": "1", "wire of the island": "0" if rank == 3 else str(rank // 2)}, "b": {}}
    with pytest.raises(RanksDifferError, match=r"rank 3 differs from rank 2: a has wire of the island 0 here, and 1"):
        compare(group, "a test", odd, island=rank // 2)
    with pytest.raises(RanksDifferError, match=r"^rank 2 differs from rank 0: it has no b, which rank 0 has"):
        compare(group, "a test", equal if rank != 2 else {"a": equal["a"]}, island=rank // 2)
    with pytest.raises(RanksDifferError, match=r"rank 1 differs from rank 0: it runs another call where rank 0 runs a"):
        compare(group, "another call" if rank == 1 else "a test", equal, island=rank // 2)


@on_ranks(2, local=1)
def test_an_optimizer_never_uses_gradients_of_programs_that_differ() -> None:
    cluster = Cluster.of(laconic.init_mesh("cpu"))
    program, rank = IssuedProgram(cluster), dist.get_rank()
    optimizer = torch.optim.SGD(laconic.fully_shard(torch.nn.Linear(1, 1)).parameters())
    for step in range(3):
        program.note("the gather of a")
        program.start_comparison(diverges=False)
        if step:
            program.settle()
        optimizer.step()
    program.note("the gather of a")
    program.note("the gather of b" if rank == 1 else "the gather of c")
    program.start_comparison(diverges=False)
    words = "rank 1 differs from rank 0 at transfer 5, .* it issued the gather of b where rank 0 issued the gather of c"
    with pytest.raises(RanksDifferError, match=words):
        optimizer.step()  # not with these gradients
    program.note("the gather of a")
    program.start_comparison(diverges=False)
    program.settle()


@on_ranks(2, local=1)
def test_a_rank_that_is_ahead_when_it_hears_the_others_compares_the_rest_too() -> None:
    """Or it would leave the next comparison out, for which the others wait."""
    program = IssuedProgram(Cluster.of(laconic.init_mesh("cpu")))
    program.note("the gather of a")
    program.start_comparison(diverges=False)
    if dist.get_rank() == 0:
        program.settle()
    program.note("the gather of b")
    program.settle()
    program.note("the gather of c" if dist.get_rank() == 0 else "the gather of d")
    program.start_comparison(diverges=False)
    with pytest.raises(RanksDifferError, match=r"at transfer 3, number 2 since .* the gather of d where"):
        program.settle()


@on_ranks(2, local=1)
def test_the_engine_notes_all_that_it_issues() -> None:
    """The names of both passes reach the comparison. Messages that fit would otherwise be mixed without a word."""
    model: Any = sharded_net.shard(sharded_net.build())
    program = model._laconic_unit.root.observer._program
    noted: list[str] = []
    program.note = noted.append
    sharded_net.train_step(model)
    gathers = [f"the gather of {name}" for name in ("Net", "blocks.0", "blocks.1", "blocks.2")]
    reductions = [f"the reduction of {name}" for name in ("blocks.2", "blocks.1", "blocks.0", "Net")]
    assert sorted(noted) == sorted([*gathers, *gathers[1:], *reductions])
