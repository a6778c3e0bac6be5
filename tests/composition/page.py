"""Fills the tables of docs/composition.md from the matrix: `python -m tests.composition.page`. A test compares them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from laconic import registry
from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError, from_dict, to_dict
from laconic.registry import Strategy
from laconic.strategies.checks import check_job
from laconic.strategies.under import job_under
from tests.composition.matrix import (
    FEATURES,
    MEANING,
    OPTIMIZERS,
    REFUSALS,
    STRATEGIES,
    cells,
    is_empty,
    refusals_of,
)

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"

_MARK = re.compile(r"(<!-- table of (?P<name>[a-z ]+) -->\n)(.*?)(\n<!-- end of the table -->)", re.DOTALL)


def render() -> str:
    """The page: its own text, with the tables and the number of cells as they are now."""
    jobs, job_refusals = job_table()
    tables = {
        "strategies": _table("strategy", STRATEGIES, (*OPTIMIZERS, *FEATURES)),
        "refusals": "\n".join(
            f"{number}. {' or '.join(each.first)} with {' or '.join(each.second)}"
            f"{' beside ' + ' or '.join(each.beside) if each.beside else ''}: "
            f'"... {each.message} ... {each.remedy}"'
            for number, each in enumerate(REFUSALS, 1)
        ),
        "features": _table("", (*OPTIMIZERS, *FEATURES), FEATURES),
        "jobs": jobs,
        "refusals of jobs": job_refusals,
        "meanings": "\n".join(["| name | meaning |", "|---|---|"] + [f"| {k} | {v} |" for k, v in MEANING.items()]),
    }
    text, found = PAGE.read_text(encoding="utf-8"), set()

    def fill(match: re.Match[str]) -> str:
        found.add(match["name"])
        return f"{match[1]}\n{tables[match['name']]}\n{match[4]}"

    text = re.sub(r"The test has \d+ cells", f"The test has {len(cells())} cells", _MARK.sub(fill, text))
    assert found == tables.keys(), "the page has lost the place of a table"
    return text


def _table(corner: str, rows: tuple[str, ...], columns: tuple[str, ...]) -> str:
    lines = [f"| {' | '.join((corner, *columns))} |", f"|---|{':-:|' * len(columns)}"]
    for row in rows:
        met = [", ".join(f"refused ({index + 1})" for index in refusals_of({row, column})) for column in columns]
        entries = [
            "" if row == column or is_empty({row, column}) else text or "works"
            for column, text in zip(columns, met, strict=True)
        ]
        lines.append(f"| {' | '.join((row, *entries))} |")
    return "\n".join(lines)


# -- jobs --------------------------------------------------------------------------------------------------------------


JOB: dict[str, Any] = {"model": {"config": {"model_type": "llama"}}, "optimizer": {"max_grad_norm": 0.0}}
COLUMNS: dict[str, dict[str, dict[str, Any]]] = {
    "AdamW8bit": {"optimizer": {"name": "adamw8bit"}},
    "Muon, Shampoo": {"optimizer": {"name": "muon"}},
    "bf16 states": {"model": {"dtype": "bfloat16"}},
    "fp32": {"shard": {"param_dtype": None}},
    "bf16": {"shard": {"param_dtype": "bfloat16"}},
    "fp16": {"shard": {"param_dtype": "float16"}},
    "LoRA": {"lora": {"enabled": True}},
    "QLoRA": {"lora": {"enabled": True, "quantize": "nf4"}},
    "accumulation": {"train": {"accumulation": 2}},
    "compile": {"train": {"compile": True}},
    "checks": {"shard": {"check_every": 100}},
    "islands": {"sync": {"mode": "local"}},
}
"""The values by which a job of a column differs from `JOB`."""
RANKS = RankInfo(rank=0, world_size=6, local_rank=0, num_local=2, num_nodes=3)


def refusal(strategy: Strategy, sections: dict[str, dict[str, Any]]) -> str:
    """The message that refuses a job, on 3 nodes x 2 ranks; empty if it is taken."""
    table = to_dict(job_under(strategy, from_dict(Config, JOB)))
    if "lossless" in strategy.name:
        table["shard"]["param_dtype"] = "bfloat16"  # its column "fp32" says what float32 does
    table["train"]["accumulation"] = 1 if strategy.schedule else 2  # "reduced always" is for jobs that accumulate
    for section, values in sections.items():
        table[section] = {**table.get(section, {}), **values}
    try:
        check_job(from_dict(Config, table), RANKS, "cpu" if "CPU" in strategy.note else "cuda")
    except JobError as error:
        return str(error)
    return ""


def job_table() -> tuple[str, str]:
    """The table, and the list of its refusals."""
    messages: list[str] = []
    lines = [f"| {' | '.join(('strategy', *COLUMNS))} |", f"|---|{':-:|' * len(COLUMNS)}"]
    for strategy in registry.strategies().values():
        if strategy.name in (registry.AUTO, "laconic"):
            continue
        cells = [strategy.name]
        for sections in COLUMNS.values():
            message = refusal(strategy, sections)
            text = message if strategy.is_own else message.replace(repr(strategy.shard["strategy"]), "...")
            if text and text not in messages:
                messages.append(text)
            cells.append(f"{messages.index(text) + 1}" if text else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines), "\n".join(f"{number}. {text}" for number, text in enumerate(messages, 1))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
