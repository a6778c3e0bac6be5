"""Rows, runs of rows and elements by index or mask of RaggedTensors, against the same brackets on the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.layout.bucket import Extent
from laconic.ragged.tensor import RaggedTensor
from tests.support.launch import on_ranks
from tests.support.sharded_net import build, inputs, moved, ragged, shard, whole

RANKS = 4
SHAPE = (6, 3)


def random(shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def joined(parts: list[RaggedTensor]) -> Tensor:
    """Join parts, and check that they lie in order and cover the tensor."""
    stop = 0
    for part in parts:
        held = part.extent or Extent(stop, stop)
        assert held.start == stop
        assert held.numel == part.to_local().numel()
        stop = held.stop
    assert stop == parts[0].numel()
    return whole(parts)


PIECES: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda x: torch.split(x, 4),
    "split_negative_dim": lambda x: x.split(1, dim=-2),
    "sizes": lambda x: x.split([1, 0, 5]),
    "chunk": lambda x: torch.chunk(x, 4),
    "tensor_split": lambda x: torch.tensor_split(x, 4),
    "unbind": lambda x: x.unbind(),
    "iteration": lambda x: tuple(x),
    "narrow": lambda x: (x.narrow(0, 1, 4),),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2),
    "slices": lambda x: (x[2:5], x[-1], x[4:2], x[3]),
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("block", [1, 3])
def test_runs_of_rows_are_views(name: str, block: int) -> None:
    value, edits = random(), []
    parts = ragged(value, RANKS, block=block, bump=lambda: edits.append(1))
    expected = PIECES[name](value.clone())
    pieces = [PIECES[name](part) for part in parts]
    assert [len(each) for each in pieces] == [len(expected)] * RANKS
    for got, plain in zip(zip(*pieces, strict=True), expected, strict=True):
        assert got[0].shape == plain.shape
        assert torch.equal(joined(list(got)), plain)
    assert not edits
    for number in range(len(expected)):
        for each in pieces:
            each[number].fill_(number)
        PIECES[name](value)[number].fill_(number)
    assert len(edits) == RANKS * len(expected), "every rank counts the change"
    assert torch.equal(whole(parts), value)


def test_sizes_that_do_not_fit_and_other_dims_are_refused() -> None:
    part = ragged(random(), RANKS)[0]
    with pytest.raises(RuntimeError, match="sum exactly to 6"):
        part.split([1, 3])
    for refused in (
        lambda: part.split(1, dim=1),
        lambda: part.unbind(-1),
        lambda: part.chunk(2, 1),
        lambda: part[:, 0],
    ):
        with pytest.raises(NotImplementedError, match=r"only whole rows .*dim 0.*full_tensor"):
            refused()


MASK = random(seed=1) > 0.2
INDICES: dict[str, Any] = {
    "mask": MASK,
    "nothing": torch.zeros(SHAPE, dtype=torch.bool),
    "all": torch.ones(SHAPE, dtype=torch.bool),
    "rows": torch.tensor([0, 2, 3]),
    "rows_from_the_end": torch.tensor([-5, -1]),
    "list": [1, 4],
    "mask_of_rows": torch.tensor([True, False, True, True, False, True]),
    "elements": (torch.tensor([0, 2, 2, 5]), torch.tensor([2, 0, 1, 0])),
    "broadcast": (torch.tensor([[0], [3]]), torch.tensor([0, 2])),
    "columns": (slice(None), torch.tensor([0, 2])),
    "row_of_mask": (4, torch.tensor([True, False, True])),
    "one": (3, 1),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("block", [1, 3])
def test_elements_are_read_and_written_where_they_lie(name: str, block: int) -> None:
    index, value, edits = INDICES[name], random(), []
    parts = ragged(value, RANKS, block=block, bump=lambda: edits.append(1))
    read = [part[index] for part in parts]
    assert read[0].shape == value[index].shape
    assert torch.equal(joined(read), value[index])
    for part, own in zip(parts, read, strict=True):
        part[index] = -own
    assert torch.equal(whole(parts), negated(value, index))
    new = torch.arange(float(value[index].numel())).view(value[index].shape)
    for part in parts:
        part[index] = new
    value[index] = new
    assert torch.equal(whole(parts), value)
    for part in parts:
        part[index] = 7
    value[index] = 7
    assert torch.equal(whole(parts), value)
    assert len(edits) == 3 * RANKS, "every rank counts the change, if it holds such elements or not"


def negated(value: Tensor, index: Any) -> Tensor:
    value = value.clone()
    value[index] = -value[index]
    return value


WRITES_IN_ANY_ORDER: dict[str, Callable[[Tensor], Any]] = {
    "in_any_order": lambda x: x.index_put_((torch.tensor([5, 0, 3]),), torch.arange(9.0).view(3, 3)),
    "added": lambda x: x.index_put_((torch.tensor([5, 0, 5]),), torch.ones(3, 3), accumulate=True),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([4, 1]), 2.0),
    "index_fill_ of columns": lambda x: x.index_fill_(1, torch.tensor([2, 0]), 2.0),
    "masked_fill_": lambda x: x.masked_fill_(MASK, 2.0),
    "broadcast": lambda x: x.__setitem__(torch.tensor([4, 1]), torch.arange(3.0)),
    "element": lambda x: x.__setitem__((2, 1), 5.0),
    "of_a_row": lambda x: x[3].__setitem__(torch.tensor([2, 0]), torch.tensor([8.0, 9.0])),
}


def test_writes_take_an_index_in_any_order() -> None:
    for name, write in WRITES_IN_ANY_ORDER.items():
        value = random()
        parts = ragged(value, RANKS)
        for each in (*parts, value):
            write(each)
        assert torch.equal(whole(parts), value), name


def test_selections_may_be_selected_from_and_computed_with() -> None:
    value = random()
    parts = ragged(value, RANKS)
    assert torch.equal(joined([part.masked_select(MASK) for part in parts]), value.masked_select(MASK))
    assert torch.equal(joined([part.index_select(0, torch.tensor([1, 5])) for part in parts]), value[[1, 5]])
    assert torch.equal(joined([part.index_select(1, torch.tensor([0, 2])) for part in parts]), value[:, [0, 2]])
    twice = value[MASK][value[MASK] > 0.5]
    assert torch.equal(joined([part[MASK][value[MASK] > 0.5] for part in parts]), twice)
    assert torch.equal(joined([part[MASK] * 2 + value[MASK] for part in parts]), value[MASK] * 3)


def test_indices_that_no_rank_can_follow_are_refused() -> None:
    part = ragged(random(), RANKS)[0]
    other = ragged(random((3, 6)), RANKS)[0]
    with pytest.raises(NotImplementedError, match=r"ascending order.*sort it.*full_tensor"):
        part[[3, 1]]
    with pytest.raises(NotImplementedError, match=r"a mask that is cut as it is.*full_tensor"):
        part[other > 0]
    with pytest.raises(NotImplementedError, match=r"of a plain tensor takes no RaggedTensor.*full_tensor"):
        random()[part > 0]
    with pytest.raises(IndexError, match=r"out of (bounds|range)"):
        part[torch.tensor([6])]
    with pytest.raises(ValueError, match="must be cut alike"):
        part[MASK] = part[torch.ones(SHAPE, dtype=torch.bool)]


@on_ranks(3, local=1)
def test_masks_that_are_cut_themselves() -> None:
    """A mask that is cut itself: as `w[w > 0]` on the whole tensor. One rank may read alone by a plain mask."""
    model = shard(build())
    weight: Any = model.blocks[0].up.weight
    plain = weight.full_tensor()
    with torch.no_grad():
        chosen = weight[weight.abs() > 0.1]
        expected = plain[plain.abs() > 0.1]
        assert 0 < expected.numel() < plain.numel()
        assert torch.equal(chosen.full_tensor(), expected)
        torch.testing.assert_close(chosen.sum(), expected.sum())
        weight[weight > 0.1] = 0.0
        weight[weight < -0.1] = -weight[weight < -0.1]
        plain = torch.where(plain > 0.1, 0.0, plain)
        plain = torch.where(plain < -0.1, -plain, plain)
        assert torch.equal(weight.full_tensor(), plain)
        values = torch.arange(float((plain > 0.1).sum()))
        weight[weight > 0.1] = values
        plain[plain > 0.1] = values
        assert torch.equal(weight.full_tensor(), plain)
        with moved(model) as nothing:
            if dist.get_rank() == 0:
                weight[plain > 0.2].to_local().sum()
            weight[plain > 0.2] = 3.0
        assert nothing.snapshot.total("node", "control", "sent") == 0
        plain[plain > 0.2] = 3.0
    before = model(inputs(0, 0)[0])
    with torch.no_grad():
        weight[torch.ones_like(plain, dtype=torch.bool)] += 1.0
    assert not torch.equal(model(inputs(0, 0)[0]), before), "the next forward gathers the change"


# -- what cannot work says what to do in its place ---------------------------------------------------------------------


def test_histograms_and_arrays_say_what_to_give_them() -> None:
    part = ragged(random(), RANKS)[0]
    counts: list[Callable[[Any], Any]] = [
        lambda x: torch.histc(x, 5),
        lambda x: torch.histogram(x, 5),
        lambda x: np.histogram(x),
        lambda x: x.detach().cpu().numpy(),  # as TensorBoard's add_histogram does
        lambda x: x.tolist(),
    ]
    for count in counts:
        with pytest.raises(NotImplementedError, match=r"full_tensor\(\).*every rank.*to_local\(\)"):
            count(part)
        count(part.to_local())
