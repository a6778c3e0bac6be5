"""The state that all rows share: predictions, and the launches of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.plan.jobs import Case, Predictions
from benchmarks.plan.lab import LabRuns
from benchmarks.plan.ranks import train_all
from laconic.config import to_dict
from laconic.plan.cluster_spec import ClusterSpec
from tests.support.launch import launch
from tests.support.measure import Options
from tests.support.record import Table

LAUNCH_S = 1500.0


class Bench:
    """The output folder, the predictions, the runs in the lab and the tables that all rows use."""

    def __init__(self, out: Path, *, quick: bool) -> None:
        self.out, self.quick = out, quick
        self.predictions = Predictions()
        self.lab = LabRuns(out)
        self.tables: dict[str, Table] = {}
        """The raw figures, by the key of their row."""

    def train(self, cases: Sequence[Case], nodes: int, local: int) -> list[dict[str, Any]]:
        """Train cases in one launch of processes, without a wire. Returns the summaries."""
        for case in cases:
            shutil.rmtree(case.config.train.output, ignore_errors=True)  # an earlier benchmark may have left it
        jobs = [to_dict(case.config) for case in cases]
        return launch(train_all, jobs, num_ranks=nodes * local, num_local=local, timeout_s=LAUNCH_S)[0]


def any_cluster(nodes: int, local: int) -> ClusterSpec:
    """A cluster whose rates are of no account, for bytes and memory."""
    return ClusterSpec(
        nodes=nodes, ranks_per_node=local, device_memory_bytes=10**11,
        device_flops_per_s=dict.fromkeys(("float32", "bfloat16", "float16"), 1e11), device_memory_bytes_per_s=1e10,
        host_memory_bytes=10**12, host_to_device_bytes_per_s=1e10, device_to_host_bytes_per_s=1e10,
        local_bytes_per_s=1e9, local_latency_s=1e-5, wire_bits_per_s=1e9, wire_latency_s=1e-4,
    )  # fmt: skip


@contextmanager
def open_bench(options: Options) -> Iterator[Bench]:
    """Make the folder for the files of the runs."""
    options.out.mkdir(parents=True, exist_ok=True)
    yield Bench(options.out.absolute(), quick=options.quick)
