"""The examples, as users start them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import rl
from tests.support.launch import free_port, launch, run_ranks, started

pytestmark = pytest.mark.machine
EXAMPLES = Path(__file__).parents[2] / "examples"


def job_script(script: str, *arguments: str) -> str:
    """Run a script with its arguments, and return what it has printed on this rank."""
    os.environ.update(TORCHELASTIC_RUN_ID="job", OMP_NUM_THREADS="1")  # torchrun sets both
    sys.argv = [str(EXAMPLES / script), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return output.getvalue()


def numbers(printed: str) -> list[list[float]]:
    lines = printed.splitlines()
    return [[float(number) for number in re.findall(r"\d+\.\d+", line)] for line in lines]


def test_gpt_with_laconic_trains_as_with_ddp_and_lightning_trains(tmp_path: Path) -> None:
    """Each starts its process group itself."""
    files = [str(tmp_path / name) for name in ("ddp.pt", "laconic.pt")]
    ddp, own, lightning = (
        launch(job_script, *command, num_ranks=2, num_local=1, backend=None)[0]
        for command in (
            ["train_gpt_ddp.py", "--steps", "3", "--save", files[0]],
            ["train_gpt.py", "--steps", "3", "--save", files[1]],
            ["train_lightning.py", "--steps", "1", "--folder", str(tmp_path)],
        )
    )
    assert len(numbers(ddp)) == 3
    torch.testing.assert_close(numbers(own), numbers(ddp), rtol=1e-5, atol=1e-5)
    want, got = (torch.load(file) for file in files)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert "val_loss" in lightning
    assert (tmp_path / "step=1.ckpt" / "meta.pt").exists()


def test_gpt_learns(tmp_path: Path) -> None:
    arguments = ["train_gpt.py", "--steps", "20", "--save", str(tmp_path / "gpt.pt")]
    losses = [loss for loss, _ in numbers(launch(job_script, *arguments, num_ranks=2, num_local=1, backend=None)[0])]
    assert losses[-1] < 0.7 * losses[0], losses


TRAINERS = {
    "trainer": "model.safetensors",
    "sft_lora": "adapter_model.safetensors",
    "dpo": "adapter_model.safetensors",
    "grpo": "model.safetensors",
}


LEARN = {"trainer": 0.8, "sft_lora": 0.9, "dpo": 0.8}
"""The last loss of an example's own steps, at most so much of the first."""


def run_trainers(folder: Path, names: Sequence[str], options: Sequence[str]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate would let every rank have a thread per core
    for name in names:
        sys.argv = [f"examples/{name}.py", "--output_dir", str(folder / name), "--use_cpu", "--disable_tqdm", "true"]
        sys.argv += options
        runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_examples_of_trainers(tmp_path: Path, num_ranks: int) -> None:
    run_ranks(run_trainers, num_ranks, tmp_path, [*TRAINERS], ["--max_steps", "2", "--save_steps", "2"])
    for name, file in TRAINERS.items():
        for folder in (tmp_path / name, tmp_path / name / "checkpoint-2"):
            assert (folder / file).exists()
        assert (tmp_path / name / "checkpoint-2" / "laconic").exists() == (num_ranks > 1)


def test_examples_of_trainers_learn(tmp_path: Path) -> None:
    run_ranks(run_trainers, 2, tmp_path, [*LEARN], [])
    for name, most in LEARN.items():
        last = max((tmp_path / name).glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
        log = json.loads((last / "trainer_state.json").read_text())["log_history"]
        losses = [entry["loss"] for entry in log if "loss" in entry]
        assert losses[-1] < most * losses[0], (name, losses)


# -- grpo.py -----------------------------------------------------------------------------------------------------------


SIZES = ["--max_steps", "4", "--per_device_train_batch_size", "24", "--max_completion_length", "6", "--base_every", "3"]
TOKEN = "a-secret-of-the-tests"
Log = list[dict[str, float]]


class Wire:
    """The addresses of a sampler and of its trainer, as options of both."""

    def __init__(self) -> None:
        sampler, trainer = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.of_trainer = ["--sampler", sampler, "--serve", trainer]
        self.of_sampler = ["--sample_at", sampler, "--weights", f"http://{trainer}"]


@contextmanager
def sampler(words: list[str], deaths: tuple[int, ...] = ()) -> Iterator[list[int]]:
    """A sampler in a process of its own, which is started again after each death. Gives the exit codes of the dead."""
    lives, has_ended, codes = [*deaths, None], threading.Event(), list[int]()
    process: Any = None

    def live() -> None:
        nonlocal process
        for dies_at in lives:
            if has_ended.is_set():
                return
            process = started(_sample, words, dies_at)
            process.join()
            codes.append(process.exitcode)

    supervisor = threading.Thread(target=live)
    supervisor.start()
    try:
        yield codes
    finally:
        has_ended.set()
        while supervisor.is_alive():
            if process is not None:
                process.kill()
            supervisor.join(0.1)


def _sample(words: list[str], dies_at: int | None) -> None:
    os.environ["LACONIC_PUBLISH_TOKEN"] = TOKEN
    rl.sample(words, dies_at)


def train_both(folder: Path, words: list[str], over_the_wire: list[str]) -> tuple[Log, Log]:
    """The figures of a run over the wire, and of a colocated run. A second run goes on in the folder of the first."""
    os.environ["LACONIC_PUBLISH_TOKEN"] = TOKEN
    words = [*SIZES, *words, "--save_strategy", "no"]
    far = rl.trained([*words, *over_the_wire, "--output_dir", str(folder / "far")])
    staleness = words[words.index("--staleness") + 1]
    return far, rl.trained([*words, "--output_dir", str(folder / staleness)], is_colocated=True)


def train_at_both_stalenesses(folder: Path, words: list[str], over_the_wire: list[str]) -> list[tuple[Log, Log]]:
    return [train_both(folder, [*words, "--staleness", staleness], over_the_wire) for staleness in ("0", "1")]


@pytest.mark.parametrize("words", [[], ["--lora", "--encoding", "smallest"]], ids=["full", "lora"])
def test_rewards_equal_those_of_a_colocated_run(words: list[str], tmp_path: Path) -> None:
    """On two nodes, at staleness 0 and then at 1, in two trainings that one sampler serves."""
    wire = Wire()
    with sampler([*words, *wire.of_sampler]):
        found = run_ranks(train_at_both_stalenesses, 2, tmp_path, words, wire.of_trainer, local=1)
    assert found[0] == found[1]
    (far, near), (stale_far, stale_near) = found[0]
    assert far == near
    assert stale_far == stale_near
    assert len({step["reward"] for step in far}) > 1
    assert all(step["grad_norm"] > 0 for step in far)
    assert stale_far != far  # by the weights that samples come from, and nothing else


def test_a_sampler_that_dies_and_is_started_again_goes_on(tmp_path: Path) -> None:
    """In the middle of requests, at staleness 1, in one process: all values come again where the base has moved on."""
    wire = Wire()
    with sampler(wire.of_sampler, deaths=(2, 3)) as codes:
        ((far, near),) = run_ranks(train_both, 1, tmp_path, ["--staleness", "1"], wire.of_trainer)
        assert codes == [1, 1]
    assert far == near


def train_in_vain(folder: Path, over_the_wire: list[str], token: str) -> str:
    os.environ["LACONIC_PUBLISH_TOKEN"] = token
    if token == TOKEN:
        rl.example().PATIENCE_S = 0.1
    with pytest.raises(RuntimeError) as error:
        rl.trained([*SIZES, *over_the_wire, "--output_dir", str(folder)])
    return str(error.value)


def test_a_sampler_that_does_not_answer_is_named_and_a_stranger_gets_no_answer(tmp_path: Path) -> None:
    wire = Wire()
    for line in run_ranks(train_in_vain, 2, tmp_path, wire.of_trainer, TOKEN):
        assert line.startswith(f"the sampler at {wire.of_trainer[1]} does not answer (ConnectionRefusedError")
        assert line.endswith(f"start it: python examples/grpo.py {' '.join(wire.of_sampler)}")
        assert "\n" not in line
    with sampler(wire.of_sampler):
        assert run_ranks(train_in_vain, 1, tmp_path, wire.of_trainer, "another") == ["the sampler has another token"]
