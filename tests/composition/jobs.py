"""The table of what `laconic train` takes: every registered strategy with values of other sections of a job."""

from __future__ import annotations

from typing import Any

from laconic import registry
from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError, from_dict, to_dict
from laconic.registry import Strategy
from laconic.strategies.checks import check_job
from laconic.strategies.under import job_under

JOB: dict[str, Any] = {"model": {"config": {"model_type": "llama"}}, "optimizer": {"max_grad_norm": 0.0}}
COLUMNS: dict[str, dict[str, dict[str, Any]]] = {
    "AdamW8bit": {"optimizer": {"name": "adamw8bit"}},
    "Muon, Shampoo": {"optimizer": {"name": "muon"}},
    "bf16 states": {"model": {"dtype": "bfloat16"}},
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
