"""Trajectories of local steps that must not change from release to release, in golden.json.

python -m tests.islands.test_golden    rewrites golden.json; say in the commit why the numbers change
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.islands.local_steps import LocalSteps
from tests.support.launch import run_ranks

GOLDEN = Path(__file__).with_name("golden.json")
ISLANDS, STEPS = 3, 12
CASES: dict[str, dict[str, Any]] = {
    "diloco": {"every": 4, "codec": "fp32"},
    "default": {"every": 4},
    "streamed": {"every": 4, "fragments": 2, "overlap": 1, "mixing": 0.5, "codec": "fp32"},
    "int8": {"every": 4, "codec": "int8"},
    "e3m0, streamed": {"every": 6, "fragments": 2, "overlap": 2, "codec": "e3m0", "error_feedback": True},
    "e2m1": {"every": 3, "codec": "e2m1"},
}


class Bowl(nn.Module):
    """Two layers of four numbers, pulled to another place on each island, without random numbers or complex kernels."""

    def __init__(self) -> None:
        super().__init__()
        starts = [torch.linspace(-1, 1, 4), torch.linspace(2, -1, 4)]
        self.layers = nn.ModuleList(nn.ParameterList([start]) for start in starts)

    def forward(self, island: int) -> Tensor:
        steepness = torch.tensor([0.5, 1.0, 1.5, 2.0])
        places = torch.arange(4) * 0.25 + island
        return torch.stack([(steepness * (layer - places).square()).sum() for layer in self.parameters()]).sum()


def job() -> dict[str, list[list[list[float]]]]:
    """Return this island's parameters by case, step and layer."""
    mesh = laconic.init_mesh("cpu", islands=ISLANDS, nodes=1, local=1)
    found = {}
    for name, options in CASES.items():
        model = Bowl()
        local = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5), mesh=mesh, **options)
        found[name] = []
        for _ in range(STEPS):
            model(dist.get_rank()).backward()
            local.step()
            local.zero_grad()
            found[name].append([layer.tolist() for layer in model.parameters()])
        local.finish()
    return found


def trajectories() -> dict[str, Any]:
    """Return the parameters by case, island, step and layer."""
    by_island = run_ranks(job, ISLANDS, local=1)
    return {name: [found[name] for found in by_island] for name in CASES}


def test_trajectories_are_the_golden_ones() -> None:
    golden, found = json.loads(GOLDEN.read_text(encoding="utf-8")), trajectories()
    assert golden.keys() == found.keys()
    for name, want in golden.items():
        got = torch.tensor(found[name])
        assert got.shape == (ISLANDS, STEPS, 2, 4)
        torch.testing.assert_close(
            got, torch.tensor(want), atol=2e-6, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
    first = torch.tensor(golden["diloco"])
    assert not torch.equal(first[0, 2], first[1, 2]), "islands differ between syncs"
    assert torch.equal(first[0, 3], first[1, 3]), "islands are equal after a sync"
    for name in {name for name in CASES if CASES[name].get("codec") != "fp32"}:
        assert (torch.tensor(golden[name]) - first).abs().max() > 1e-4, "a codec has an effect"


if __name__ == "__main__":
    rounded = {
        name: [[[[float(f"{x:.7g}") for x in layer] for layer in step] for step in island] for island in islands]
        for name, islands in trajectories().items()
    }
    lines = (f"{json.dumps(name)}: {json.dumps(islands)}" for name, islands in rounded.items())
    GOLDEN.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
