"""Blocks by rule, by function and by name pattern, and the errors of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.layout.granularity import Block, block_of, check_matched, elements, resolve, rows, whole
from tests.support.launch import on_ranks
from tests.support.sharded_net import (
    Net,
    assert_gradients,
    assert_nothing_gathered,
    build,
    micro_batches,
    oracle_of,
    shard,
    squared_error,
)


def parameters(**shapes: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    return [(name.replace("_", "."), torch.empty(shape, device="meta")) for name, shape in shapes.items()]


@pytest.mark.parametrize(
    ("block", "shape", "numel"),
    [
        (rows(1), (6, 5), 5), (rows(4), (6, 5), 20), (rows(8), (6, 5), 30), (rows(4), (7,), 1), (rows(4), (), 1),
        (rows(3), (4, 6, 5), 15), (rows(2), (0, 5), 1), (rows(2), (5, 0), 1),
        (elements(7), (6, 5), 7), (elements(64), (6, 5), 30), (elements(4), (7,), 4), (elements(4), (), 1),
        (whole(), (6, 5), 30), (whole(), (7,), 7), (whole(), (), 1), (whole(), (0, 3), 1),
    ],
)  # fmt: skip
def test_elements_per_block(block: Block, shape: tuple[int, ...], numel: int) -> None:
    assert block.numel(shape) == numel


def test_texts_name_blocks() -> None:
    assert [block_of(text) for text in ("32 rows", "1 row", "256 elements", "whole")] == [
        rows(32), rows(1), elements(256), whole(),
    ]  # fmt: skip


def of_names(name: str, parameter: Tensor) -> Any:
    return rows(2) if name == "w" else parameter.numel()


def test_a_block_for_all_or_a_function_of_names() -> None:
    for granularity, numels in ((None, (5, 1)), (whole(), (30, 7)), (of_names, (10, 7))):
        assert resolve(granularity, parameters(w=(6, 5), b=(7,))).numels == numels  # type: ignore[arg-type]


def test_the_first_pattern_that_matches_counts() -> None:
    found = resolve(
        {"mlp.*": rows(2), "*.w": whole(), "*.b": elements(3)},
        parameters(mlp_w=(6, 5), out_w=(6, 5), out_b=(9,), scale=(4, 4)),
    )
    assert found.numels == (10, 30, 3, 4), "a parameter that no pattern matches gets one row"
    assert found.used == {"mlp.*", "*.w", "*.b"}
    check_matched([found])


def test_what_is_no_block_is_refused() -> None:
    def of_w(granularity: Any) -> Callable[[], Any]:
        return lambda: resolve(granularity, parameters(w=(6, 5)))

    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: rows(0), "a block of 0 rows cuts nothing; it needs at least 1"),
        (lambda: elements(-1), "a block of -1 elements cuts nothing; it needs at least 1"),
        (lambda: block_of("0 rows"), "'0 rows' is not a block"),
        (of_w(32), r"granularity is 32; it must be a block such as laconic.rows\(32\)"),
        (of_w({"*": 32}), r"granularity\['\*'\] is 32; it must be a block"),
        *((of_w(lambda *_, n=n: n), f"of w is {n}; it must be 1 to 30 elements") for n in (0, -3, 31)),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_pattern_must_match_somewhere_and_be_the_first() -> None:
    mapping = {"mlp.*": rows(2), "*.attention": whole()}
    units = [resolve(mapping, parameters(mlp_w=(6, 5))), resolve(mapping, parameters(head_w=(6, 5)))]
    with pytest.raises(ValueError, match=r"'\*.attention' matches no parameter. Patterns see names .*: head.w, mlp.w$"):
        check_matched(units)
    check_matched([*units, resolve(mapping, parameters(x_attention=(2, 2)))])
    hidden = resolve({"*": rows(2), "mlp.*": whole()}, parameters(mlp_w=(6, 5)))
    with pytest.raises(ValueError, match=r"'mlp.\*' is never used: .* such as mlp.w, matches an earlier pattern"):
        check_matched([hidden])


# -- through fully_shard -----------------------------------------------------------------------------------------------


def wide() -> nn.Module:
    """A net whose blocks have rows of 33 and of 57: on 6 ranks whole rows fit best in a bucket each."""
    return Net(2, 33, 57)


@on_ranks(6, local=3)
def test_units_of_several_buckets_train_as_in_one_process() -> None:
    model = shard(build(wide), cache="host", granularity={"*.weight": rows(1), "*": elements(1)})
    for block in model.blocks:
        cuts = [{slot.block for slot in bucket.layout.slots} - {1} for bucket in block._laconic_unit.buckets]
        assert sorted(cuts, key=max) == [{33}, {57}]
    check_matched([unit.blocks for unit in model._units()])
    oracle = oracle_of(model, wide)
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, oracle.model))
    for step in range(2):
        batches = micro_batches(1, step)
        squared_error(model, batches[0][dist.get_rank()]).backward()
        assert_gradients(model, oracle, batches)
        optimizer.step()
        optimizer.zero_grad()
        for name, gradient in oracle.gradients(batches)[1].items():
            oracle.model.get_parameter(name).grad = gradient
        theirs.step()
    assert_nothing_gathered(model)


@on_ranks(3, local=3)
def test_whole_tensors_lie_on_one_rank_and_waste_gives_a_warning() -> None:
    layer = nn.Linear(40, 30)
    with pytest.warns(UserWarning, match=r"make the unit of weight take 2\.\dx the memory of its tensors on 3 ranks"):
        laconic.fully_shard(layer, mesh=laconic.init_mesh("cpu"), granularity=whole())
    held = [int(parameter.to_local().numel()) for parameter in layer.parameters()]
    assert held[0] in (0, 1200)
    assert held[1] in (0, 30)
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert total.tolist() == [1200, 30]


@on_ranks(4, local=2)
def test_adapters_are_cut_anywhere_by_default() -> None:
    """Whole rows of rank-8 adapters would pad, and the user did not ask for rows."""
    adapters = nn.ModuleDict({"a": nn.Linear(256, 8, bias=False), "b": nn.Linear(8, 321, bias=False)})
    module = nn.Sequential(adapters["a"], adapters["b"])
    laconic.fully_shard(module, mesh=laconic.init_mesh("cpu"))
    (bucket,) = module._laconic_unit.buckets
    assert bucket.layout.padding * 200 <= bucket.layout.numel
    assert [slot.name for slot in bucket.layout.slots] == ["0.weight", "1.weight"]
