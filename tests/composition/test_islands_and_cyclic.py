"""Each cell of islands and of the cyclic schedule trains as its oracle, or is refused before the first step."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

import laconic
from tests.composition.compare import assert_right
from tests.composition.job import build, error, stage_optimizer, stages_of
from tests.composition.matrix import CYCLIC, ISLANDS, Cell, cells_of
from tests.support.launch import on_ranks


@pytest.mark.parametrize("strategy", [*ISLANDS, *CYCLIC])
def test_a_sample_of_its_cells(strategy: str) -> None:
    assert_right(cells_of(strategy, in_sample=True))


@pytest.mark.heavy
@pytest.mark.parametrize("strategy", [*ISLANDS, *CYCLIC])
def test_all_its_other_cells(strategy: str) -> None:
    assert_right(cells_of(strategy, in_sample=False))


@on_ranks(4, local=2)
def test_islands_around_cyclic_runs_have_all_parameters_and_do_not_recover() -> None:
    cell = Cell("cyclic", "AdamW")
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "worker")), build(cell, 0)
    run = laconic.CyclicDataParallel(
        stages_of(cell, model), error, stage_optimizer(cell), mesh["worker"], states="sharded"
    )
    with pytest.raises(
        ValueError, match=r'and LocalSteps: a worker holds only its own stages.* use states="replicated"'
    ):
        laconic.LocalSteps(model, run.optimizer, mesh=laconic.init_mesh("cpu", islands=2))
    with pytest.raises(ValueError, match=r"recovery= and the optimizer of a cyclic run.*save checkpoints of the run"):
        laconic.LocalSteps(model, run.optimizer, mesh=laconic.init_mesh("cpu", islands=2), recovery="unused")
