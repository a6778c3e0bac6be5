"""The configuration: strict reading, options, and writing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from laconic.comm.launch import RankInfo
from laconic.config import Config, ConfigError, all_keys, from_dict, load, to_dict, to_toml
from laconic.config.job import parse_toml
from laconic.models.build import build_model
from laconic.models.tokenizer import ByteTokenizer, with_vocabulary
from laconic.registry import named
from laconic.strategies.checks import check_job
from laconic.strategies.under import job_under
from laconic.train.cli import main, parse

MODEL = {"model_type": "llama"}


@pytest.mark.parametrize(
    ("table", "parts"),
    [
        ({"train": {"step": 3}}, ["unknown key `train.step`", "nearest valid key is `train.steps`"]),
        ({"optimizer": {"weightdecay": 0.0}}, ["`optimizer.weightdecay`", "`optimizer.weight_decay`"]),
        ({"trian": {}}, ["unknown section `trian`", "`train`"]),
        ({"train": {"sequence_length": 8}}, ["`train.sequence_length`", "`data.sequence_length`"]),
        ({"shard": {"dp_shard": 8}}, ["`shard.dp_shard`", "nodes x local ranks", "torchrun"]),
        ({"shard": {"dp_replicate": 8}}, ["`shard.dp_replicate`", "islands"]),
        (
            {"shard": {"prefetch_units": 2, "prefetch_bytes": 5}},
            ["shard.prefetch_units = 2", "shard.prefetch_bytes = 5"],
        ),
        ({"shard": {"shares": [24, 0]}}, ["shard.shares = [24.0, 0.0] must be a positive number"]),
        ({"shard": {"shares": []}}, ["shard.shares", "a list of numbers, one for each rank of an island"]),
        ({"shard": {"shares": 24}}, ["`shard.shares` must be a list"]),
        (
            {"shard": {"strategy": "fsdp2", "shares": [2, 1]}},
            ["shard.shares is for shard.strategy = 'laconic'", "'fsdp2'; leave it out"],
        ),
        ({"train": {"steps": "ten"}}, ["`train.steps` must be an integer", "'ten' (string)"]),
        ({"train": {"steps": 1.5}}, ["`train.steps` must be an integer"]),
        ({"train": {"steps": True}}, ["`train.steps` must be an integer", "boolean"]),
        ({"train": {"resume": 1}}, ['`train.resume` must be one of "never", "auto" or true or false or a string']),
        ({"optimizer": {"lr": "big"}}, ["`optimizer.lr` must be a number"]),
        ({"optimizer": {"betas": [0.9]}}, ["`optimizer.betas` must be a list of 2 of a number values"]),
        ({"lora": {"targets": [1]}}, ["`lora.targets` must be a list of a string values"]),
        ({"data": {"kind": "csv"}}, ["`data.kind` must be one of", '"datasets"']),
        ({"train": 3}, ["`train` is a section"]),
        ({"model": {"config": 3}}, ["`model.config` must be a table or a string"]),
        ({"model": {"config": {"hidden_size": 8}}}, ["no `model_type`"]),
        ({"model": {"config": MODEL, "path": "x"}}, ["both set"]),
        ({"data": {"kind": "text"}}, ["needs data.path"]),
        ({"data": {"path": "x"}}, ["not used by"]),
        ({"data": {"sequence_length": 1}}, ["at least 2"]),
        ({"optimizer": {"lr": 0.0}}, ["positive"]),
        ({"optimizer": {"betas": [0.9, 1.0]}}, ["[0, 1)"]),
        ({"shard": {"wire": "4bit", "cache": "none"}}, ["shard.cache = 'none' keeps none; use shard.cache = 'host'"]),
        ({"shard": {"wire": {"weights": "int5"}}}, ["shard.wire: Wire(weights='int5') is not known"]),
        ({"shard": {"wire": {"bits": 4}}}, ["unexpected keyword argument 'bits'"]),
        ({"shard": {"wire": "4bit", "strategy": "fsdp2"}}, ["is for shard.strategy = 'laconic'; leave it out"]),
        ({"shard": {"strategy": "ddp", "param_dtype": "bfloat16"}}, ["no mixed precision"]),
        ({"shard": {"strategy": "ddp", "check_every": 9}}, ["is for shard.strategy = 'laconic'"]),
        ({"train": {"timeout_s": 1e308}}, ["lie in (0, 1e9]"]),
        ({"shard": {"strategy": "fsdp2-hpz", "reshard_after_forward": True}}, ["leave it out"]),
        (
            {"model": {"dtype": "float16"}},
            ["model.dtype = 'float16' must not be float16: an optimizer's small updates"],
        ),
        ({"shard": {"reduce_dtype": "float16"}}, ["needs shard.param_dtype = 'float16'"]),
        ({"train": {"steps": 3, "epochs": 1.0}}, ["train.epochs = 1.0 and train.steps = 3 are both set"]),
        ({"log": {"wandb_name": "x"}}, ["unknown key `log.wandb_name`", "WANDB_NAME"]),
        ({"data": {"packing": True}}, ["unknown key `data.packing`", "docs/fine-tune.md"]),
        ({"lora": {"quantize": "nf4"}}, ["lora.quantize = 'nf4' needs lora.enabled = true"]),
        ({"lora": {"dora": True}}, ["lora.dora = True needs lora.enabled"]),
        ({"lora": {"enabled": True, "quantize_skip": ["lm_head"]}}, ["needs lora.quantize"]),
        ({"train": {"steps": 0}}, ["at least 1"]),
        ({"train": {"rows": "sped"}}, ["`train.rows` must be"]),
        ({"train": {"rows": [2, 0]}}, ["train.rows = [2, 0] must give each rank a whole number of rows"]),
        ({"train": {"keep": 1}}, ["at least 2"]),
        (
            {"sync": {"mode": "local", "last_codec": "int4", "rendezvous": "there:1", "islands": 2}},
            ["islands that come and go do not take the same last step"],
        ),
        ({"train": {"steps": 10**400}}, ["train.steps is an integer of 1329 bits; it must fit into 64 bits"]),
        ({"optimizer": {"lr": 1 << 20_000}}, ["optimizer.lr is an integer of 20001 bits"]),
        ({"model": {"config": {**MODEL, "rope": [2**63]}}}, ["an item of model.config.rope is an integer of 64 bits"]),
        ({"train": {"output": "a\0b"}}, ["has a NUL"]),
        ({"train": {"device": "\udcff"}}, ["is not UTF-8"]),
        ({"train": {"steps": "x" * 5000}}, ["x... (string)"]),
    ],
)
def test_a_wrong_file_is_refused(table: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        from_dict(Config, table)
    for part in parts:
        assert part in str(refused.value)


def test_written_toml_reads_back_equal(tmp_path: Path) -> None:
    """Also its shares, which its peers without laconic do not get."""
    table = {
        "model": {"config": {**MODEL, "rope": {"type": "x", "odd key": [1, 2.5, False]}, "name": 'a "b" \\ \n\x7f é'}},
        "lora": {"targets": ["q_proj", "v_proj"]},
        "optimizer": {"betas": [0.8, 0.9], "eps": 1e-12, "lr": 1},
        "shard": {"reshard_after_forward": False, "shares": [24, 24, 12.5]},
    }
    config = from_dict(Config, table)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load(path) == config
    assert from_dict(Config, to_dict(config)) == config
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.shard.policy.shares == config.shard.policy.arguments()["shares"] == (24.0, 24.0, 12.5)
    assert job_under(named("host"), config).shard.policy.shares == config.shard.policy.shares
    assert job_under(named("ddp"), config).shard.policy.shares is None
    assert "shares" not in parse_toml(to_toml(Config()))["shard"]


def test_options_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\nconfig = {model_type = "llama", hidden_size = 8}\n[train]\nsteps = 3\nmicro_batch_size = 7\n'
    )
    options = "--train.steps 9 --train.resume auto --lora.targets a b --optimizer.betas 0 0.5 --data.tokenizer t"
    table = "--model.config.hidden_size 16 --model.config.tie_word_embeddings=false"
    config = parse([str(path), *options.split(), "--lora.enabled", "true", *table.split()])
    wanted = {
        "model": {"config": {"model_type": "llama", "hidden_size": 16, "tie_word_embeddings": False}},
        "train": {"steps": 9, "micro_batch_size": 7, "resume": "auto"},
        "lora": {"enabled": True, "targets": ["a", "b"]},
        "optimizer": {"betas": [0, 0.5]},
        "data": {"tokenizer": "t"},
    }
    assert config == from_dict(Config, wanted)
    for given, resume in (("true", "auto"), ("false", "never"), ("runs/other", "runs/other")):
        assert parse(["--train.resume", given]).train.resume == resume
    assert parse(["--model.config", '{model_type = "gpt2"}']).model.config == {"model_type": "gpt2"}
    assert parse(["--model.config", "some/config.json"]).model.config == "some/config.json"


def test_help_shows_every_key_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for key in all_keys():
        assert f"--{key} " in shown
    assert "dp_shard" in shown


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.mark.heavy
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path) -> None:
    """Each is read, its model is built on meta, and its first lines say how to start it."""
    config = load(path)
    check_job(config, RankInfo(rank=0, world_size=4, local_rank=0, num_local=1, num_nodes=4))
    model = with_vocabulary(config.model, ByteTokenizer)
    trained = {p.requires_grad for p in build_model(model, config.lora).parameters()}
    assert trained == ({True, False} if config.lora.enabled else {True})
    assert f"-m laconic.train examples/{path.name}" in path.read_text()
    assert len(EXAMPLES) >= 5


_PARTS = ".".join("a" * 2_000)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[train]\nstep = 1\n", "job.toml: unknown key"),
        ("[train\n", "not valid TOML"),
        (f"x = {'[' * 5000}", "not valid TOML"),
        (f"[train]\nsteps = {'9' * 5000}", "not valid TOML"),
        (f"{_PARTS} = 1", ""),
        (f"train.{_PARTS} = 1", ""),
        (f"data.path.{_PARTS} = 1", ""),
        (f"[model.config]\nmodel_type = 'llama'\n{_PARTS} = 1", ""),
        (f"[model]\nconfig = {{{_PARTS} = 1}}", ""),
        (f"[data]\npath = {'[' * 10_000}{']' * 10_000}", ""),
        (f"[model]\nconfig = {'{a=' * 10_000}1{'}' * 10_000}", ""),
        (f"[model]\nconfig = {{model_type = 'llama', a = {'[' * 150}{']' * 150}}}", ""),
    ],
    ids=range(12),
)
def test_wrong_and_deep_files_are_refused(
    text: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    assert main([str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("laconic train: ")
    assert part in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--train.step", "3"], "--train.steps"),
        (["--train.steps", "x"], "--train.steps"),
        (["--lora.enabled", "maybe"], "must be true or false"),
        (["--shard.strategy", "zero"], "fsdp2-hpz"),
        ([f"--train.{_PARTS}", "1"], ""),
        (["--model.config.x", "{a=" * 90 + "{b=" * 90 + "1" + "}" * 180], ""),
        ([f"--model.config.x={{{_PARTS} = 1}}"], ""),
        (["--model.config", f"{{model_type = 'llama', {_PARTS} = 1}}"], ""),
    ],
    ids=range(8),
)
def test_wrong_and_deep_options_are_refused(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert part in err
    assert len(err.splitlines()) == 1


def test_torchruns_last_lines_show_the_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert main([str(tmp_path / "no-such.toml")]) == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert re.search(r"traceback : .*no-such\.toml", str(ChildFailedError("laconic.train", {0: failure})))
