"""The content of `summary.json`, which a run writes at its end."""

import contextlib
import dataclasses
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from laconic.comm.launch import RankInfo
from laconic.config import Config, to_dict
from laconic.strategies.islands import num_islands
from laconic.strategies.memory import whole_numel
from laconic.train.records import Step

_LISTS = (
    "step_s", "wait_s", "wire_bytes", "traffic_bytes", "interface_sent_bytes", "interface_received_bytes",
    "loopback_bytes",
)  # fmt: skip
"""Attributes of `Step` of which the summary has the values of all steps."""
_PEAKS = ("device_peak_bytes", "host_bytes_per_node", "allocated_peak_bytes", "resident_bytes")
"""The attributes of `Step` whose largest value is in the summary."""


def summarise(config: Config, ranks: RankInfo, model: nn.Module, steps: Sequence[Step]) -> dict[str, Any]:
    """Describe a run and its steps in plain JSON values."""
    parameters, is_cyclic = list(model.parameters()), config.schedule.is_cyclic
    values = {key: [getattr(step, key) for step in steps] for key in (*_LISTS, *_PEAKS)}
    return {
        "strategy": "cyclic" if is_cyclic else config.shard.strategy,
        "islands": num_islands(config, ranks),
        "slices": config.sync.slices,
        "cache": None if is_cyclic or config.shard.strategy != "laconic" else config.shard.cache,
        "lora": config.lora.enabled,
        "num_nodes": ranks.num_nodes,
        "num_local": ranks.num_local,
        "num_parameters": sum(map(whole_numel, parameters)),
        "num_trainable": sum(whole_numel(parameter) for parameter in parameters if parameter.requires_grad),
        "losses": [step.loss for step in steps],
        "grad_norms": [step.grad_norm for step in steps],
        **{key: values[key] for key in _LISTS},
        **{key: max((value for value in values[key] if value is not None), default=None) for key in _PEAKS},
        "syncs": [dataclasses.asdict(sync) for step in steps for sync in step.syncs],
        "cyclic": [dataclasses.asdict(step.cyclic) for step in steps if step.cyclic is not None],
        "output": config.train.output,
        "versions": _versions(),
        "config": to_dict(config),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("laconic", "torch", "transformers", "peft"):
        with contextlib.suppress(PackageNotFoundError):  # laconic may run from a source tree
            found[name] = version(name)
    return found
