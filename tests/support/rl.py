"""examples/grpo.py for tests and benchmarks: its trainer on this process's ranks, its sampler, and a colocated run.

A colocated run has no folder, no wire and no patch on the way to its samples: each rank casts the weights that the
trainer itself gathers, and generates from the cast copy. Requests, seeds and staleness are those of the run over the
wire, so both have equal rewards if the wire brings equal weights.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainerCallback

from laconic import RaggedTensor

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
FIGURES = ("reward", "reward_std", "loss", "grad_norm")


@functools.cache
def example() -> Any:
    """The example as a module."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL warns of each use of rollout_func
    spec = importlib.util.spec_from_file_location("grpo_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks for its module
    spec.loader.exec_module(module)
    return module


class Colocated(TrainerCallback):
    """Copies of the trained model in this process, one for each version, as the trainer gathers them."""

    def __init__(self, setup: Any) -> None:
        self.copies: dict[int, dict[str, torch.Tensor]] = {}
        copies = self.copies

        class Copy(example().Sampler):  # type: ignore[name-defined, misc]
            def go_to(self, version: int) -> None:
                self.model.load_state_dict(copies[version], strict=False)

        self.sampler = Copy(example().new_model(setup), None)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Gather a version. Collective."""
        self.copies[len(self.copies) + 1] = {
            name: (parameter.full_tensor() if isinstance(parameter, RaggedTensor) else parameter).detach().bfloat16()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    on_step_end = on_train_begin


def trained(words: list[str], *, is_colocated: bool = False) -> list[dict[str, float]]:
    """Train with the options of a command line. Returns the figures of each step. On all ranks."""
    arguments, setup = example().parsed([*words, "--use_cpu", "--logging_steps", "1", "--disable_tqdm", "true"])
    colocated = Colocated(setup) if is_colocated else None
    trainer = example().make_trainer(arguments, setup, colocated.sampler.answer if colocated else None)
    trainer.remove_callback(PrinterCallback)
    if colocated:
        trainer.add_callback(colocated)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    return [{figure: float(entry[figure]) for figure in FIGURES} for entry in logged]


def sample(words: list[str], dies_at: int | None = None) -> None:
    """Be the sampler, with the options of a command line. It is killed at its so-many-th request, before it answers."""
    torch.set_num_threads(1)
    answer, num_requests = example().Sampler.answer, 0

    def answer_or_die(self: Any, request: dict[str, Any]) -> dict[str, Any]:
        nonlocal num_requests
        num_requests += 1
        if num_requests == dies_at:
            os._exit(1)
        return answer(self, request)  # type: ignore[no-any-return]

    example().Sampler.answer = answer_or_die
    sys.argv = [str(EXAMPLE), "--use_cpu", *words]
    example().main()
