"""Train with each coding of gradients, and keep the losses: one process, one device, all seeds and nodes at once.

    python -m benchmarks.few_bits.study DIR                     on a GPU; a study that was stopped goes on
    python -m benchmarks.few_bits.study DIR --minutes 8         begin no run that would end later
    python -m benchmarks.few_bits.study DIR --only "int2 rotated" --quick

DIR/few_bits.json has the results. It is written after each run.

[Note: Two protocols]
`continued`: a coding goes on where the exact run of its seed was half way, on the same schedule and rows, with empty
feedback. Such runs stay close to each other, so differences of a tenth of a percent can be seen. `scratch`: coded from
the first step on. Roundings alone part such runs by more. Each is compared with the exact runs of its seed; the floor
is an exact run whose sums have another order.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import re
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.few_bits.candidates import EXACT, Protocol, plan
from benchmarks.few_bits.crossing import BETA, Coding, Crossing
from benchmarks.few_bits.model import Nodes
from benchmarks.local_steps.islands import DECAY, MAX_NORM, Shape, open_corpus
from laconic.compare.machine import describe_machine, in_words
from laconic.config import OptimizerConfig
from laconic.data import tokens as data
from laconic.strategies.optimizers import lr_at

BETA2, EPS = 0.95, 1e-8
FILE = "few_bits.json"
"""The file of results in their folder."""
_DATA_SEED = 1000


_LARGE = Shape(hidden=384, intermediate=1024, layers=6, heads=6)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The training that all codings share."""

    shape: Shape = _LARGE
    seeds: int = 5
    nodes: int = 4
    rows: int = 8
    """The rows of a node in a step."""
    length: int = 256
    steps: int = 600
    fork: int = 300
    """The steps of the exact run that `continued` runs share."""
    lr: float = 1e-3
    warmup_steps: int = 30
    eval_rows: int = 1024
    probes: int = 4
    """The steps of a run in which codes are looked at."""

    def lr_of(self, step: int) -> float:
        """Return the learning rate of a step, from 0: a cosine to a tenth."""
        config = OptimizerConfig(lr=self.lr, warmup_steps=self.warmup_steps, lr_schedule="cosine")
        return lr_at(step, config, total_steps=self.steps)


QUICK = Setting(
    shape=Shape(hidden=64, intermediate=128, layers=2, heads=2), seeds=2, rows=1, length=32, steps=12, fork=6,
    warmup_steps=2, eval_rows=16, probes=2,
)  # fmt: skip


class Adam:
    """AdamW on the flat parameters of all seeds."""

    def __init__(self, parameters: Tensor, *, decay: float) -> None:
        self._parameters, self._decay = parameters, decay
        self.first, self._second = torch.zeros_like(parameters), torch.zeros_like(parameters)
        self._steps = 0

    def state(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return a copy of all that a step changes."""
        return self._parameters.clone(), self.first.clone(), self._second.clone(), self._steps

    def load(self, state: tuple[Tensor, Tensor, Tensor, int]) -> None:
        """Go back to a state."""
        for own, kept in zip((self._parameters, self.first, self._second), state[:3], strict=True):
            own.copy_(kept)
        self._steps = state[3]

    def step(self, gradient: Tensor, lr: float, *, is_momentum: bool = False) -> None:
        """Take a step; with `is_momentum` the gradient is the first moment itself, and the second stays."""
        self._steps += 1
        if is_momentum:
            self.first.copy_(gradient)
        else:
            self.first.lerp_(gradient, 1 - BETA)
            self._second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        divisors = self._second.sqrt().div_(math.sqrt(1 - BETA2**self._steps)).add_(EPS)
        self._parameters.mul_(1 - lr * self._decay)
        self._parameters.addcdiv_(self.first, divisors, value=-lr / (1 - BETA**self._steps))


State = tuple[tuple[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor, int]]


class Study:
    """The runs of one setting, and the file of their results."""

    def __init__(self, folder: Path, setting: Setting, device: torch.device) -> None:
        """Read what `folder` has. Tokens are made anew, since a folder that comes back from afar should be small."""
        torch.set_float32_matmul_precision("highest")  # rotations must not be rounded to tf32
        self.setting, self._device, self._begun_s = setting, device, time.monotonic()
        self._file = folder / FILE
        self.results: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}
        wanted = json.loads(json.dumps(dataclasses.asdict(setting)))
        if self.results and self.results["setting"] != wanted:
            raise ValueError(f"{self._file} has results of another setting; give another folder")
        self.results = {"setting": wanted, "runs": {}, "failed": {}} | self.results
        self.results["machine"] = in_words(describe_machine())
        self.nodes = Nodes(
            setting.shape, seeds=setting.seeds, nodes=setting.nodes, length=setting.length, device=device
        )
        self.results["parameters"] = self.nodes.parameters
        with tempfile.TemporaryDirectory() as corpus:
            tokens = open_corpus(Path(corpus), setting.length)
            self._rows = _rows_of(setting, tokens.train).to(device)
            spread = len(tokens.evaluation) - setting.length - 1
            starts = np.arange(setting.eval_rows) * spread // setting.eval_rows
            self._held = torch.from_numpy(data.rows_at(tokens.evaluation, starts, setting.length + 1)).to(device)
        self._matrices = Adam(self.nodes.matrices, decay=DECAY)
        self._vectors = Adam(self.nodes.vectors, decay=0.0)
        self._first = self._state()
        self._half: State | None = None
        self._exact: list[float] = []
        self._step_s = 0.0
        self.say(f"{self.nodes.parameters:,} parameters, {self._rows.numel():,} tokens of training are there")

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"[{time.monotonic() - self._begun_s:6.1f} s] {text}", flush=True)

    def _state(self) -> State:
        return self._matrices.state(), self._vectors.state()

    def _load(self, state: State) -> None:
        self._matrices.load(state[0])
        self._vectors.load(state[1])

    def begin(self) -> None:
        """Take the exact run, half of which all continued runs share."""
        self._load(self._first)
        started_s = time.monotonic()
        self._exact = self._train(EXACT, 0)[0]
        self._step_s = (time.monotonic() - started_s) / self.setting.steps
        self.say(f"exact: {', '.join(f'{loss:.4f}' for loss in self._exact)}; {self._step_s * 1e3:.1f} ms a step")
        self.results.setdefault("exact", []).append(self._exact)
        self._write()

    def seconds_of(self, protocol: Protocol) -> float:
        """Return about how long a run takes: coding makes a step somewhat longer."""
        steps = self.setting.steps - (self.setting.fork if protocol == "continued" else 0)
        return 1.4 * steps * self._step_s

    def has(self, coding: Coding, protocol: Protocol) -> bool:
        """Whether the run is there, or has failed with an error of the device before."""
        key = f"{protocol}: {coding.name}"
        return key in self.results["runs"] or "CUDA error" in self.results["failed"].get(key, "")

    def run(self, coding: Coding, protocol: Protocol) -> None:
        """Take a run and keep its result; a run that fails is kept as that.

        Raises: RuntimeError if the device itself has failed, after which nothing can run on it.
        """
        key, started_s = f"{protocol}: {coding.name}", time.monotonic()
        assert self._half is not None, "begin() comes first"
        try:
            self._load(self._half if protocol == "continued" else self._first)
            found, crossing = self._train(coding, self.setting.fork if protocol == "continued" else 0)
        except Exception as error:  # of any kind: a coding that fails must not cost the others
            self.results["failed"][key] = traceback.format_exc()
            self._write()
            self.say(f"{key} FAILED: {type(error).__name__}: {str(error)[:300]}")
            if "CUDA error" in str(error):
                raise
            return
        finally:
            gc.collect()
        excess = [loss / exact - 1 for loss, exact in zip(found, self._exact, strict=True)]
        self.results["failed"].pop(key, None)
        self.results["runs"][key] = {
            "losses": found,
            "exact": self._exact,
            "excess": statistics.mean(excess),
            "error": statistics.stdev(excess) / len(excess) ** 0.5,
            **_nominal(crossing),
            "memory_bytes": coding.memory_bytes(self.setting.nodes),
            **_means(crossing.facts),
            "seconds": time.monotonic() - started_s,
        }
        self._write()
        result = self.results["runs"][key]
        bits = ", ".join(f"{name} {result[name]:.3f}" for name in FIGURES if name in result)
        self.say(f"{key}: {result['excess']:+.3%} +- {result['error']:.3%}; {bits}; {result['seconds']:.1f} s")

    @torch.no_grad()
    def _train(self, coding: Coding, first_step: int) -> tuple[list[float], Crossing]:
        setting, nodes = self.setting, self.nodes
        torch.manual_seed(0)
        crossing = Crossing(coding, nodes.matrix_slots, seeds=setting.seeds, nodes=setting.nodes)
        is_momentum = coding.way == "momentum"
        if is_momentum:
            crossing.start_momentum(self._matrices.first)
        apart = max(1, (setting.steps - first_step) // setting.probes)
        for step in range(first_step, setting.steps):
            if coding is EXACT and step == setting.fork and self._half is None:
                self._half = self._state()
            with torch.enable_grad():
                nodes.differentiate(self._rows[step])
            probes = (step - first_step) % apart == apart // 2
            gradient = crossing.sum(nodes.gradients, probes=probes).div_(setting.nodes)
            of_vectors = nodes.vector_gradients.sum(1).div_(setting.nodes)
            if not is_momentum:
                squares = gradient.square().sum(1) + of_vectors.square().sum(1)
                factors = (MAX_NORM / (squares.sqrt() + 1e-6)).clamp_(max=1.0)[:, None]
                gradient.mul_(factors)
                of_vectors.mul_(factors)
            lr = setting.lr_of(step)
            self._matrices.step(gradient, lr, is_momentum=is_momentum)
            self._vectors.step(of_vectors, lr)
        return nodes.evaluate(self._held), crossing

    def _write(self) -> None:
        partial = self._file.with_suffix(".part")
        partial.write_text(json.dumps(self.results, indent=1) + "\n")
        partial.replace(self._file)


FIGURES = ("nominal_bits", "entropy", "entropy_by_block", "rice", "memory_bytes", "error_of_term", "error_of_sum")
"""The figures of a run beside its losses."""


def _nominal(crossing: Crossing) -> dict[str, float]:
    """The bits of a value of a code of fixed width, or of an exact gradient."""
    bits = 32.0 if crossing.code is None else crossing.code.nominal_bits
    return {} if bits is None else {"nominal_bits": bits}


def _means(facts: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.mean(fact[name] for fact in facts) for name in (facts[0] if facts else ())}


def _rows_of(setting: Setting, tokens: Any) -> Tensor:
    """The rows of all steps, (steps, seeds, nodes, rows, length + 1), uint8: others for each seed."""
    of_seeds = []
    for seed in range(setting.seeds):
        size = (setting.steps, setting.nodes, setting.rows)
        starts = np.random.default_rng(_DATA_SEED + seed).integers(0, len(tokens) - setting.length - 1, size=size)
        of_seeds.append(torch.from_numpy(data.rows_at(tokens, starts, setting.length + 1).astype(np.uint8)))
    return torch.stack(of_seeds, dim=1)


def study(folder: Path, setting: Setting, *, minutes: float = math.inf, only: str = "") -> dict[str, Any]:
    """Take the runs that are missing, and return the content of the file of results."""
    end_s = time.monotonic() + 60 * minutes
    folder.mkdir(parents=True, exist_ok=True)
    found = Study(folder, setting, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    missing = [each for each in plan() if not found.has(*each) and re.search(only, each[0].name)]
    if missing:
        found.begin()
    for coding, protocol in missing:
        if time.monotonic() + found.seconds_of(protocol) > end_s:
            found.say(f"no time for {protocol}: {coding.name}")
            continue
        found.run(coding, protocol)
    return found.results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--only", default="", help="a pattern of the names of codings, as in `re`")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    results = study(options.folder, QUICK if options.quick else Setting(), minutes=options.minutes, only=options.only)
    for key, failure in results["failed"].items():
        print(f"{key} failed:\n{failure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
