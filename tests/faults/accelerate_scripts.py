"""The checks of accelerate's own scripts, run with our `Accelerator`.

The scripts `test_sync` and `test_script` lie in accelerate's wheel. They run unchanged, with another `Accelerator`. A
check is one function of a script with its arguments, or the script's `main`, which chooses checks by the strategy. The
kind `laconic-whole` has DDP's mixed precision (param_dtype="float32"), and compares whole tensors: torch refuses to
compare a DTensor with a plain tensor there, and asks for `.full_tensor()`.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from torch.distributed.tensor import DTensor

from laconic.integrations import LaconicArguments
from laconic.integrations.accelerate import LaconicAccelerator

Kind = Literal["laconic", "laconic-whole"]


@dataclass(frozen=True)
class Check:
    """One check of a script."""

    script: str
    function: str
    arguments: tuple[Any, ...] = ()
    needs: Literal["accelerator", "dataset"] | None = None
    """The object that `main` gives to the check before the arguments."""


_FLAGS = tuple(itertools.product([True, False], repeat=3))
"""split_batches, dispatch_batches, sync_each_batch."""

_PLAIN = (
    "init_state_check", "process_execution_check", "test_split_between_processes_list",
    "test_split_between_processes_nested_dict", "test_split_between_processes_tensor",
    "test_split_between_processes_evenly", "test_split_between_processes_dataset", "rng_sync_check",
    "dl_preparation_check", "central_dl_preparation_check", "custom_sampler_check", "check_seedable_sampler",
    "check_seedable_sampler_with_data_seed", "check_seedable_sampler_in_batch_sampler_shard",
)  # fmt: skip
CHECKS: tuple[Check, ...] = (
    Check("test_sync", "test_dataloader_break"),
    Check("test_sync", "test_distributed_sync", needs="accelerator"),
    Check("test_sync", "test_distributed_sync_multiple_fwd", needs="accelerator"),
    *(Check("test_sync", "test_gradient_accumulation", flags) for flags in _FLAGS),
    *(Check("test_sync", "test_gradient_accumulation_with_opt_and_scheduler", flags) for flags in _FLAGS),
    Check("test_sync", "main"),
    *(Check("test_script", name, needs="dataset" if name.endswith("_dataset") else None) for name in _PLAIN),
    *(Check("test_script", "training_check", (flag,)) for flag in (False, True)),
    *(Check("test_script", name) for name in ("test_trigger", "test_reinstantiated_state", "main")),
)
"""Every check that the scripts call on two ranks, in their order, and `main` itself."""


def run_checks(checks: Sequence[Check], kind: Kind, folder: Path) -> dict[Check, str | None]:
    """Run checks one after another on this rank, each with a new state; return the error of each, None if it passes.

    Collective over two ranks. `folder` takes the scripts' files.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # or accelerate counts the cores, and warns
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.chdir(folder)
    arguments = LaconicArguments(param_dtype="float32") if kind == "laconic-whole" else LaconicArguments()
    accelerator, compare = partial(LaconicAccelerator, arguments), torch.testing.assert_close

    def compare_whole(*pair: Any, **how: Any) -> None:
        compare(*(each.full_tensor() if isinstance(each, DTensor) else each for each in pair), **how)

    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(None))  # the scripts tell what they do
        # the launcher ends the process group
        stack.enter_context(mock.patch.object(PartialState, "destroy_process_group"))
        if kind == "laconic-whole":
            stack.enter_context(mock.patch("torch.testing.assert_close", compare_whole))
        return {check: _error_of(check, accelerator) for check in checks}


def _error_of(check: Check, accelerator: Callable[..., Any]) -> str | None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    script = importlib.import_module(f"accelerate.test_utils.scripts.{check.script}")
    try:
        with mock.patch.object(script, "Accelerator", accelerator):
            given: tuple[Any, ...] = ()
            if check.function != "main":
                made = script.Accelerator()  # as `main` makes one first
                given = {"accelerator": (made,), "dataset": (Dataset,), None: ()}[check.needs]
            getattr(script, check.function)(*given, *check.arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
