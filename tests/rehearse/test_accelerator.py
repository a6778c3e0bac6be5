"""What an accelerator changes beside the programs of programs.py: devices, groups, waits and codecs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import laconic
from laconic.codec import scaled
from laconic.codec.scaled import SCALED_FORMATS, ScaledFormat
from laconic.comm.cluster import default_mesh
from laconic.cyclic.links import Links
from laconic.cyclic.stage import synchronize
from laconic.rehearse import rehearsal
from laconic.rehearse.tape import HOST, Wait
from tests.support.launch import launch

pytestmark = pytest.mark.machine


def rehearsed(function: Any, *arguments: Any) -> Any:
    """The result of a function in a process of its own, which has no process group."""
    return launch(function, *arguments, num_ranks=1, timeout_s=100, backend=None)[0]


def _devices() -> tuple[str, str, str]:
    """The type of the default mesh, and the refusals of other devices."""
    with rehearsal(nodes=2):
        mesh = default_mesh()
        with pytest.raises(ValueError, match="needs such a device") as no_type:
            laconic.init_mesh("xpu", nodes=2)
        layer = nn.Linear(4, 4).to("cuda")
        other = mock.patch.object(torch.accelerator, "current_device_index", return_value=1)
        with other, pytest.raises(ValueError, match="weight is on") as no_device:
            laconic.fully_shard(layer, mesh=mesh)
        return mesh.device_type, str(no_type.value), str(no_device.value)


def test_a_mesh_is_of_the_accelerator_and_another_device_is_refused() -> None:
    device_type, no_type, no_device = rehearsed(_devices)
    assert device_type == "cuda"
    assert no_type == "init_mesh('xpu') needs such a device, but torch finds cuda:0 here"
    assert no_device.startswith("weight is on cuda:0, but this rank computes on cuda:1: call init_mesh, which chooses")


def _groups_of_links(backend: str) -> int:
    with rehearsal(nodes=3, backend=backend):
        mesh = laconic.init_mesh("cuda", nodes=3, local=1)
        links = Links(mesh["node"], torch.device("cuda"), lambda message: 0)
        return len({id(group) for group in (links._control, *links._groups.values())})


def test_a_cyclic_run_on_nccl_has_a_group_for_each_direction() -> None:
    """There a receive that is posted blocks what comes later between the same two ranks."""
    assert rehearsed(_groups_of_links, "nccl") == 3
    assert rehearsed(_groups_of_links, "gloo") == 2


def _waits(on_device: bool) -> tuple[int, int]:
    """How often the host waits: without and with `synchronize`."""
    waits = []
    with rehearsal(has_values=True) as machine:
        x = torch.ones(8).to("cuda" if on_device else "cpu")
        with machine.recording() as tape:
            y = x + 1
            waits.append(sum(isinstance(each, Wait) and each.timeline == HOST for each in tape.entries))
            synchronize([x, y, torch.ones(2)])
            waits.append(sum(isinstance(each, Wait) and each.timeline == HOST for each in tape.entries))
    return waits[0], waits[1]


def test_measured_seconds_begin_and_end_with_an_idle_device() -> None:
    before, after = rehearsed(_waits, True)
    assert (before, after > 0) == (0, True)
    assert rehearsed(_waits, False) == (0, 0)


def _coded(weight_format: ScaledFormat, whole: torch.Tensor) -> list[torch.Tensor]:
    scale = weight_format.matrix_scale(weight_format.largest_of(whole)) if weight_format.has_matrix_scale else None
    codes, scales = weight_format.quantize(whole, scale)
    decoded = weight_format.dequantize(codes, scales, scale)
    return [each.to("cpu").view(torch.uint8) for each in (codes, scales, decoded)]


def _differing() -> list[str]:
    torch.manual_seed(0)
    found = []
    with rehearsal(has_values=True), mock.patch.object(scaled, "kernels_for", return_value=None):  # without triton
        for name, weight_format in SCALED_FORMATS.items():
            whole = torch.randn(257, 384)  # several panels on a processor, and one on a device
            pairs = zip(_coded(weight_format, whole), _coded(weight_format, whole.to("cuda")), strict=True)
            found += [name for one, other in pairs if not torch.equal(one, other)]
    return found


def test_scaled_formats_have_the_same_bits_in_one_panel() -> None:
    assert rehearsed(_differing) == []
