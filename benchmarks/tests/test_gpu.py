"""benchmarks.gpu: rows from canned measurements, and the message without a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import host_time
from benchmarks.gpu import kernels, memory, overlap, policies, publish, report, training
from benchmarks.gpu.__main__ import BENCHMARK
from benchmarks.gpu.memory import Peak
from benchmarks.gpu.overlap import overlap as overlap_of
from benchmarks.gpu.training import TOY, Bench
from laconic.compare.machine import describe_machine, in_words
from tests.support import record

pytestmark = pytest.mark.machine


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
    assert (plain.key, plain.measured, plain.is_met) == ("step-plain", "1.020x", True)
    assert "1.0e-01 at most" in plain.note
    assert (fsdp2.key, fsdp2.measured, fsdp2.is_met) == ("step-fsdp2", "0.816x", True)


def peak(allocated: float) -> Peak:
    return Peak(allocated=int(allocated), engine=0, host=0, is_pageable=False)


def test_memory_is_that_of_the_rank_with_the_highest_peak() -> None:
    shards = memory.node_shards_bytes(TOY)
    small = {kind: peak(1e5) for kind in memory.KINDS}
    large = {"none": peak(1e6), "host": peak(1.01e6), "device": peak(1e6 + shards), "fsdp2": peak(2.02e6)}
    made = bench(memory.memory_rank, memory.KINDS, False, by_rank=[small, large])
    device, fsdp2 = memory.memory_device(made), memory.memory_fsdp2(made)
    assert (device.key, device.measured, device.is_met) == ("memory-device", "1.0000", True)
    assert (fsdp2.key, fsdp2.measured, fsdp2.is_met) == ("memory-fsdp2", "0.500x", True)


def test_a_baseline_that_cannot_run_is_a_result() -> None:
    made = bench(
        memory.memory_rank, memory.KINDS, False, by_rank=[{"host": peak(1), "fsdp2": "RuntimeError: not over Gloo"}]
    )
    row = memory.memory_fsdp2(made)
    assert (row.measured, row.is_met) == ("-", False)
    assert row.note.endswith("RuntimeError: not over Gloo")


def test_a_publisher_is_judged_by_its_largest_version_and_its_later_times() -> None:
    times = {"gaps": [9.0, 5.0, 0.1, 0.2, 0.3], "smallest": [9.0, 5.0, 1.0, 2.0, 3.0]}
    found = publish.Published(
        added={"gaps": [10, 101], "smallest": [10, 40]}, unit=100, seconds=times, writing=times, gather=[7.0, 7.0, 0.4]
    )
    made = bench(publish.publish_rank, by_rank=[found])
    held, stands = publish.publish_memory(made), publish.publish_standstill(made)
    assert (held.key, held.measured, held.is_met) == ("publish-memory", "1.010x", False)
    assert (stands.key, stands.measured, stands.is_met) == ("publish-standstill", "0.500x", True)
    assert "laconic.publish" in held.measures


def test_exposed_copies_are_those_beside_no_kernel() -> None:
    found = overlap_of(overlap.SYNTHETIC_TRACE, overlap.LABEL_BYTES)
    assert (found.copies_us, found.exposed_us, found.moved_bytes) == (105, 5, 10_000)


def test_losses_are_compared_over_all_ranks_and_steps() -> None:
    on_device = [{"host": [2.0, 1.0]}, {"host": [2.0, 1.001]}]
    made = bench(training.loss_rank, by_rank=on_device, cpu=[{"host": [2.0, 1.0]}] * 2)
    row = BENCHMARK.rows["loss-host"](made)
    assert (row.key, row.measured, row.is_met) == ("loss-host", "1.0e-03", False)


def test_rows_are_recorded_as_those_of_every_benchmark(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "RESULTS.md")
    row = training.step_fsdp2(bench(training.step_rank, by_rank=[{"fsdp2": ([0.1], []), "none": ([0.1], [])}]))
    record.Record("gpu", [row], BENCHMARK.rows, ["--rows", row.key]).save()
    text = (tmp_path / "RESULTS.md").read_text()
    assert "\n## gpu\n\n`python -m benchmarks.gpu --rows step-fsdp2`, " in text
    assert f"; {in_words(describe_machine())}." in text


def test_without_a_gpu_the_command_says_what_helps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert BENCHMARK.main([]) == 1
    assert "benchmarks.gpu: torch finds no CUDA device here; --quick tries" in capsys.readouterr().err


def losses_of(**others: Any) -> dict[str, Any]:
    return {policy.name: [2.0, 1.0] for policy in policies.POLICIES} | others


def test_policies_are_compared_one_by_one_and_errors_are_told() -> None:
    found = losses_of(host=[2.0, 1.01], **{"4bit, host": [2.0, 1.01], "checks": "Traceback: no"})
    row = policies.policies(bench(policies.policies_rank, by_rank=[losses_of(), found], cpu=[losses_of()] * 2))
    total = len(policies.POLICIES)
    assert (row.required, row.measured, row.is_met) == (f"{total} of {total}", f"{total - 2} of {total}", False)
    assert "host 1e-02" in row.note, "more than the bound of exact policies"
    assert "checks Traceback: no" in row.note


def test_lossless_policies_equal_their_exact_twins_to_the_bit() -> None:
    names = [each.name for policy in policies.LOSSLESS for each in (policy, policies.exact_twin(policy))]
    equal: dict[str, Any] = {name: [2.0, 1.0] for name in ("exact, again", *names)}
    assert len(equal) == 2 * len(policies.LOSSLESS) + 1, "no two have a name in common"
    other = equal | {names[0]: [2.0, 1.0 + 1e-15], names[3]: "Traceback: no"}
    row = policies.lossless_equal(bench(policies.lossless_rank, by_rank=[equal, other]))
    total = len(policies.LOSSLESS)
    assert (row.required, row.measured, row.is_met) == (f"{total} of {total}", f"{total - 2} of {total}", False)
    assert "lossless, host 1 of 4 losses differ; lossless, device Traceback: no" in row.note
    assert row.note.endswith("A second run with exact weights: equal.")
    assert policies.lossless_equal(bench(policies.lossless_rank, by_rank=[equal, equal])).is_met


def test_the_lossless_coder_is_compared_with_a_copy() -> None:
    cpu, numels = torch.device("cpu"), TOY.lossless_numels
    kinds = [kernels._coding(numel, cpu, uses_last=uses) for numel in numels for uses in (False, True)]
    for coding in kinds:
        assert coding.is_right
        assert 2 < coding.bits < 4
        coding.seconds = {"encode": 3.0, "decode": 1.0, "encode, plain": 9.0, "decode, plain": 9.0, "copy": 2.0}
        coding.launches |= {"encode": 7}
        coding.kernels |= {"encode": {"_write": 5.0}}
    row = kernels.lossless_coding(bench(kernels.lossless_coding_rank, by_rank=[kinds]))
    assert (row.measured, row.is_met) == ("1.500x", True)
    assert "; 7 launches: _write 5 us; decode" in row.note
    kinds[0].is_right = False
    wrong = kernels.lossless_coding(bench(kernels.lossless_coding_rank, by_rank=[kinds]))
    assert not wrong.is_met
    assert "WRONG BITS" in wrong.note


def test_a_report_runs_every_file_with_a_test_on_a_gpu() -> None:
    root = Path(__file__).parents[2]
    marked = {str(path.relative_to(root)) for path in root.glob("tests/**/test_*.py") if _MARK in path.read_text()}
    assert marked == set(report._TESTS)
    assert not [path for path in marked if "hypothesis" in (root / path).read_text()], "it needs pytest alone"
    assert set(report.ORDER) == set(BENCHMARK.rows)


_MARK = "pytest.mark." + "cuda"


def test_the_hosts_time_is_compared_with_fsdp2s_pair_by_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {
        "fsdp2": [2.0, 4.0, 2.0],
        "none": [1.0, 3.0, 1.8],
        "host": [1.0] * 3,
        "4bit": [4.0] * 3,
        "plain": [0.5] * 3,
    }
    monkeypatch.setattr(host_time, "launch", lambda *_, **__: [times])
    found = host_time.host_time(host_time.Bench(TOY.host))
    assert (found.measured, found.is_met) == ("0.750x / 0.500x / 2.000x", False)
    assert "fsdp2 666,667, none 600,000" in found.note, "microseconds for each of three layers"


def row(key: str, *, is_met: bool) -> record.Row:
    return record.Row(key=key, claim=f"claim of {key}", required="1", measured="2", is_met=is_met)


def test_a_report_says_whether_laconic_is_sound_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(bench: Bench) -> record.Row:
        raise RuntimeError("no such luck")

    rows = {
        "policies": lambda bench: row("policies", is_met=True),
        "step-plain": lambda bench: row("step-plain", is_met=False),
    }
    monkeypatch.setattr(report, "ORDER", ("policies", "step-plain", "codecs"))
    monkeypatch.setattr(report, "measure_several", lambda *_: None)
    monkeypatch.setattr(BENCHMARK, "rows", {**rows, "codecs": lambda bench: row("codecs", is_met=True)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert report.main(["--quick", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "laconic is sound on this machine: CUDA tests: not run, as there is no GPU." in said
    assert "Falls short: claim of step-plain (2, required 1)." in said
    monkeypatch.setitem(BENCHMARK.rows, "codecs", fails)
    assert report.main(["--quick", "--out", str(tmp_path)]) == 1
    text = (tmp_path / "report.md").read_text()
    assert "NOT sound" in text
    assert "## codecs" in text
    assert "RuntimeError: no such luck" in text
    assert report.main(["--quick", "--out", str(tmp_path), "--minutes", "0"]) == 0
    assert "Left: policies, step-plain, codecs." in capsys.readouterr().out.splitlines()[-2]


def test_rows_of_several_gpus_run_on_ranks_of_a_cpu() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m"]
    command = [*torchrun, "benchmarks.gpu.several", "--quick", "--rows", "several-communicators,several-gathers"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True).stdout
    rows = [line for line in said.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 2, "the first rank alone prints"
    assert "node" in rows[0]
    assert "local" in rows[0]
    assert "| 5 " in rows[1]
    assert "2 x 2 ranks over Gloo: default, all; gather node" in said


def test_rows_of_several_gpus_ask_for_torchrun() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.several", "--quick"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 1
    assert "start it with torchrun --nproc-per-node GPUS" in run.stderr
