"""Small runs under every strategy: how they are started, and the state in which they end."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.checkpoint import commit, open_checkpoint, storage
from laconic.config import Config, to_toml
from tests.faults.victims import Place, Victim
from tests.support.jobs import SMALL_LLAMA, job

STEPS, SAVE_EVERY = 12, 2
PEER_TIMEOUT_S = 10.0
"""The time that a rank may wait for its peers, as the runs configure it."""
LIMIT_S = PEER_TIMEOUT_S + 25
"""The time after a fault in which all ranks must have ended, and a third of that in which a run must be complete.

A rank may have just been started when another is killed, and its imports take 10 s on a busy machine.
"""

_CYCLIC = {"optimizer": {"max_grad_norm": 0.0}, "schedule": {"kind": "cyclic", "cut_by": "parameters"}}
_ISLANDS = {"mode": "local", "every": 2, "recovery": "$FOLDER/recovery"}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way of training, as sections of the job."""

    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    place: Place = field(default_factory=lambda: Place(num_ranks=4, num_local=2))
    is_exact: bool = True
    """Whether a run that was killed must end equal to the bit. Islands go on from the last sync or from an average."""


STRATEGIES: dict[str, Strategy] = {
    "cache none": Strategy(sections={"shard": {"cache": "none"}}),
    "cache host": Strategy(sections={"shard": {"cache": "host"}}),
    "cache device, saves in the background": Strategy(
        sections={"shard": {"cache": "device"}, "train": {"async_save": True}}
    ),
    "4bit": Strategy(sections={"shard": {"wire": "4bit"}, "train": {"accumulation": 2}}),
    "LoRA": Strategy(sections={"lora": {"enabled": True, "rank": 2, "dropout": 0.1}}),
    "Muon": Strategy(sections={"optimizer": {"name": "muon"}}, place=Place(num_ranks=3, num_local=1)),
    "islands": Strategy(sections={"sync": _ISLANDS}, is_exact=False),
    "islands, streamed": Strategy(
        sections={"sync": {**_ISLANDS, "every": 4, "fragments": 2, "overlap": 1}}, is_exact=False
    ),
    "islands, slices": Strategy(
        sections={"sync": {**_ISLANDS, "slices": 2}}, is_exact=False, place=Place(num_ranks=2, num_local=1)
    ),
    "cyclic": Strategy(sections=_CYCLIC, place=Place(num_ranks=3, num_local=3)),
    "cyclic, sharded": Strategy(
        sections={**_CYCLIC, "schedule": {**_CYCLIC["schedule"], "states": "sharded"}},
        place=Place(num_ranks=3, num_local=3),
    ),
    "FSDP2": Strategy(sections={"shard": {"strategy": "fsdp2"}}, place=Place(num_ranks=2, num_local=1)),
    "DDP": Strategy(sections={"shard": {"strategy": "ddp"}}, place=Place(num_ranks=2, num_local=1)),
}
"""All strategies of the trainer, and the two of PyTorch that it offers beside them."""


@dataclass(kw_only=True)
class EndState:
    """The state of a run after its last step."""

    tensors: dict[str, Tensor]
    losses: dict[int, float]
    """The training loss of every step in metrics.jsonl. Islands that go on from a sync may lack the step before it."""
    eval_loss: float


class Run:
    """One run in a folder of its own, started as often as needed."""

    def __init__(self, strategy: Strategy, folder: Path) -> None:
        """Write the job into a new folder."""
        self.strategy, self.folder = strategy, folder
        folder.mkdir()
        self._checkpoints = folder / "out" / "checkpoints"
        (folder / "job.toml").write_text(to_toml(_config(strategy, folder)))
        self.arguments = [str(folder / "job.toml"), "--train.resume", "auto"]
        """The arguments of `laconic train`."""
        self._starts = 0

    def start(self) -> Victim:
        """Start the run on this machine."""
        self._starts += 1
        log = self.folder / f"log-{self._starts}.txt"
        return Victim.start(self.arguments, self.strategy.place, log)

    def finish(self) -> str:
        """Let the run go on to its end; return the problem if it does not get there, else an empty text."""
        victim = self.start()
        left = victim.wait(3 * LIMIT_S)
        if left:
            return f"ranks {left} hang; log: {victim.log}"
        return f"exit codes {victim.exit_codes}; log: {victim.log}" if any(victim.exit_codes) else ""

    def newest_step(self) -> int:
        """The step of the newest checkpoint, all of whose files are intact; 0 without one. Raises: ValueError."""
        if not self._checkpoints.is_dir() or not any(commit.candidates(self._checkpoints)):
            return 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a damaged checkpoint is one too many, even if another is intact
            try:
                return open_checkpoint(self._checkpoints).step
            except UserWarning as warning:
                raise ValueError(str(warning)) from None

    def end_state(self) -> EndState:
        """Read the state of the run, which has come to its end."""
        folder = self._checkpoints / f"step-{STEPS}"
        tensors = storage.entries_of(metadata := storage.read_metadata(folder))
        lines = [json.loads(line) for line in (self.folder / "out" / "metrics.jsonl").read_text().splitlines()]
        losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
        evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
        return EndState(
            tensors=storage.read_values(folder, metadata, tensors), losses=losses, eval_loss=evaluations[-1]
        )


def _config(strategy: Strategy, folder: Path) -> Config:
    sections: dict[str, dict[str, Any]] = {
        "model": {"config": {"model_type": "llama", **SMALL_LLAMA, "num_hidden_layers": 4}},
        "train": {
            "steps": STEPS, "micro_batch_size": 1, "save_every": SAVE_EVERY, "eval_every": STEPS, "log_every": 1,
            "timeout_s": PEER_TIMEOUT_S,
        },
        "log": {"progress": False},
    }  # fmt: skip
    for section, values in strategy.sections.items():
        filled = {k: v.replace("$FOLDER", str(folder)) if isinstance(v, str) else v for k, v in values.items()}
        sections[section] = {**sections.get(section, {}), **filled}
    return job(folder, **sections)


def difference(found: EndState, expected: EndState) -> str:
    """Describe how two end states differ; an empty text if they are equal to the bit."""
    steps = [step for step, loss in expected.losses.items() if found.losses.get(step) != loss]
    names = [name for name, tensor in expected.tensors.items() if not torch.equal(found.tensors[name], tensor)]
    if found.tensors.keys() != expected.tensors.keys():
        return "other tensors"
    if not steps and not names:
        return ""
    return f"losses of steps {steps}; {len(names)} of {len(expected.tensors)} tensors, such as {names[:2]}"
