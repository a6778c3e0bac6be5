"""A whole comparison: real ranks, real sockets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laconic.compare import cli
from laconic.compare.result import Result

pytestmark = pytest.mark.machine


def test_two_strategies_side_by_side(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine moves fewer bytes than FSDP2, to the same losses, and the report names files that exist."""
    out = job.parent / "out"
    argv = [str(job), "--strategies", "fsdp2,host", "--rates", "1gbit", "--local", "1", "--steps", "3", "--save"]
    assert cli.main([*argv, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    report = json.loads((out / "compare.json").read_text())
    fsdp2, host = map(Result.from_dict, report["results"])
    assert host.losses == pytest.approx(fsdp2.losses, rel=1e-5)
    assert len(host.losses) == 3
    assert host.counted_bytes is not None
    assert host.wire_bytes is not None
    assert fsdp2.wire_bytes is not None
    # two ranks, tiny messages: weights W/2 and gradients W/2, against weights twice
    assert host.counted_bytes < host.wire_bytes < 0.8 * fsdp2.wire_bytes
    assert host.counted_bytes == pytest.approx(host.num_parameters * 4, rel=0.05)
    assert host.host_bytes_per_node == pytest.approx(host.num_parameters * 4, rel=0.05)
    assert fsdp2.host_bytes_per_node == 0
    assert fsdp2.allocated_peak_bytes
    assert host.allocated_peak_bytes
    assert report["machine"]["torch"]
    assert (out / "compare.png").exists()
    page = (out / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert f"{host.step_s:.3f}" in page
    assert (out / "runs/full-1gbit-host/checkpoints/step-3").is_dir()
    assert "| full training | 1gbit | laconic host |" in (out / "compare.md").read_text()
    assert shown.count("laconic host") <= 3, "a row, and the words about it"
    assert "out/report.html" in shown


def test_a_refused_job_says_why_and_ends_with_1(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trainer's refusal on its ranks becomes one message, without a traceback."""
    (job.parent / "corpus.txt").write_text("short")
    argv = [str(job), "--strategies", "host", "--no-wire", "--nodes", "1", "--local", "1"]
    assert cli.main([*argv, "--out", "out"]) == 1
    shown = capsys.readouterr().err
    assert "full training, laconic host, unshaped failed: the corpus" in shown
    assert "shorter than one sequence" in shown
    assert "Traceback" not in shown
