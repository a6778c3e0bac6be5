"""Checkpoints of islands: the same bits after a resume, and any other number of islands and slices."""

from __future__ import annotations

import contextlib
import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import laconic
from laconic.checkpoint import load_dcp, open_checkpoint, storage
from laconic.comm.launch import RankInfo
from laconic.config import Config, SyncConfig
from laconic.models.build import build_model
from laconic.models.export import export
from laconic.policy import to_keys
from laconic.ragged.parts import sliced_parts
from laconic.strategies.simultaneous import Simultaneous
from laconic.train.loop import Trainer
from tests.support.jobs import job, table, train, train_and_resume
from tests.support.launch import run_ranks

pytestmark = pytest.mark.machine

STREAMED = {"mode": "local", "every": 4, "fragments": 2, "overlap": 1}
SLICED = {"outer_sliced_lr": 0.4, "outer_sliced_momentum": 0.6}
KEPT_AT, STEPS = 4, 7
"""After step 4 a fragment is in flight, and so it is after step 6, but for the last step's `finish`."""

RUNS: dict[str, dict[str, Any]] = {
    "feedback": {"sync": {**STREAMED, "codec": "e2m1", "error_feedback": True, "mixing": 0.5, "islands": 2}},
    "slices": {"sync": {**STREAMED, "codec": "int8", "slices": 4, **SLICED}, "train": {"async_save": True}},
    "adamw8bit": {
        "sync": {"mode": "local", "every": 3, "mixing": 0.5, "slices": 2},
        "optimizer": {"name": "adamw8bit"},
    },
    "lora": {"sync": {**STREAMED, "mixing": 0.5}, "lora": {"enabled": True, "rank": 2}},
}


def island_job(folder: Path, name: str) -> Config:
    """A model whose layers have four heads, and matrices large enough for 8 bits where they are asked for."""
    given = RUNS[name]
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4}
    if name == "adamw8bit":
        sizes |= {"hidden_size": 64, "intermediate_size": 128}
    run = {"steps": STEPS, "eval_every": STEPS, "save_every": KEPT_AT, "keep": 9, "output": str(folder / name)}
    own = {"model": {"config": table(folder)["model"]["config"] | sizes}, "train": {**run, **given.get("train", {})}}
    return job(folder, **{**given, **own})


def everything(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint by their keys, whole."""
    entries = storage.entries_of(storage.read_metadata(folder))
    tensors = {key: torch.empty(entry.shape, dtype=entry.dtype) for key, entry in entries.items()}
    storage.load(tensors, folder, offline=True)
    return tensors


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Four ranks, each a node, run the jobs of RUNS, and again from the middle."""
    folder = tmp_path_factory.mktemp("runs")
    configs = [island_job(folder, name) for name in RUNS]
    return folder, dict(zip(RUNS, run_ranks(train_and_resume, 4, configs, KEPT_AT, local=1)[0], strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_repeats_the_unbroken_one(runs: tuple[Path, dict[str, Any]], name: str) -> None:
    folder, summaries = runs
    unbroken, rest = summaries[name]
    assert rest["start_step"] == KEPT_AT
    assert rest["losses"] == unbroken["losses"][KEPT_AT:]
    assert rest["grad_norms"] == unbroken["grad_norms"][KEPT_AT:]
    assert rest["evaluations"] == unbroken["evaluations"]
    numbers = ("step", "fragment", "drift_norm", "mean_norm", "cosine", "codec_error")
    expected = [{key: sync[key] for key in numbers} for sync in unbroken["syncs"] if sync["step"] > KEPT_AT]
    assert expected
    for got, want in zip(rest["syncs"], expected, strict=True):
        assert {key: got[key] for key in numbers} == pytest.approx(want, rel=1e-12)  # sums over ranks, in any order
    whole, broken = (everything(folder / run / "checkpoints" / f"step-{STEPS}") for run in (name, f"{name}-resumed"))
    assert whole.keys() == broken.keys()
    assert [key for key in whole if not torch.equal(whole[key], broken[key])] == []


def test_a_checkpoint_has_the_outer_parameters_unsliced(runs: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """An export has the same weights, and so has every island's checkpoint."""
    folder, summaries = runs
    for name in ("feedback", "slices"):
        stored = open_checkpoint(folder / name / "checkpoints")
        plain = build_model(island_job(folder, name).model)  # the vocabulary aside
        assert stored.tensors.keys() == dict(plain.named_parameters()).keys()
        export(folder / name, tmp_path / name)
        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(exported.lm_head.weight, stored.read(["lm_head.weight"])["lm_head.weight"])
        assert exported.num_parameters() == summaries[name][0]["num_parameters"]
        islands = {key.split(".")[1] for key in everything(stored.folder) if key.startswith("islands.")}
        assert islands == {str(island) for island in range(summaries[name][0]["islands"])}
        differences = load_dcp(stored.folder, model=exported)  # a folder like any other
        assert not differences


# -- other islands, other slices ---------------------------------------------------------------------------------------


def look(config: Config) -> dict[str, Any]:
    """Resume without training: what differs from the folder, and which parameters have no inner state."""
    ranks = RankInfo.from_environment()
    assert dist.group.WORLD is not None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer = Trainer(config, ranks, torch.device("cpu"), dist.group.WORLD)
    stepper = trainer.stepper
    assert isinstance(stepper, Simultaneous)
    model, optimizer = stepper.module, stepper.optimizer
    stored = everything(open_checkpoint(Path(config.train.output) / "checkpoints").folder)
    inner = {name: value.clone() for name, value in laconic.unsliced_state_dict(model).items()}
    with stepper.local.outer_parameters() if stepper.local else torch.no_grad():
        outer = laconic.unsliced_state_dict(model)
    places = sliced_parts(model)
    wrong, without = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if not optimizer.state.get(parameter):
            without.append(name)
        for key, value in optimizer.state.get(parameter, {}).items():
            whole, sliced, index = places.get(name, (name, None, 0))
            saved = stored.get(f"optim.state.{whole}.{key}", stored.get(f"optim.state.{name}.{key}"))
            assert saved is not None
            held = value.full_tensor() if isinstance(value, laconic.RaggedTensor) else value
            if sliced is not None and saved.shape == sliced.shape:
                saved = sliced.split(saved)[index]
            wrong += [] if torch.equal(held, saved) else [f"{name}.{key}"]
    state = stepper.local.state_dict() if stepper.local else {}
    momenta = {key: value.full_tensor() for key, value in state.items() if key.startswith("outer_optimizer.")}
    pairs = [(name, value, stored[f"model.{name}"]) for each in (outer, inner) for name, value in each.items()]
    pairs += [  # the outer momentum of whole parameters; zero if the folder has none
        (key, value, stored.get(f"outer.optimizer.{key.partition('.')[2]}", torch.zeros_like(value)))
        for key, value in momenta.items()
        if "_slice" not in key and "_shared" not in key
    ]
    return {
        "printed": printed.getvalue(),
        "start": trainer.start_step,
        "agreed": [name for name, value, saved in pairs if not torch.equal(value, saved)],
        "wrong": wrong,
        "without": without,
    }


def look_all(configs: list[Config]) -> list[dict[str, Any]]:
    return [look(config) for config in configs]


def changed(config: Config, output: Path, **sync: Any) -> Config:
    output_ = shutil.copytree(config.train.output, output)
    given = config.sync.with_keys(**sync)
    return replace(config, sync=given, train=replace(config.train, output=str(output_), resume="auto"))


def test_any_islands_go_on_from_the_agreed_parameters(runs: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Saved by four islands with a slice each, or by two without: loaded by more, fewer, one, none, other slices."""
    folder, _ = runs
    four, two = island_job(folder, "slices"), island_job(folder, "feedback")
    blocks = island_job(folder, "adamw8bit")
    whole = {"slices": 1, "outer_sliced_lr": None, "outer_sliced_momentum": None}
    cases = {
        "2 islands, 2 slices": (four, {"islands": 2, "slices": 2}),
        "2 islands, 1 slice": (four, {"islands": 2, **whole}),
        "1 island": (four, {"islands": 1, **whole}),
        "4 islands, 2 slices of heads, too": (four, {"slices": 2, "slice_include": ("mlp", "attention")}),
        "4 islands from 2, sliced": (two, {"islands": 4, "slices": 4}),
        "no islands": (two, to_keys(SyncConfig())),
        "8 bits, the same slices": (blocks, {"islands": 2}),
        "8 bits, other slices": (blocks, {"islands": 4, "slices": 4}),
    }
    configs = [changed(config, tmp_path / str(i), **sync) for i, (config, sync) in enumerate(cases.values())]
    by_rank = run_ranks(look_all, 4, configs, local=1)
    printed = [found["printed"].splitlines()[-1] for found in by_rank[0]]
    for number, name in enumerate(cases):
        for rank in range(4):
            found = by_rank[rank][number]
            assert found["start"] == STEPS, name
            assert found["agreed"] == [], name
            if cases[name][0] is four or name == "no islands":
                assert found["wrong"] == found["without"] == [], name
            if "same" in name:
                assert found["without"] == []
                assert bool(found["wrong"]) == (rank >= 2), "the second island has kept its own"
            if name == "8 bits, other slices":
                assert all("_slice" in part for part in found["without"])
                assert found["without"]
    assert "was saved by 4 islands, this run has 2: every island starts from the outer parameters" in printed[0]
    assert "islands that train slices 0, 1, 2, 3 of 4, this run's train 0, 1, 0, 1 of 2: every island" in printed[3]
    assert "was saved by 2 islands: this run goes on from what they agreed on" in printed[5]


def test_a_run_without_islands_becomes_one_with(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 2, "save_every": 0}
    run_ranks(train, 2, job(tmp_path, train=settings), local=1)
    sliced = job(tmp_path, sync={"mode": "local", "every": 2, "slices": 2}, train={**settings, "resume": "auto"})
    for found in run_ranks(look, 2, sliced, local=1):
        assert found["start"] == 2
        assert found["agreed"] == found["wrong"] == found["without"] == []
