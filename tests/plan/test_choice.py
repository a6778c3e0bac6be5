"""`laconic plan JOB.toml`: the ranking, its reasons, the remedy, what is written, and refusals; work in forks."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from laconic import cli
from laconic.config import Config, ConfigError, OptimizerConfig, SyncConfig, from_dict, load
from laconic.plan import choose
from laconic.plan.candidates import CANDIDATES, candidate_named
from laconic.plan.choice import _in_code, break_even
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.estimates import MARGIN, Estimate
from laconic.plan.forks import map_forked
from laconic.plan.job_cli import print_choice
from laconic.plan.prediction import Predictor, Refusal
from tests.plan.traces import cluster

JOB = """
[model.config]
model_type = "llama"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 4
vocab_size = 256
tie_word_embeddings = false

[data]
sequence_length = 32

[train]
micro_batch_size = 2
device = "cpu"
"""
CLUSTER = """
nodes = 2
ranks_per_node = 2
device_memory_bytes = "4 GB"
device_memory_bytes_per_s = "10 GB/s"
host_memory_bytes = "32 GB"
host_to_device_bytes_per_s = "10 GB/s"
device_to_host_bytes_per_s = "10 GB/s"
local_bytes_per_s = "1 GB/s"
local_latency_s = "50 us"
wire_bits_per_s = "100 Mbit/s"
wire_latency_s = "200 us"

[device_flops_per_s]
float32 = "50 GFLOP/s"
"""


NAMES = ["none", "host", "4bit"]


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict in this process, without forks."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    """The predictor of a small job, which has traced its model."""
    return Predictor(from_dict(Config, tomllib.loads(JOB)), slow())


def slow(**figures: object) -> ClusterSpec:
    return cluster(2, 2, wire_bits_per_s=1e8, wire_latency_s=1e-4, local_latency_s=1e-5, **figures)


def test_the_fastest_exact_strategy_is_taken(predictor: Predictor) -> None:
    choice = choose(predictor, names=NAMES)
    assert choice.recommended is not None
    exact = [entry.estimate for entry in choice.entries if not entry.estimate.inexact]
    assert choice.recommended.seconds <= 1.05 * min(each.seconds for each in exact if each.fits)
    assert choice.recommended.strategy == "host"
    order = [entry.estimate.seconds_per_token for entry in choice.entries if entry.estimate.fits]
    assert order == sorted(order)
    for entry in choice.entries:
        assert entry.reason
        assert entry.is_recommended == (entry.estimate is choice.recommended)
    by_name = {entry.estimate.strategy: entry for entry in choice.entries}
    console = Console(file=io.StringIO())
    print_choice(choice, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "run, not planned: FSDP2 pipeline; DeepSpeed ZeRO-3; " in printed
    assert re.search(r"s/step +tokens/s ", printed)
    *_, in_a_job, in_a_script = printed.splitlines()
    assert in_a_job == "in a job: as it is"
    assert in_a_script == 'in a script: laconic.fully_shard(layer, cache="host")  # each layer, then the model'
    assert "waits" in by_name["none"].reason
    assert "wire" in by_name["none"].reason
    assert "inexact" in by_name["4bit"].reason


def test_what_may_be_recommended_has_a_line_of_python(predictor: Predictor) -> None:
    for name, candidate in CANDIDATES.items():
        code = _in_code(candidate.code, predictor.job(candidate), predictor.cluster)
        ast.parse(code)
        assert bool(code) == (name != "zero++"), "it has no single line"


def test_inexact_strategies_win_where_they_are_asked_for(predictor: Predictor) -> None:
    allowed = choose(predictor, names=NAMES, allow=["4bit"])
    assert allowed.recommended is not None
    assert allowed.recommended.strategy == "4bit"
    assert allowed.job is not None
    assert allowed.job.shard.policy.wire.word == "4bit"
    assert (allowed.in_toml, 'wire="4bit"' in allowed.in_code) == ('shard.wire = "4bit"', True)
    islands = dataclasses.replace(predictor.config, sync=SyncConfig.of_keys({"mode": "local", "every": 50}))
    asked = predictor.with_job(islands, same_model=True)
    own = choose(asked, names=["host", "local-steps"])
    assert own.recommended is not None
    assert own.recommended.strategy == "local-steps"
    assert own.job is not None
    assert own.job.sync.policy.schedule.every == 50
    assert "LocalSteps(model, optimizer, mesh=mesh, every=50, " in own.in_code
    named = choose(asked, names=["host", "none"])
    assert named.job is not None
    assert not named.job.sync.is_local


def test_nothing_fits_and_the_remedy_says_what_would(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    host = predictor.estimate(CANDIDATES["host"])
    assert isinstance(host, Estimate)
    enough = predictor.cluster.device_memory_bytes - host.spare_device_bytes / (1 - MARGIN)
    asked = predictor.on(dataclasses.replace(slow(), device_memory_bytes=int(enough) - 1000))
    choice = choose(asked, names=["host"])
    assert choice.recommended is None
    assert choice.job is None
    assert choice.in_toml == choice.in_code == ""
    for words in ("nothing fits", "needs", "with model.activation_checkpointing = true, laconic host would fit"):
        assert words in choice.remedy
    assert all("does not fit" in entry.reason for entry in choice.entries)
    monkeypatch.setattr("laconic.plan.choice._changes", lambda predictor: [])
    assert "no single change" in choose(asked, names=["host"]).remedy


def test_the_break_even_rate_is_where_two_strategies_take_equally_long(predictor: Predictor) -> None:
    host, none = (predictor.estimate(CANDIDATES[name]) for name in ("host", "none"))
    assert isinstance(host, Estimate)
    assert isinstance(none, Estimate)
    rate = break_even(predictor, host, none, upwards=True)
    assert rate is not None
    assert rate > 1e8
    at = dataclasses.replace(predictor.cluster, wire_bits_per_s=rate)
    two = [predictor.on(at).estimate(CANDIDATES[name]) for name in ("host", "none")]
    seconds = [each.seconds for each in two if isinstance(each, Estimate)]
    assert seconds[1] == pytest.approx(1.05 * seconds[0], rel=1e-3)


def test_refused_jobs_and_strategies_say_why(predictor: Predictor) -> None:
    for name, message in (("zero", "'zero' is not known"), ("deepspeed", "is run, not planned: a short run")):
        with pytest.raises(ConfigError, match=message):
            candidate_named(name)
    muon = dataclasses.replace(predictor.config, optimizer=OptimizerConfig(name="muon"))
    shares = dataclasses.replace(predictor.config, shard=predictor.config.shard.with_keys(shares=[3, 3, 1, 1]))
    message = "shard.shares: laconic plan predicts ranks that are all alike; leave shares out"
    for config, name, words in ((muon, "fsdp2", "whole blocks or matrices"), (shares, "fsdp2", message)):
        found = Predictor(config, predictor.cluster).estimate(CANDIDATES[name])
        assert isinstance(found, Refusal)
        assert words in found.reason
    with pytest.raises(ConfigError, match=message):
        choose(Predictor(shares, predictor.cluster))


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A job and a cluster file."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return str(tmp_path / "job.toml"), str(tmp_path / "cluster.toml")


@pytest.mark.heavy
def test_the_command_ranks_writes_and_draws(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, picture = tmp_path / "best.toml", tmp_path / "step.svg"
    arguments = ["--strategies", "none,host", "--out", str(best), "--timeline", str(picture)]
    assert cli.main(["plan", files[0], "--cluster", files[1], *arguments]) == 0
    printed = capsys.readouterr().out
    assert "take laconic host" in printed
    assert "laconic none: 1.4" in printed
    assert "1.50x the bytes" in printed
    assert "not planned" not in printed, "the strategies were named"
    assert load(best).shard.policy.cache.where == "host"
    text = picture.read_text()
    ElementTree.fromstring(text)
    assert cli.main(["plan", files[0], "--cluster", files[1], "--strategies", "host", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["recommended"] == "host"
    assert [each["strategy"] for each in table["strategies"]] == ["host"]
    assert table["strategies"][0]["rank_bytes"]["node/weights"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "zero"], "'zero' is not known; there are fsdp2, "),
        (["--allow", "2bit"], "'2bit' is not known"),
        (["--timeline", "step.bmp"], "step.bmp names no kind of picture"),
        (["j"], "absent.toml"),
        (["c"], "absent.toml"),
        (["--out", "/nowhere/best.toml"], "the folder does not exist"),
        (
            ["--strategies", "host", "--device", "cuda", "--timeline", "s.svg", "--strategy", "fsdp2-gloo"],
            "cannot run this job",
        ),
        (["--strategies", "cyclic"], "'cyclic' is run, not planned"),
    ],
)
def test_a_mistake_is_one_line(
    files: tuple[str, str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job, cluster = ("absent.toml" if name in arguments else file for name, file in zip("jc", files, strict=True))
    options = [] if {"j", "c"} & set(arguments) else arguments
    assert cli.main(["plan", job, "--cluster", cluster, *options]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.strip().splitlines()) == 1


# -- work in forks -----------------------------------------------------------------------------------------------------


def run_alone(code: str) -> str:
    """Run code in a process of its own, since pytest's workers have threads, beside which nothing forks."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.machine
def test_several_processes_work_and_order_stays_and_errors_come_back() -> None:
    code = """
import os, time
from laconic.plan.forks import map_forked
os.sched_getaffinity = lambda pid: {0, 1}

def slow_first(number):
    time.sleep(0.3 if number == 0 else 0.1)
    return number, os.getpid()

found = list(map_forked(slow_first, range(5)))
assert [number for number, _ in found] == [0, 1, 2, 3, 4], found
assert len({pid for _, pid in found} - {os.getpid()}) == 2, found

def fail(number):
    raise ValueError(f"no {number}")

for deed in (fail, lambda number: os.kill(os.getpid(), 9)):
    try:
        list(map_forked(deed, range(3)))
    except (RuntimeError, ValueError) as error:
        print(error)
"""
    error, death = run_alone(code).splitlines()
    assert error == "no 0"
    assert death.startswith("one of 2 processes that worked for this one was killed")


def test_beside_other_threads_one_process_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    is_done = threading.Event()
    thread = threading.Thread(target=is_done.wait)
    thread.start()
    try:
        assert set(map_forked(lambda _: os.getpid(), range(3))) == {os.getpid()}
    finally:
        is_done.set()
        thread.join()


@pytest.mark.machine
def test_all_strategies_are_predicted_as_each_alone() -> None:
    names = ("fsdp2", "host", "ddp")
    code = f"""
import os
import tomllib
from laconic.config import Config, from_dict
from laconic.plan.cluster_file import parse_cluster
from laconic.plan.prediction import Predictor

os.sched_getaffinity = lambda pid: {{0, 1}}
names = {names!r}
job, cluster = from_dict(Config, tomllib.loads({JOB!r})), parse_cluster({CLUSTER!r})
together = list(Predictor(job, cluster).all(names))
alone = [found for name in names for found in Predictor(job, cluster).all([name])]
assert together == alone, (together, alone)
assert not list(Predictor(job, cluster).all([]))
print(sum(hasattr(found, "seconds") for found in together))
"""
    assert int(run_alone(code)) >= len(names) - 1
