"""benchmarks.wire: bytes and times from results, and the record of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.wire import __main__ as wire
from benchmarks.wire import bench, picture, seconds, slowed, traffic
from tests.support import record
from tests.support.canned import canned, canned_host

pytestmark = pytest.mark.machine

W_BYTES = 25_000_000 * 4


@pytest.mark.parametrize(("strategy", "weights_crossed"), [("none", 1.5), ("host", 1.0), ("fsdp2", 2.25), ("ddp", 1.5)])
def test_formula_of_a_run(strategy: str, weights_crossed: float) -> None:
    assert bench.formula_bytes(canned_host(strategy=strategy)).node == pytest.approx(weights_crossed * W_BYTES)


def test_formula_of_lora_leaves_frozen_weights_out_where_they_rest() -> None:
    trainable = 100_000
    lora = {"job": "lora", "num_trainable": trainable}
    assert bench.formula_bytes(canned_host(**lora)).node == trainable * 4
    frozen_bytes = W_BYTES - trainable * 4
    assert bench.formula_bytes(canned_host(**lora, strategy="none")).node == 1.5 * trainable * 4 + frozen_bytes


def test_the_interfaces_are_held_to_the_formula_at_each_level() -> None:
    run = canned_host(wire_bytes=W_BYTES / 0.99, local_bytes=3 * W_BYTES / 1.01)
    assert traffic.node_error(run) == pytest.approx(-0.01)
    assert traffic._local_error(run) == pytest.approx(0.01)


def test_ratios_of_all_clusters_by_the_formula() -> None:
    header, _, first, *_, last = picture.formula_table().splitlines()
    assert [cell.strip() for cell in header.split("|")[1:4]] == ["nodes", "1 rank each", "2 ranks each"]
    assert first.split()[1::2] == ["2", "0.667", "0.444", "0.381", "0.356"]
    assert last.split()[1::2] == ["64", "0.667", "0.661", "0.659", "0.658"]


def test_share_of_a_step_that_its_bytes_take() -> None:
    assert seconds.wire_fraction(canned(step_s=16.0, wire_bytes=300e6, rate_bits_per_s=200e6)) == 0.75


def test_a_partial_run_is_recorded_beside_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_DOCS", tmp_path / "docs")
    results = tmp_path / "RESULTS.md"
    monkeypatch.setattr(record, "RESULTS", results)
    first = record.Row(key="losses", claim="losses", required="equal", measured="equal", is_met=True)
    second = record.Row(key="wire-full", claim="bytes", required="<= 1", measured="0.3", is_met=True)
    for row, results_of_run in ((first, [canned(), canned_host()]), (second, [canned_host(step_s=1.25)])):
        wire.save(record.Record("wire", [row], wire.BENCHMARK.rows, ["--rows", row.key]), results_of_run)
    text = results.read_text()
    assert text.index("| bytes ") < text.index("| losses ")  # in the order of the claim, not of measuring
    assert text.count("| laconic host |") == 1
    assert "1.250" in text
    assert "`python -m benchmarks.wire --rows losses`" in text
    assert text.count("2 nodes x 2 ranks, 25.0 M parameters:") == 1
    assert (tmp_path / "docs" / "wire.png").exists()
    assert (tmp_path / "docs" / "levels.png").exists()


def test_a_section_is_replaced_and_its_neighbours_stay(tmp_path: Path) -> None:
    path = tmp_path / "RESULTS.md"
    record.write_section("one", "first", path)
    record.write_section("two", "second", path)
    record.write_section("one", "third\n\n### inner\n", path)
    text = path.read_text()
    assert text.startswith("# Results\n")
    assert text.endswith("## one\n\nthird\n\n### inner\n\n## two\n\nsecond\n")
    record.write_section("two", "fourth", path)
    assert path.read_text() == text.replace("second", "fourth")


def test_a_missed_row_is_shown_as_missed() -> None:
    rows = [
        record.Row(key="a", claim="bytes", required="<= 1", measured="2", is_met=False, note="because."),
        record.Row(key="b", claim="seconds", required="<= 1", measured="1", is_met=True),
    ]
    header, _, missed, met, *rest = record.rows_table(rows).splitlines()
    assert "**no**" in missed
    assert "yes" in met
    assert len(header) == len(missed) == len(met)
    assert rest == ["", "- *bytes*: because."]


@pytest.mark.parametrize(
    ("shown", "folder", "contents"),
    [
        ("cgroup.controllers", ".", {"cpu.max": "4000 10000"}),
        ("cpu/tasks", "cpu", {"cpu.cfs_quota_us": "4000", "cpu.cfs_period_us": "10000"}),
    ],
)
def test_control_groups_of_both_versions_get_their_quotas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, folder: str, contents: dict[str, str]
) -> None:
    monkeypatch.setattr(slowed, "_ROOT", tmp_path)
    with slowed.control_groups([0.4]) as groups:
        assert groups == [None], "there are no control groups"
    (tmp_path / shown).parent.mkdir(exist_ok=True)
    (tmp_path / shown).touch()
    with slowed.control_groups([0.4, 0.2]) as groups:
        first, second = map(Path, filter(None, groups))
        assert first.parent == second.parent == tmp_path / folder
        assert {name: (first / name).read_text() for name in contents} == contents
        for file in (*first.iterdir(), *second.iterdir()):
            file.unlink()  # the files of a real control group go with it
    assert not first.exists()
    assert not second.exists()
