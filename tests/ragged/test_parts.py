"""Parameters that are parts of a named whole, and the whole that checkpoints see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from laconic.ragged.parts import (
    JoinedTensor,
    SlicedParameter,
    SlicePiece,
    add_sliced,
    joined,
    slice_of_parameter,
    slice_of_parameters,
    sliced_of,
    sliced_parameters,
    sliced_parts,
    whole_parameters,
)
from tests.support.sharded_net import ragged

COLUMNS = [[0, 1, 5], [2, 3, 6], [4]]
"""The columns of the whole in slice 0, in slice 1 and in the shared part."""
PIECES = (
    SlicePiece(start=0, length=2, part=0, offset=0),
    SlicePiece(start=2, length=2, part=1, offset=0),
    SlicePiece(start=4, length=1, part=2, offset=0),
    SlicePiece(start=5, length=1, part=0, offset=2),
    SlicePiece(start=6, length=1, part=1, offset=2),
)
WHOLE = torch.arange(21.0).view(3, 7)
SLICED = SlicedParameter(name="weight", shape=(3, 7), dim=1, num_slices=2, pieces=PIECES)
NAMES = ["weight_slice0", "weight_slice1", "weight_shared"]


class Sliced(nn.Module):
    """A module with a sliced weight and a bias that all islands train."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        for name, columns in zip(NAMES, COLUMNS, strict=True):
            self.register_parameter(name, nn.Parameter(WHOLE[:, columns].clone()))
        add_sliced(self, SLICED)


def test_parts_are_cut_and_joined() -> None:
    parts = SLICED.split(WHOLE)
    assert [part.tolist() for part in parts] == [WHOLE[:, columns].tolist() for columns in COLUMNS]
    assert parts[2].data_ptr() == WHOLE[:, 4:].data_ptr(), "a part that is one run is a view"
    assert torch.equal(SLICED.join(parts), WHOLE)
    assert torch.equal(SLICED.join([part[1] for part in parts]), WHOLE[1]), "parts may lack leading dims"


def test_the_slices_of_a_model_by_the_names_of_parameters_and_of_wholes() -> None:
    model = nn.Sequential(Sliced(), nn.Linear(3, 2))
    assert sliced_of(model[0]) == {"weight": SLICED}
    assert sliced_of(model[1]) == {}
    assert sliced_parameters(model) == {"0.weight": SLICED}
    assert sliced_parts(model) == {f"0.{name}": ("0.weight", SLICED, index) for index, name in enumerate(NAMES)}
    slices = {"0.weight_slice0": 0, "0.weight_slice1": 1, "0.weight_shared": None}
    assert slice_of_parameters(model) == {"0.bias": None, **slices, "1.weight": None, "1.bias": None}
    assert [slice_of_parameter(model[0], name) for name in (*NAMES, "bias")] == [0, 1, None, None]


def filled(tensor: JoinedTensor) -> Tensor:
    """Put the boxes of a joined tensor together; elements that no box covers are -1."""
    result = torch.full(tensor.shape, -1.0)
    for chunk in tensor.__create_chunk_list__():
        box = tensor.__get_tensor_shard__(MetadataIndex("weight", chunk.offsets))
        place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        assert bool((result[place] == -1).all()), "boxes do not overlap"
        result[place] = box
    return result


def test_the_boxes_of_plain_parts_cover_the_whole() -> None:
    model = Sliced()
    wholes = whole_parameters(model)
    assert list(wholes) == ["bias", "weight"]
    assert wholes["bias"] is model.bias
    weight = wholes["weight"]
    assert isinstance(weight, JoinedTensor)
    assert torch.equal(filled(weight), WHOLE)
    for item in weight.__create_write_items__("weight", weight):
        chunk = item.tensor_data.chunk  # type: ignore[union-attr]
        weight.__get_tensor_shard__(MetadataIndex("weight", chunk.offsets)).detach().add_(100)
    assert torch.equal(model.weight_slice1, WHOLE[:, COLUMNS[1]] + 100), "boxes are views of the parts"
    with pytest.raises(ValueError, match="does not hold"):
        weight.__get_tensor_shard__(MetadataIndex("weight", torch.Size([2, 2])))
    with pytest.raises(NotImplementedError, match="for checkpoints alone; use its parts"):
        weight + 1


def test_the_boxes_of_all_ranks_cover_the_whole_once() -> None:
    num_ranks = 5
    changes: list[int] = []
    parts = [ragged(part.contiguous(), num_ranks, bump=lambda: changes.append(1)) for part in SLICED.split(WHOLE)]
    found = torch.full(WHOLE.shape, -1.0)
    for own in zip(*parts, strict=True):
        held = filled(JoinedTensor(SLICED, own))
        assert bool(((found == -1) | (held == -1)).all())
        found = torch.where(held == -1, found, held)
    assert torch.equal(found, WHOLE)
    assert len(changes) == 3 * num_ranks, "a load into the boxes counts as a change of every part, on every rank"


def test_missing_parts_are_not_covered() -> None:
    tensors = {"weight_slice1": WHOLE[:, COLUMNS[1]], "other": WHOLE}
    result = joined(tensors, sliced_parts(Sliced()))
    assert list(result) == ["weight", "other"]
    assert result["other"] is WHOLE
    held = filled(result["weight"])  # type: ignore[arg-type]
    assert torch.equal(held[:, COLUMNS[1]], WHOLE[:, COLUMNS[1]])
    assert bool((held[:, COLUMNS[0] + COLUMNS[2]] == -1).all())
