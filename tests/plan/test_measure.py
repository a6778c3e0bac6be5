"""`laconic doctor --out`: its figures, the arithmetic behind them, and the file it writes. No time is checked."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic import cli
from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster, init_mesh
from laconic.config import ConfigError
from laconic.doctor import cli as doctor
from laconic.plan import measure
from laconic.plan.cluster_file import load_cluster, parse_cluster, to_toml
from laconic.plan.measure import Effort, Figure, as_spec
from tests.support.launch import run_ranks

SMALL = Effort(products=(8, 16), copies_bytes=(1 << 12, 1 << 16), transfers_bytes=(1 << 10, 1 << 12), repetitions=3)
LEAST = Effort(products=(16,), copies_bytes=(1 << 12,), transfers_bytes=(1 << 12,), repetitions=2, enough_s=1e-4)


def job_measure(folder: str) -> dict[str, Any]:
    """The command with little work, then the same figures with clocks that always say half a second."""
    doctor.measure = lambda cluster, ranks, _: measure.measure(cluster, ranks, LEAST)  # type: ignore[assignment]
    said = io.StringIO()
    with redirect_stdout(said):
        code = cli.main(["doctor", "--out", f"{folder}/cluster.toml"])
    measure._Measuring._seconds = half_a_second  # type: ignore[method-assign]
    cluster = Cluster.of(init_mesh("cpu"))
    before = cluster.traffic.snapshot()
    figures = measure.measure(cluster, RankGroup(), SMALL)
    sent = (cluster.traffic.snapshot() - before).total("node", "control", "sent")
    return {"code": code, "said": said.getvalue(), "figures": [vars(f) for f in figures], "sent_bytes": sent}


def half_a_second(self: Any, action: Callable[[], object], repetitions: int, *, calls: int = 1) -> tuple[float, ...]:
    """A product, a copy or a transfer takes half a second; a transfer after a product, twice as long."""
    is_pair = getattr(action, "__name__", "") == "after"
    assert calls in (1, measure._LATENCY_CALLS), "half a second is long enough"
    action()
    return (1.0 if is_pair else 0.5,) * repetitions


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("measured")
    return folder, run_ranks(job_measure, 4, str(folder), local=2)


@pytest.mark.machine
def test_the_command_writes_a_cluster_file(measured: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = measured
    text = (folder / "cluster.toml").read_text()
    spec = load_cluster(folder / "cluster.toml")
    assert (spec.nodes, spec.ranks_per_node) == (2, 2)
    assert set(spec.device_flops_per_s) == {"float32", "bfloat16", "float16"}
    assert spec.device_memory_bytes == spec.host_memory_bytes // 2
    assert spec.bytes_per_s("node") > 0 < spec.bytes_per_s("local")
    assert parse_cluster(to_toml(spec)) == spec
    figures = [line for line in text.splitlines() if re.match(r"(?!device =)\w+ = ", line)]
    assert all(re.search("# .*(measured|assumed): ", line) for line in figures), "every figure has its source"
    assert re.search(
        r"; measured: all-gathers of 4.096 kB by 2 ranks, on 2 ranks of each node at once, 2 times, ", text
    )
    assert "wire_header_factor = 1.0456  # assumed: TCP" in text, "the ranks are on one machine, without a wire"
    assert all(result["code"] < 2 for result in results)
    assert "device_flops_per_s.float32" in results[0]["said"]


@pytest.mark.machine
def test_the_arithmetic_of_the_figures(measured: tuple[Path, list[dict[str, Any]]]) -> None:
    results = measured[1]
    figures = {figure["key"]: figure["values"] for figure in results[0]["figures"]}
    assert all(result["figures"] == results[0]["figures"] for result in results)
    assert figures["device_flops_per_s.float32"] == (2 * 8**3 / 0.5,) * 6
    assert figures["device_memory_bytes_per_s"] == (2 * (1 << 12) / 0.5,) * 6
    assert figures["host_memory_bytes_per_s"] == (2 * 2 * (1 << 12) / 0.5,) * 6
    assert figures["host_to_device_bytes_per_s"] == figures["device_to_host_bytes_per_s"] == ((1 << 16) / 0.5,) * 3
    assert figures["ranks_per_host_link"] == (1,)
    assert figures["device_attention_share"] == (1.0,) * 6, "the clock says that attention is faster than products"
    fewest = 4 * 8  # four blocks of four operations forward, and as many backward; then some sums
    assert 0.5 / (2 * fewest) < figures["device_launch_s"][0] < 0.5 / fewest
    assert figures["local_latency_s"] == figures["wire_latency_s"] == (0.5,) * 3
    half = (1 << 10) / 2  # of a buffer, to the other rank
    assert figures["local_bytes_per_s"] == (half / 0.25,) * 3  # a latency takes at most half of the duration
    assert figures["wire_bits_per_s"] == pytest.approx([8 * 1.0456 * 2 * half / 0.25] * 3)
    assert figures["local_overlap"] == figures["wire_overlap"] == (1.0,) * 3, "both at once take as long as one"
    few = 2 + 3  # trial and repetition alone; one for each latency
    trials = 3 + 5  # one chose the size, two of the rate; for the overlap one, two alone, and two with products
    assert results[0]["sent_bytes"] == few * 8 + trials * half


def test_operations_are_counted_without_views() -> None:
    with measure._Operations() as operations:
        torch.ones(2, 3).t().view(3, 2).add(1)
    assert operations.count == 2, "ones and add"


def test_repetitions_and_their_spread() -> None:
    figure = Figure(key="wire_bits_per_s", values=(180e6, 200.04e6, 240e6), how="a test")
    assert (figure.median, figure.spread) == (200e6, pytest.approx(0.3, rel=1e-3))
    assert figure.source == "measured: a test, 3 times, 180 Mbit/s to 240 Mbit/s"
    (line,) = measure._unsteady_lines([figure, Figure(key="nodes", values=(2,), how="as started")])
    assert "wire_bits_per_s varied by more than 20%; measure again" in line


@pytest.mark.machine
def test_a_figure_that_makes_no_sense_is_refused(measured: tuple[Path, list[dict[str, Any]]]) -> None:
    figures = [Figure(**values) for values in measured[1][0]["figures"]]
    dead = [Figure(key=f.key, values=(1e-6,) * 3, how=f.how) if f.key == "wire_bits_per_s" else f for f in figures]
    with pytest.raises(ConfigError, match="wire_bits_per_s = 1e-06 must lie between 1 kbit/s and 1 Pbit/s"):
        as_spec(dead, {})


@pytest.mark.machine
def test_alone_there_is_no_network() -> None:
    (result,) = run_ranks(job_alone, 1)
    keys = [figure.key for figure in result]
    assert not [key for key in keys if key.startswith(("wire_", "local_"))]
    assert as_spec(result, {"device": measure.device_name(torch.device("cpu"))}).ranks == 1


def job_alone() -> list[Figure]:
    return measure.measure(Cluster.of(init_mesh("cpu")), RankGroup(), LEAST)


def test_a_folder_is_no_cluster_file(tmp_path: Path) -> None:
    for out, problem in ((tmp_path, "is a folder"), (tmp_path / "nowhere" / "file", "does not exist")):
        with pytest.raises(OSError, match=problem):
            measure._check_writable(out)
