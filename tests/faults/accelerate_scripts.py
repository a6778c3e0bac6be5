"""The checks of accelerate's own scripts, run with accelerate's `Accelerator` and with ours.

The scripts `test_sync` and `test_script` lie in accelerate's wheel. They run unchanged but for one line: the import of
`Accelerator`. A check is one function of a script with its arguments, or the script's `main`, which chooses checks by
the strategy. The kinds of accelerators:

- `ddp`: accelerate's own, which replicates the model;
- `fsdp2`: accelerate's own with its plugin for FSDP2, which shards the model as laconic does. Accelerate reads the
  plugin on accelerators only, so here a subclass sets its state on the CPU;
- `laconic`: ours;
- `laconic-whole`: ours with DDP's mixed precision (param_dtype="float32"), and `torch.testing.assert_close` compares
  whole tensors. torch itself refuses to compare a DTensor with a plain tensor there, and asks for `.full_tensor()`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset
from torch.distributed.tensor import DTensor

from laconic.integrations import LaconicArguments
from laconic.integrations.accelerate import LaconicAccelerator
from tests.faults.bench import Bench, campaign_row
from tests.support.launch import launch
from tests.support.record import Row


class FSDP2Accelerator(Accelerator):
    """accelerate's own with its plugin for FSDP2, also on the CPU, where accelerate does not look at the plugin."""

    def __init__(self, **settings: Any) -> None:
        """Start as `Accelerator` does; the settings are its own."""
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
        super().__init__(fsdp_plugin=plugin, **settings)
        if self.distributed_type is DistributedType.MULTI_CPU:
            PartialState().distributed_type = self.state.distributed_type = DistributedType.FSDP
        self.state.fsdp_plugin = plugin


class AutocastAccelerator(LaconicAccelerator):
    """Ours with DDP's mixed precision: autocast casts what operations read, and parameters stay in float32."""

    def __init__(self, **settings: Any) -> None:
        """Start as `LaconicAccelerator` does; the settings are those of accelerate."""
        super().__init__(LaconicArguments(param_dtype="float32"), **settings)


Kind = Literal["ddp", "fsdp2", "laconic", "laconic-whole"]

_ACCELERATORS: dict[Kind, str] = {
    "ddp": "from accelerate import Accelerator",
    "fsdp2": "from tests.faults.accelerate_scripts import FSDP2Accelerator as Accelerator",
    "laconic": "from laconic.integrations.accelerate import LaconicAccelerator as Accelerator",
    "laconic-whole": "from tests.faults.accelerate_scripts import AutocastAccelerator as Accelerator",
}
"""The import that makes a script's `Accelerator`."""

_IMPORTS = {
    "test_sync": "from accelerate.accelerator import Accelerator, ",
    "test_script": "from accelerate import Accelerator\n",
}
"""The line of each script that imports `Accelerator`, up to what follows it."""


@dataclass(frozen=True)
class Check:
    """One check of a script."""

    script: str
    function: str
    arguments: tuple[Any, ...] = ()
    needs: Literal["accelerator", "dataset"] | None = None
    """The object that `main` gives to the check before the arguments."""

    @property
    def name(self) -> str:
        """The check in words."""
        return f"{self.script}: {self.function}" + (str(self.arguments) if self.arguments else "")


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


def load_script(name: str, kind: Kind) -> ModuleType:
    """Run the text of one script as a module, with the `Accelerator` of `kind`.

    Raises:
        RuntimeError: the script imports `Accelerator` in another way.
    """
    spec = find_spec(f"accelerate.test_utils.scripts.{name}")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    line = _IMPORTS[name]
    if text.count(line) != 1:
        raise RuntimeError(f"{spec.origin} has no line {line!r}: this accelerate imports Accelerator in another way")
    rest = "" if line.endswith("\n") else "; from accelerate.accelerator import "
    module = ModuleType(name)
    exec(compile(text.replace(line, _ACCELERATORS[kind] + (rest or "\n")), spec.origin, "exec"), module.__dict__)
    return module


def run_checks(checks: Sequence[Check], kind: Kind, folder: Path) -> dict[Check, str | None]:
    """Run checks one after another on this rank, each with a new state; return the error of each, None if it passes.

    Collective over two ranks. `folder` takes the scripts' files.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # or accelerate counts the cores, and warns
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.chdir(folder)
    compare = torch.testing.assert_close
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(None))  # the scripts tell what they do
        # the launcher ends the process group
        stack.enter_context(mock.patch.object(PartialState, "destroy_process_group"))
        if kind == "laconic-whole":
            stack.enter_context(
                mock.patch("torch.testing.assert_close", lambda *pair, **how: compare(*map(_whole, pair), **how))
            )
        return {check: _error_of(check, kind) for check in checks}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _error_of(check: Check, kind: Kind) -> str | None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    script = load_script(check.script, kind)
    try:
        given: tuple[Any, ...] = ()
        if check.function != "main":
            accelerator = script.Accelerator()  # as `main` makes one first
            given = {"accelerator": (accelerator,), "dataset": (Dataset,), None: ()}[check.needs]
        getattr(script, check.function)(*given, *check.arguments)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None


_SAMPLE = ("test_dataloader_break", "test_gradient_accumulation", "test_trigger")


@campaign_row("accelerate-scripts", section="mend")
def row(bench: Bench) -> Row:
    """Checks that pass with accelerate's own `Accelerator` and fail with ours."""
    checks = [check for check in CHECKS if check.function in _SAMPLE] if bench.quick else list(CHECKS)
    passed = {kind: passing(checks, kind, bench.out) for kind in ("ddp", "fsdp2", "laconic", "laconic-whole")}
    ours = passed["laconic"] | passed["laconic-whole"]
    lost = passed["fsdp2"] - passed["laconic"]
    left = passed["ddp"] - ours
    named = f" ({', '.join(check.name for check in checks if check in lost | left)})" if lost or left else ""
    return Row(
        claim="accelerate's test_sync and test_script with our Accelerator on 2 ranks",
        required="every check that passes with its own",
        measured=f"of {len(checks)} checks pass: its own on DDP {len(passed['ddp'])}, its own on FSDP2 "
        f"{len(passed['fsdp2'])}, ours {len(passed['laconic'])}, {len(ours)} with whole weights and DDP's autocast; "
        f"fail with ours: {len(lost)} that pass with FSDP2, {len(left)} that pass with DDP{named}",
        is_met=not lost and not left,
        note="torch.testing.assert_close refuses to compare a DTensor with a plain tensor, so the checks of training "
        "run again with `full_tensor()` on both sides, and with param_dtype='float32', which is DDP's autocast.",
    )


def passing(checks: Sequence[Check], kind: Kind, folder: Path) -> set[Check]:
    """Run each check in two new processes, and return those that pass on both."""
    found = set()
    for check in checks:
        try:
            results = launch(run_checks, [check], kind, folder, num_ranks=2, timeout_s=90)
        except (RuntimeError, TimeoutError):  # it ended a rank, or left one waiting
            continue
        if all(result[check] is None for result in results):
            found.add(check)
    return found
