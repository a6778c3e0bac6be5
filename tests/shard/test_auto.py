"""`cache="auto"`, and placements by hand: equal numbers wherever units rest, within the bytes, alike on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import laconic
from laconic import Cache
from laconic.comm.speed import AS_IN_A_RACK
from laconic.shard import choosing
from laconic.shard.choosing import Chooser
from laconic.shard.policies import Placement
from laconic.shard.unit import Root
from tests.support import sharded_net
from tests.support.launch import on_ranks
from tests.support.sharded_net import buckets

MESHES = [(1, 1), (3, 1), (3, 3), (4, 2), (6, 2)]
"""(ranks, local ranks)."""
MUCH = 1 << 40
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WORDS = ("rank", "none", "host", "device")


def _auto(device_bytes: int | None = MUCH, host_bytes: int | None = 0) -> Cache:
    return Cache(where="auto", device_bytes=device_bytes, host_bytes=host_bytes)


def _net(*frozen: int) -> nn.Module:
    model: Any = sharded_net.build()
    for index in frozen:
        model.blocks[index].requires_grad_(False)
    return model


def _train(
    model: Any, steps: int = 3, micro_batches: int = 1, before: Callable[[int], Any] = lambda step: None
) -> list[float]:
    """Train; `before` is called before each step. Returns all losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        before(step)
        for number in range(micro_batches):
            model.set_requires_gradient_sync(number == micro_batches - 1)
            loss = sharded_net.squared_error(model, sharded_net.inputs(10 * step + number, dist.get_rank()))
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        sharded_net.assert_nothing_gathered(model)
    return losses


def _assert_equal_parameters(model: Any, other: Any) -> None:
    wanted = sharded_net.full_parameters(other)
    for name, value in sharded_net.full_parameters(model).items():
        assert torch.equal(value, wanted[name]), name


def _assert_alike(value: Any) -> None:
    """Assert that all ranks have an equal value."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(each == value for each in found), found


def _weights(model: Any) -> list[str]:
    """Where the root and the blocks rest."""
    return [each.weights for each in model.placements().values()]


def _peak_bytes(model: Any, micro_batches: int = 1) -> int:
    """The most device bytes that the engine holds in a step."""
    model.reset_peak_memory()
    for number in range(micro_batches):
        model.set_requires_gradient_sync(number == micro_batches - 1)
        sharded_net.squared_error(model, sharded_net.inputs(7, dist.get_rank())).backward()
    model.zero_grad()
    peak: int = model.memory().device_peak_bytes
    return peak


def _resting_bytes(model: Any) -> int:
    """The bytes of the device that weights at rest take."""
    on_device = [bucket for bucket in buckets(model) if bucket.node_shard.where in ("device", "rank")]
    return sum(bucket.node_shard.nbytes for bucket in on_device)


def _whole_bytes(model: Any) -> int:
    return sum(bucket.layout.numel * bucket.compute_dtype.itemsize for bucket in buckets(model))


def _as_in_a_rack() -> None:
    """Let this rank measure the speeds of a rack: what is chosen is then equal on each machine."""
    choosing.measure_gathers = lambda cluster, level: AS_IN_A_RACK[level]


@contextmanager
def _choices_counted() -> Iterator[list[Any]]:
    """The choices that this rank makes in the body."""
    made: list[Any] = []
    choose = Chooser._choose
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Chooser, "_choose", lambda chooser: made.append(choose(chooser)) or made[-1])  # type: ignore[func-returns-value]
        yield made


@contextmanager
def _logged() -> Iterator[list[str]]:
    """The lines that this rank logs in the body."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("laconic").addHandler(handler)
    yield texts
    logging.getLogger("laconic").removeHandler(handler)


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(("world_size", "local"), MESHES)
@on_ranks("world_size", local="local")
def test_any_budget_gives_the_losses_of_no_cache_within_its_bytes() -> None:
    _as_in_a_rack()
    plain = sharded_net.shard(_net(1), cache="none")
    expected = _train(plain)
    places = []
    for share in (0.0, 0.4, 0.8, 2.0):
        budget = int(share * _whole_bytes(plain))
        model = sharded_net.shard(_net(1), cache=_auto(budget, host_bytes=budget // 3))
        assert set(_weights(model)) == {"none"}, "the first step finds out"
        seen: list[dict[str, Placement]] = []
        assert _train(model, before=lambda step, model=model, seen=seen: seen.append(model.placements())) == expected  # type: ignore[misc]
        _assert_equal_parameters(model, plain)
        assert {each.weights for each in seen[1].values()} == {"none"}, "chosen at the second step"
        assert seen[2] == model.placements(), "and not changed any more"
        _assert_alike({name: (each.weights, each.gradients) for name, each in model.placements().items()})
        assert {each.gradients for each in model.placements().values()} == {"node"}, "there is one micro-batch"
        assert model.memory().host_bytes <= budget // 3
        assert _peak_bytes(model) <= _peak_bytes(plain) + budget
        places.append(_weights(model))
    if dist.get_world_size() > 1:
        assert places[0] != places[1]
        assert "none" not in places[3][1:], "with much memory all that is used twice rests somewhere"
    else:
        assert places[3] == places[0], "one rank has all in its shards"


@pytest.mark.heavy
@pytest.mark.parametrize(("world_size", "local"), [(3, 3), (4, 2)])
@on_ranks("world_size", local="local")
def test_gradients_that_wait_whole_count_in_the_budget() -> None:
    """The bits are those of a run that was placed alike by hand: sums over micro-batches have another order."""
    _as_in_a_rack()
    for share in (0.0, 1.5, 3.0):
        model = sharded_net.shard(_net(0), cache=_auto())
        budget = int(share * _whole_bytes(model))
        model = sharded_net.shard(_net(0), cache=_auto(budget))
        losses = _train(model, micro_batches=3)
        placed = sharded_net.shard(_net(0))
        chosen = model.placements()
        by_hand = {1: lambda placed=placed, chosen=chosen: placed.set_placements(chosen)}
        assert _train(placed, micro_batches=3, before=lambda step: by_hand.get(step, lambda: None)()) == losses  # noqa: B023
        _assert_equal_parameters(model, placed)
        gradients = [each.gradients for each in chosen.values()]
        assert ("rank" in gradients) == (share > 0)
        assert share < 3 or gradients == ["rank", "node", "rank", "rank"], "frozen ones have none"
        plain = sharded_net.shard(_net(0))
        _train(plain, micro_batches=3)
        assert _peak_bytes(model, 3) <= _peak_bytes(plain, 3) + budget


@pytest.mark.heavy
@on_ranks(4, local=2)
def test_with_other_policies_too() -> None:
    _as_in_a_rack()
    changes: list[dict[str, Any]] = [
        {"mp_policy": BF16}, {"offload_policy": CPUOffloadPolicy()}, {"reshard_after_forward": False},
        {"reshard_after_forward": True}, {"wire": laconic.Wire(weights="int8", as_values=True)},
        {"checks": laconic.Checks(interval=1, on_damage="regather", unnoticed_edits=True)},
    ]  # fmt: skip
    for change in changes:
        plain = sharded_net.shard(_net(1), **{"cache": "none", **change})
        model = sharded_net.shard(_net(1), cache=_auto(_whole_bytes(plain) // 2), **change)
        assert _train(model, steps=3) == _train(plain, steps=3), change
        _assert_equal_parameters(model, plain)
        assert set(_weights(model)) != {"none"}, change


@on_ranks(2, local=1)
def test_without_a_budget_there_is_room_on_a_machine() -> None:
    model = sharded_net.shard(_net(), cache="auto")
    assert _train(model) == _train(sharded_net.shard(_net()))
    assert _weights(model)[1:] == ["rank"] * 3
    assert model.memory().host_bytes == 0, "the host's memory is the device's here"


@on_ranks(4, local=1)
def test_each_island_of_replicas_chooses_and_all_train_as_one() -> None:
    _as_in_a_rack()
    mesh = laconic.init_mesh("cpu", islands=2, nodes=2, local=1)
    plain = sharded_net.shard(_net(), mesh=mesh)
    model = sharded_net.shard(_net(), mesh=mesh, cache=_auto(_whole_bytes(plain) // 2))
    assert _train(model) == _train(plain)
    _assert_equal_parameters(model, plain)
    assert "rank" in _weights(model)


# -- when --------------------------------------------------------------------------------------------------------------


@pytest.mark.machine
@on_ranks(4, local=2)
def test_a_training_forward_after_a_step_chooses_once() -> None:
    _as_in_a_rack()
    with _choices_counted() as made:
        model = sharded_net.shard(_net(), cache=_auto())
        batch = sharded_net.inputs(0, dist.get_rank())

        def evaluate() -> None:
            with torch.no_grad():
                sharded_net.squared_error(model, batch)
            with torch.inference_mode():
                sharded_net.squared_error(model, batch)

        evaluate()
        for _ in range(2):  # of no step: the gradients wait
            with model.no_sync():
                sharded_net.squared_error(model, batch).backward()
            evaluate()
        sharded_net.squared_error(model, batch)  # without a backward
        assert not made
        sharded_net.squared_error(model, batch).backward()  # ends a step
        evaluate()
        assert not made
        with model.no_sync():
            sharded_net.squared_error(model, batch).backward()
        assert not made, "no optimizer has stepped"
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert set(_weights(model)) == {"none"}
        with model.no_sync():
            sharded_net.squared_error(model, batch).backward()
        assert len(made) == 1
        assert _weights(model)[1:] == ["rank"] * 3
        for _ in range(3):
            sharded_net.train_step(model)
            evaluate()
        assert len(made) == 1
        other = sharded_net.shard(_net(), cache=_auto())
        _train(other, steps=2)
        assert len(made) == 2, "each root chooses for itself"


@pytest.mark.machine
@on_ranks(2, local=1)
def test_an_audit_is_no_step_and_its_uses_do_not_count() -> None:
    with _choices_counted() as made:
        model = sharded_net.shard(_net(), cache=_auto())
        laconic.audit(model, sharded_net.inputs(0, dist.get_rank()), sharded_net.squared_error)
        laconic.audit(model, sharded_net.inputs(0, dist.get_rank()), sharded_net.squared_error)
        assert not made
        _train(model, steps=1)
        uses = [unit.use() for unit in model._laconic_unit.root.units]
        assert [use.num_gathers for use in uses] == [1, 2, 2, 2]
        assert [use.num_early_sums for use in uses] == [0] * 4
        laconic.audit(model, sharded_net.inputs(0, dist.get_rank()), sharded_net.squared_error)
        assert len(made) == 1, "an audit's forward is one like others"


@pytest.mark.machine
@on_ranks(4, local=2)
def test_one_rank_says_once_what_was_chosen() -> None:
    _as_in_a_rack()
    with _logged() as texts:
        _train(sharded_net.shard(_net(0), cache=_auto()), micro_batches=2)
    if dist.get_rank():
        assert not texts
        return
    [text] = texts
    assert text.startswith("cache='auto' places 4 units: 4 whole on each rank, gradients of 3 whole until the last"), (
        text
    )
    assert "and 0.00 GB of host memory, and saves " in text


class Twice(sharded_net.Net):
    """Runs its first block twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in (0, 1, 2, 0):
            x = self.blocks[index](x)
        return self.out(x)


@on_ranks(3, local=3)
def test_what_waiting_whole_would_save_is_counted() -> None:
    """The sums of micro-batches that do not sync, each of the uses of a unit."""
    _as_in_a_rack()
    for num_micro_batches, waits in ((1, ["node"] * 4), (3, ["rank"] * 4)):
        model = sharded_net.shard(sharded_net.build(Twice), cache=_auto())
        _train(model, steps=1, micro_batches=num_micro_batches)
        uses = [unit.use() for unit in model._laconic_unit.root.units]
        assert [use.num_gathers for use in uses] == [num_micro_batches * each for each in (1, 4, 2, 2)]
        assert [use.num_early_sums for use in uses] == [(num_micro_batches - 1) * each for each in (1, 2, 1, 1)]
        saved = []
        for cache in ("none", laconic.Cache(gradients="rank")):
            counted = sharded_net.shard(sharded_net.build(Twice), cache=cache)
            with sharded_net.moved(counted) as bytes_moved:
                _train(counted, steps=1, micro_batches=num_micro_batches)
            saved.append(bytes_moved.sent("local", "gradients"))
        units = model._laconic_unit.root.units
        early = [
            use.num_early_sums * sharded_net.reduce_bytes("local", unit.buckets)
            for use, unit in zip(uses, units, strict=True)
        ]
        assert saved[0] - saved[1] == sum(early)
        _train(model, steps=1)
        assert [each.gradients for each in model.placements().values()] == waits


# -- memory ------------------------------------------------------------------------------------------------------------


@contextmanager
def _without_memory(num_times: int, error: Callable[[], Exception]) -> Iterator[list[int]]:
    """Let rank 1 run out of memory so many times. The list gets the bytes that this rank has tried."""
    tried: list[int] = []
    allocate = Root.allocate_resting

    def allocate_or_raise(root: Root, units: Sequence[Any]) -> int:
        tried.append(sum(bucket.node_shard.nbytes for unit in units for bucket in unit.buckets))
        if dist.get_rank() == 1 and len(tried) <= num_times:
            raise error()
        return allocate(root, units)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Root, "allocate_resting", allocate_or_raise)
        patched.setattr(choosing, "_LEAST_BYTES", 1)
        yield tried


@pytest.mark.machine
@on_ranks(4, local=2)
def test_where_one_rank_has_no_memory_all_choose_within_half() -> None:
    _as_in_a_rack()
    expected = _train(sharded_net.shard(_net()))
    kinds: list[Callable[[], Exception]] = [
        lambda: torch.OutOfMemoryError("no memory"),
        lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"),
        lambda: OSError(12, "Cannot allocate memory"),
    ]
    for error in kinds:
        with _without_memory(1, error) as tried, _choices_counted() as made, _logged() as texts:
            model = sharded_net.shard(_net(), cache=_auto())
            assert _train(model) == expected
        assert len(made) == 1
        assert len(tried) == 2
        assert 0 < tried[1] <= tried[0] // 2
        assert tried[1] == _resting_bytes(model)
        _assert_alike(_weights(model))
        begins = ["there was no memory for the 0.00 GB on the device and 0.00 GB on the host", "cache='auto' places 4"]
        assert [text[: len(begin)] for text, begin in zip(texts, begins, strict=dist.get_rank() == 0)] == (
            [] if dist.get_rank() else begins
        )


@pytest.mark.machine
@on_ranks(4, local=2)
def test_where_a_rank_never_has_memory_nothing_rests() -> None:
    """Half of little is nothing, and the choice ends there."""
    with _without_memory(100, lambda: torch.OutOfMemoryError("no memory")) as tried:
        model = sharded_net.shard(_net(), cache=_auto())
        assert _train(model) == _train(sharded_net.shard(_net()))
    assert set(_weights(model)) <= {"none", "rank"}, "the last choice takes no more than a step without it"
    _assert_alike(_weights(model))
    assert len(tried) < 30
    assert all(after <= before // 2 for before, after in pairwise(tried))


@pytest.mark.machine
@on_ranks(2, local=1)
def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    model = sharded_net.shard(_net(), cache=_auto())
    _train(model, steps=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Root, "allocate_resting", _raise_something_else)
        with pytest.raises(RuntimeError, match="something else"):
            sharded_net.train_step(model)


def _raise_something_else(root: Root, units: Any) -> int:
    raise RuntimeError("something else")


# -- differences on the wire -------------------------------------------------------------------------------------------


@pytest.mark.heavy
@on_ranks(4, local=2)
def test_copies_for_differences_always_rest_somewhere() -> None:
    """The bits are those of a fixed cache whose weights cross exactly once more, at the second step."""
    fixed = sharded_net.shard(_net(1), cache="host", wire="4bit")

    def cross_exactly(step: int) -> None:
        for module in (fixed, *fixed.blocks) if step == 1 else ():
            module.forget_copies()

    expected = _train(fixed, steps=5, before=cross_exactly)
    node_shards = sum(bucket.node_shard_numel * 4 for bucket in buckets(fixed) if not bucket.is_frozen)
    for device_bytes, host_bytes in ((0, node_shards), (node_shards // 2, node_shards), (MUCH, 0), (node_shards, 0)):
        model = sharded_net.shard(_net(1), cache=_auto(device_bytes, host_bytes), wire="4bit")
        assert _weights(model) == ["host", "host", "none", "host"], "only the frozen unit has no copy"
        assert _train(model, steps=5) == expected, (device_bytes, host_bytes)
        _assert_equal_parameters(model, fixed)
        root, first, _, last = _weights(model)
        assert "none" not in (root, first, last)
        assert model.memory().host_bytes <= host_bytes
    for device_bytes, host_bytes in ((0, 0), (node_shards // 3, node_shards // 3)):
        model = sharded_net.shard(_net(1), cache=_auto(device_bytes, host_bytes), wire="4bit")
        _train(model, steps=1)
        message = (
            rf"device_bytes={device_bytes} and host_bytes={host_bytes} have no room.*raise one, or use wire='exact'"
        )
        with pytest.raises(ValueError, match=message):
            sharded_net.train_step(model)


# -- placements by hand ------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize(("world_size", "local"), [(1, 1), (3, 3), (6, 2)])
@on_ranks("world_size", local="local")
def test_units_may_move_between_steps() -> None:
    """Each unit rests in each place once, in another order than the others; the bits are those of none."""
    expected: dict[str, list[float]] = {}
    options: dict[str, dict[str, Any]] = {
        "plain": {}, "bf16": {"mp_policy": BF16}, "offload": {"offload_policy": CPUOffloadPolicy()},
        "checks": {"checks": laconic.Checks(interval=1, on_damage="regather", unnoticed_edits=True)},
    }  # fmt: skip
    for kind, given in options.items():
        plain = sharded_net.shard(_net(0, 2), **given)
        expected[kind] = _train(plain, steps=5)
        model = sharded_net.shard(_net(0, 2), **given)

        def move(step: int, model: Any = model) -> None:
            names = list(model.placements())
            chosen = {name: Placement(weights=WORDS[(step + place) % 4]) for place, name in enumerate(names)}  # type: ignore[arg-type]
            model.set_placements(chosen)
            assert model.placements() == chosen

        assert _train(model, steps=5, before=move) == expected[kind], kind
        _assert_equal_parameters(model, plain)
        model.set_placements({name: Placement() for name in model.placements()})
        assert model.memory().device_bytes + model.memory().host_bytes == sum(b.shard.nbytes for b in buckets(model))


@on_ranks(4, local=2)
def test_what_moves_is_gathered_once_more_and_what_rests_again_saves_bytes() -> None:
    model = sharded_net.shard(_net(1), cache="none")
    trained = [bucket for bucket in buckets(model) if not bucket.is_frozen]
    everything = sharded_net.gather_bytes("node", buckets(model))
    sharded_net.train_step(model)
    for word in ("rank", "host", "device"):
        model.set_placements({name: Placement(weights=word) for name in model.placements()})
        held, at_rest = model.memory(), sum(bucket.shard.nbytes for bucket in buckets(model))
        assert held.device_bytes == at_rest, "nothing is gathered yet"
        assert (held.host_bytes > 0) == (word == "host")
        for number, which in enumerate((everything, sharded_net.gather_bytes("node", trained))):
            with sharded_net.moved(model) as bytes_moved:
                sharded_net.train_step(model)
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        with torch.no_grad():
                            parameter.add_(0)
            assert bytes_moved.weights == which, (word, number)
    model.set_placements({})
    with sharded_net.moved(model) as bytes_moved:
        sharded_net.train_step(model)
    assert bytes_moved.weights == everything


@on_ranks(4, local=2)
def test_differences_go_on_after_a_move_with_an_exact_crossing() -> None:
    fixed = sharded_net.shard(_net(1), cache="host", wire="4bit")
    model = sharded_net.shard(_net(1), cache="host", wire="4bit")
    words = {2: "rank", 4: "device", 5: "host"}

    def cross_exactly(step: int) -> None:
        for module in (fixed, *fixed.blocks) if step in words else ():
            module.forget_copies()

    def move(step: int) -> None:
        if step in words:
            model.set_placements({name: Placement(weights=words[step]) for name in model.placements()})  # type: ignore[arg-type]

    assert _train(model, steps=7, before=move) == _train(fixed, steps=7, before=cross_exactly)
    _assert_equal_parameters(model, fixed)


@on_ranks(4, local=2)
def test_who_places_by_hand_has_chosen() -> None:
    """Before the first forward or after it; units that are not named stay where they are."""
    for steps_before in (0, 1):
        with _choices_counted() as made:
            model = sharded_net.shard(_net(), cache=_auto())
            _train(model, steps=steps_before)
            model.set_placements({"blocks.1": Placement(weights="device", gradients="rank")})
            _train(model)
            assert not made
            assert _weights(model) == ["none", "none", "device", "none"]
            assert model.placements()["blocks.1"].gradients == "rank"
            model.set_placements({})
            assert _weights(model) == ["none", "none", "device", "none"]
    other = sharded_net.shard(_net(), cache="none")
    other.set_placements(model.placements())
    assert other.placements() == model.placements()


@on_ranks(2, local=1)
def test_placements_that_cannot_be_are_refused() -> None:
    model = sharded_net.shard(_net(1), cache="host", wire="4bit")
    with pytest.raises(ValueError, match=r"'blocks.7' is no unit of this root; its units are .*'blocks.0', 'blocks.1'"):
        model.set_placements({"blocks.0": Placement(weights="rank"), "blocks.7": Placement()})
    wrong: list[dict[str, Any]] = [{"weights": "disk"}, {"weights": "auto"}, {"weights": "host", "gradients": "host"}]
    for words in wrong:
        with pytest.raises(
            ValueError, match=r"Placement\((weights|gradients)='\w+'\) is not known; use one of '\w+', "
        ):
            Placement(**words)
    with pytest.raises(ValueError, match="sends differences to the copies that a cache keeps"):
        model.set_placements({"blocks.0": Placement()})
    assert _weights(model) == ["host"] * 4, "nothing has moved"
    model.set_placements({"blocks.1": Placement()})
    assert _weights(model) == ["host", "host", "none", "host"], "frozen weights cross as they are"
    _train(model, steps=2)


@on_ranks(4, local=2)
def test_units_with_a_cache_of_their_own_keep_it() -> None:
    _as_in_a_rack()

    def mixed(rest: Any) -> Any:
        model: Any = _net(1)
        mesh = laconic.init_mesh("cpu")
        fixed = (Cache(where="host", until="backward"), Cache(where="rank", gradients="rank"), rest)
        for block, cache in zip(model.blocks, fixed, strict=True):
            laconic.fully_shard(block, mesh=mesh, cache=cache)
        return laconic.fully_shard(model, mesh=mesh, cache=rest)

    plain, model = mixed("none"), mixed(_auto())
    assert _train(model) == _train(plain)
    _assert_equal_parameters(model, plain)
    assert _weights(model) == ["none", "host", "rank", "rank"], "the root is used once a step"
    assert model.placements()["blocks.1"].gradients == "rank"
    assert {bucket.node_shard.until for bucket in buckets(model.blocks[0])} == {"backward"}
    assert model.memory().host_bytes == sum(bucket.node_shard.nbytes for bucket in buckets(model.blocks[0]))


# -- the policy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "device", "device_bytes": 5}, r"Cache\(device_bytes=5\) limits what where='auto' may take"),
        ({"host_bytes": 0}, r"Cache\(host_bytes=0\) limits what where='auto' may take; got Cache\(where='none'\)"),
        ({"where": "auto", "device_bytes": -1}, r"Cache\(device_bytes=-1\) must not be negative"),
        ({"where": "auto", "gradients": "rank"}, r"gradients='rank'\) is what where='auto' chooses itself; leave it"),
        ({"where": "auto", "until": "backward"}, r"lets weights go after backward, but .*where='auto'\) keeps them"),
        ({"gradients": "host"}, r"Cache\(gradients='host'\) is not known; use one of 'node', 'rank'"),
    ],
)
def test_budgets_that_limit_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cache(**options)
