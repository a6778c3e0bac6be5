"""`cache="auto"`, and placements by hand: equal numbers wherever units rest, within the bytes, alike on all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic import Cache
from laconic.comm.speed import AS_IN_A_RACK
from laconic.shard import choosing
from laconic.shard.choosing import Chooser
from laconic.shard.policies import Placement
from laconic.shard.unit import Root
from tests.support.launch import on_ranks, run_ranks
from tests.support.scenario import Run, Scenario, assert_same_bits, play
from tests.support.sharded_net import (
    Net,
    buckets,
    build,
    gather_bytes,
    inputs,
    micro_batches,
    reduce_bytes,
    shard,
    squared_error,
    train_step,
)

MUCH = 1 << 40


def _auto(device_bytes: int | None = MUCH, host_bytes: int | None = 0) -> Cache:
    return Cache(where="auto", device_bytes=device_bytes, host_bytes=host_bytes)


def _net(*frozen: int) -> nn.Module:
    model: Any = Net(2)
    for index in frozen:
        model.blocks[index].requires_grad_(False)
    return model


def _all(word: Any) -> Callable[[Any], None]:
    """Lets all units of a model rest in one place."""
    return lambda model: model.set_placements({name: Placement(weights=word) for name in model.placements()})


def _forget_copies(model: Any) -> None:
    """Let the weights cross exactly once more."""
    for module in (model, *model.blocks):
        module.forget_copies()


PLAIN = Scenario(local=2, make=partial(_net, 1), steps=3, look=lambda model: dict(model.placements()))
"""Two nodes of two ranks, and units that rest nowhere: a block, a frozen one and the root."""


def _weights(run: Run | Any) -> list[str]:
    """Where the root and the blocks of a model rest."""
    model = run.model if isinstance(run, Run) else run
    return [each.weights for each in model.placements().values()]


def _whole_bytes(run: Run) -> int:
    return sum(bucket.layout.numel * bucket.form.compute_dtype.itemsize for bucket in buckets(run.model))


@pytest.fixture(autouse=True)
def _rack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks measure the speeds of a rack: what is chosen is then equal on each machine."""
    monkeypatch.setattr(choosing, "measure_gathers", lambda cluster, level: AS_IN_A_RACK[level])


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The number of choices of each rank."""
    made: Counter[int] = Counter()
    choose = Chooser._choose

    def counted(chooser: Chooser) -> Any:
        made[dist.get_rank()] += 1
        return choose(chooser)

    monkeypatch.setattr(Chooser, "_choose", counted)
    return made


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "local", "shares"), [(1, 3, [2.0]), (2, 2, [0.0, 0.4])])
def test_any_budget_gives_the_losses_of_no_cache_within_its_bytes(nodes: int, local: int, shares: list[float]) -> None:
    scenario = replace(PLAIN, nodes=nodes, local=local)
    plain = scenario.run()
    places = {}
    for share in shares:
        budget = int(share * _whole_bytes(plain[0]))
        runs = replace(scenario, cache=_auto(budget, host_bytes=budget // 3)).run()
        for run, other in zip(runs, plain, strict=True):
            assert_same_bits(run, other)
            assert run.looks == runs[0].looks, "alike on all ranks"
            assert run.memory[-1].host_bytes <= budget // 3
            assert run.memory[-1].device_peak_bytes <= other.memory[-1].device_peak_bytes + budget
        at_first, after_one, after_two, at_last = runs[0].looks
        assert {each.weights for each in (*at_first.values(), *after_one.values())} == {"none"}, "the step finds out"
        assert after_two == at_last, "chosen at the second step, and not changed any more"
        assert {each.gradients for each in at_last.values()} == {"node"}, "there is one micro-batch"
        places[share] = _weights(runs[0])
    assert 0.0 not in places or places[0.0] != places[0.4]
    assert "none" not in places.get(2.0, [])[1:], "with much memory all that is used twice rests somewhere"


def test_gradients_that_wait_whole_count_in_the_budget() -> None:
    """The bits are those of a run that was placed alike by hand: sums over micro-batches have another order."""
    plain = replace(PLAIN, nodes=1, local=3, make=partial(_net, 0), micro_batches=2)
    [unplaced, *_] = plain.run()
    budget = 3 * _whole_bytes(unplaced)
    [run, *_] = replace(plain, cache=_auto(budget)).run()
    chosen = run.looks[-1]
    [placed, *_] = replace(plain, events={1: lambda model: model.set_placements(chosen)}).run()
    assert_same_bits(run, placed)
    assert [each.gradients for each in chosen.values()] == ["rank", "node", "rank"], "frozen ones have none"
    assert run.memory[-1].device_peak_bytes <= unplaced.memory[-1].device_peak_bytes + budget


# -- when --------------------------------------------------------------------------------------------------------------


def test_a_training_forward_after_a_step_chooses_once(choices: Counter[int]) -> None:
    def body() -> None:
        rank = dist.get_rank()
        model, batch = shard(build(), cache=_auto()), inputs(0, rank)

        def evaluate() -> None:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    squared_error(model, batch)

        def accumulate() -> None:
            with model.no_sync():
                squared_error(model, batch).backward()

        for deed in (evaluate, accumulate, evaluate, accumulate, evaluate):
            deed()
        squared_error(model, batch)  # without a backward
        assert not choices[rank], "no step: the gradients wait"
        squared_error(model, batch).backward()  # ends a step
        evaluate()
        accumulate()
        assert not choices[rank], "no optimizer has stepped"
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert set(_weights(model)) == {"none"}
        accumulate()
        assert choices[rank] == 1
        assert _weights(model)[1:] == ["rank"] * 3
        train_step(model)
        evaluate()
        train_step(model)
        assert choices[rank] == 1

    run_ranks(body, 2, local=1)


def test_an_audit_is_no_step_and_its_uses_do_not_count(choices: Counter[int]) -> None:
    def body() -> None:
        model, batch = shard(build(), cache=_auto()), inputs(0, dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        laconic.audit(model, batch, squared_error)
        laconic.audit(model, batch, squared_error)
        train_step(model, optimizer)
        assert not choices[dist.get_rank()]
        uses = [unit.use() for unit in model._laconic_unit.root.units]
        assert [(use.num_gathers, use.num_early_sums) for use in uses] == [(1, 0), (2, 0), (2, 0), (2, 0)]
        laconic.audit(model, batch, squared_error)
        assert choices[dist.get_rank()] == 1, "an audit's forward is one like others"

    run_ranks(body, 2, local=1)


class Twice(Net):
    """Runs its first block twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in (0, 1, 2, 0):
            x = self.blocks[index](x)
        return self.out(x)


@on_ranks(3, local=3)
def test_what_waiting_whole_would_save_is_counted() -> None:
    """The sums of micro-batches that do not sync, each of the uses of a unit."""
    scenario = Scenario(nodes=1, local=3, make=Twice, steps=1, micro_batches=2)
    run = play(replace(scenario, cache=_auto()))
    units = run.model._laconic_unit.root.units
    uses = [unit.use() for unit in units]
    assert [use.num_gathers for use in uses] == [2, 8, 4, 4]
    assert [use.num_early_sums for use in uses] == [1, 2, 1, 1]
    in_node, whole = (
        play(replace(scenario, cache=cache)).sent[0].sent("local", "gradients")
        for cache in ("none", Cache(gradients="rank"))
    )
    pairs = zip(uses, units, strict=True)
    assert in_node - whole == sum(use.num_early_sums * reduce_bytes("local", unit.buckets) for use, unit in pairs)
    for batch in micro_batches(1):
        squared_error(run.model, batch[dist.get_rank()]).backward()
    assert [each.gradients for each in run.model.placements().values()] == ["rank"] * 4


# -- memory ------------------------------------------------------------------------------------------------------------


def _let_rank_1_lack_memory(num_times: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Returns, by rank, what will have been the bytes of each try."""
    tried: dict[int, list[int]] = defaultdict(list)
    allocate = Root.allocate_chosen

    def allocate_or_raise(root: Root) -> int:
        own = tried[dist.get_rank()]
        own.append(sum(bucket.node_shard.nbytes for unit in root.units for bucket in unit.buckets))
        if dist.get_rank() == 1 and len(own) <= num_times:
            raise error
        return allocate(root)

    monkeypatch.setattr(Root, "allocate_chosen", allocate_or_raise)
    monkeypatch.setattr(choosing, "_LEAST_BYTES", 1)
    return tried


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        MemoryError("no memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_where_one_rank_has_no_memory_all_choose_within_half(
    error: Exception, choices: Counter[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = _let_rank_1_lack_memory(1, error, monkeypatch)
    runs = replace(PLAIN, local=1, steps=2, cache=_auto()).run()
    assert choices == {0: 1, 1: 1}
    assert caplog.messages[0].startswith("there was no memory for the 0.00 GB on the device")
    assert caplog.messages[-1].startswith("cache='auto' places")
    for rank, run in enumerate(runs):
        first, second = tried[rank]
        assert 0 < second <= first // 2
        on_device = [bucket for bucket in buckets(run.model) if bucket.node_shard.where in ("device", "rank")]
        assert second == sum(bucket.node_shard.nbytes for bucket in on_device)
        assert run.looks == runs[0].looks


def test_where_a_rank_never_has_memory_nothing_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of little is nothing, and the choice ends there. Other errors are not taken for a lack of memory."""
    with monkeypatch.context() as patched:
        _let_rank_1_lack_memory(1, RuntimeError("something else"), patched)
        with pytest.raises(RuntimeError, match="something else"):
            replace(PLAIN, local=1, steps=2, cache=_auto()).run()
    tried = _let_rank_1_lack_memory(100, torch.OutOfMemoryError("no memory"), monkeypatch)
    runs = replace(PLAIN, local=1, steps=2, cache=_auto()).run()
    for rank, run in enumerate(runs):
        assert set(_weights(run)) <= {"none", "rank"}, "the last choice takes no more than a step without it"
        assert run.looks == runs[0].looks
        assert len(tried[rank]) < 30
        assert all(after <= before // 2 for before, after in pairwise(tried[rank]))


# -- differences on the wire -------------------------------------------------------------------------------------------


def test_copies_for_differences_always_rest_somewhere() -> None:
    """The bits are those of a fixed cache whose weights cross exactly once more, at the second step."""
    coded = replace(PLAIN, local=1, cache="host", options={"wire": "4bit"})
    [fixed, *_] = replace(coded, events={1: _forget_copies}).run()
    trained = [bucket for bucket in buckets(fixed.model) if not bucket.stored.is_frozen]
    node_shards = sum(bucket.form.geometry.node_numel * 4 for bucket in trained)
    for device_bytes, host_bytes in ((0, node_shards), (MUCH, 0)):
        run = replace(coded, cache=_auto(device_bytes, host_bytes)).run()[0]
        weights = [each.weights for each in run.looks[0].values()]
        assert weights == ["host", "host", "none"], "only the frozen unit has no copy"
        assert_same_bits(run, fixed)
        assert "none" not in _weights(run)[:2]
        assert run.memory[-1].host_bytes <= host_bytes
    few = node_shards // 3
    with pytest.raises(RuntimeError, match=rf"device_bytes={few} and host_bytes={few} have no room.*raise one, or use"):
        replace(coded, cache=_auto(few, few)).run()


# -- placements by hand ------------------------------------------------------------------------------------------------


def test_what_moves_is_gathered_once_more_and_what_rests_again_saves_bytes() -> None:
    def move(word: str, model: Any) -> None:
        _all(word)(model)
        assert {each.weights for each in model.placements().values()} == {word}
        held = model.memory()
        assert held.device_bytes == sum(bucket.shard.nbytes for bucket in buckets(model)), "nothing is gathered yet"
        assert (held.host_bytes > 0) == (word == "host")

    words = {1: "rank", 3: "host", 5: "device", 7: "none"}
    scenario = replace(PLAIN, local=1, steps=8, events={step: partial(move, word) for step, word in words.items()})
    run = scenario.run()[0]
    trained = gather_bytes("node", [bucket for bucket in buckets(run.model) if not bucket.stored.is_frozen])
    of_root = gather_bytes("node", run.model._laconic_unit.buckets)
    once = gather_bytes("node", buckets(run.model))
    nowhere = 2 * once - of_root
    assert [sent.weights for sent in run.sent] == [nowhere, once, trained, once, trained, once, trained, nowhere]


def test_who_places_by_hand_has_chosen(choices: Counter[int]) -> None:
    """Units that are not named stay where they are."""
    chosen = {"blocks.1": Placement(weights="device", gradients="rank")}
    run = replace(PLAIN, local=1, cache=_auto(), events={1: lambda model: model.set_placements(chosen)}).run()[0]
    assert not choices
    run.model.set_placements({})
    assert list(run.model.placements().values()) == [Placement(), Placement(), chosen["blocks.1"]]
    other = replace(PLAIN, steps=0).run()[0].model
    other.set_placements(run.model.placements())
    assert other.placements() == run.model.placements()


@on_ranks(2, local=1)
def test_placements_that_cannot_be_are_refused() -> None:
    model = shard(build(partial(_net, 1)), cache="host", wire="4bit")
    with pytest.raises(ValueError, match=r"'blocks.7' is no unit of this root; its units are .*'blocks.0', 'blocks.1'"):
        model.set_placements({"blocks.0": Placement(weights="rank"), "blocks.7": Placement()})
    with pytest.raises(ValueError, match="sends differences to the copies that a cache keeps"):
        model.set_placements({"blocks.0": Placement()})
    assert _weights(model) == ["host"] * 3, "nothing has moved"
    model.set_placements({"blocks.1": Placement()})
    assert _weights(model) == ["host", "host", "none"], "frozen weights cross as they are"
    train_step(model)


def test_units_with_a_cache_of_their_own_keep_it() -> None:
    until_backward, whole = Cache(where="host", until="backward"), Cache(where="rank", gradients="rank")
    plain = replace(PLAIN, local=1, make=Net, own={"blocks.0": {"cache": until_backward}, "blocks.1": {"cache": whole}})
    run = replace(plain, cache="auto").run()[0]
    assert_same_bits(run, plain.run()[0])
    assert _weights(run)[1:] == ["host", "rank", "rank"]
    assert run.looks[-1]["blocks.1"].gradients == "rank"
    own = buckets(run.model.blocks[0])
    assert {bucket.node_shard.until for bucket in own} == {"backward"}
    assert run.memory[-1].host_bytes == sum(bucket.node_shard.nbytes for bucket in own)
