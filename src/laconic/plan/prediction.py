"""Predictions of a job under one strategy or many: `laconic.plan.estimate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from laconic import registry
from laconic.comm.launch import RankInfo
from laconic.config import Config, ConfigError, ShardConfig
from laconic.errors import JobError
from laconic.plan.candidates import CANDIDATES, candidate_named
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.estimates import Estimate, estimate_of
from laconic.plan.forks import map_forked
from laconic.plan.model_trace import ModelTrace, trace_job, writes_in_place
from laconic.plan.pipelined import best_pipeline, rows_of
from laconic.plan.rehearsal import Rehearsal, Rehearsals
from laconic.plan.rehearsed import StepWork
from laconic.plan.tracing import TraceError
from laconic.registry import Strategy
from laconic.rehearse.rings import Places
from laconic.strategies.checks import check_job
from laconic.strategies.under import job_under


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A strategy that cannot run the job, and why."""

    strategy: str
    label: str
    reason: str


class Predictor:
    """Predicts strategies of one job on one cluster. The model is traced once for each way of keeping gradients."""

    def __init__(self, config: Config, cluster: ClusterSpec, *, device_type: str | None = None) -> None:
        """Predict for devices of a type, "cuda" or "cpu". Default: that of train.device, and "cuda" for "auto"."""
        self.config, self.cluster = config, cluster
        device = config.train.device
        self.device_type = device_type or ("cuda" if device == "auto" else device.partition(":")[0])
        self._traces: dict[tuple[bool, str | None, int, int], ModelTrace] = {}
        self._rehearsals = Rehearsals()

    def on(self, cluster: ClusterSpec) -> Predictor:
        """Predict the same job on another cluster, with the same traces."""
        other = Predictor(self.config, cluster, device_type=self.device_type)
        other._traces, other._rehearsals = self._traces, self._rehearsals
        return other

    def with_job(self, config: Config, *, same_model: bool = False) -> Predictor:
        """Predict another job on the same cluster. `same_model`: its model and batches are those traced already."""
        other = Predictor(config, self.cluster, device_type=self.device_type)
        if same_model:
            other._traces, other._rehearsals = self._traces, self._rehearsals
        return other

    def all(self, names: Iterable[str] | None = None) -> Iterator[Estimate | Refusal]:
        """Predict the strategies with these names; by default all.

        Raises:
            ConfigError: a name is not known, or ranks are not alike.
        """
        _refuse_shares(self.config.shard)
        wanted = [candidate_named(name) for name in (CANDIDATES if names is None else names)]
        for first in wanted[:1]:
            with suppress(ConfigError, JobError, ValueError):  # a refusal says so below
                self._trace(self.job(first))  # before the forks, which share it
        queue = sorted(wanted, key=lambda each: each.pipeline is None)  # what takes longest comes first
        estimates = {}
        for candidate, (found, rehearsed) in zip(queue, map_forked(self._estimate_apart, queue), strict=True):
            self._rehearsals.done.update(rehearsed)
            estimates[candidate.name] = found
        yield from (estimates[each.name] for each in wanted)

    def _estimate_apart(self, candidate: Strategy) -> tuple[Estimate | Refusal, dict[Any, Rehearsal]]:
        """Predict one strategy, maybe in a fork. Returns new rehearsals, too, but those that hold process groups."""
        before = set(self._rehearsals.done)
        found = self.estimate(candidate)
        new = {key: value for key, value in self._rehearsals.done.items() if key not in before}
        return found, {key: value for key, value in new.items() if not (value.matrices or value.fragments)}

    def estimate(
        self, candidate: Strategy, *, job: Config | None = None, keeps_spans: bool = False
    ) -> Estimate | Refusal:
        """Predict one strategy, with the best of its pipelines if the job leaves that open.

        `job`: that of an earlier estimate. Default: this one's, under the strategy.
        """
        try:
            _refuse_shares(self.config.shard)
            has_choice = candidate.pipeline is not None and job is None and not self.config.pipeline.is_on
            job = job or self.job(candidate)
            if has_choice and self.cluster.nodes > 1:
                return best_pipeline(job, self.cluster.nodes, partial(self._checked, candidate))
            return self._checked(candidate, job, keeps_spans=keeps_spans)
        except TraceError:
            raise
        except (ConfigError, JobError, ValueError, AssertionError) as error:  # torch's FSDP2 asserts what it needs
            return Refusal(strategy=candidate.name, label=candidate.label, reason=str(error))

    def job(self, candidate: Strategy) -> Config:
        """The job under a strategy.

        Raises:
            ConfigError: the strategy cannot run the job.
        """
        return job_under(candidate, self.config)

    def _checked(self, candidate: Strategy, job: Config, *, keeps_spans: bool = False) -> Estimate:
        nodes, local = self.cluster.nodes, self.cluster.ranks_per_node
        first = RankInfo(rank=0, world_size=nodes * local, local_rank=0, num_local=local, num_nodes=nodes)
        check_job(job, first, self.device_type)
        return self._estimate(candidate, job, keeps_spans=keeps_spans)

    def _estimate(self, candidate: Strategy, job: Config, *, keeps_spans: bool = False) -> Estimate:
        cluster, train = self.cluster, job.train
        islands = (job.sync.membership.islands or cluster.nodes) if job.sync.is_local else 1
        if cluster.nodes % islands:
            raise ValueError(f"{islands} islands do not divide {cluster.nodes} nodes; use a divisor")
        places = Places(nodes=cluster.nodes // islands, local=cluster.ranks_per_node, islands=islands)
        work = StepWork(job=job, trace=self._trace(job), rehearsals=self._rehearsals, places=places)
        program = registry.load(candidate.predict)(cluster, work, keeps_spans=keeps_spans)
        tokens = cluster.ranks * train.accumulation * train.micro_batch_size * job.data.sequence_length
        return estimate_of(
            program, cluster, candidate, device_type=self.device_type, tokens=tokens, notes=work.trace.notes, job=job
        )

    def _trace(self, job: Config) -> ModelTrace:
        """The trace of one micro-batch of a job."""
        if job.pipeline.is_on:
            job = replace(job, train=replace(job.train, micro_batch_size=rows_of(job, self.cluster)))
        key = (
            writes_in_place(job.shard, job.model.dtype),
            job.shard.policy.precision.param_dtype,
            job.sync.slices,
            job.train.micro_batch_size,
        )
        if key not in self._traces:
            self._traces[key] = trace_job(job, device_type=self.device_type, model=self._rehearsals.model(job))
        return self._traces[key]


def _refuse_shares(shard: ShardConfig) -> None:
    """Refuse a job whose ranks hold unequal shards: a rehearsal is one rank that stands for all.

    Raises:
        ConfigError: it has shares.
    """
    if shard.policy.shares is not None:
        raise ConfigError(
            "shard.shares: laconic plan predicts ranks that are all alike; leave shares out to plan the job with equal "
            "shards, and name a shard.strategy other than 'auto' to train with unequal ones"
        )


def estimate(
    config: Config, cluster: ClusterSpec, strategy: str = "host", *, device_type: str | None = None
) -> Estimate | Refusal:
    """Predict the seconds, bytes and memory of a step of `config` on `cluster` under one strategy.

    Cost: a trace of the model on fake tensors, some seconds, and milliseconds for the strategy.

    Raises:
        ConfigError: there is no such strategy, or the cluster file lacks a figure.
        JobError: the model cannot be built.
        TraceError: the model cannot be traced.
    """
    (found,) = Predictor(config, cluster, device_type=device_type).all([strategy])
    return found
