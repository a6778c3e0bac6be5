"""benchmarks.gpu: rows from canned measurements, and what a report says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import memory, overlap, policies, report, training
from benchmarks.gpu.__main__ import BENCHMARK
from benchmarks.gpu.overlap import overlap as overlap_of
from benchmarks.gpu.training import TOY, Bench
from tests.support import record


def bench(*job: Any, by_rank: list[Any], **more: list[Any]) -> Bench:
    """A bench that has measured already."""
    made = Bench(TOY, "cuda")
    made.answers[job[0], "cuda", *job[1:]] = by_rank
    made.answers |= {(job[0], device_type): found for device_type, found in more.items()}
    return made


def test_step_times_are_compared_by_their_medians() -> None:
    times = {"plain": ([0.1, 0.2, 0.1], [5.0]), "fsdp2": ([0.125] * 3, [5.0]), "none": ([0.102, 0.3, 0.102], [5.5])}
    made = bench(training.step_rank, by_rank=[times])
    plain, fsdp2 = training.step_plain(made), training.step_fsdp2(made)
    assert (plain.key, plain.measured) == ("step-plain", "1.020x")
    assert (fsdp2.key, fsdp2.measured) == ("step-fsdp2", "0.816x")


def test_memory_is_that_of_the_rank_with_the_highest_peak() -> None:
    def peak(allocated: float) -> memory.Peak:
        return memory.Peak(allocated=int(allocated), engine=0, host=0, is_pageable=False)

    shards = memory.node_shards_bytes(TOY)
    small = {kind: peak(1e5) for kind in memory.KINDS}
    large = {"none": peak(1e6), "host": peak(1.01e6), "device": peak(1e6 + shards), "fsdp2": peak(2.02e6)}
    made = bench(memory.memory_rank, memory.KINDS, False, by_rank=[small, large])
    device, fsdp2 = memory.memory_device(made), memory.memory_fsdp2(made)
    assert (device.key, device.measured) == ("memory-device", "1.0000")
    assert (fsdp2.key, fsdp2.measured) == ("memory-fsdp2", "0.500x")


def test_exposed_copies_are_those_beside_no_kernel() -> None:
    found = overlap_of(overlap.SYNTHETIC_TRACE, overlap.LABEL_BYTES)
    assert (found.copies_us, found.exposed_us, found.moved_bytes) == (105, 5, 10_000)


def test_lossless_policies_equal_their_exact_twins_to_the_bit() -> None:
    names = [each.name for policy in policies.LOSSLESS for each in (policy, policies.exact_twin(policy))]
    equal: dict[str, Any] = {name: [2.0, 1.0] for name in ("exact, again", *names)}
    other = equal | {names[0]: [2.0, 1.0 + 1e-15], names[3]: "Traceback: no"}
    row = policies.lossless_equal(bench(policies.lossless_rank, by_rank=[equal, other]))
    total = len(policies.LOSSLESS)
    assert row.measured == f"{total - 2} of {total}"
    row = policies.lossless_equal(bench(policies.lossless_rank, by_rank=[equal, equal]))
    assert row.measured == f"{total} of {total}"


def test_a_report_runs_every_file_with_a_test_on_a_gpu() -> None:
    root, mark = Path(__file__).parents[2], "pytest.mark." + "cuda"
    assert {str(path.relative_to(root)) for path in root.glob("tests/**/test_*.py") if mark in path.read_text()} == set(
        report._TESTS
    )
    assert set(report.ORDER) == set(BENCHMARK.rows)


def test_a_report_says_whether_laconic_is_sound_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def canned(key: str, measured: str) -> Any:
        return lambda bench: record.Row(key=key, claim=f"claim of {key}", measured=measured)

    def fails(bench: Bench) -> record.Row:
        raise RuntimeError("no such luck")

    rows = {"policies": canned("policies", "2 of 2"), "step-plain": canned("step-plain", "2.0x")}
    monkeypatch.setattr(report, "ORDER", tuple(rows))
    monkeypatch.setattr(report, "measure_several", lambda *_: None)
    monkeypatch.setattr(BENCHMARK, "rows", rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert report.main(["--quick", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "laconic is sound on this machine: CUDA tests: not run, as there is no GPU." in said
    assert "claim of step-plain (2.0x, target <= 1.03)." in said
    monkeypatch.setitem(rows, "policies", canned("policies", "1 of 2"))
    assert report.main(["--quick", "--out", str(tmp_path)]) == 1
    assert "NOT sound" in capsys.readouterr().out
    monkeypatch.setitem(rows, "policies", fails)
    assert report.main(["--quick", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "report.md").read_text()
    assert "NOT sound" in text
    assert "RuntimeError: no such luck" in text
