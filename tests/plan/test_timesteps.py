"""`laconic plan cyclic`: the time table, the facts below it, JSON, the picture, and refusals."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, get_args

import matplotlib
import pytest

from laconic import cli
from laconic.cyclic.schedule import RULES, STATES, MessageKind, Rule, Schedule
from laconic.plan.pictures import KIND_COLOURS
from laconic.plan.timesteps import CyclicPlan


def planned(stages: int, rule: str = "v2", states: Any = "replicated", batches: int = 3) -> CyclicPlan:
    return CyclicPlan(schedule=Schedule(Rule.named(rule, stages), states), batches=batches)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", "cyclic", *arguments]) == 0
    return capsys.readouterr().out


def test_the_time_table_of_four_workers(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, "--stages", "4").splitlines()
    assert lines[:6] == [
        "step   0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23",
        "  w1  F1 F2 F3 F4 B4 B3 B2 B1 F1 F2 F3 F4 B4 B3 B2 B1 F1 F2 F3 F4 B4 B3 B2 B1",
        "  w2   .  . F1 F2 F3 F4 B4 B3 B2 B1 F1 F2 F3 F4 B4 B3 B2 B1 F1 F2 F3 F4 B4 B3",
        "  w3   .  .  .  . F1 F2 F3 F4 B4 B3 B2 B1 F1 F2 F3 F4 B4 B3 B2 B1 F1 F2 F3 F4",
        "  w4   .  .  .  .  .  . F1 F2 F3 F4 B4 B3 B2 B1 F1 F2 F3 F4 B4 B3 B2 B1 F1 F2",
        "live   1  2  4  6  8  9 10 10 10 10 10 10 10 10 10 10 10 10 10 10 10 10 10 10",
    ]
    words = {
        "": ("at most 10, or 16 if all workers run at once", "30 for 3 batches, or 24 if all workers run at once",
             "62.5% of all (worker, stage) pairs have the newest parameters", "cannot be clipped"),
        "--states shared --rule v1": (
             "devices 10, against 16 for model and data parallelism", "can be clipped",
             "from nobody, nobody, nobody, nobody on", "36 activation, 36 activation gradient"),
    }  # fmt: skip
    for options, parts in words.items():
        text = " ".join(shown(capsys, "--stages", "4", *options.split()).split())
        assert all(part in text for part in parts)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("rule", RULES)
def test_every_schedule_has_a_summary(rule: str, states: str, capsys: pytest.CaptureFixture[str]) -> None:
    if rule == "dp" and states == "shared":
        assert cli.main(["plan", "cyclic", "--stages", "3", "--rule", rule, "--states", states]) == 2
        assert "all 3 are at the same stage at once" in capsys.readouterr().err
        return
    plan = planned(3, rule, states)
    facts = plan.facts()
    assert facts["peak_live"] == (9 if rule == "dp" else 6)
    assert sum(facts["messages_by_kind"].values()) == sum(map(len, plan.messages()))
    assert all(len(line) < 160 for line in str(plan).splitlines())


@pytest.mark.parametrize("rule", ["v1", "v2", "lag2", "clip"])
def test_a_burst_does_not_grow_with_the_model_or_the_workers(rule: str) -> None:
    for stages in (2, 8):
        sends, receives = planned(stages, rule).largest_burst()
        assert sends == 1 <= receives <= 2


def test_json_holds_the_table_and_every_message(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(shown(capsys, "--stages", "3", "--rule", "lag2", "--states", "sharded", "--json"))
    assert (report["rule"], report["states"], report["stages"], report["devices"]) == ("lag2", "sharded", 3, 3)
    assert report["switch"] == [3, 2, 1]
    assert report["slack"] == [2, 2, 2]
    assert report["table"][1][:4] == [None, None, "F1", "F2"]
    assert max(report["live"]) == report["peak_live"] == 6
    kinds = {message["kind"] for message in report["messages"]}
    assert kinds == {"gradient", "total", "weights", "rear weights"}
    assert len(report["messages"]) == sum(report["messages_by_kind"].values())
    assert all(message["source"] != message["target"] for message in report["messages"])
    assert report["largest_burst"] == report["most_sends"] / 3


def test_the_picture_shows_every_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters stay letters
        shown(capsys, "--stages", "3", "--batches", "2", "--draw", str(tmp_path / "cyclic.svg"))
    texts = [element.text for element in ElementTree.parse(tmp_path / "cyclic.svg").iter() if element.text]
    for label in ("F1", "F2", "F3", "B1", "B2", "B3"):
        assert texts.count(label) == 3 * 2
    assert "3 workers and stages, rule v2" in texts
    assert set(KIND_COLOURS) == set(get_args(MessageKind))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "0"], "'0' is not a positive number"),
        (["--stages", "4", "--rule", "v3"], "invalid choice: 'v3'"),
        (["--stages", "4", "--draw", "no/such/folder/a.svg"], "does not exist; make no/such/folder first"),
        (["--stages", "2", "--draw", "plan.docx"], "end it in .png, .svg, .pdf"),
        (["--stages", "2", "--draw", "a.png"], "--draw needs matplotlib: pip install '.[bench]' in a clone"),
    ],
)
def test_mistakes_in_arguments(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "matplotlib" in message:
        for name in ("matplotlib", "matplotlib.figure"):
            monkeypatch.setitem(sys.modules, name, None)
    try:
        code = cli.main(["plan", "cyclic", *arguments])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    printed = capsys.readouterr().err
    assert all(part in printed for part in message.split(": "))
