"""The examples, as users start them: on two ranks, and in one process."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.launch import run_ranks

EXAMPLES = {"trainer": "model.safetensors", "sft_lora": "adapter_model.safetensors", "dpo": "adapter_model.safetensors"}


def run_examples(folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate would let every rank have a thread per core
    options = ["--use_cpu", "--max_steps", "2", "--save_steps", "2", "--disable_tqdm", "true"]
    for name in EXAMPLES:
        sys.argv = [f"examples/{name}.py", "--output_dir", str(folder / name), *options]
        runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_examples(tmp_path: Path, num_ranks: int) -> None:
    run_ranks(run_examples, num_ranks, tmp_path)
    for name, file in EXAMPLES.items():
        for folder in (tmp_path / name, tmp_path / name / "checkpoint-2"):
            assert (folder / file).exists()
        assert (tmp_path / name / "checkpoint-2" / "laconic").exists() == (num_ranks > 1)
