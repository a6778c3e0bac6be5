"""RaggedTensors as code for torch's own DTensors sees them: [Note: RaggedTensors are DTensors]."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.swa_utils import get_ema_multi_avg_fn

import laconic
from laconic.ragged.tensor import RaggedTensor
from tests.support.launch import on_ranks

SHAPES = [(7, 5), (13,), (2, 3, 4), (1,)]


def make() -> tuple[nn.ParameterList, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    model = nn.ParameterList(value.clone() for value in values)
    model.forward = lambda: None  # type: ignore[method-assign]
    whole_elements = laconic.elements(1)  # parts that begin and end inside rows
    return laconic.fully_shard(model, mesh=laconic.init_mesh("cpu"), granularity=whole_elements), values  # type: ignore[return-value]


@on_ranks(3, local=1)
def test_placements_and_redistribution_as_of_a_dtensor() -> None:
    model, values = make()
    assert isinstance(model, FSDPModule)
    assert fully_shard.state(model) is model._laconic_unit, "torch's own register"  # type: ignore[attr-defined]
    for parameter, value in zip(model, values, strict=True):
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter, RaggedTensor)
        mesh, placements = parameter.device_mesh, parameter.placements
        assert placements[0] == Replicate()
        assert placements[1:] != (Shard(0), Shard(0))
        assert placements == parameter.detach().placements
        assert len({*placements, *parameter.detach().placements}) == 3
        with pytest.raises(TypeError, match="a RaggedShard cannot be pickled"):
            pickle.dumps(placements)
        everywhere = [Replicate()] * mesh.ndim
        assert type(parameter.redistribute(mesh, everywhere)) is DTensor
        assert torch.equal(parameter.redistribute(mesh, everywhere).to_local(), value)
        rows = parameter.redistribute(placements=[Replicate(), Shard(0), Replicate()], async_op=True)
        assert torch.equal(rows.full_tensor(), value)
        assert parameter.redistribute(placements=placements) is parameter
        with pytest.raises(ValueError, match="needs placements on its own mesh"):
            parameter.redistribute(mesh)
        with pytest.raises(AttributeError, match="a RaggedTensor has no DTensorSpec"):
            _ = parameter._spec

        cut = distribute_tensor(2 * value, mesh, placements)  # as set_model_state_dict and accelerate do
        assert torch.equal(cut.full_tensor(), 2 * value)
        with torch.no_grad():
            parameter.copy_(cut)
        assert torch.equal(parameter.full_tensor(), 2 * value)
        assert placements[1]._local_shard_size_and_offset(7, 2, 0) == (7, 0), "the last axis alone cuts"
        sizes, offsets = compute_local_shape_and_global_offset(value.shape, mesh, placements)
        box = value[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
        for source in (box, value, parameter.spec.part_of(value)):
            parameter.detach().fill_(0)
            version = parameter.to_local()._version
            assert type(parameter.to_local() + 0) is Tensor
            parameter.to_local().copy_(source)
            assert parameter.to_local()._version > version, "on ranks without elements, too"
            assert torch.equal(parameter.full_tensor(), value)


@on_ranks(3, local=1)
def test_operands_averages_and_flattening_as_of_a_dtensor() -> None:
    model, values = make()
    for parameter, value in zip(model, values, strict=True):
        mesh, tensor = parameter.device_mesh, parameter.detach()
        two = DTensor.from_local(torch.tensor(2.0), mesh)
        everywhere = distribute_tensor(value, mesh)
        assert torch.equal((tensor * two).full_tensor(), value * 2)  # type: ignore[attr-defined]
        rows = torch.tensor([0, value.shape[0] - 1])
        if tensor.dim() > 1:
            assert torch.equal(tensor[distribute_tensor(rows, mesh)].full_tensor(), value[rows])
        assert torch.equal((everywhere + tensor).full_tensor(), value * 2)  # type: ignore[attr-defined]
        if value.numel() > 1:
            rows = distribute_tensor(value, mesh, [Replicate(), Shard(0), Replicate()])
            with pytest.raises(ValueError, match="mixes a RaggedTensor with a DTensor that is cut as"):
                _ = rows + tensor
        torch.testing.assert_close(parameter, copy.deepcopy(parameter))
        average = copy.deepcopy(parameter).detach().zero_()
        get_ema_multi_avg_fn(0.75)([average], [tensor], 1)  # type: ignore[arg-type]
        torch.testing.assert_close(average.full_tensor(), value / 4)  # type: ignore[attr-defined]
        names, context = parameter.__tensor_flatten__()
        inner = {name: getattr(parameter, name) for name in names}
        again = RaggedTensor.__tensor_unflatten__(inner, context, parameter.shape, parameter.stride())
        assert torch.equal(again.full_tensor(), value)


@on_ranks(1)
def test_a_compiled_step_is_refused_by_name() -> None:
    model, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(Exception, match="Call the optimizer's step, and other code on sharded parameters, uncompiled"):
        torch.compile(optimizer.step, backend="eager")()
    optimizer.step()
