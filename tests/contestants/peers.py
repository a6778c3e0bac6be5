"""DeepSpeed and torchft, from the folder in which the Makefile puts them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from laconic.config import Config, JobError
from tests.support import jobs


def train(*configs: Config) -> list[dict[str, Any] | str]:
    """Train one job after the other on this rank. Returns their summaries; the message of a job that is refused."""
    sys.path.append(str(Path(sys.prefix) / "peers"))
    found: list[dict[str, Any] | str] = []
    for config in configs:
        try:
            found.append(jobs.train(config))
        except JobError as error:
            found.append(str(error))
    return found


def under(folder: Path, strategy: str, name: str = "", **sections: dict[str, Any]) -> Config:
    """A job under `strategy` with its own output folder."""
    shard = {"strategy": strategy, **sections.pop("shard", {})}
    train_keys = {"output": str(folder / (name or strategy)), **sections.pop("train", {})}
    return jobs.job(folder, shard=shard, train=train_keys, **sections)
