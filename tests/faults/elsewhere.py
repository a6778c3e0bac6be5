"""The power cuts of `crash_states`, for other writers: PyTorch's DCP and transformers' Trainer.

Each is loaded as its users load it. DCP: the newest folder with a `.metadata` (as torchtitan does), or the one folder
that each save writes again. Trainer: `train(resume_from_checkpoint=True)`. Where no checkpoint was saved yet, a fresh
start is right.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tests.faults import saves
from tests.faults.bench import Bench, campaign_row
from tests.faults.crash_states import LIMIT, on_disk
from tests.faults.power_loss import Recorder, State, attached, crash_states, sampled_states
from tests.support.record import Row

OUTCOMES = ("loads", "loads an older one", "loads differing", "not loadable")
NUM_SAVES = 3
_NUM_TRAINER_STATES = 400  # each takes a Trainer

Load = Callable[[Path], str | None]
"""Loads the checkpoint of a run's folder and returns its digest; None for a fresh start. Raises any error."""


def outcomes(states: Iterable[State], expected: list[str], load: Load) -> Counter[str]:
    """Count what the states of a run do to a resume; `expected` has the digests of the saves in order."""
    found = Counter[str]()
    for state in states:
        done = len(state.marks)
        with on_disk(state) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                digest = load(folder / saves.RUN)
            except BaseException:  # of any kind; DCP's own error is no Exception
                found["not loadable"] += 1
                continue
        number = 0 if digest is None else expected.index(digest) + 1 if digest in expected else None
        if number is None:
            found["loads differing"] += 1
        else:
            found["loads" if number >= done else "loads an older one"] += 1
    return found


def digest_of(tree: Any) -> str:
    """A hash of nested dicts and lists of tensors and numbers."""
    hasher = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                hasher.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif isinstance(value, torch.Tensor):
            hasher.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            hasher.update(repr(value).encode())

    add(tree)
    return hasher.hexdigest()


# -- DCP ---------------------------------------------------------------------------------------------------------------


def dcp_run(root: Path, *, in_one_folder: bool) -> tuple[Recorder, list[str], Load]:
    """Save with DCP's own writer, and record it. Returns the record, the digests and the loader."""
    root.mkdir(parents=True)
    recorder, expected = Recorder(root, only=saves.RUN), []
    model = saves.small_model()
    optimizer = torch.optim.AdamW(model.parameters())

    def tree() -> dict[str, Any]:
        states = {str(index): state for index, state in optimizer.state_dict()["state"].items()}
        return {"model": model.state_dict(), "optimizer": states}

    with attached(recorder.announce), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(NUM_SAVES):
            saves.train_step(model, optimizer)
            folder = root / saves.RUN / ("newest" if in_one_folder else f"step-{number}")
            dcp.save(tree(), checkpoint_id=folder, no_dist=True)
            recorder.announce(mark=saves.COMMITTED)
            expected.append(digest_of(tree()))

    def load(run: Path) -> str | None:
        found = sorted(path.parent for path in run.glob("*/.metadata"))
        if not found:
            return None
        values = {key: _zeros(value) for key, value in tree().items()}
        dcp.load(values, checkpoint_id=found[-1], no_dist=True)
        return digest_of(values)

    return recorder, expected, load


def _zeros(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _zeros(value) for key, value in tree.items()}
    return torch.zeros_like(tree)


# -- transformers' Trainer ---------------------------------------------------------------------------------------------


class _Enough(Exception):
    """Ends a Trainer that has loaded its checkpoint."""


def trainer_run(root: Path) -> tuple[Recorder, list[str], Load]:
    """Save with transformers' Trainer, and record it. Returns the record, the digests and the loader."""
    import transformers

    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    root.mkdir(parents=True)
    recorder, expected = Recorder(root, only=saves.RUN), list[str]()
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    rows = [{"input_ids": [n % 16] * 4, "labels": [n % 16] * 4} for n in range(16)]
    loaded: list[str] = []

    def digest(kwargs: dict[str, Any], step: int) -> str:
        return digest_of([kwargs["model"].state_dict(), kwargs["optimizer"].state_dict()["state"], step])

    class Saving(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.announce(mark=saves.COMMITTED)
            expected.append(digest(kwargs, state.global_step))
            control.should_training_stop = state.global_step == NUM_SAVES

    class Loading(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            loaded.append(digest(kwargs, state.global_step))
            raise _Enough

    def trainer(output: Path, callback: Any) -> Any:
        torch.manual_seed(0)
        arguments = transformers.TrainingArguments(
            output_dir=str(output), max_steps=9, save_steps=1, save_total_limit=2, per_device_train_batch_size=1,
            use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        return transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback])

    with attached(recorder.announce):
        trainer(root / saves.RUN, Saving()).train()

    def load(run: Path) -> str | None:
        if not run.is_dir() or not any(run.glob("checkpoint-*")):
            return None
        loaded.clear()
        try:
            trainer(run, Loading()).train(resume_from_checkpoint=True)
        except _Enough:
            return loaded[0]
        raise AssertionError("no step was taken")

    return recorder, expected, load


@campaign_row("crash-states-elsewhere")
def row(bench: Bench) -> Row:
    """Count the outcomes of other writers. It promises nothing of laconic."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for writer, in_one_folder in (("DCP, a folder for each save", False), ("DCP, the same folder", True)):
            recorder, expected, load = dcp_run(Path(name) / writer, in_one_folder=in_one_folder)
            found[writer] = outcomes(crash_states(recorder, limit=4 if bench.quick else LIMIT), expected, load)
        recorder, expected, load = trainer_run(Path(name) / "trainer")
        states = sampled_states(recorder, 20 if bench.quick else _NUM_TRAINER_STATES)
        found["transformers' Trainer"] = outcomes({state.digest: state for state in states}.values(), expected, load)
    texts = []
    for writer, counts in found.items():
        parts = ", ".join(f"{counts[outcome]:,} {outcome}" for outcome in OUTCOMES)
        texts.append(f"{writer}: {parts} of {counts.total():,}")
        print(texts[-1], flush=True)
    return Row(
        claim="the same power cuts with other writers",
        required="none: for comparison",
        measured="; ".join(texts),
        is_met=True,
        note="One rank, three saves. Loaded as their users load them: DCP from the newest folder with a .metadata, "
        f"Trainer with resume_from_checkpoint=True; of its states {_NUM_TRAINER_STATES} are drawn, equal ones once.",
    )
