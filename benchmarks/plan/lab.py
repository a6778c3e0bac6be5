"""Runs in the lab, shared by the rows `bytes-interface`, `seconds` and `best`: each case runs once at each rate."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.plan.jobs import Case, Predictions
from laconic.compare.runner import explain_failure
from laconic.config import to_dict
from laconic.lab import Lab, LabUnavailable, format_rate
from laconic.plan.cluster_file import load_cluster
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.estimates import Estimate
from laconic.plan.prediction import Refusal
from tests.support.measure import BenchmarkError

_TIMEOUT_S = 900.0
WARM_STEPS = 2
"""The steps that are not timed: the first fills caches, and the second still allocates."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A case at a rate: what was predicted, and what was measured."""

    case: Case
    nodes: int
    local: int
    rate_bits_per_s: float | None
    estimate: Estimate
    seconds: float
    """The median of the timed steps; with local steps, whose steps differ, their mean."""
    wire_bytes: float
    """The bytes that a node's interface sends in a step, as the mean over nodes and warm steps."""
    tokens: int
    peak_bytes: float
    """The device memory at its fullest, by torch's allocator on the fullest rank; 0 if the case watches no step."""

    @property
    def name(self) -> str:
        """The run in words."""
        return f"{self.case.name}, {self.nodes} x {self.local}, {format_rate(self.rate_bits_per_s)}"

    @property
    def seconds_error(self) -> float:
        """The relative error of the predicted seconds."""
        return self.estimate.seconds / self.seconds - 1

    @property
    def memory_error(self) -> float:
        """The relative error of the predicted peak."""
        return self.estimate.peak_bytes / self.peak_bytes - 1

    @property
    def bytes_error(self) -> float:
        """The relative error of the predicted bytes of the interface."""
        return self.estimate.interface_bytes / self.wire_bytes - 1


class LabRuns:
    """Runs in labs, and the cluster files of these labs. Answers stay in the folder, so a second call is quick."""

    def __init__(self, out: Path) -> None:
        self._out = out / "lab"
        self._out.mkdir(parents=True, exist_ok=True)
        self._predictions = Predictions()

    def cluster(self, nodes: int, local: int, rate: float | None) -> ClusterSpec:
        """The lab's cluster file, measured by `laconic doctor` before any run. The wire's rate is the lab's."""
        file = self._out / f"cluster-{nodes}x{local}-{format_rate(rate)}.toml"
        if not file.exists():
            self._ranks(["-m", "laconic.cli", "doctor", "--out", str(file)], nodes, local, rate, makes=file)
        measured = load_cluster(file)
        return measured if rate is None else replace(measured, wire_bits_per_s=rate)

    def runs(self, cases: Sequence[Case], nodes: int, local: int, rate: float | None) -> list[Run]:
        """Run cases at a rate, in one launch. Cases that the planner or the trainer refuses are left out, and named."""
        cluster = self.cluster(nodes, local, rate)
        predicted = []
        for case in cases:
            estimate = self._predictions.of(case, cluster)
            if isinstance(estimate, Refusal):
                print(f"left out: {case.name} on {nodes} x {local}: {estimate.reason}", flush=True)
            else:
                predicted.append((case, estimate))
        found = []
        summaries = self._answers([case for case, _ in predicted], nodes, local, rate)
        for (case, estimate), summary in zip(predicted, summaries, strict=True):
            if "error" in summary:
                print(f"left out: {case.name} on {nodes} x {local}: {summary['error']}", flush=True)
                continue
            warm, mean = slice(WARM_STEPS, None), statistics.median
            if case.config.sync.is_local:  # only some steps sync
                every = case.config.sync.policy.schedule.every
                warm, mean = slice(every, 2 * every), statistics.fmean
            found.append(
                Run(
                    case=case, nodes=nodes, local=local, rate_bits_per_s=rate, estimate=estimate,
                    seconds=mean(summary["step_s"][warm]),
                    wire_bytes=statistics.fmean(summary["interface_sent_bytes"][warm]) / nodes,
                    tokens=summary["tokens_per_step"],
                    peak_bytes=_peak_bytes(summary) if case.config.log.memory_step else 0.0,
                )
            )  # fmt: skip
            print(
                f"{found[-1].name}: {estimate.seconds:.3f} s said, {found[-1].seconds:.3f} s "
                f"({found[-1].seconds_error:+.1%}); bytes {found[-1].bytes_error:+.2%}", flush=True,
            )  # fmt: skip
        return found

    def _answers(self, cases: Sequence[Case], nodes: int, local: int, rate: float | None) -> list[dict[str, Any]]:
        """The summaries of cases. Those that the folder has not run in one launch."""
        files = {case.name: self._file(case, nodes, local, rate) for case in cases}
        new = [case for case in cases if not files[case.name].exists()]
        if new:
            for case in new:
                shutil.rmtree(case.config.train.output, ignore_errors=True)
            jobs, answers = self._out / "jobs.json", self._out / "answers.json"
            jobs.write_text(json.dumps([to_dict(case.config) for case in new]), encoding="utf-8")
            self._ranks(["-m", "benchmarks.plan.ranks", str(jobs), str(answers)], nodes, local, rate)
            for case, answer in zip(new, json.loads(answers.read_text(encoding="utf-8")), strict=True):
                files[case.name].write_text(json.dumps(answer), encoding="utf-8")
        return [json.loads(file.read_text(encoding="utf-8")) for file in files.values()]

    def _file(self, case: Case, nodes: int, local: int, rate: float | None) -> Path:
        name = f"{case.name.replace(', ', '-').replace(' ', '-')}-{nodes}x{local}-{format_rate(rate)}"
        return self._out / f"{name}-{case.config.train.steps}.json"

    def _ranks(self, command: list[str], nodes: int, local: int, rate: float | None, makes: Path | None = None) -> None:
        """Run a command in a lab. It may find fault with the lab if it `makes` its file."""
        try:
            with Lab(nodes=nodes, rate_bits_per_s=rate) as lab:
                outcome = lab.run(command, local=local, timeout_s=_TIMEOUT_S, show=False)
        except LabUnavailable as error:
            raise BenchmarkError(str(error)) from None
        if outcome.exit_code and not (makes and makes.exists()):
            raise BenchmarkError(f"{' '.join(command)} failed: {explain_failure(outcome)}")


def _peak_bytes(summary: Mapping[str, Any]) -> float:
    return float(summary["resting_bytes"] + summary["step_peak_bytes"])
