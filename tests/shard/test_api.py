"""The interface of a sharded module: names, setters, edits that it refuses; and the kinds that share a bucket."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import laconic
from laconic.layout.bucket import BucketLayout
from laconic.shard.api import BucketKind
from laconic.shard.gather import GatherState
from laconic.shard.policies import Wire
from tests.support.launch import on_ranks
from tests.support.sharded_net import (
    Block,
    Net,
    assert_nothing_gathered,
    buckets,
    build,
    full_gradients,
    full_parameters,
    gather_bytes,
    held_bytes,
    inputs,
    micro_batches,
    moved,
    oracle_of,
    set_divide_factors,
    shard,
    squared_error,
    train_step,
)

# -- setters ----------------------------------------------------------------------------------------------------------


@on_ranks(4, local=2)
def test_units_stay_gathered_as_their_setters_say() -> None:
    model = shard(build(), reshard_after_forward=False)
    sharded, batch = dict(model.named_parameters()), inputs(0, dist.get_rank())
    of_blocks, of_root = gather_bytes("node", buckets(model.blocks)), gather_bytes("node", model._laconic_unit.buckets)

    def sent_in_steps(num_steps: int = 1) -> int:
        with moved(model) as m:
            for _ in range(num_steps):
                train_step(model)
        return m.weights

    with moved(model) as m:
        loss = squared_error(model, batch)
        assert all(unit.gather.state is GatherState.SHOWN for unit in model._units())
        loss.backward()
    assert m.weights == of_blocks + of_root, "kept from forward to backward"
    assert_nothing_gathered(model)
    with torch.no_grad():
        model(batch[0])
    assert_nothing_gathered(model)  # forward alone leaves nothing, whatever the setting

    model.set_reshard_after_forward(True)
    assert sent_in_steps() == 2 * (of_blocks + of_root), "the root too, once it is set"
    model.set_reshard_after_forward(False, recurse=False)
    assert sent_in_steps() == 2 * of_blocks + of_root

    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    assert sent_in_steps(3) == of_blocks + of_root, "kept from one micro-batch to the next"
    squared_error(model, batch).backward()
    torch.optim.SGD(sharded.values(), lr=0.1).step()
    plain = build()
    plain.load_state_dict({name: p.full_tensor() for name, p in sharded.items()})
    with moved(model) as m:
        torch.testing.assert_close(model(batch[0]), plain(batch[0]))
    assert m.weights == of_blocks + of_root, "gathered again after a step"
    model.set_reshard_after_backward(True)
    model(batch[0]).sum().backward()
    assert_nothing_gathered(model)


@on_ranks(3, local=1)
def test_the_divide_factor_can_be_set() -> None:
    model = shard(build())
    batches = micro_batches(1)
    _, want = oracle_of(model).gradients(batches)
    for of_blocks, of_root in ((1.0, 1.0), (3.0, 1.0)):
        set_divide_factors(model, of_blocks)
        model.set_gradient_divide_factor(of_root)  # modules below keep their divisor
        squared_error(model, batches[0][dist.get_rank()]).backward()
        for name, got in full_gradients(model).items():
            factor = of_blocks if name.startswith("blocks") else of_root
            torch.testing.assert_close(got, want[name] * 3 / factor, msg=name)
        model.zero_grad()
    for factor in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="must be a positive number"):
            model.set_gradient_divide_factor(factor)


@on_ranks(4, local=2)
def test_unshard_and_reshard_by_hand() -> None:
    model, plain, x = shard(build()), build(), inputs(0, 0)[0]
    with moved(model) as m:
        handle = model.unshard(async_op=True)
        assert handle is not None
        assert model._laconic_unit.gather.state is GatherState.NODE, "it has begun"
        assert isinstance(model.inp.weight, laconic.RaggedTensor), "the sharded parameter stays until wait()"
        handle.wait()
        assert type(model.inp.weight) is nn.Parameter
        assert torch.equal(model.inp.weight, plain.get_parameter("inp.weight"))
        assert model.unshard() is None
        model.reshard()
        model.reshard()
    assert isinstance(model.inp.weight, laconic.RaggedTensor)
    assert m.weights == gather_bytes("node", model._laconic_unit.buckets)
    sharded = model.blocks[1].up.bias
    model.blocks[1].unshard()
    sharded.requires_grad_(False)
    assert torch.equal(model.blocks[1].up.weight, plain.get_parameter("blocks.1.up.weight"))
    with moved(model) as m:
        model.unshard()
        y = model(x)
    torch.testing.assert_close(y, plain(x))
    assert m.weights == gather_bytes("node", buckets(model)) - gather_bytes("node", buckets(model.blocks[1]))
    y.sum().backward()
    assert sharded.grad is None, "it was frozen while gathered"
    assert model.blocks[1].down.bias.grad is not None


@on_ranks(4, local=2)
def test_unshard_before_the_first_forward_and_before_an_edit() -> None:
    x, plain, model = inputs(0, 0)[0], build(), shard(build(), cache="host")
    for block in model.blocks:
        block.unshard()  # before the root has run: FSDP2 allows it
    torch.testing.assert_close(model(x), plain(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train_step(model, optimizer)
    assert model.memory().device_bytes == held_bytes(model), "one ledger counts all units"
    assert_nothing_gathered(model)

    handle = model.unshard(async_op=True)
    with torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.fill_(0.5)
    handle.wait()
    torch.testing.assert_close(model(x), plain(x), msg="the pending gather is stale, and the unit is gathered again")


@on_ranks(3)
def test_gathered_parameters_are_views_of_one_buffer_that_comes_and_goes() -> None:
    model = shard(build(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    [bucket] = model._laconic_unit.buckets
    assert bucket.layout.shard_numel * 2 % 16 == 0, "shards start on 16 bytes in the smallest dtype"
    assert bucket.shard.dtype == torch.float32
    held = model.memory().device_bytes
    model.unshard()
    weight, *others = model.inp.weight, model.inp.bias, model.out.weight, model.out.bias
    assert all(each.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for each in others)
    assert model.memory().device_bytes == held + 2 * bucket.layout.numel
    model.reshard()
    assert weight.untyped_storage().nbytes() == 0
    assert (model.memory().device_bytes, model.memory().device_peak_bytes) == (held, held + 2 * bucket.layout.numel)
    model.reset_peak_memory()
    assert model.memory().device_peak_bytes == held
    model.unshard()
    assert torch.equal(weight, build().get_parameter("inp.weight").bfloat16())


@on_ranks(1)
def test_on_one_rank_the_shard_is_the_bucket() -> None:
    model = shard(build())
    model.unshard()
    assert model.memory().device_peak_bytes == sum(bucket.shard.nbytes for bucket in buckets(model))


@on_ranks(3, local=1)
def test_names_classes_and_identities_stay() -> None:
    plain, model = build(), shard(build())
    assert type(model).__name__ == "ShardedNet"
    assert isinstance(model, laconic.ShardedModule)
    assert isinstance(model, Net)
    assert isinstance(model.blocks[0], Block)
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    identities = [id(p) for p in model.parameters()]
    train_step(model, torch.optim.AdamW(model.parameters()))
    assert [id(p) for p in model.parameters()] == identities, "the optimizer's parameters are the model's"
    model.load_state_dict(plain.state_dict())
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, value in full_parameters(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name
    # The root stays gathered after forward, yet a state dict holds sharded parameters.
    squared_error(model, inputs(0, 0))
    assert all(isinstance(value, laconic.RaggedTensor) for value in model.state_dict().values())


# -- edits of gathered parameters -------------------------------------------------------------------------------------


class Edits(Net):
    """A model that edits a gathered parameter in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inp.weight.mul_(0.5)
        return super().forward(x)


@on_ranks(2, local=1)
def test_editing_a_gathered_parameter_is_refused() -> None:
    """By `.data`, which has no version, in the first steps, as where a teacher's weights follow a student's."""
    edits, model = shard(build(Edits), cache="host"), shard(build(), cache="host")
    message = r"inp.weight.*edited in place.*reshard\(\).*under torch.no_grad"
    with pytest.raises(RuntimeError, match=message), torch.no_grad():
        edits(inputs(0, 0)[0])
    owns = bool(model.out.bias.to_local().numel())
    for part in (lambda bias: bias, lambda bias: bias.data):
        model.unshard()
        with torch.no_grad():
            part(model.out.bias).fill_(1)
        with pytest.raises(RuntimeError, match=r"parameter out.bias was edited in place") if owns else nullcontext():
            model.reshard()
    assert all(isinstance(p, laconic.RaggedTensor) for p in (*edits.parameters(), *model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_reshard_after_backward(False)
    for _ in range(3):
        train_step(model, optimizer)  # weights that change while they are gathered are no edits of theirs
    checked = shard(build(), checks=laconic.Checks(interval=1))
    for _ in range(3):
        train_step(checked)
    loss = squared_error(checked, inputs(0, 0))
    checked.out.bias.data.fill_(1)
    with pytest.raises(laconic.CorruptionError, match="weights"):
        loss.backward()


@on_ranks(2, local=1)
def test_attributes_and_hooks_stay_whichever_form_of_a_parameter_gets_them() -> None:
    plain, summed = build(), list[Tensor]()
    plain.inp.weight.kind = "matrix"
    plain.inp.weight.register_post_accumulate_grad_hook(lambda parameter: summed.append(parameter.grad))
    model = shard(plain)
    assert model.inp.weight.kind == "matrix"
    squared_error(model, inputs(0, 0)).backward()
    assert len(summed) == 1
    assert isinstance(summed[0], laconic.RaggedTensor)
    model.unshard()
    assert model.inp.weight.kind == "matrix"
    model.inp.weight.later = 1  # on the gathered one
    model.reshard()
    assert model.inp.weight.later == 1
    model.inp.weight.last = 2  # on the sharded one
    model.unshard()
    assert model.inp.weight.last == 2
    assert not hasattr(model.inp.weight, "spec"), "the engine's own stay apart"
    hooked = build()
    hooked.inp.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match=r"inp.weight has a hook of Tensor.register_hook.*post_accumulate_grad_hook"):
        shard(hooked)
    laconic.fully_shard(hooked, ignored_params=[hooked.inp.weight])  # there it runs


@pytest.mark.parametrize("wire", ["exact", "4bit"])
@on_ranks(2, local=1)
def test_a_new_version_with_the_same_values_is_no_edit(wire: Any) -> None:
    """As where a parametrization is registered on a gathered parameter, which peft does in forward."""
    model = shard(build(), cache="host", wire=wire)
    model.unshard()
    with torch.no_grad():
        model.out.bias.set_(model.out.bias)
    if wire == "exact":
        model.reshard()
    else:
        with pytest.raises(RuntimeError, match=r"parameter out.bias was edited in place"):
            model.reshard()


@on_ranks(2, local=1)
def test_a_replaced_parameter_is_taken_at_first_and_refused_later() -> None:
    model, x = shard(build()), inputs(0, 0)[0]
    sharded = model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(29, 17))
    with pytest.warns(UserWarning, match=r"up.weight replaced sharded parameters.*model.parameters\(\)"):
        model(x)
    model.reshard()
    assert model.blocks[1].up.weight is sharded
    assert not sharded.full_tensor().any(), "the values of the replacement"
    model.blocks[1].up.weight = nn.Parameter(torch.ones(29, 17))
    message = r"up.weight is no longer the one fully_shard made.*load_state_dict of the sharded module"
    with pytest.raises(RuntimeError, match=message):
        model(x)


@on_ranks(2, local=1)
def test_compiled_modules_have_the_same_gradients() -> None:
    """Blocks compiled before they are sharded, in place or wrapped, and a compiled root."""
    in_place, wrapped, root = build(), build(), shard(build())
    for index, block in enumerate(in_place.blocks):  # type: ignore[arg-type]
        block.compile(backend="eager")
        wrapped.blocks[index] = torch.compile(wrapped.blocks[index], backend="eager")  # type: ignore[index,operator]
    batches = micro_batches(1)
    _, want = oracle_of(root).gradients(batches)
    for model, run in (
        (in_place, shard(in_place)),
        (wrapped, shard(wrapped)),
        (root, torch.compile(root, backend="eager")),
    ):
        squared_error(run, batches[0][dist.get_rank()]).backward()
        got = {name.replace("_orig_mod.", ""): value for name, value in full_gradients(model).items()}
        torch.testing.assert_close(got, want)


# -- kinds of buckets --------------------------------------------------------------------------------------------------

MATRIX = BucketLayout.whole_in(0, name="weight", shape=(4, 3), num_shards=2)
VECTOR = BucketLayout.whole_in(0, name="bias", shape=(4,), num_shards=2)


def kind(**fields: Any) -> BucketKind:
    return BucketKind(**{"dtype": torch.float32, "is_trained": True, **fields})


@pytest.mark.parametrize(
    ("own", "layout", "nodes", "islands", "coded"),
    [
        ({}, MATRIX, 2, 1, ("int4", "int4")),
        ({}, MATRIX, 1, 1, ("exact", "exact")),
        ({}, VECTOR, 2, 1, ("exact", "exact")),
        ({"is_trained": False}, MATRIX, 2, 1, ("exact", "exact")),
        ({"dtype": torch.int8}, MATRIX, 2, 1, ("exact", "exact")),
        ({"part": 1}, MATRIX, 3, 2, ("int4", "int4")),
        ({"converted": nn.Parameter}, MATRIX, 2, 1, ("exact", "int4")),
        ({}, MATRIX, 1, 2, ("exact", "int4")),  # only gradients cross between islands of one node
    ],
)
def test_trained_matrices_alone_are_coded(
    own: dict[str, Any], layout: BucketLayout, nodes: int, islands: int, coded: tuple[str, str]
) -> None:
    found = kind(**own).wire(Wire.of("4bit"), layout, num_nodes=nodes, num_islands=islands)
    assert (found.weights, found.gradients) == coded
