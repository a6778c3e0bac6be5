"""The interface of a sharded module: names, setters, edits that it refuses; and the kinds that share a bucket."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.layout.bucket import BucketLayout
from laconic.shard.api import BucketKind, group_by_kind
from laconic.shard.gather import GatherState
from laconic.shard.policies import Wire
from tests.support import sharded_net
from tests.support.launch import on_ranks

# -- setters ----------------------------------------------------------------------------------------------------------


@on_ranks(4, local=2)
def test_units_stay_gathered_as_their_setters_say() -> None:
    model = sharded_net.shard(sharded_net.build(), cache="none", reshard_after_forward=False)
    everything = sharded_net.gather_bytes("node", sharded_net.buckets(model))
    batch = sharded_net.inputs(0, dist.get_rank())
    with sharded_net.moved(model) as m:
        loss = sharded_net.squared_error(model, batch)
        assert all(unit.gather.state is GatherState.SHOWN for unit in model._units())
        loss.backward()
    assert m.weights == everything, "kept from forward to backward"
    sharded_net.assert_nothing_gathered(model)
    with torch.no_grad():
        model(batch[0])
    sharded_net.assert_nothing_gathered(model)  # forward alone leaves nothing, whatever the setting

    model.set_reshard_after_forward(True)
    with sharded_net.moved(model) as m:
        sharded_net.train_step(model)
    assert m.weights == 2 * everything, "the root too, once it is set"
    model.set_reshard_after_forward(False, recurse=False)
    with sharded_net.moved(model) as m:
        sharded_net.train_step(model)
    assert m.weights == 2 * sharded_net.gather_bytes(
        "node", sharded_net.buckets(model.blocks)
    ) + sharded_net.gather_bytes("node", model._laconic_unit.buckets)

    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    with sharded_net.moved(model) as m:
        for _ in range(3):
            sharded_net.train_step(model)
    assert m.weights == everything, "kept from one micro-batch to the next"
    optimizer = torch.optim.SGD([p for u in model._units() for b in u.buckets for p in b.sharded], lr=0.1)
    sharded_net.squared_error(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    plain = sharded_net.build()
    squared_error_all = (
        sum(sharded_net.squared_error(plain, b) for b in sharded_net.micro_batches(1)[0]) / dist.get_world_size()
    )
    squared_error_all.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with sharded_net.moved(model) as m:
        torch.testing.assert_close(model(batch[0]), plain(batch[0]))
    assert m.weights == everything, "gathered again after a step"
    model.set_reshard_after_backward(True)
    model(batch[0]).sum().backward()
    sharded_net.assert_nothing_gathered(model)


@on_ranks(3, local=1)
def test_the_divide_factor_can_be_set() -> None:
    model = sharded_net.shard(sharded_net.build(), cache="none")
    oracle, batches = sharded_net.oracle_of(model), sharded_net.micro_batches(1)
    sharded_net.set_divide_factors(model, 1.0)
    sharded_net.squared_error(model, batches[0][dist.get_rank()]).backward()
    _, want = oracle.gradients(batches)
    for name, got in sharded_net.full_gradients(model).items():
        torch.testing.assert_close(got, want[name] * dist.get_world_size(), msg=name)
    model.zero_grad()
    sharded_net.set_divide_factors(model, float(dist.get_world_size()))
    model.set_gradient_divide_factor(1.0)
    sharded_net.squared_error(model, batches[0][dist.get_rank()]).backward()
    for name, got in sharded_net.full_gradients(model).items():
        factor = 1 if name.startswith("blocks") else dist.get_world_size()
        torch.testing.assert_close(got, want[name] * factor, msg=f"{name}: modules below keep their divisor")
    for factor in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be a positive number"):
            model.set_gradient_divide_factor(factor)


@on_ranks(4, local=2)
def test_unshard_and_reshard_by_hand() -> None:
    model = sharded_net.shard(sharded_net.build(), cache="none")
    plain = dict(sharded_net.build().named_parameters())
    with sharded_net.moved(model) as m:
        handle = model.unshard(async_op=True)
        assert handle is not None
        assert model._laconic_unit.gather.state is GatherState.NODE, "it has begun"
        assert isinstance(model.inp.weight, laconic.RaggedTensor), "the sharded parameter stays until wait()"
        handle.wait()
        assert type(model.inp.weight) is nn.Parameter
        assert torch.equal(model.inp.weight, plain["inp.weight"])
        assert model.unshard() is None
        model.reshard()
        model.reshard()
    assert isinstance(model.inp.weight, laconic.RaggedTensor)
    assert m.weights == sharded_net.gather_bytes("node", model._laconic_unit.buckets)
    model.blocks[1].unshard()
    assert torch.equal(model.blocks[1].up.weight, plain["blocks.1.up.weight"])
    with sharded_net.moved(model) as m:
        model.unshard()
        torch.testing.assert_close(model(sharded_net.inputs(0, 0)[0]), sharded_net.build()(sharded_net.inputs(0, 0)[0]))
    untouched = [b for i in (0, 2) for b in sharded_net.buckets(model.blocks[i])]
    assert m.weights == sharded_net.gather_bytes("node", untouched + model._laconic_unit.buckets), (
        "block 1 was there already"
    )


@on_ranks(4, local=2)
def test_unshard_before_the_first_forward_and_before_an_edit() -> None:
    batch, plain = sharded_net.inputs(0, 0), sharded_net.build()
    model = sharded_net.shard(sharded_net.build(), cache="host")
    for block in model.blocks:
        block.unshard()  # before the root has run: FSDP2 allows it
    torch.testing.assert_close(model(batch[0]), plain(batch[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        sharded_net.train_step(model, optimizer)
    assert model.memory().device_bytes == sharded_net.held_bytes(model), "one ledger counts all units"
    sharded_net.assert_nothing_gathered(model)

    handle = model.unshard(async_op=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
        for parameter in plain.parameters():
            parameter.fill_(0.5)
    handle.wait()
    torch.testing.assert_close(
        model(batch[0]), plain(batch[0]), msg="the pending gather is stale, and the unit is gathered again"
    )


@on_ranks(3, local=1)
def test_names_classes_and_identities_stay() -> None:
    plain, model = sharded_net.build(), sharded_net.shard(sharded_net.build(), cache="none")
    assert type(model).__name__ == "ShardedNet"
    assert isinstance(model, laconic.ShardedModule)
    assert isinstance(model, sharded_net.Net)
    assert isinstance(model.blocks[0], sharded_net.Block)
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    identities = [id(p) for p in model.parameters()]
    sharded_net.train_step(model, torch.optim.AdamW(model.parameters()))
    assert [id(p) for p in model.parameters()] == identities, "the optimizer's parameters are the model's"
    model.load_state_dict(plain.state_dict())
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, value in sharded_net.full_parameters(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name
    # The root stays gathered after forward, yet a state dict holds sharded parameters.
    sharded_net.squared_error(model, sharded_net.inputs(0, 0))
    assert all(isinstance(value, laconic.RaggedTensor) for value in model.state_dict().values())


# -- edits of gathered parameters -------------------------------------------------------------------------------------


class Edits(sharded_net.Net):
    """A model that edits a gathered parameter in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inp.weight.mul_(0.5)
        return super().forward(x)


@on_ranks(2, local=1)
def test_editing_a_gathered_parameter_is_refused() -> None:
    for make in (Edits, sharded_net.Net):
        model = sharded_net.shard(sharded_net.build(make), cache="host")
        if make is Edits:
            with (
                pytest.raises(
                    RuntimeError, match=r"inp.weight.*edited in place.*sharded parameter under torch.no_grad"
                ),
                torch.no_grad(),
            ):
                model(sharded_net.inputs(0, 0)[0])
        else:
            model.unshard()
            with torch.no_grad():
                model.out.bias.fill_(1)
            with pytest.raises(RuntimeError, match=r"out.bias.*edited in place"):
                model.reshard()
        assert all(isinstance(p, laconic.RaggedTensor) for p in model.parameters())


@on_ranks(2, local=1)
def test_a_replaced_parameter_is_taken_at_first_and_refused_later() -> None:
    model = sharded_net.shard(sharded_net.build(), cache="none")
    sharded, x = model.blocks[1].up.weight, sharded_net.inputs(0, 0)[0]
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(29, 17))
    with pytest.warns(UserWarning, match=r"up.weight replaced sharded parameters.*model.parameters\(\)"):
        model(x)
    model.reshard()
    assert model.blocks[1].up.weight is sharded
    assert not sharded.full_tensor().any(), "the values of the replacement"
    model.blocks[1].up.weight = nn.Parameter(torch.ones(29, 17))
    with pytest.raises(
        RuntimeError, match=r"up.weight is no longer the one fully_shard made.*load_state_dict of the sharded module"
    ):
        model(x)


@on_ranks(2, local=1)
def test_compiled_modules_have_the_same_gradients() -> None:
    """Blocks compiled before they are sharded, in place or wrapped, and a compiled root."""
    batch = sharded_net.inputs(0, dist.get_rank())
    _, want = sharded_net.oracle_of(sharded_net.shard(sharded_net.build())).gradients(sharded_net.micro_batches(1))

    def check(run: Any, model: Any) -> None:
        sharded_net.squared_error(run, batch).backward()
        got = {name.replace("_orig_mod.", ""): value for name, value in sharded_net.full_gradients(model).items()}
        assert set(got) == set(want)
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, msg=name)

    in_place: Any = sharded_net.build()
    for block in in_place.blocks:
        block.compile(backend="eager")
    check(sharded_net.shard(in_place), in_place)
    wrapped: Any = sharded_net.build()
    for index, block in enumerate(wrapped.blocks):
        wrapped.blocks[index] = torch.compile(block, backend="eager")
    check(sharded_net.shard(wrapped), wrapped)
    root = sharded_net.shard(sharded_net.build())
    check(torch.compile(root, backend="eager"), root)


MATRIX = BucketLayout.whole_in(0, name="weight", shape=(4, 3), num_shards=2)
VECTOR = BucketLayout.whole_in(0, name="bias", shape=(4,), num_shards=2)


def kind(**fields: Any) -> BucketKind:
    return BucketKind(**{"dtype": torch.float32, "is_trained": True, **fields})


def test_kinds_and_members_stay_in_order_of_appearance() -> None:
    groups = group_by_kind("bAaCBc", lambda letter: kind(is_trained=letter.islower()))
    assert [(each.is_trained, members) for each, members in groups.items()] == [
        (True, ["b", "a", "c"]), (False, ["A", "C", "B"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("own", "layout", "nodes", "islands", "is_coded"),
    [
        ({}, MATRIX, 2, 1, True),
        ({}, MATRIX, 1, 1, False),
        ({}, VECTOR, 2, 1, False),
        ({"is_trained": False}, MATRIX, 2, 1, False),
        ({"dtype": torch.int8}, MATRIX, 2, 1, False),
        ({"part": 1}, MATRIX, 3, 2, True),
    ],
)
def test_trained_matrices_alone_are_coded(
    own: dict[str, Any], layout: BucketLayout, nodes: int, islands: int, is_coded: bool
) -> None:
    policy = Wire.of("4bit")
    found = kind(**own).wire(policy, layout, num_nodes=nodes, num_islands=islands)
    assert found == (policy if is_coded else Wire())


def test_gradients_alone_are_coded_where_weights_convert_themselves() -> None:
    found = kind(converted=nn.Parameter).wire(Wire.of("4bit"), MATRIX, num_nodes=2, num_islands=1)
    assert (found.weights, found.gradients) == ("exact", "int4")


def test_only_gradients_cross_between_islands_of_one_node() -> None:
    found = kind().wire(Wire.of("8bit"), MATRIX, num_nodes=1, num_islands=2)
    assert (found.weights, found.gradients) == ("exact", "int8")


def test_parameters_that_differ_in_dtype_trainability_or_slice_are_apart() -> None:
    half = {"dtype": torch.bfloat16}
    parameters: dict[str, dict[str, Any]] = {
        "base": {"is_trained": False}, "half": half, "up_slice0": {"part": 0}, "up_slice1": {"part": 1}, "adapter": {},
        "other": {"is_trained": False}, "down_slice0": {"part": 0}, "last": half,
    }  # fmt: skip
    assert list(group_by_kind(parameters, lambda name: kind(**parameters[name])).values()) == [
        ["base", "other"], ["half", "last"], ["up_slice0", "down_slice0"], ["up_slice1"], ["adapter"],
    ]  # fmt: skip
