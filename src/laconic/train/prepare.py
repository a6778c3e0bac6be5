"""The preparations of a job before its first step, which refuse a job that cannot work."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from laconic.checkpoint import commit
from laconic.comm.agreement import RankGroup
from laconic.comm.launch import RankInfo
from laconic.config import (
    Config,
    DataConfig,
    JobError,
    LogConfig,
    LoraConfig,
    ModelConfig,
    TrainConfig,
    all_keys,
    from_dict,
    to_dict,
)
from laconic.data import arrays, tokens
from laconic.data.batches import TrainingData
from laconic.extras import how_to_install
from laconic.models.build import build_model
from laconic.models.tokenizer import Tokenizer
from laconic.plan.candidates import CANDIDATES
from laconic.plan.choice import choose, fitting_cluster
from laconic.plan.cluster_file import load_cluster
from laconic.plan.prediction import Predictor
from laconic.plan.tracing import TraceError
from laconic.plan.units import format_quantity
from laconic.strategies.checks import check_job
from laconic.strategies.cyclic import num_workers
from laconic.strategies.islands import num_islands
from laconic.strategies.parallelize import shard_policy
from laconic.strategies.stepper import CHECKPOINTS, Setup, Stepper, checkpoints_to_load
from laconic.train.lock import as_output

CONFIGURATION = "config.toml"


def open_output(train: TrainConfig) -> None:
    """Create the output folder.

    Raises:
        JobError: the folder cannot be written, or has results of a run and train.resume is "never"; or train.resume
            names a folder without a checkpoint.
    """
    output = Path(train.output)
    with as_output(output):
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    if train.resume == "never" and (results := _results_of_a_run(output)):
        raise JobError(
            f"train.output = {str(output)!r} already holds {' and '.join(results)} of a run; go on with that run with "
            "--train.resume auto, choose another folder, or remove them"
        )
    if train.resume not in ("never", "auto") and not commit.candidates(checkpoints_to_load(train)):
        raise JobError(
            f"train.resume = {train.resume!r} holds no checkpoint; give the output folder of a run, one of its "
            "step-N folders, 'auto' or 'never'"
        )


def _results_of_a_run(output: Path) -> list[str]:
    """What a run before has left in its output folder. A run that was refused before its first step leaves nothing."""
    metrics, summary = output / "metrics.jsonl", output / "summary.json"
    found = {
        CHECKPOINTS: any((output / CHECKPOINTS).glob("step-*")),
        metrics.name: metrics.is_file() and metrics.stat().st_size > 0,
        summary.name: summary.exists(),
    }
    return [name for name, is_there in found.items() if is_there]


def check_wandb(log: LogConfig) -> None:
    """Import the package wandb, if the job needs it.

    Raises:
        JobError: the package cannot be imported.
    """
    if log.wandb:
        try:
            importlib.import_module("wandb")
        except ImportError as error:
            advice = f"{how_to_install('wandb')}; or set log.wandb = false"
            raise JobError(f"log.wandb = true needs the package wandb ({error}): {advice}") from error


def with_steps(train: TrainConfig, corpus: TrainingData, workers: int) -> TrainConfig:
    """The section with `steps` in place of `epochs`; the global batch has a part for each worker."""
    if train.epochs is None:
        return train
    rows_per_step = train.micro_batch_size * train.accumulation * workers
    steps = max(1, math.ceil(train.epochs * corpus.steps_per_epoch(rows_per_step)))
    return replace(train, steps=steps, epochs=None)


def show_launch(setup: Setup, console: Console) -> None:
    """Print the launch, and the place of the effective configuration."""
    ranks, sync, schedule = setup.ranks, setup.sync, setup.schedule
    launch = f"{ranks.num_nodes} nodes x {ranks.num_local} ranks, {setup.device.type}"
    if schedule.is_cyclic:
        launch += f", {num_workers(schedule, ranks)} workers one after the other by {schedule.rule}"
    if sync.is_local:
        every, codec = sync.policy.schedule.every, sync.policy.coding.codec
        launch += f", {num_islands(sync, ranks)} islands that sync every {every} steps in {codec}"
    crossings = shard_policy(setup.shard, setup.optimizer).wire
    if not crossings.is_exact:
        launch += f", weights cross in {crossings.weights} and gradients in {crossings.gradients}"
    launch += f"; configuration: {Path(setup.train.output) / CONFIGURATION}"
    console.print(launch, markup=False, highlight=False, soft_wrap=True)


def build_checked(model: ModelConfig, lora: LoraConfig, tokenizer: Tokenizer, name: str) -> nn.Module:
    """The job's model on the meta device. `name` is that of the tokenizer.

    Raises:
        JobError: the model cannot be built, or its vocabulary is smaller than the tokenizer's.
    """
    built = build_model(model, lora, device="meta")
    vocab_size = built.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if tokenizer.vocab_size > vocab_size:
        raise JobError(
            f"the tokenizer {name!r} has {tokenizer.vocab_size} tokens, but the model's vocabulary "
            f"has {vocab_size}; raise vocab_size in model.config, or use the model's own tokenizer"
        )
    return built


def open_training_data(
    data: DataConfig, train: TrainConfig, tokenizer: Tokenizer, peers: RankGroup, ranks: RankInfo, console: Console
) -> TrainingData:
    """The tokenised corpus. One rank per node makes its files unless they exist. Collective.

    Raises:
        JobError: on all ranks, if the corpus cannot be read or is too short, or holds nothing out for evaluation; or if
            nodes have different tokens.
    """
    folder = Path(data.cache) if data.cache else Path(train.output) / "tokens"
    peers.agree(lambda: tokens.prepare(data, tokenizer, folder), only=ranks.is_first_on_node)
    index = peers.agree(lambda: tokens.prepare(data, tokenizer, folder, writes=False))
    assert index is not None
    corpus = peers.agree(lambda: tokens.open_data(index, data))
    assert corpus is not None
    _refuse_unequal(peers.gather(arrays.read_index(index).checksum), ranks, folder)
    if train.eval_every and not corpus.num_held_out:
        raise JobError("train.eval_every is set, but data.eval_fraction = 0 holds nothing out; set one of the two")
    console.print(corpus.describe(), highlight=False)
    return corpus


def _refuse_unequal(digests: list[str], ranks: RankInfo, folder: Path) -> None:
    """Refuse digests of tokens that are not the same on all ranks: see [Note: Damaged arrays] in data/arrays.py."""
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise JobError(
            f"node {others[0] // ranks.num_local} has other tokens than node 0 in {str(folder)!r} (SHA-256 "
            f"{digests[others[0]][:12]}... and {digests[0][:12]}...); give every node the same corpus, tokenizer and "
            "chat template, and the same releases of laconic and of the tokenizer's package"
        )


def resume(
    stepper: Stepper, train: TrainConfig, job: dict[str, Any], peers: RankGroup, console: Console
) -> tuple[int, dict[str, Any]]:
    """Go on from the last sync of islands or from the newest checkpoint, whichever is later. Collective.

    Of the same step, the checkpoint: it goes on to the same bits, also if islands sync fragment by fragment. `job` is
    the configuration as a table.

    Return the number of steps that the run has taken already, 0 if there is nothing to resume; and what the checkpoint
    has beside the stepper's state.

    Raises:
        JobError: the checkpoint belongs to another job.
    """
    checkpoints = checkpoints_to_load(train)
    newest = peers.broadcast(newest_step(checkpoints) if peers.rank == 0 else 0)
    if stepper.recovered_steps and stepper.recovered_steps > newest:
        console.print(f"going on from the sync of islands after step {stepper.recovered_steps}", highlight=False)
        return stepper.recovered_steps, {}
    with as_job_error():
        extra = stepper.load(checkpoints)
    if extra is None:
        console.print("nothing to resume: starting from step 0")
        return 0, {}
    defaults, known = to_dict(Config()), all_keys()  # an older release had other keys
    saved = {
        section: {**defaults.get(section, {}), **{key: keys[key] for key in keys if f"{section}.{key}" in known}}
        for section, keys in extra["config"].items()
    }
    if changed := differences(saved, job):
        console.print(f"resuming with a changed configuration: {'; '.join(changed)}", markup=False)
    console.print(f"resuming after step {extra['step']}", highlight=False)
    if "islands" in extra:
        console.print(f"the checkpoint {extra['islands']}", highlight=False, soft_wrap=True)
    return int(extra["step"]), extra


def newest_step(checkpoints: Path) -> int:
    """The step of the newest checkpoint that looks complete; 0 if there is none."""
    manifests = (candidate.manifest for candidate in commit.candidates(checkpoints))
    return next((manifest.step for manifest in manifests if manifest is not None), 0)


def differences(saved: dict[str, Any], current: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for each value that differs between two configurations, except train.resume."""
    found = []
    for key in sorted({*saved, *current}):
        name, old, new = f"{prefix}{key}", saved.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{name}.")
        elif old != new and name != "train.resume":
            found.append(f"{name}: {old} -> {new}")
    return found


@contextlib.contextmanager
def as_job_error() -> Iterator[None]:
    """Turn a ValueError into a JobError: before the first step, it means that a part does not fit the job."""
    try:
        yield
    except JobError:
        raise
    except ValueError as error:
        raise JobError(str(error)) from error


def with_strategy(config: Config, ranks: RankInfo, device_type: str, peers: RankGroup, console: Console) -> Config:
    """The job with a strategy in place of "auto"; other jobs stay. Rank 0 plans, and all ranks follow. Collective.

    A job whose islands agree rarely keeps them: the plan chooses among exact strategies only where the job trains every
    step together.

    Raises:
        JobError: the cluster file is wrong, the model cannot be traced, or nothing fits; the message says by how much,
            and what would.
    """
    if config.shard.strategy != "auto":
        return config

    def plan() -> dict[str, Any]:
        cluster = load_cluster(str(config.shard.cluster))
        cluster = fitting_cluster(cluster, nodes=ranks.num_nodes, local=ranks.num_local)
        names = [name for name, each in CANDIDATES.items() if (each.sync is not None) is config.sync.is_local]
        try:
            choice = choose(Predictor(config, cluster, device_type=device_type), names=names)
        except TraceError as error:
            raise JobError(f"{error}; choose shard.strategy yourself") from error
        if choice.job is None or choice.recommended is None:
            raise JobError(f"shard.strategy = 'auto': {choice.remedy}")
        best = choice.recommended
        said = f"auto: {best.label}, {format_quantity(best.seconds, 's')} a step predicted" + (
            f"; {choice.rival}" if choice.rival else ""
        )
        return {"job": to_dict(choice.job), "said": said}

    planned = peers.on_rank_0(plan, "cannot choose a strategy")
    chosen = from_dict(Config, planned["job"])
    check_job(chosen, ranks, device_type)
    console.print(planned["said"], markup=False, highlight=False, soft_wrap=True)
    return chosen
