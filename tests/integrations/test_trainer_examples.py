"""The examples, as users start them: on two ranks, and in one process."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.ranks import run_ranks

EXAMPLES = {"trainer": "model.safetensors", "sft_lora": "adapter_model.safetensors", "dpo": "adapter_model.safetensors"}


def run_examples(folder: Path) -> list[bool]:
    os.environ["OMP_NUM_THREADS"] = "1"  # accelerate would let every rank have a thread per core
    found = []
    for name, file in EXAMPLES.items():
        out = folder / name
        options = [
            "--output_dir",
            str(out),
            "--use_cpu",
            "--max_steps",
            "2",
            "--save_steps",
            "2",
            "--disable_tqdm",
            "true",
        ]
        sys.argv = [f"examples/{name}.py", *options]
        runpy.run_path(sys.argv[0], run_name="__main__")
        found.append((out / file).exists() and (out / "checkpoint-2" / file).exists())
    return found


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_examples(tmp_path: Path, num_ranks: int) -> None:
    assert run_ranks(run_examples, num_ranks, tmp_path) == [[True] * len(EXAMPLES)] * num_ranks
