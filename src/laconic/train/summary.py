"""What a run leaves behind in `summary.json`."""

from __future__ import annotations

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from laconic.config.job import to_dict
from laconic.strategies.sync import num_islands

if TYPE_CHECKING:
    from laconic.train.loop import Trainer


def summarise(trainer: Trainer) -> dict[str, Any]:
    """What a run was and measured, as plain values."""
    config, steps = trainer.config, trainer.history
    parameters = list(trainer.stepper.module.parameters())
    return {
        "strategy": "cyclic" if config.schedule.is_cyclic else config.shard.strategy,
        "islands": num_islands(config, trainer.ranks),
        "slices": config.sync.slices,
        "cache": None if config.schedule.is_cyclic or config.shard.strategy != "laconic" else config.shard.cache,
        "lora": config.lora.enabled,
        "num_nodes": trainer.ranks.num_nodes,
        "num_local": trainer.ranks.num_local,
        "device": trainer.device.type,
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "num_trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "start_step": trainer.start_step,
        "tokens_per_step": trainer.tokens_per_step,
        "losses": [step.loss for step in steps],
        "grad_norms": [step.grad_norm for step in steps],
        "step_s": [step.step_s for step in steps],
        "wait_s": [step.wait_s for step in steps],
        "wire_bytes": [step.wire_bytes for step in steps],
        "traffic_bytes": [step.traffic_bytes for step in steps],
        "interface_sent_bytes": [step.interface_sent_bytes for step in steps],
        "interface_received_bytes": [step.interface_received_bytes for step in steps],
        "device_peak_bytes": _most(step.device_peak_bytes for step in steps),
        "host_bytes_per_node": _most(step.host_bytes_per_node for step in steps),
        "allocated_peak_bytes": _most(step.allocated_peak_bytes for step in steps),
        **trainer.measured,
        "resident_bytes": _most(step.resident_bytes for step in steps),
        "syncs": [dict(sync.__dict__) for step in steps for sync in step.syncs],
        "cyclic": [dict(step.cyclic.__dict__) for step in steps if step.cyclic is not None],
        "evaluations": trainer.evaluations,
        "output": str(trainer.output),
        "versions": _versions(),
        "config": to_dict(config),
    }


def _most(values: Any) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("laconic", "torch", "transformers", "peft"):
        with contextlib.suppress(PackageNotFoundError):  # laconic run from a source tree
            found[name] = version(name)
    return found
