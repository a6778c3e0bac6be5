"""The tables of docs/which-strategy.md, and the sample of a plan in docs/choose.md, are what the planner computes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from laconic import cli
from laconic.config import load
from laconic.plan import Predictor, choose, load_cluster
from laconic.plan.units import format_number, format_quantity

pytestmark = pytest.mark.machine

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "which-strategy.md"
CHOOSE = ROOT / "docs" / "choose.md"
SAMPLE_OF_A_PLAN = re.compile(r"```\n\$ laconic (plan [^\n]*)\n(.*?)```", re.DOTALL)
HEAD = "| strategy | s/step | tokens/s | wire | device | fits |\n|---|---|---|---|---|---|\n"
CASES = {
    "lora-14b": [
        "ddp", "ddp-bf16", "rank", "device", "host", "hsdp", "pipeline", "fsdp2-hpz", "fsdp2-two-level", "fsdp2",
    ],
    "a40-10b": [
        "pipeline", "lossless", "hsdp", "host", "device", "rank", "4bit", "fsdp2-hpz", "fsdp2-two-level", "fsdp2",
        "ddp",
    ],
    "full-13b": [
        "pipeline", "lossless", "host", "device", "rank", "4bit", "hsdp", "fsdp2-two-level", "fsdp2", "fsdp2-reduced",
    ],
    "sites": ["local-steps", "4bit", "lossless", "host", "hsdp", "fsdp2-reduced", "fsdp2-two-level", "fsdp2"],
    "infiniband": ["fsdp2", "fsdp2-hpz", "fsdp2-two-level", "host", "device", "hsdp"],
}  # fmt: skip
"""The strategies of each table, which the page has in the order of the plan."""
TAKEN = dict(zip(CASES, ("ddp", "pipeline", "pipeline", "local-steps", "fsdp2"), strict=True))

OTHERS = [each for each in CASES if each != "sites"]


def table(case: str, *, among: Sequence[str] | None) -> str:
    """The table of a case, as the page has it, where the choice is `among` these strategies. None: among all."""
    folder = ROOT / "examples" / "plan"
    predictor = Predictor(load(folder / f"{case}.toml"), load_cluster(folder / f"{case}-cluster.toml"))
    choice = choose(predictor, names=among)
    assert choice.recommended is not None
    assert choice.recommended.strategy == TAKEN[case]
    rows = []
    for entry in choice.entries:
        estimate = entry.estimate
        if estimate.strategy not in CASES[case]:
            continue
        label = f"**{estimate.label}**" if entry.is_recommended else estimate.label
        wire, device = (format_quantity(each, "B") for each in (estimate.wire_bytes, estimate.peak_bytes))
        speed = f"{format_number(estimate.seconds)} | {format_number(estimate.tokens_per_s)}"
        rows.append(f"| {label} | {speed} | {wire} | {device} | {'yes' if estimate.fits else 'no'} |\n")
    return HEAD + "".join(rows)


@pytest.mark.parametrize(
    "case", ["sites", *(pytest.param(each, marks=pytest.mark.campaign(seconds=120)) for each in OTHERS)]
)
def test_a_table(case: str) -> None:
    """Among the strategies that it shows; `main` writes the tables, and chooses among all."""
    assert table(case, among=CASES[case]) == shown(case)


@pytest.mark.campaign(seconds=90)
def test_the_sample_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    command, sample = SAMPLE_OF_A_PLAN.search(CHOOSE.read_text()).groups()  # type: ignore[union-attr]
    with contextlib.chdir(ROOT):
        assert cli.main(command.split()) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in sample.splitlines() if line not in printed] == []


def shown(case: str) -> str:
    text = PAGE.read_text().partition(f"<!-- case: {case} -->\n\n")[2]
    return re.match(r"(?:\|.*\n)*", text)[0]  # type: ignore[index]


def main() -> None:
    """Write the tables into the page."""
    text = PAGE.read_text()
    for case in CASES:
        pattern = rf"(<!-- case: {case} -->\n\n)(?:\|.*\n)*"
        text = re.sub(pattern, lambda found, case=case: found[1] + table(case, among=None), text)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
