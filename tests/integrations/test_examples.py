"""The examples, as users start them. `train_gpt.py` is `train_gpt_ddp.py` but for a few lines."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.support.launch import launch, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def job_script(script: str, *arguments: str) -> str:
    """Run a script with its arguments, and return what it has printed on this rank."""
    os.environ.update(TORCHELASTIC_RUN_ID="job", OMP_NUM_THREADS="1")  # torchrun sets both
    sys.argv = [str(EXAMPLES / script), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return output.getvalue()


def run_scripts(*commands: list[str], num_ranks: int = 2) -> list[str]:
    """Run scripts one after the other on ranks that start their process groups themselves, each at a port of its own.

    Returns the first rank's output of each.
    """
    return [
        launch(job_script, *command, num_ranks=num_ranks, num_local=1, timeout_s=90, backend=None)[0]
        for command in commands
    ]


def numbers(printed: str) -> list[list[float]]:
    lines = printed.splitlines()
    return [[float(number) for number in re.findall(r"\d+\.\d+", line)] for line in lines]


def changed_lines(before: str, after: str) -> int:
    """Count the changed lines of a diff: a line in place of another one counts once, as does one more or one fewer."""
    blocks = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_opcodes()
    return sum(max(end1 - begin1, end2 - begin2) for tag, begin1, end1, begin2, end2 in blocks if tag != "equal")


@pytest.mark.machine
def test_gpt_with_laconic_trains_as_with_ddp(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("ddp.pt", "laconic.pt")]
    ddp, laconic = run_scripts(
        ["train_gpt_ddp.py", "--steps", "3", "--save", files[0]], ["train_gpt.py", "--steps", "3", "--save", files[1]]
    )
    assert len(numbers(ddp)) == 3
    torch.testing.assert_close(numbers(laconic), numbers(ddp), rtol=1e-5, atol=1e-5)
    want, got = (torch.load(file) for file in files)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_gpt_with_laconic_is_a_few_lines_away_from_ddp() -> None:
    before, after = ((EXAMPLES / name).read_text() for name in ("train_gpt_ddp.py", "train_gpt.py"))
    assert 0 < changed_lines(before, after) <= 8


@pytest.mark.machine
def test_lightning_example(tmp_path: Path) -> None:
    arguments = ["--steps", "1", "--folder", str(tmp_path)]
    (printed,) = run_scripts(["train_lightning.py", *arguments])
    assert "val_loss" in printed
    assert (tmp_path / "step=1.ckpt" / "meta.pt").exists()


TRAINERS = {
    "trainer": "model.safetensors",
    "sft_lora": "adapter_model.safetensors",
    "dpo": "adapter_model.safetensors",
    "grpo": "model.safetensors",
}


def run_trainers(folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate would let every rank have a thread per core
    options = ["--use_cpu", "--max_steps", "2", "--save_steps", "2", "--disable_tqdm", "true"]
    for name in TRAINERS:
        sys.argv = [f"examples/{name}.py", "--output_dir", str(folder / name), *options]
        runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.machine
@pytest.mark.parametrize("num_ranks", [2, 1])
def test_examples_of_trainers(tmp_path: Path, num_ranks: int) -> None:
    run_ranks(run_trainers, num_ranks, tmp_path)
    for name, file in TRAINERS.items():
        for folder in (tmp_path / name, tmp_path / name / "checkpoint-2"):
            assert (folder / file).exists()
        assert (tmp_path / name / "checkpoint-2" / "laconic").exists() == (num_ranks > 1)
