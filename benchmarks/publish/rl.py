"""examples/grpo.py in the lab: a trainer sharded over two nodes, and a sampler on a third one that reads its versions.

`rewards_row` and `sync_row` measure. Each starts this module on the nodes:

    python -m benchmarks.publish.rl trainer|sampler GIVEN.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.llama import Llama
from benchmarks.publish.job import fine_tuned
from laconic.compare.runner import explain_failure
from laconic.lab import Lab, format_rate
from laconic.lab.counters import interface_bytes
from laconic.lab.wire import INTERFACE, node_address
from tests.support import rl
from tests.support.launch import torchrun_environment
from tests.support.record import Row

_TRAINERS, _SAMPLER = 2, 2  # the nodes 0 and 1, and the node 2
_RATES_BITS_PER_S = (200e6, 50e6)
_RATE = 1e-6
_SAMPLER_AT, _SERVED_AT = f"{node_address(_SAMPLER)}:9000", f"{node_address(0)}:8377"
_OF_TRAINER = ("--sampler", _SAMPLER_AT, "--serve", _SERVED_AT)
_OF_SAMPLER = ("--sample_at", _SAMPLER_AT, "--weights", f"http://{_SERVED_AT}")
_PUBLISHED, _APPLIED, _DONE, _ANSWER = "published.json", "applied.jsonl", "done", "answer.json"
_TIMEOUT_S = 1200.0
_MEASURES = (
    "laconic.integrations.trl",
    "laconic.integrations.transformers",
    "laconic.publish",
    "laconic.codec.lossless",
)


@dataclass(frozen=True, kw_only=True)
class Given:
    """A run of the example."""

    out: str
    words: list[str]
    """Options of trainer and sampler."""
    llama: dict[str, int] | None = None
    """The model of the rows with times, in place of the example's; then `out` has its weights. Otherwise rewards are
    compared with those of a colocated run."""
    reads_whole: bool = False
    """Whether the sampler has no version to begin with, each time."""


# -- rows --------------------------------------------------------------------------------------------------------------


def rewards_row(bench: Any) -> Row:
    """Rewards with the sampler over the wire against those of a colocated run."""
    steps, found = 4 * bench.versions, {}
    for name, words in {"full": [], "LoRA": ["--lora"]}.items():
        out = _folder(bench.out, f"rl-rewards-{name}")
        given = Given(out=str(out), words=["--max_steps", str(steps), "--save_strategy", "no", *words])
        with Lab(nodes=_TRAINERS + 1, rate_bits_per_s=_RATES_BITS_PER_S[0]) as lab:
            _execute(lab, given)
        for staleness, (far, near) in json.loads((out / _ANSWER).read_text()).items():
            found[f"{name}, staleness {staleness}"] = (far, near)
    unequal = [name for name, (far, near) in found.items() if far != near]
    each = "; ".join(f"{name} {far[0]['reward']:.3f} to {far[-1]['reward']:.3f}" for name, (far, _) in found.items())
    return Row(
        claim=f"GRPO, trainer on 2 nodes and sampler on a third: rewards, losses and gradient norms of {steps} steps "
        "against a colocated run, at staleness 0 and 1, full and LoRA",
        required="equal",
        measured=f"not equal: {', '.join(unequal)}" if unequal else "equal to the last digit",
        is_met=not unequal,
        note=f"examples/grpo.py, {format_rate(_RATES_BITS_PER_S[0])}; first and last mean reward: {each}. The "
        "colocated run has no folder and no patch: each rank casts the weights that it gathers, and generates from "
        "the copy.",
        measures=_MEASURES,
    )


def sync_row(bench: Any) -> Row:
    """Seconds and bytes of a sync, by patches against whole values."""
    out = _folder(bench.out, "rl-sync")
    model, _ = fine_tuned(bench.job, _RATE)
    save_file(model.state_dict(), out / "weights.safetensors")
    ways = {"whole": ["--base_every", "1"], "gaps": [], "smallest": ["--encoding", "smallest"]}
    found: dict[tuple[float, str], dict[str, float]] = {}
    with Lab(nodes=_TRAINERS + 1, rate_bits_per_s=_RATES_BITS_PER_S[0]) as lab:
        for rate in _RATES_BITS_PER_S:
            lab.set_rate(rate)
            for way, words in ways.items():
                found[rate, way] = _synced(bench, lab, out, way, words)
            found[rate, "smallest, ahead"] = _synced(
                bench, lab, out, "smallest", [*ways["smallest"], "--staleness", "1"]
            )
    whole = {rate: found[rate, "whole"]["seconds"] for rate in _RATES_BITS_PER_S}
    ratios = {rate: {way: found[rate, way]["seconds"] / whole[rate] for way in ways} for rate in _RATES_BITS_PER_S}
    received = {way: found[_RATES_BITS_PER_S[0], way]["received_bytes"] for way in ways}
    fewer = {way: received["whole"] / received[way] for way in ways}
    rates = "; ".join(map(format_rate, _RATES_BITS_PER_S))
    each = "; ".join(
        f"{format_rate(rate)}, {way}: {it['seconds']:.3f} s, of which a request waits {it['waited_s']:.3f} s, "
        f"{it['received_bytes'] / 1e6:.3f} MB"
        for (rate, way), it in found.items()
    )
    return Row(
        claim="GRPO, trainer on 2 nodes and sampler on a third, AdamW at 1e-6: seconds from a step until the sampler "
        f'has its weights, `encoding="gaps"` / "smallest" against whole values, {rates}',
        required="measured",
        measured="; ".join(f"{of['gaps']:.3f}x / {of['smallest']:.3f}x" for of in ratios.values()),
        is_met=True,
        note=f"{bench.job.llama}, after {bench.job.first_steps} steps at 1e-3, by HTTP; medians of "
        f"{_num_timed(bench)} versions. {each}. Bytes are those that enter the sampler's interface, "
        f"1/{fewer['gaps']:.0f} and 1/{fewer['smallest']:.0f} of whole values. Ahead is `--staleness 1`: the seconds "
        "hold a training step, in which the sampler reads the version, so the trainer hardly waits when it asks. Three "
        "processes share two processors; comparing, coding, writing, hashing and applying take the rest.",
        measures=_MEASURES,
    )


def _num_timed(bench: Any) -> int:
    """The versions with times: fewer than in other rows, since the trainer's own sums take seconds at 50 Mbit/s."""
    return max(2, bench.versions // 2)


def _synced(bench: Any, lab: Lab, out: Path, way: str, words: Sequence[str]) -> dict[str, float]:
    """The medians of a run: seconds from `publish` to applied weights, those of a request's wait, and bytes."""
    for name in (_PUBLISHED, _APPLIED):
        (out / name).unlink(missing_ok=True)
    steps = _num_timed(bench) + 2
    sizes = ["--max_steps", str(steps), "--per_device_train_batch_size", "2", "--num_generations", "2"]
    rates = ["--learning_rate", str(_RATE), "--lr_scheduler_type", "constant"]
    folder = _folder(out, "run")
    given = Given(
        out=str(out),
        words=["--base_every", "1000", *words, *sizes, *rates, "--save_strategy", "no", "--output_dir", str(folder)],
        llama=dataclasses.asdict(bench.job.llama),
        reads_whole=way == "whole",
    )
    _execute(lab, given)
    published = {int(version): begun_s for version, begun_s in json.loads((out / _PUBLISHED).read_text()).items()}
    applied = [json.loads(line) for line in (out / _APPLIED).read_text().splitlines()]
    # The first version has all values, and the second one makes what is kept.
    pairs = [pair for pair in pairwise(applied) if pair[1]["version"] > 2]
    return {
        "seconds": statistics.median(each["ended_s"] - published[each["version"]] for _, each in pairs),
        "waited_s": statistics.median(each["ended_s"] - each["asked_s"] for _, each in pairs),
        "received_bytes": statistics.median(each["received_bytes"] - last["received_bytes"] for last, each in pairs),
    }


def _folder(out: Path, name: str) -> Path:
    """A folder that is new in each call."""
    index = len(list(out.glob(f"{name}-*")))
    path = out / f"{name}-{index}"
    path.mkdir()
    return path


def _execute(lab: Lab, given: Given) -> None:
    """Run the trainer's two ranks and the sampler, each on its node."""
    path = Path(given.out) / "given.json"
    path.write_text(json.dumps(dataclasses.asdict(given)))
    (path.parent / _DONE).unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.publish.rl"]
    commands = []
    for rank in range(_TRAINERS):
        variables = torchrun_environment(rank, _TRAINERS, 1, 29500)
        variables |= {"MASTER_ADDR": node_address(0), "GLOO_SOCKET_IFNAME": INTERFACE}
        commands.append(
            ["env", *(f"{name}={value}" for name, value in variables.items()), *command, "trainer", str(path)]
        )
    commands.append([*command, "sampler", str(path)])
    env = {"OMP_NUM_THREADS": "1", "LACONIC_PUBLISH_TOKEN": "benchmark"}
    outcome = lab.execute(commands, env=env, timeout_s=_TIMEOUT_S, show=False)
    if outcome.exit_code:
        raise RuntimeError(f"{' '.join(given.words)} failed: {explain_failure(outcome)}")


# -- on the nodes ------------------------------------------------------------------------------------------------------


def _use_llama(given: Given) -> None:
    """Give the example the model of the rows with times, and a reward that no two completions share."""
    shape = Llama(**given.llama or {})

    def new_model(setup: Any) -> Any:
        model: Any = shape.build(torch.device("cpu"), torch.float32)
        model.load_state_dict(load_file(Path(given.out) / "weights.safetensors"))
        for config in (model.config, model.generation_config):
            config.pad_token_id, config.eos_token_id, config.bos_token_id = rl.example().PAD, rl.example().EOS, None
        return model

    def mean_number(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) / len(ids) / shape.vocab for ids in completion_ids]

    rl.example().new_model, rl.example().next_number = new_model, mean_number


def train(given: Given) -> None:
    """Be a rank of the trainer."""
    torch.set_num_threads(1)
    out = Path(given.out)
    if given.llama:
        begun: dict[int, float] = {}

        class Timed(rl.example().Publishing):  # type: ignore[name-defined, misc]
            def on_step_end(self, *args: Any, **more: Any) -> None:
                begun_s = time.monotonic()
                super().on_step_end(*args, **more)
                begun[self.newest] = begun_s

        _use_llama(given)
        rl.example().Publishing = Timed
        rl.trained([*given.words, *_OF_TRAINER])
        if dist.get_rank() == 0:
            (out / _PUBLISHED).write_text(json.dumps(begun))
    else:
        answer = {}
        for staleness in ("0", "1"):
            words = [*given.words, "--staleness", staleness, "--output_dir"]
            far = rl.trained([*words, str(out / "far"), *_OF_TRAINER])
            answer[staleness] = (far, rl.trained([*words, str(out / f"near-{staleness}")], is_colocated=True))
        if dist.get_rank() == 0:
            (out / _ANSWER).write_text(json.dumps(answer))
    dist.barrier()
    (out / _DONE).touch()
    dist.destroy_process_group()


def sample(given: Given) -> None:
    """Be the sampler, until the trainer is done."""
    out = Path(given.out)

    class Timed(rl.example().Sampler):  # type: ignore[name-defined, misc]
        def go_to(self, version: int) -> None:
            if version == self.reader.version:
                return
            if given.reads_whole:
                next(self.model.parameters()).data.zero_()
            asked_s = time.monotonic()
            super().go_to(version)
            ended_s, counted = time.monotonic(), interface_bytes()
            received = counted.received if counted else 0
            line = {"version": version, "asked_s": asked_s, "ended_s": ended_s, "received_bytes": received}
            with (out / _APPLIED).open("a") as file:
                file.write(json.dumps(line) + "\n")

        def read_ahead(self) -> None:
            if "--staleness" in given.words:
                super().read_ahead()

    def end() -> None:
        while not (out / _DONE).exists():
            time.sleep(0.1)
        os._exit(0)

    if given.llama:
        _use_llama(given)
        rl.example().Sampler = Timed
    threading.Thread(target=end, daemon=True).start()
    rl.sample([*given.words, *_OF_SAMPLER])


if __name__ == "__main__":
    {"trainer": train, "sampler": sample}[sys.argv[1]](Given(**json.loads(Path(sys.argv[2]).read_text())))
