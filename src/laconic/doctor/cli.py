"""`laconic doctor`: says what the cluster is, measures it, and names what is wrong, what it costs, and what to do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from laconic.comm.agreement import RankGroup
from laconic.comm.cluster import Cluster, init_mesh
from laconic.comm.failure import failing_together
from laconic.comm.groups import started_bytes
from laconic.comm.launch import ExitWithoutTeardown, RankInfo, ending_with_launcher, pick_device, process_group
from laconic.config import ConfigError
from laconic.doctor import probes
from laconic.doctor.facts import Meeting, RankFacts, read_facts, unreachable
from laconic.doctor.judgements import Finding, judge_facts, judge_measured, judge_unreachable
from laconic.doctor.probes import Measured, measure_all
from laconic.errors import JobError, say_mistake
from laconic.plan.cluster_file import load_cluster
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.measure import check_out, measure, write_out
from laconic.plan.units import format_quantity, unit_for

_DESCRIPTION = """\
Say what this cluster is and whether it is well. The first block has its nodes, devices, versions, rates, latencies and
a step of each placement of node shards. Then comes a line for each thing that is wrong: what it costs, and the remedy.
Start it as you start training, and leave the machines alone for the half minute that it takes."""

_EPILOG = """\
examples:
  laconic doctor                                                               # one rank, on this machine
  torchrun --nnodes 2 --node-rank R --nproc-per-node 1 --master-addr box1 -m laconic.doctor     # on both boxes
  laconic lab --nodes 2 --local 2 --rate 200mbit -- -m laconic.doctor          # an emulated cluster
  torchrun ... -m laconic.doctor --out cluster.toml                            # for `laconic plan`; some minutes

The exit code is 0 if all is well, 1 if something is wrong, and 2 for a mistake in the arguments."""

_TIMEOUT_S = 120.0


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code on every rank. Collective over torchrun's ranks."""
    options = _parse(argv)
    leaving = ExitWithoutTeardown() if "RANK" in os.environ else None
    try:
        before = load_cluster(options.cluster) if options.cluster else None
        findings = _examine(options, before)
    except (JobError, ConfigError) as error:
        say_mistake("laconic doctor", error)
        return 2
    if leaving is not None:
        leaving.code = 1 if findings else 0
    return 1 if findings else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="laconic doctor", description=_DESCRIPTION, epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", default="auto", help='"cpu", "cuda" or another; default: an accelerator, if any')
    parser.add_argument("--cluster", type=Path, metavar="FILE", help="the rates that the cluster had when it was well")
    parser.add_argument("--out", type=Path, metavar="FILE", help="measure thoroughly, and write the cluster file")
    return parser.parse_args(argv)


def _examine(options: argparse.Namespace, before: ClusterSpec | None) -> list[Finding]:
    """Read, measure, judge, and print on rank 0. Returns the same findings on all ranks. Collective."""
    ranks = RankInfo.from_environment()
    device = pick_device(options.device, ranks)
    own = read_facts(ranks, device)
    with ending_with_launcher():
        meeting = Meeting(ranks, _TIMEOUT_S)
        facts = meeting.exchange(own, RankFacts)
        _say(ranks, _cluster_lines(facts))
        findings = judge_facts(facts)
        if not any(finding.stops for finding in findings):
            findings += judge_unreachable(facts, unreachable(meeting, ranks, facts))
        if any(finding.stops for finding in findings):
            _say(ranks, ["", "nothing was measured: the ranks cannot make a process group"])
        else:
            findings += _measured(options, ranks, device, facts, before)
        meeting.leave()
    _say(ranks, ["", *map(str, findings)] if findings else ["", "all is well"])
    return findings


def _measured(
    options: argparse.Namespace,
    ranks: RankInfo,
    device: torch.device,
    facts: Sequence[RankFacts],
    before: ClusterSpec | None,
) -> list[Finding]:
    """Measure, print what was measured, and judge it. Collective."""
    with process_group(ranks, device, _TIMEOUT_S) as group, failing_together(ranks.world_size):
        peers = RankGroup(group)
        check_out(options.out, peers)
        cluster = Cluster.of(init_mesh(device.type))
        figures = measure(cluster, peers, probes.QUICK if options.out is None else None)
        measured = measure_all(cluster, peers, figures)
        lines = [*_measured_lines(measured), *_communicator_lines(cluster)]
        if options.out is not None:
            lines += write_out(options.out, figures, device, peers)
    _say(ranks, lines)
    return judge_measured(facts, measured, before)


def _say(ranks: RankInfo, lines: Iterator[str] | Sequence[str]) -> None:
    if ranks.is_main:
        print("\n".join(lines), flush=True)


def _cluster_lines(facts: Sequence[RankFacts]) -> Iterator[str]:
    nodes: dict[int, list[RankFacts]] = {}
    for own in facts:
        nodes.setdefault(own.node, []).append(own)
    yield f"{len(nodes)} node{'s' * (len(nodes) > 1)}, {len(facts)} rank{'s' * (len(facts) > 1)}"
    for node, those in nodes.items():
        own = those[0]
        over = own.interface()
        rate = own.interfaces[over].bits_per_s if over in own.interfaces else None
        talks = f", talks over {over}" if over else ""
        talks += f" ({format_quantity(rate, 'bit/s')})" if rate else ""
        yield f"{f'node {node}':<10}{own.host}: {len(those)} x {own.device}{talks}"
    yield f"{'versions':<10}" + ", ".join(f"{name} {version}" for name, version in facts[0].versions.items())


def _measured_lines(measured: Measured) -> Iterator[str]:
    for key, value in measured.figures.items():  # by the names that they have in a cluster file
        shown = f"{value:.0%}" if key.endswith("overlap") else format_quantity(value, unit_for(key.partition(".")[0]))
        yield f"{key:<32}{shown}"
    for step in measured.steps:
        sent = f", a node sends {format_quantity(step.sent_bytes, 'B')}" if measured.links else ""
        yield f'{"step":<10}cache = "{step.where}": {format_quantity(step.step_s, "s")}{sent}'
    if measured.links:
        best = min(measured.steps, key=lambda step: step.step_s)
        yield (
            f'{"set":<10}cache = "{best.where}" was fastest, with {best.numel:,} parameters; for your job ask '
            "`laconic plan JOB.toml --cluster FILE`, where FILE comes from --out"
        )


def _communicator_lines(cluster: Cluster) -> Iterator[str]:
    """The groups of the device, which take memory there; on a CPU they take none that is worth a line."""
    if cluster.device_type != "cpu":
        names, taken = "; ".join(cluster.communicators), format_quantity(started_bytes(), "B")
        yield f"{'groups':<10}{len(cluster.communicators)} communicators ({names}), begun in {taken} of device memory"
