"""What an accelerator changes beside the programs of programs.py: devices, groups, waits and codecs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import laconic
from laconic.comm.cluster import default_mesh
from laconic.cyclic.links import Links
from laconic.layers import scaled
from laconic.layers.scaled import SCALED_FORMATS, ScaledFormat
from laconic.pipeline.stages import synchronize
from laconic.rehearse import rehearsal
from laconic.rehearse.tape import HOST, Wait


def test_a_mesh_is_of_the_accelerator_and_another_device_is_refused() -> None:
    with rehearsal(nodes=2):
        mesh = default_mesh()
        assert mesh.device_type == "cuda"
        with pytest.raises(ValueError, match=r"init_mesh\('xpu'\) needs such a device, but torch finds cuda:0 here"):
            laconic.init_mesh("xpu", nodes=2)
        layer = nn.Linear(4, 4).to("cuda")
        refused = pytest.raises(ValueError, match="weight is on cuda:0, but this rank computes on cuda:1")
        with mock.patch.object(torch.accelerator, "current_device_index", return_value=1), refused:
            laconic.fully_shard(layer, mesh=mesh)


@pytest.mark.parametrize(("backend", "num_groups"), [("nccl", 3), ("gloo", 2)])
def test_a_cyclic_run_on_nccl_has_a_group_for_each_direction(backend: str, num_groups: int) -> None:
    """There a receive that is posted blocks what comes later between the same two ranks."""
    with rehearsal(nodes=3, backend=backend):
        mesh = laconic.init_mesh("cuda", nodes=3, local=1)
        links = Links(mesh["node"], torch.device("cuda"), lambda message: 0)
        assert len({id(group) for group in (links._control, *links._groups.values())}) == num_groups


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_measured_seconds_begin_and_end_with_an_idle_device(device: str) -> None:
    with rehearsal(has_values=True) as machine:
        x = torch.ones(8).to(device)
        with machine.recording() as tape:
            y = x + 1
            assert not any(isinstance(each, Wait) and each.timeline == HOST for each in tape.entries)
            synchronize([x, y, torch.ones(2)])
            waits = any(isinstance(each, Wait) and each.timeline == HOST for each in tape.entries)
    assert waits == (device == "cuda")


def _coded(weight_format: ScaledFormat, whole: torch.Tensor) -> list[torch.Tensor]:
    scale = weight_format.matrix_scale(weight_format.largest_of(whole)) if weight_format.has_matrix_scale else None
    codes, scales = weight_format.quantize(whole, scale)
    decoded = weight_format.dequantize(codes, scales, scale)
    return [each.to("cpu").view(torch.uint8) for each in (codes, scales, decoded)]


@pytest.mark.parametrize("weight_format", SCALED_FORMATS.values(), ids=SCALED_FORMATS.keys())
def test_scaled_formats_have_the_same_bits_in_one_panel(weight_format: ScaledFormat) -> None:
    torch.manual_seed(0)
    with rehearsal(has_values=True), mock.patch.object(scaled, "kernels_for", return_value=None):  # without triton
        whole = torch.randn(257, 384)  # several panels on a processor, and one on a device
        for one, other in zip(_coded(weight_format, whole), _coded(weight_format, whole.to("cuda")), strict=True):
            assert torch.equal(one, other)
