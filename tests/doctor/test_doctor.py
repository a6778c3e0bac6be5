"""`laconic doctor`: a healthy lab has no finding, each planted fault has one; and the judgements on facts made up."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from laconic.comm.entries import decode, encode
from laconic.doctor import judgements
from laconic.doctor.facts import Interface, RankFacts, named_interfaces
from laconic.doctor.judgements import Finding, judge_facts
from laconic.doctor.probes import Measured, turns
from laconic.lab import Lab
from laconic.plan.cluster_file import parse_cluster
from tests.support.planted import examine, open_lab

LO = Interface(addresses=("127.0.0.1", "::1"), is_up=True, bits_per_s=None)
ETH = Interface(addresses=("10.0.0.1",), is_up=True, bits_per_s=10e9)
FACTS = RankFacts(
    rank=0, node=0, host="box", network="n", device_type="cuda", device="H100",
    versions={"torch": "2.13.0", "NCCL": "2.27.5", "Python": "3.12.1"}, locked_bytes=None, open_files=1024,
    has_rdma=False, interfaces={"lo": LO, "eth0": ETH}, chosen={}, route="eth0", own_address="10.0.0.1",
)  # fmt: skip


def healthy(nodes: int = 2, local: int = 2, **changed: Any) -> list[RankFacts]:
    """The facts of all ranks; `changed` on the ranks of the last node."""
    places = [(rank, rank // local) for rank in range(nodes * local)]
    ranks = [replace(FACTS, rank=rank, node=node, network=f"n{node}") for rank, node in places]
    return [replace(own, **changed) if own.node == nodes - 1 else own for own in ranks]


def kinds(findings: list[Finding] | Iterator[Finding]) -> list[tuple[str, str]]:
    return [(finding.kind, finding.severity) for finding in findings]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with open_lab() as lab:
        yield lab


@pytest.mark.machine
def test_a_healthy_lab_has_no_finding(lab: Lab) -> None:
    code, said, found = examine(lab)
    assert (code, found) == (0, []), said
    assert said.startswith("2 nodes, 2 ranks\nnode 0 ")
    for line in (r"node 1 +\S+: 1 x .* talks over wire0", r"versions +torch \S+, Python", r"wire_bits_per_s +.*bit/s"):
        assert re.search(line, said), said
    steps = re.findall(r'^step +cache = "(\w+)": .* a node sends (.*)$', said, re.M)
    assert [where for where, _ in steps] == ["none", "host", "device", "rank"]
    assert steps[0][1] != steps[1][1] == steps[2][1], "a cache saves a gather"
    assert said.endswith("all is well\n")


@pytest.mark.machine
def test_five_faults_of_a_node_are_found_together(lab: Lab) -> None:
    faults = ["slow-link", "memlock", "clock", "versions", "slow-node"]
    code, said, found = examine(lab, *faults)
    assert sorted(found) == sorted(faults), said
    assert code == 1
    blamed = [line for line in said.splitlines() if re.match("error|warning", line) and "node 1" in line]
    assert len(blamed) == 4, said
    assert all(text in said for text in ("torch is ", "2.12.0 on rank 1")), said


@pytest.mark.machine
@pytest.mark.parametrize(("fault", "text"), [("loopback", "lo, which reaches this"), ("missing", "no interface")])
def test_a_wrong_interface_is_found_before_ranks_hang(lab: Lab, fault: str, text: str) -> None:
    code, said, found = examine(lab, fault)
    assert (code, found) == (1, ["interface"]), said
    assert text in said
    assert "export GLOO_SOCKET_IFNAME=wire0 on node 1" in said
    assert "nothing was measured" in said


@pytest.mark.machine
def test_a_cluster_file_that_cannot_be_written_is_refused_before_the_measurement(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "laconic.doctor", "--out", str(tmp_path / "none" / "cluster.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done
    assert f"the folder {tmp_path / 'none'} does not exist" in done.stderr
    assert "flops" not in done.stdout


@pytest.mark.parametrize(
    ("changed", "kind", "severity"),
    [
        ({"locked_bytes": 8 << 20}, "memlock", "warning"),
        ({"locked_bytes": 8 << 20, "has_rdma": True}, "memlock", "error"),
        ({"open_files": 256}, "open-files", "error"),
        ({"versions": {**FACTS.versions, "torch": "2.12.0"}}, "versions", "error"),
        ({"versions": {"torch": "2.13.0", "Python": "3.12.1"}}, "versions", "error"),
        ({"versions": {**FACTS.versions, "Python": "3.11.2"}}, "versions", "warning"),
        ({"chosen": {"NCCL_SOCKET_IFNAME": "ib"}}, "interface", "error"),
        ({"chosen": {"GLOO_SOCKET_IFNAME": "eth"}}, "interface", "error"),
        ({"interfaces": {"eth0": replace(ETH, is_up=False)}, "chosen": {"GLOO_SOCKET_IFNAME": "eth0"}}, "interface",
         "error"),
        ({"own_address": "127.0.1.1"}, "interface", "error"),
        ({"interfaces": {"eth0": ETH, "eth1": replace(ETH, bits_per_s=100e9)}}, "interface", "warning"),
    ],
)  # fmt: skip
def test_a_fault_of_one_node_is_one_finding(changed: dict[str, Any], kind: str, severity: str) -> None:
    findings = judge_facts(healthy(**changed))
    assert kinds(findings) == [(kind, severity)], findings
    assert "node 1" in findings[0].what or "rank 2, 3" in findings[0].what


def test_what_is_no_fault_is_not_found_and_each_device_is_told() -> None:
    """A processor locks nothing, and ranks of one machine may talk over loopback. Facts survive the journey."""
    assert judge_facts(healthy()) == []
    assert [decode(RankFacts, encode(own).encode()) for own in healthy()] == healthy()
    small = [replace(own, locked_bytes=65536, device_type="cpu") for own in healthy()]
    assert judge_facts(small) == []
    assert judge_facts([replace(own, chosen={"GLOO_SOCKET_IFNAME": "lo"}) for own in healthy(nodes=1)]) == []
    assert kinds(judge_facts(healthy(device="A100"))) == [("devices", "warning")]


@pytest.mark.parametrize(
    ("value", "names"),
    [("eth", "eth0 eth1"), ("=eth", ""), ("=eth1", "eth1"), ("^docker,lo", "eth0 eth1"), ("eth1,eth0", "eth0 eth1")],
)
def test_values_of_nccl_are_prefixes_exact_names_or_exclusions(value: str, names: str) -> None:
    assert named_interfaces(value, ["lo", "eth0", "eth1", "docker0"]) == names.split()


def links(nodes: int, slow: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    return {(of, to): slow.get((of, to), 9.4e9) for of in range(nodes) for to in range(nodes) if of != to}


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 8])
def test_in_a_turn_a_node_does_one_thing_and_all_nodes_meet(nodes: int) -> None:
    order = list(turns(nodes))
    assert all(len({node for pair in turn for node in pair}) == 2 * len(turn) for turn in order)
    assert sorted(pair for turn in order for pair in turn) == sorted(links(nodes, {}))


@pytest.mark.parametrize(
    ("nodes", "slow", "named"),
    [
        (2, {(1, 0): 0.9e9}, ["node 1"]),
        (3, {(0, 2): 0.9e9, (1, 2): 0.9e9, (2, 0): 0.9e9, (2, 1): 0.9e9}, ["node 2"]),
        (4, {(0, 1): 0.9e9}, ["node 0"]),
        (4, {(0, 1): 0.9e9, (0, 2): 0.9e9, (0, 3): 0.9e9, (3, 2): 0.9e9}, ["node 0", "node 3"]),
        (3, {(0, 1): 8e9}, []),
    ],
)
def test_slow_links_are_blamed_on_the_node_that_explains_most(
    nodes: int, slow: dict[tuple[int, int], float], named: list[str]
) -> None:
    found = list(judgements.judge_links(healthy(nodes, 1), links(nodes, slow)))
    assert [finding.what.partition(" (")[0] for finding in found] == named


def test_a_wire_is_judged_by_its_adapters_and_by_earlier_days() -> None:
    slow = dict.fromkeys(links(2, {}), 0.94e9)
    (finding,) = judgements.judge_links(healthy(), slow)
    assert "the wire gives 940 Mbit/s; the adapters agreed on 10 Gbit/s" in finding.what
    one = {"lo": LO, "eth0": replace(ETH, bits_per_s=1e9)}
    (finding,) = judgements.judge_links(healthy(interfaces=one), slow)
    assert "its adapter agreed on 1 Gbit/s, others on 10 Gbit/s" in finding.what
    assert not list(judgements.judge_links([replace(own, interfaces={"lo": LO}) for own in healthy()], slow))
    then = parse_cluster(CLUSTER)
    figures = {"wire_bits_per_s": 0.9e9, "device_flops_per_s.float32": 0.4e12, "wire_latency_s": 1.0, "nodes": 2.0}
    found = list(judgements.judge_against(then, figures))
    assert [finding.kind for finding in found] == ["slow-link", "slower-than-before"]
    assert found[0].what == "wire_bits_per_s is 900 Mbit/s; the cluster file says 10 Gbit/s"
    assert not list(judgements.judge_against(then, {"wire_bits_per_s": 9e9}))
    assert not list(judgements.judge_against(None, figures))


CLUSTER = """
nodes = 2
ranks_per_node = 1
device_memory_bytes = "80 GB"
device_memory_bytes_per_s = "3 TB/s"
host_memory_bytes = "128 GB"
host_to_device_bytes_per_s = "50 GB/s"
device_to_host_bytes_per_s = "50 GB/s"
wire_bits_per_s = "10 Gbit/s"
wire_latency_s = "20 us"
[device_flops_per_s]
float32 = "1 TFLOP/s"
"""


def test_all_measurements_are_judged() -> None:
    """Only a sure skew is a finding, and a device that is slow; a busy network or a shared core is none."""
    facts = healthy(2, 1)
    ill = Measured(
        clocks_s=[(0.0, 0.0), (9.0, 9.1)], links=links(2, {(1, 0): 1e9}), products_s=[1.0, 2.0], figures={}, steps=[]
    )
    found = judgements.judge_measured(facts, ill)
    assert [finding.kind for finding in found] == ["clock", "slow-link", "slow-node"]
    well = replace(ill, clocks_s=[(-0.1, 0.1)] * 2, links=links(2, {}), products_s=[1.0, 1.1])
    assert judgements.judge_measured(facts, well) == []
    for bounds, word in (((89.0, 91.0), "ahead of"), ((-91.0, -89.0), "behind")):
        (finding,) = judgements.judge_clocks(facts, [(0.0, 0.0), bounds])
        assert f"its clock is 89 s {word} that of node 0" in finding.what
    assert not list(judgements.judge_clocks(facts, [(0.0, 0.0), (-20.0, 91.0)])), "a busy network proves nothing"
    assert kinds(judgements.judge_products(healthy(), [1.0, 1.0, 1.0, 1.4])) == [("slow-node", "warning")]
    on_cpu = [replace(own, device_type="cpu") for own in healthy()]
    assert not list(judgements.judge_products(on_cpu, [1.0, 1.0, 1.0, 2.0]))
    (finding,) = judgements.judge_products(on_cpu, [1.0, 1.0, 3.0, 3.0])
    assert "rank 2, 3 takes 3.0 times as long" in finding.what
    (finding,) = judgements.judge_unreachable(healthy(), [(0, 1, "10.0.0.2: timed out")])
    assert finding.stops
    assert "node 0 (box) cannot connect to node 1 (box) at 10.0.0.2: timed out" in str(finding)
