"""shard.strategy = "auto": the strategy that `laconic plan` recommends for the job and its machines."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from laconic.comm.agreement import RankGroup
from laconic.comm.launch import RankInfo
from laconic.config import Config, JobError, from_dict, to_dict
from laconic.plan.candidates import CANDIDATES
from laconic.plan.choice import choose, fitting_cluster
from laconic.plan.cluster_file import load_cluster
from laconic.plan.prediction import Predictor
from laconic.plan.tracing import TraceError
from laconic.strategies.checks import check_job


def with_strategy(config: Config, ranks: RankInfo, device_type: str, peers: RankGroup, console: Console) -> Config:
    """The job with a strategy in place of "auto"; other jobs stay. Rank 0 plans, and all ranks follow. Collective.

    A job whose islands agree rarely keeps them: the plan chooses among exact strategies only where the job trains every
    step together.

    Raises:
        JobError: the cluster file is wrong, the model cannot be traced, or nothing fits; the message says by how much,
            and what would.
    """
    if config.shard.strategy != "auto":
        return config

    def plan() -> dict[str, Any]:
        cluster = load_cluster(str(config.shard.cluster))
        cluster = fitting_cluster(config, cluster, nodes=ranks.num_nodes, local=ranks.num_local)
        names = [name for name, each in CANDIDATES.items() if (each.sync is not None) is config.sync.is_local]
        try:
            choice = choose(Predictor(config, cluster, device_type=device_type), names=names)
        except TraceError as error:
            raise JobError(f"{error}; choose shard.strategy yourself") from error
        if choice.job is None or choice.recommended is None:
            raise JobError(f"shard.strategy = 'auto': {choice.remedy}")
        best = choice.recommended
        said = f"auto: {best.label}, {best.seconds:.3g} s a step predicted" + (
            f"; {choice.rival}" if choice.rival else ""
        )
        return {"job": to_dict(choice.job), "said": said}

    planned = peers.on_rank_0(plan, "cannot choose a strategy")
    chosen = from_dict(Config, planned["job"])
    check_job(chosen, ranks)
    console.print(planned["said"], markup=False, highlight=False, soft_wrap=True)
    return chosen
