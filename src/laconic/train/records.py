"""The figures of one optimizer step, on one rank and on the whole cluster, and of the whole run (`summary.json`)."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from laconic.comm.launch import RankInfo
from laconic.comm.traffic import WIRE_LEVELS, Level, Purpose
from laconic.config import Config, to_dict
from laconic.extras import versions_of
from laconic.islands.exchange import SyncReport
from laconic.strategies.islands import num_islands
from laconic.strategies.memory import whole_numel
from laconic.strategies.stepper import StepResult
from laconic.strategies.under import strategy_of

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


# -- all ranks together ------------------------------------------------------------------------------------------------

_ON_WIRE = [kind for kind, (level, _) in KINDS.items() if level in WIRE_LEVELS]
_Figures = Mapping[str, float | None]
_NO_MEANS = ("step", "fragment", "sent_bytes", "num_islands")
_SYNC_MEANS = [item.name for item in dataclasses.fields(SyncReport) if item.name not in _NO_MEANS]


def reduce_records(
    records: Sequence[StepRecord],
    ranks: RankInfo,
    group: dist.ProcessGroup,
    *,
    tokens_after: Callable[[int], int],
    steps_per_sync: int | None = None,
) -> list[ClusterStep]:
    """Combine the records of the same steps on all ranks. `group` has all ranks and a backend for CPU tensors.

    Collective: two small all-reduces, whatever the number of steps.
    `tokens_after` gives the tokens of the first n global batches; `steps_per_sync` is None without islands.
    """
    if not records:
        return []
    reports = [report for record in records for report in record.result.syncs]
    results = [record.result for record in records]
    losses = [{"grad_norm": own.grad_norm, "loss": own.loss, "num_losses": own.loss is not None} for own in results]
    of_steps: list[_Figures] = [{**record.sums, **loss} for record, loss in zip(records, losses, strict=True)]
    of_syncs = [{name: getattr(report, name) for name in (*_SYNC_MEANS, "sent_bytes")} for report in reports]
    sums = _all_reduce([*of_steps, *of_syncs], dist.ReduceOp.SUM, group)
    step_sums, sync_sums = sums[: len(records)], sums[len(records) :]
    peaks = _all_reduce([record.peaks for record in records], dist.ReduceOp.MAX, group)

    def tokens_in(last: int, num_steps: int) -> int:
        """The tokens of `num_steps` steps, of which the last is the `last`-th of the run."""
        return tokens_after(last) - tokens_after(max(last - num_steps, 0))

    syncs = [
        SyncMetrics(
            step=report.step,
            fragment=report.fragment,
            sent_bytes=int(total["sent_bytes"]),
            num_islands=report.num_islands,
            bytes_per_token=total["sent_bytes"] / tokens_in(report.step, steps_per_sync or 1),
            **{name: total[name] / ranks.world_size for name in _SYNC_MEANS},
        )
        for report, total in zip(reports, sync_sums, strict=True)
    ]
    has_islands = steps_per_sync is not None  # then each has its own gradient norm
    return [
        ClusterStep(
            step=record.step,
            tokens=tokens_after(record.step),
            loss=total["loss"] / total["num_losses"],
            loss_scale=record.result.loss_scale,
            skipped_steps=record.result.skipped_steps,
            grad_norm=total["grad_norm"] / ranks.world_size if has_islands else record.result.grad_norm,
            lr=record.lr,
            step_s=record.step_s,
            data_s=record.data_s,
            tokens_per_s=tokens_in(record.step, 1) / record.step_s,
            wait_s=None if total["wait_s"] is None else total["wait_s"] / ranks.world_size,
            wire_bytes=None if total["wait_s"] is None else sum(int(total[kind]) for kind in _ON_WIRE),
            traffic_bytes={kind: int(total[kind]) for kind in KINDS if total[kind]},
            interface_sent_bytes=_whole(total["interface_sent_bytes"]),
            loopback_bytes=_whole(total["loopback_bytes"]),
            host_bytes_per_node=_whole(total["host_bytes"], ranks.num_nodes),
            **{name: _whole(value) for name, value in peak.items()},
            resting=record.resting,
            rows=record.rows,
            syncs=tuple(sync for sync in syncs if sync.step == record.step),
        )
        for record, total, peak in zip(records, step_sums, peaks, strict=True)
    ]


def _whole(value: float | None, parts: int = 1) -> Any:
    return None if value is None else int(value) // parts


def _all_reduce(
    rows: Sequence[_Figures], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup
) -> list[dict[str, Any]]:
    """Reduce rows of named numbers over ranks, in one collective; None stays where no rank has a number.

    All ranks pass the same names in the same order.
    """
    pairs = [(value or 0.0, value is not None) for row in rows for value in row.values()]
    values = torch.tensor(pairs, dtype=torch.float64)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
    reduced = iter(values.tolist())
    return [
        {name: value if known else None for name, (value, known) in zip(row, reduced, strict=False)} for row in rows
    ]


# -- the whole run -----------------------------------------------------------------------------------------------------

_LISTS = (
    "step_s", "wait_s", "wire_bytes", "traffic_bytes", "interface_sent_bytes", "loopback_bytes",
)  # fmt: skip
"""Attributes of `ClusterStep` of which the summary has the values of all steps."""
_PEAKS = ("device_peak_bytes", "host_bytes_per_node", "allocated_peak_bytes", "resident_bytes")
"""The attributes of `ClusterStep` whose largest value is in the summary."""


def summarise(config: Config, ranks: RankInfo, model: nn.Module, steps: Sequence[ClusterStep]) -> dict[str, Any]:
    """Describe a run and its steps in plain JSON values."""
    parameters, is_cyclic = list(model.parameters()), config.schedule.is_cyclic
    staged = config.pipeline.is_on and strategy_of(config.shard, config.sync, config.schedule, config.pipeline)
    values = {key: [getattr(step, key) for step in steps] for key in (*_LISTS, *_PEAKS)}
    return {
        "strategy": "cyclic" if is_cyclic else staged.name if staged else config.shard.strategy,
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
