"""benchmarks.simulated: all rows on one job, and the words of its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.simulated import grid
from benchmarks.simulated.__main__ import BENCHMARK
from benchmarks.simulated.cluster import FIGURES, h100_nodes
from benchmarks.simulated.grid import Bench, Cell, SimulatedStep, figures_table
from benchmarks.simulated.jobs import RIVALS
from laconic.plan.machine import PlanLane
from laconic.plan.prediction import Refusal
from tests.support.record import RESULTS

pytestmark = pytest.mark.machine


def step(seconds: float, *, fits: bool = True) -> SimulatedStep:
    """A step in which compute waits for the wire for a tenth of the time."""
    waits_s = {PlanLane.WIRE.value: seconds / 10, PlanLane.LOCAL.value: seconds / 1000}
    return SimulatedStep(seconds=seconds, waits_s=waits_s, busy_s={"compute": seconds}, peak_bytes=2e9, fits=fits)


def cell(**seconds: float) -> Cell:
    """A cell in which negative seconds do not fit."""
    steps = {label.replace("_", " "): step(abs(value), fits=value > 0) for label, value in seconds.items()}
    return Cell(model="Llama 3 8B", form="full", tokens=2048, nodes=2, rate_gbit_per_s=25, steps=steps)


def test_the_best_of_a_side_is_exact_and_fits() -> None:
    assert cell(FSDP2=10, HSDP=4, host=3, device=-1, **{"4bit": 2}).ratio == pytest.approx(3 / 4)
    assert cell(FSDP2=10, HSDP=-4, host=3, FSDP2_offload=6).ratio == pytest.approx(3 / 6)
    assert cell(FSDP2=-10, host=3).ratio is None


def test_a_cell_of_the_table_says_seconds_waits_and_memory() -> None:
    assert grid._shown(step(10.0)) == "10 w1"
    assert grid._shown(step(10.0, fits=False)) == "10* w1"
    assert grid._shown(SimulatedStep(refused="no")) == "refused"
    assert grid._against(cell(FSDP2=-10, host=3)) == "laconic alone fits"
    assert grid._against(cell(FSDP2=-10, host=-3)) == "none fits"


def test_each_figure_has_a_source_and_the_spec_its_value() -> None:
    table = figures_table()
    assert table in (RESULTS.parents[1] / "docs" / "simulated.md").read_text(encoding="utf-8")
    assert all(each.source in table and each.text in table for each in FIGURES)
    cluster = h100_nodes(4, 100)
    assert cluster.ranks == 32
    assert 8 * cluster.bytes_per_s("node") == pytest.approx(0.928e11, rel=1e-3)


@pytest.mark.timeout(240)
def test_quick_gives_all_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "RATES_GBIT_PER_S", (25,))
    assert BENCHMARK.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert "1 simulated cells" in printed
    assert all(rival.label in printed for rival in RIVALS)
    assert "refused" not in printed


def test_pictures_are_of_the_slower_wires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(grid, "simulate", lambda predictor, rival, **_: Refusal(strategy="", label="", reason="no"))
    monkeypatch.setattr(grid, "draw_timelines", lambda steps, path, **_: drawn.append(path.name))
    bench = Bench(tmp_path, quick=True, keeps=True)
    monkeypatch.setattr(grid, "map_forked", map)
    assert len(bench.all()) == 3
    assert drawn == ["llama-3-8b-full-2-8192-25.png", "llama-3-8b-full-2-8192-100.png"]
