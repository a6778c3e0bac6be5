"""The table, the picture and the progress on the screen, made from canned results."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from laconic.compare.case import Case
from laconic.compare.plot import save_plot
from laconic.compare.progress import ConsoleReporter
from laconic.compare.table import ScreenTable, render, savings_in_words
from tests.support.canned import canned, canned_host


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_each_row_is_compared_with_fsdp2_of_its_own_job_and_rate() -> None:
    results = [
        canned(), canned_host(losses=(5.0, 4.0, 3.0, 2.6)), canned_host(rate_bits_per_s=None),
        canned(job="lora", step_s=4.0, wire_bytes=150e6), canned_host(job="lora", step_s=0.1, wire_bytes=300e3),
    ]  # fmt: skip
    header, _, *rows = render(results).splitlines()
    assert cells(header)[:4] == ["job", "wire", "strategy", "tokens / s"]
    fsdp2, host, alone, _, lora = map(cells, rows)
    assert fsdp2 == [
        "full training", "200mbit", "FSDP2", "12,400", "8.000", "1.00", "300.0", "1.000", "310.0", "50.0", "0.0",
        "2.5000", "0", "-",
    ]  # fmt: skip
    assert host == [
        "full training", "200mbit", "laconic host", "35,429", "2.800", "0.35", "100.0", "0.333", "310.0", "50.0",
        "100.0", "2.6000", "1.0e-01", "1.500",
    ]  # fmt: skip
    assert alone[1] == "unshaped"
    assert (alone[5], alone[7], alone[12]) == ("-", "-", "-")
    assert lora[0] == "LoRA"
    assert lora[4:8] == ["0.100", "0.03", "0.300", "0.002"]


def test_without_a_wire_the_engines_count_is_shown() -> None:
    rows = render(
        [canned(wire_bytes=None, local_bytes=None), canned_host(wire_bytes=None, local_bytes=None)]
    ).splitlines()[2:]
    assert cells(rows[0])[6:9] == ["-", "-", "-"]
    assert cells(rows[1])[6:9] == ["99.0", "-", "50.0"]


def test_the_screen_gets_each_row_as_it_comes() -> None:
    table = ScreenTable(["fsdp2", "host"], device_limit_bytes=60e6)
    _, title, header, fsdp2 = table.add(canned())
    assert title == "full training, 200mbit; a rank may use 60.0 MB"
    assert header.split()[:4] == ["tokens/s", "s/step", "xFSDP2", "wire"]
    assert fsdp2.split() == [
        "FSDP2", "12,400", "8.000", "1.00", "300.0", "1.000", "50.0", "0.0", "2.5000", "0", "-", 8 * "\u2588",
    ]  # fmt: skip
    (host,) = table.add(canned_host(allocated_peak_bytes=61_000_000, losses=(5.0, 4.0, 3.0, 2.6)))
    assert host.split()[:5] == ["laconic", "host", "35,429", "2.800", "0.35"]
    assert host.endswith(f" 1.0e-01   1.500  {3 * chr(0x2588)}  does not fit"), "the legend explains both"
    assert len(header) == len(fsdp2) - 2 - 8 == len(host.partition("  \u2588")[0]), "columns are aligned"
    *_, host = ScreenTable(["host"]).add(canned_host())
    assert host.split()[2:7] == ["35,429", "2.800", "-", "100.0", "-"], "without FSDP2 there are no ratios"


def test_the_closing_words_say_what_was_saved_and_when_nothing_is() -> None:
    results = [canned(), canned(strategy="hsdp", allocated_peak_bytes=70_000_000), canned_host()]
    words = savings_in_words(results, device_limit_bytes=60e6)
    assert words.startswith("laconic host: 0.35 of FSDP2's seconds and 0.33 of its bytes on the wire. HSDP would not")
    assert "On one node laconic saves nothing" in words
    assert "would not fit" not in savings_in_words(results)
    assert savings_in_words([canned_host()]) == savings_in_words([canned()]) == ""


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    results = [make(job=job, rate_bits_per_s=rate) for job in ("full", "lora") for rate in (None, 20e6)
               for make in (canned, canned_host)]  # fmt: skip
    path = tmp_path / "compare.png"
    save_plot([*results, canned(strategy="ddp", wire_bytes=None)], path, title="a title")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_row_after_a_run_and_on_a_terminal_its_time(terminal: bool) -> None:
    text, case = io.StringIO(), Case(strategy="host", rate_bits_per_s=200e6, steps=4)
    console = Console(file=text, force_terminal=terminal, width=120, color_system=None)
    reporter = ConsoleReporter(console, ScreenTable(["host"]), num_runs=2)
    with reporter.running(case):
        assert terminal or not text.getvalue(), "a row after each run, and nothing before"
    reporter.finished(canned_host())
    assert "laconic host    35,429    2.800" in text.getvalue().splitlines()[-1]
    assert ("[1/2] full training, laconic host, 200mbit, 4 steps 0:00:00" in text.getvalue()) == terminal
