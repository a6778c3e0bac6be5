"""The figures of one optimizer step, on one rank and on the whole cluster, and of the whole run (`summary.json`)."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import nn

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import Level, Purpose
from laconic.config import Config, to_dict
from laconic.extras import versions_of
from laconic.islands.exchange import SyncReport
from laconic.strategies.islands import num_islands
from laconic.strategies.memory import whole_numel
from laconic.strategies.stepper import StepResult

_LARGEST_EXPONENT = 709.0
KINDS: dict[str, tuple[Level, Purpose]] = {
    f"{level}/{purpose}": (level, purpose) for level, purpose in itertools.product(get_args(Level), get_args(Purpose))
}
"""The keys of `ClusterStep.traffic_bytes`."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step on one rank."""

    step: int
    """The number of the optimizer step; 1 for the first."""
    lr: float
    """The learning rate that belongs to optimizer.lr."""
    result: StepResult
    data_s: float
    """Seconds to fetch the rows, before the step."""
    measured_s: Callable[[], float]
    """Gives `step_s`; on an accelerator it waits until the step has ended there."""
    sums: Mapping[str, float | None]
    """Bytes and seconds that are summed over ranks, by their names in `ClusterStep`; None where nothing counts them.
    Those of interfaces are of one rank per node, from the end of the last step until the host had issued this one."""
    peaks: Mapping[str, float | None]
    """Bytes of memory at the end of the step, of which the cluster's figure is the largest over ranks."""
    resting: Mapping[str, int] = field(default_factory=dict)
    """See `ClusterStep.resting`."""
    rows: tuple[int, ...] = ()
    """See `ClusterStep.rows`."""

    @property
    def step_s(self) -> float:
        """Seconds from the first forward to the end of the optimizer, on the device. May wait: see `measured_s`."""
        return self.measured_s()


@dataclass(frozen=True, kw_only=True)
class SyncMetrics(SyncReport):
    """One sync of one fragment on the whole cluster. `sent_bytes` is the sum over ranks; other figures are means."""

    bytes_per_token: float
    """`sent_bytes` divided by the tokens of all islands since the previous fragment's sync."""


@dataclass(frozen=True, kw_only=True)
class ClusterStep:
    """One optimizer step of the whole cluster."""

    step: int
    """The number of the optimizer step; 1 for the first."""
    tokens: int
    """Tokens seen since the beginning of the run."""
    loss: float
    """Mean over all ranks, and therefore over islands."""
    grad_norm: float | None
    """Mean over islands; None if it is not measured."""
    lr: float
    step_s: float
    """Rank 0's seconds for the step."""
    data_s: float
    """Rank 0's seconds to fetch the rows."""
    tokens_per_s: float
    """Tokens of the global batch per second of `step_s`."""
    loss_scale: float | None = None
    """The factor of the loss in this step; None without loss scaling."""
    skipped_steps: int | None = None
    """The steps so far that were skipped as gradients overflowed; None without loss scaling."""
    wait_s: float | None
    """Seconds that a rank waited for the wire, mean over ranks; None if the strategy does not count them."""
    wire_bytes: int | None
    """Bytes that all ranks together sent between machines, as counted by the engine."""
    traffic_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that all ranks together sent, by "level/purpose": `KINDS`."""
    interface_sent_bytes: int | None = None
    """Bytes that all nodes' interfaces together sent, as counted by the kernel."""
    loopback_bytes: int | None = None
    """Bytes that ranks sent to ranks of their own node, over all nodes, as counted by the kernel."""
    device_bytes: int | None = None
    """Bytes that the engine holds on the device, on the fullest rank."""
    device_peak_bytes: int | None = None
    """The peak of `device_bytes` in the step."""
    host_bytes_per_node: int | None = None
    """Bytes of the host caches of all ranks, per node."""
    allocated_peak_bytes: int | None = None
    """The most bytes that torch has allocated on the fullest rank's accelerator since the run began; None on CPU."""
    resident_bytes: int = 0
    """Bytes of resident memory of the largest process."""
    resting: Mapping[str, int] = field(default_factory=dict)
    """The units whose weights rest in each place, once `shard.cache = "auto"` has chosen; empty without it."""
    rows: tuple[int, ...] = ()
    """The rows of each rank in this step, unless `train.rows = "equal"`."""
    syncs: tuple[SyncMetrics, ...] = ()
    """The syncs that ended with this step."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return perplexity(self.loss)

    def to_dict(self) -> dict[str, Any]:
        """The figures that are measured, as plain JSON values."""
        values = {**dataclasses.asdict(self), "perplexity": self.perplexity}
        return {key: value for key, value in values.items() if value not in (None, {}, ())}


def perplexity(loss: float) -> float:
    """The exponential of a loss, up to the largest number that JSON has."""
    return math.exp(min(loss, _LARGEST_EXPONENT))


_LISTS = (
    "step_s", "wait_s", "wire_bytes", "traffic_bytes", "interface_sent_bytes", "loopback_bytes",
)  # fmt: skip
"""Attributes of `ClusterStep` of which the summary has the values of all steps."""
_PEAKS = ("device_peak_bytes", "host_bytes_per_node", "allocated_peak_bytes", "resident_bytes")
"""The attributes of `ClusterStep` whose largest value is in the summary."""


def summarise(config: Config, ranks: RankInfo, model: nn.Module, steps: Sequence[ClusterStep]) -> dict[str, Any]:
    """Describe a run and its steps in plain JSON values."""
    parameters, is_cyclic = list(model.parameters()), config.schedule.is_cyclic
    values = {key: [getattr(step, key) for step in steps] for key in (*_LISTS, *_PEAKS)}
    return {
        "strategy": "cyclic" if is_cyclic else config.shard.strategy,
        "islands": num_islands(config.sync, ranks),
        "slices": config.sync.slices,
        "cache": None if is_cyclic or config.shard.strategy != "laconic" else config.shard.policy.cache.where,
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
        "output": config.train.output,
        "versions": versions_of("laconic", "torch", "transformers", "peft"),
        "config": to_dict(config),
    }
