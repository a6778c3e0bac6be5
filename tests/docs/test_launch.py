"""The files of examples/launch: their schemas and shellcheck pass them, and each really starts two nodes of the lab.

SkyPilot, Ray and Slurm are too large for every test run: `python -m benchmarks.start --rows launch` runs them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from laconic.lab import Lab, RunResult
from tests.docs.blocks import ROOT, check_job
from tests.support.launch import PATIENCE_S
from tests.support.launch_files import FILES, FOLDER, KINDS, SCRIPTS, object_fault, objects, script_fault

pytestmark = pytest.mark.machine

VENV = Path(sys.executable).parents[1]
MINIMAL = ["examples/minimal.py"]


def test_each_file_is_on_the_page() -> None:
    page = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    assert [name for name in FILES if f"../examples/launch/{name})" not in page] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_finds_nothing(name: str) -> None:
    assert script_fault(name) == ""
    assert os.access(FOLDER / name, os.X_OK)


def test_kubernetes_takes_every_object_and_no_wrong_key() -> None:
    found = {given["kind"]: object_fault(given) for given in objects()}
    assert found == dict.fromkeys(KINDS, "")
    assert all(object_fault({**given, "spec": {**given["spec"], "parallelsim": 1}}) for given in objects())


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(nodes=2) as lab:
        yield lab


def launch(lab: Lab, commands: list[list[str]], **env: str) -> RunResult:
    """Run a command on each node, with this environment's programs."""
    path = f"{VENV / 'bin'}:{os.environ['PATH']}"
    given = {"PATH": path, "VENV": str(VENV), "NETWORK": "wire0", "OMP_NUM_THREADS": "1", "RANKS": "1", **env}
    result = lab.execute(commands, env=given, timeout_s=PATIENCE_S, show=False)
    assert result.exit_code == 0, [node.output for node in result.nodes]
    return result


def assert_two_ranks_trained(result: RunResult) -> None:
    """Both nodes sent what a run of minimal.py sends: the ranks met, over the wire."""
    assert all((node.sent_bytes or 0) > 3e6 for node in result.nodes), result


def shorter(words: list[str]) -> list[str]:
    """The arguments of torchrun with minimal.py, which takes seconds, for a job that must be right."""
    module, name, *job = words
    assert (module, name) == ("-m", "laconic.train")
    check_job(job)
    return MINIMAL


def pod(container: Mapping[str, Any], head: str) -> list[list[str]]:
    """The commands of a container on both nodes, with its own environment, and the lab's interface and addresses."""
    fixed = {"PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "node0", "PET_MASTER_PORT": "29500"}
    env = {each["name"]: each.get("value", "") for each in container["env"]}
    assert env.get("PET_MASTER_ADDR", head) == head
    env |= {**fixed, "NCCL_SOCKET_IFNAME": "wire0", "GLOO_SOCKET_IFNAME": "wire0"}
    words = [f"{name}={value}" for name, value in env.items()]
    program = [*container["command"], *shorter(container["args"])]
    return [["env", *words, f"PET_NODE_RANK={node}", *program] for node in range(2)]


def test_the_pods_of_a_jobset_train(lab: Lab) -> None:
    (job,) = yaml.safe_load_all(FILES["jobset.yaml"])
    (replicated,) = job["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    name = job["metadata"]["name"]
    head = f"{name}-{replicated['name']}-0-0.{name}"  # JobSet's name of the first pod
    assert_two_ranks_trained(launch(lab, pod(container, head)))


@pytest.mark.campaign
def test_the_pods_of_a_trainjob_train(lab: Lab) -> None:
    """With the variables that kubeflow's plugin for torch adds, which the file does not set itself."""
    runtime, job = yaml.safe_load_all(FILES["kubeflow.yaml"])
    trainer = job["spec"]["trainer"]
    reserved = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
    assert not reserved & {each["name"] for each in trainer["env"]}, "the trainer refuses them"
    assert job["spec"]["runtimeRef"] == {"name": runtime["metadata"]["name"], "kind": runtime["kind"]}
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    added = {**trainer, "env": [*trainer["env"], {"name": "PET_NNODES", "value": str(trainer["numNodes"])}]}
    assert_two_ranks_trained(launch(lab, pod(added, "")))


SSH = """#!/bin/bash
# ssh, between nodes of the lab: it hands the command to the node's `serve`, and waits for the exit code.
[ "$1" = -n ] && shift
name=$1.$BASHPID.$RANDOM
printf '%s\\n' "$2" > "$MAIL/$name.new" && mv "$MAIL/$name.new" "$MAIL/$name.do"
while [ ! -e "$MAIL/$name.code" ]; do sleep 0.05; done
exit "$(cat "$MAIL/$name.code")"
"""
SERVE = """
serve() { # what this host is told, until the launcher ends
  while [ ! -e "$MAIL/end" ]; do
    for order in "$MAIL/$1."*.do; do
      [ -e "$order" ] || continue
      mv "$order" "${order%.do}.run"
      (code=0; bash "${order%.do}.run" || code=$?; echo $code > "${order%.do}.tmp"
       mv "${order%.do}.tmp" "${order%.do}.code") &
    done
    sleep 0.05
  done
}
"""


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def ssh_commands(tmp_path: Path, head: str) -> tuple[list[list[str]], dict[str, str]]:
    """A command for each node that serves orders by `ssh`; node 0 runs `head`, too."""
    program(tmp_path / "ssh", SSH)
    (tmp_path / "mail").mkdir()
    first = f'{SERVE}serve node0 & code=0; {{ {head}; }} || code=$?; touch "$MAIL/end"; wait; exit $code'
    path = f"{tmp_path}:{VENV / 'bin'}:{os.environ['PATH']}"
    env = {"MAIL": str(tmp_path / "mail"), "FOLDER": str(ROOT), "PATH": path}
    return [["bash", "-c", first], ["bash", "-c", f"{SERVE}serve node1; wait"]], env


@pytest.mark.campaign
def test_ssh_trains_and_a_signal_saves_and_ends_it(lab: Lab, tmp_path: Path) -> None:
    options = f"--train.steps 100000 --train.output {tmp_path}/run --train.log_every 1"
    job = f"examples/launch/ssh.sh node0,node1 -m laconic.train examples/pretrain.toml {options}"
    until_a_step = f"until [ -s {tmp_path}/run/metrics.jsonl ]; do sleep 0.1; done"
    head = f"{job} & launcher=$!; {until_a_step}; kill -TERM $launcher; ! wait $launcher"
    commands, env = ssh_commands(tmp_path, head)
    assert_two_ranks_trained(launch(lab, commands, **env))
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))


@pytest.mark.campaign
def test_two_desktops(lab: Lab, tmp_path: Path) -> None:
    """`cable` gives the addresses over which `train` meets; the lab's link has frames of 1500 bytes."""
    program(tmp_path / "ping", '#!/bin/sh\necho "$@" >> "$PINGS"\n')
    script = "examples/launch/two_desktops.sh"
    env = {"MTU": "1500", "PINGS": str(tmp_path / "pings"), "PATH": f"{tmp_path}:{VENV / 'bin'}:{os.environ['PATH']}"}
    cabled = launch(lab, [[script, "cable", "0"], [script, "cable", "1"]], **env)
    assert ["192.168.77.1/24" in cabled.nodes[0].output, "192.168.77.2/24" in cabled.nodes[1].output] == [True, True]
    result = launch(lab, [[script, "train", "0", *MINIMAL], [script, "train", "1", *MINIMAL]], **env)
    assert_two_ranks_trained(result)
    pings = (tmp_path / "pings").read_text().splitlines()
    assert sorted(pings) == [f"-c 1 -W 5 -M do -s 1472 192.168.77.{box}" for box in (1, 2)]


def test_two_desktops_without_a_cable_says_so(lab: Lab, tmp_path: Path) -> None:
    program(tmp_path / "ping", "#!/bin/sh\nexit 1\n")
    env = {"NETWORK": "wire0", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    result = lab.execute(
        [["examples/launch/two_desktops.sh", "train", "0"]] * 2, env=env, timeout_s=PATIENCE_S, show=False
    )
    assert result.exit_code == 1
    assert "no frame of 9000 bytes reaches 192.168.77.2 over wire0" in result.nodes[0].output
