"""What `laconic plan` expects of the runs of a comparison, beside what is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from laconic import registry
from laconic.compare.case import Case, config_of
from laconic.compare.result import Prediction
from laconic.config import Config
from laconic.plan.choice import fitting_cluster
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.estimates import Estimate
from laconic.plan.prediction import Predictor

_DEVICE_TYPE = "cpu"  # the lab's ranks have no other


def predict(
    cases: Sequence[Case], base: Config, cluster: ClusterSpec, out: Path, *, nodes: int, local: int
) -> list[Prediction | None]:
    """Predict every case on a lab of `nodes` x `local` ranks whose figures are in `cluster`; None where nothing can.

    A rate of a case takes the place of the wire's.

    Raises:
        ConfigError: the cluster file lacks a figure that these ranks need.
        TraceError: the model cannot be traced.
    """
    cluster = fitting_cluster(cluster, nodes=nodes, local=local)
    traced: dict[str, Predictor] = {}
    found: list[Prediction | None] = []
    for case in cases:
        config = config_of(base, case, out)
        predictor = traced.setdefault(case.job, Predictor(config, cluster, device_type=_DEVICE_TYPE))
        predictor = predictor.with_job(config, same_model=True)
        if case.rate_bits_per_s is not None:
            predictor = predictor.on(dataclasses.replace(cluster, wire_bits_per_s=case.rate_bits_per_s))
        strategy = registry.named(case.strategy)
        estimate = predictor.estimate(strategy, is_under=True) if strategy.predict else None
        found.append(_as_prediction(estimate) if isinstance(estimate, Estimate) else None)
    return found


def _as_prediction(estimate: Estimate) -> Prediction:
    return Prediction(
        step_s=estimate.seconds,
        wire_bytes=estimate.interface_bytes,
        allocated_peak_bytes=estimate.peak_bytes,
        host_bytes_per_node=estimate.host_bytes * estimate.ranks_per_node,
    )
