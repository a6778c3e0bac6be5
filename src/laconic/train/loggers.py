"""Loggers that write the figures of a run to files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from laconic.config import Config, to_dict
from laconic.train.records import Step

_WANDB_RUN = "wandb-run-id"
_GROUPS = {
    "train": ("loss", "perplexity", "grad_norm", "lr", "tokens", "loss_scale", "skipped_steps"),
    "speed": ("step_s", "data_s", "tokens_per_s", "mfu", "allocated_peak_bytes"),
    "wire": ("wait_s", "wire_bytes", "interface_sent_bytes", "interface_received_bytes", "loopback_bytes"),
    "memory": ("device_bytes", "device_peak_bytes", "host_bytes_per_node", "resident_bytes"),
}
"""The groups of the plain figures of a step, in TensorBoard and in Weights & Biases."""


class Logger:
    """Receives the figures of a run. Every method of this base class does nothing."""

    def tick(self, step: int, loss: float) -> None:
        """Receive this rank's loss right after a step, before the figures of all ranks are known."""

    def step(self, step: Step) -> None:
        """Receive the figures of all ranks for a step."""

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the figures of an evaluation after `step`."""

    def close(self) -> None:
        """Finish the output."""


class JsonlLogger(Logger):
    """Writes one JSON object per line, and flushes each line at once."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Continue the file `path`, if there is one, without the lines of steps after `after_step`."""
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        complete = (line for line in lines if line.endswith("}\n"))  # a killed run may leave half a line
        kept = [line for line in complete if json.loads(line).get("step", 0) <= after_step]
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._file.writelines(kept)
        self._file.flush()

    def step(self, step: Step) -> None:
        """See `Logger.step`."""
        self._write(step.to_dict())

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.evaluation`."""
        self._write({"step": step, **values})

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """See `Logger.close`."""
        self._file.close()


def scalars_of(step: Step) -> dict[str, float]:
    """The figures of a step as flat scalars, by "group/name"."""
    row = step.to_dict()
    scalars = {f"{group}/{key}": row[key] for group, keys in _GROUPS.items() for key in keys if key in row}
    for group in ("traffic_bytes", "cyclic"):
        scalars |= {f"{group}/{key}": value for key, value in row.get(group, {}).items()}
    for sync in row.get("syncs", ()):
        tag = f"fragment-{sync['fragment']}"
        scalars |= {f"sync/{key}/{tag}": value for key, value in sync.items() if key not in ("step", "fragment")}
    return scalars


class TensorBoardLogger(Logger):
    """Writes scalars in the groups train, speed, wire, traffic_bytes, memory, sync, cyclic and eval."""

    def __init__(self, folder: Path, *, after_step: int) -> None:
        """Continue the events in `folder`, if there are any, without the events of steps after `after_step`."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else None)

    def step(self, step: Step) -> None:
        """See `Logger.step`."""
        for name, value in scalars_of(step).items():
            self._writer.add_scalar(name, value, step.step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.evaluation`."""
        for name, value in values.items():
            self._writer.add_scalar(f"eval/{name}", value, step)

    def close(self) -> None:
        """See `Logger.close`."""
        self._writer.close()


class WandbLogger(Logger):
    """Sends the same scalars to Weights & Biases, whose package reads its account and mode from the environment."""

    def __init__(self, config: Config, folder: Path, *, after_step: int) -> None:
        """Begin a run, or after step `after_step` go on with the one that was begun in `folder`."""
        import wandb

        noted = folder / _WANDB_RUN
        run_id = noted.read_text().strip() if after_step and noted.is_file() else None
        settings = {"project": config.log.wandb_project, "name": config.log.wandb_name, "dir": str(folder)}
        self._run = wandb.init(**settings, config=to_dict(config), id=run_id, resume="allow")
        noted.write_text(f"{self._run.id}\n")

    def step(self, step: Step) -> None:
        """See `Logger.step`."""
        self._run.log(scalars_of(step), step=step.step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `Logger.evaluation`."""
        self._run.log({f"eval/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """See `Logger.close`."""
        self._run.finish()
