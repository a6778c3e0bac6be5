"""Jobs with [pipeline]: refusals, training as without stages, checkpoints of any number of stages, and figures."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from laconic.checkpoint import load_dcp, save_checkpoint, storage
from laconic.comm.launch import RankInfo, process_group
from laconic.config import Config, JobError, PipelineConfig
from laconic.hf.causal_lm import blocks_for_stages
from laconic.models.build import build_model
from laconic.models.export import export
from laconic.pipeline import SCHEDULES
from laconic.publish import Publisher, Reader
from laconic.strategies.checks import check_job
from laconic.strategies.pipeline import num_places, pipeline_policy, token_costs
from laconic.train.loop import Trainer
from tests.hf.zoo import TINY, differing
from tests.support.jobs import (
    SMALL_LLAMA,
    job,
    metrics,
    refusal,
    said_after_kill,
    started,
    train,
    train_all,
    train_and_listen,
    train_and_resume,
)
from tests.support.launch import run_ranks

MODEL = {"model_type": "llama", **SMALL_LLAMA, "num_hidden_layers": 4}
STEPS = 3


def launched(nodes: int, local: int = 1) -> RankInfo:
    return RankInfo(rank=0, world_size=nodes * local, local_rank=0, num_local=local, num_nodes=nodes)


def piped(folder: Path, name: str, *, stages: int | None = 2, **sections: Any) -> Config:
    """A job of four layers; without `stages` the same job on ranks that hold all layers."""
    given: dict[str, dict[str, Any]] = {
        "model": {"config": MODEL},
        "train": {"steps": STEPS, "accumulation": 2, "output": str(folder / name), "eval_every": STEPS},
        "pipeline": {"stages": stages, **sections.pop("pipeline", {})} if stages else {},
    }
    return job(folder, **{key: {**given.get(key, {}), **sections.get(key, {})} for key in given | sections})


# -- before the first step ---------------------------------------------------------------------------------------------


def test_places_and_micro_batches_come_from_the_launch(tmp_path: Path) -> None:
    def of(nodes: int, **pipeline: Any) -> tuple[int, int]:
        config = piped(tmp_path, "out", pipeline=pipeline)
        found = pipeline_policy(config.pipeline, config.train, launched(nodes, 2))
        return num_places(config.pipeline, launched(nodes, 2)), found.micro_batches

    assert num_places(PipelineConfig(), launched(1)) == 1
    assert of(2) == (2, 4), "micro-batches of 2 rows, of two ranks with 2 x 2 rows each"
    assert of(4, stages="nodes") == (4, 8)
    assert of(4, stages=2, micro_batches=8) == (2, 8)
    assert piped(tmp_path, "out", pipeline={"cut": [1, 2, 3], "stages": 3}).pipeline.cut == (1, 2, 3)


REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline.stages = 2 and one node: stages are on different nodes": (1, {}),
    "pipeline.stages = 2 does not divide the 3 nodes of this launch; set it to one of 3": (3, {}),
    "pipeline.micro_batches = 3 does not divide the 8 rows that a pipeline of 2 ranks takes": (
        2, {"pipeline": {"micro_batches": 3}},
    ),
    "micro_batches=1 are too few: 1F1B with 2 stages needs 2 at least": (2, {"pipeline": {"micro_batches": 1}}),
    "micro_batches=2 are too few: DualPipeV with 4 stages": (
        2, {"pipeline": {"schedule": "DualPipeV"}, "train": {"accumulation": 1}},
    ),
    "pipeline.cut = [1, 2, 3] has 3 stages, which do not divide over 2": (2, {"pipeline": {"cut": [1, 2, 3]}}),
    "pipeline.stages_per_rank = 2 does not go with pipeline.schedule = '1F1B'": (
        2, {"pipeline": {"cut": [1, 1, 2, 2]}},
    ),
    "sync.mode = 'local' and pipeline.stages: islands train on their own": (2, {"sync": {"mode": "local"}}),
    "schedule.kind = 'cyclic' and pipeline.stages": (2, {"schedule": {"kind": "cyclic"}}),
    "train.rows = 'by-speed' and pipeline.stages": (2, {"train": {"rows": "by-speed"}}),
    "shard.audit_every = 2 and pipeline.stages": (2, {"shard": {"audit_every": 2}}),
    "optimizer.name = 'shampoo' and pipeline.stages": (2, {"optimizer": {"name": "shampoo"}}),
    "pipeline.stages = 2 needs shard.strategy = 'fsdp2' or 'laconic', got 'ddp'": (2, {"shard": {"strategy": "ddp"}}),
    "needs shard.strategy = 'fsdp2' or 'laconic', got 'auto'": (
        2, {"shard": {"strategy": "auto", "cluster": "cluster.toml"}},
    ),
    "train.compile = true and pipeline.schedule = 'ZBVZeroBubble', which splits backward": (
        2, {"train": {"compile": True}, "pipeline": {"schedule": "ZBVZeroBubble"}},
    ),
    "pipeline.wire = '8bit' is for shard.strategy = 'laconic'": (
        2, {"shard": {"strategy": "fsdp2"}, "pipeline": {"wire": "8bit"}},
    ),
}  # fmt: skip
"""What a refusal says, with the nodes of a launch and the sections of its job."""


@pytest.mark.parametrize("part", REFUSED)
def test_a_launch_that_a_pipeline_does_not_fit_is_refused(tmp_path: Path, part: str) -> None:
    nodes, sections = REFUSED[part]
    with pytest.raises(JobError) as refused:
        check_job(piped(tmp_path, "out", **sections), launched(nodes))
    assert part in str(refused.value)


MISFITS: dict[str, dict[str, Any]] = {
    "pipeline.cut = [1, 2] adds up to 3 blocks, and the model has 6: its embedding, 4 layers": {
        "pipeline": {"cut": [1, 2]},
    },
    "need as many blocks, and the model has 3: its embedding, 1 layers": {
        "model": {"config": {**MODEL, "num_hidden_layers": 1}}, "pipeline": {"schedule": "LoopedBFS"},
    },
    "has the first and the last stage on one rank, which would have two copies of": {
        "model": {"config": {**MODEL, "tie_word_embeddings": True}}, "pipeline": {"schedule": "ZBVZeroBubble"},
    },
    "model.config.output_router_logits = true adds a loss of all layers' routers": {
        "model": {"config": {**TINY["mixtral"], "vocab_size": 256, "output_router_logits": True}},
    },
    "Gemma3nForCausalLM is not the sequence of its embedding, layers and head": {
        "model": {"config": {
            "model_type": "gemma3n_text", **SMALL_LLAMA, "num_hidden_layers": 4, "head_dim": 8, "vocab_size": 256,
            "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
            "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4, "layer_types": ["full_attention"] * 4,
        }},
    },
}  # fmt: skip


def refused_one_by_one(configs: list[Config]) -> list[str]:
    return [refusal(config) for config in configs]


def test_a_model_that_cannot_be_cut_so_is_refused(tmp_path: Path) -> None:
    configs = [piped(tmp_path, str(index), **sections) for index, sections in enumerate(MISFITS.values())]
    for said in run_ranks(refused_one_by_one, 2, configs, local=1):
        assert [(part in text, text) for part, text in zip(MISFITS, said, strict=True)] == [(True, t) for t in said]


def refused_by_rank(configs: list[Config]) -> str:
    return refusal(configs[dist.get_rank()])


@pytest.mark.parametrize("key", ["cut", "schedule", "micro_batches"])
def test_ranks_with_different_jobs_are_told_before_the_first_message(tmp_path: Path, key: str) -> None:
    values = {"cut": ([3, 3], [4, 2]), "schedule": ("1F1B", "GPipe"), "micro_batches": (4, 2)}[key]
    jobs = [piped(tmp_path, "out", pipeline={"cut": [3, 3], key: value}) for value in values]
    for said in run_ranks(refused_by_rank, 2, jobs, local=1):
        assert "rank 1 of the pipeline differs from rank 0: its" in said


def test_a_model_is_refused_whose_layers_take_what_no_other_machine_can_know() -> None:
    config = Config().model
    model: Any = build_model(config.with_keys(config=MODEL))
    rotary = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda hidden, **given: tuple(e + hidden.mean() for e in rotary(hidden, **given))
    with pytest.raises(
        ValueError, match=r"hands its layers a tensor of shape \[1, 8, 8\] beside the hidden states that"
    ):
        blocks_for_stages(model, 2, 8)
    model = build_model(config.with_keys(config={"model_type": "bart", "d_model": 16, "decoder_layers": 1}))
    with pytest.raises(ValueError, match="BartForCausalLM cannot be cut into stages: on tensors without values"):
        blocks_for_stages(model, 2, 8)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_an_embedding_costs_nothing_and_a_head_what_it_multiplies(kind: str) -> None:
    config = {**TINY[kind], "num_hidden_layers": 3} if kind != "gpt2" else {**TINY[kind], "n_layer": 3}
    model = build_model(Config().model.with_keys(config=config))
    costs = token_costs(model, blocks_for_stages(model, 2, 8).blocks)
    assert len(costs) == 5
    assert costs[0] == 0
    assert costs[1] == costs[2] == costs[3] > 0
    assert costs[4] == config["vocab_size"] * config.get("hidden_size", config.get("n_embd"))


# -- training ----------------------------------------------------------------------------------------------------------

EACH: dict[str, dict[str, Any]] = {
    "LoRA": {"lora": {"enabled": True, "rank": 2}, "pipeline": {"schedule": "Interleaved1F1B"}},
    "tied": {"model": {"config": {**MODEL, "tie_word_embeddings": True}}},
    "DoRA on codes": {"lora": {"enabled": True, "rank": 2, "dora": True, "quantize": "nf4"}},
    "recomputed": {"model": {"config": MODEL, "activation_checkpointing": True}, "shard": {"cache": "device"}},
    "whole": {"shard": {"cache": "rank"}, "pipeline": {"cut": [3, 3]}},
    "small micro-batches": {"shard": {"cache": "none"}, "pipeline": {"micro_batches": 8}},
    "Muon": {"optimizer": {"name": "muon", "adamw_lr": 0.01}},
    "experts": {"model": {"config": {**TINY["mixtral"], "vocab_size": 256, "num_hidden_layers": 4}}},
    "windows": {"model": {"config": {**MODEL, "model_type": "gemma2", "head_dim": 8, "sliding_window": 8}}},
    "FSDP2": {"shard": {"strategy": "fsdp2"}, "pipeline": {"schedule": "LoopedBFS"}},
}
"""Jobs by what is special about them."""


def assert_trains_as_without_stages(found: dict[str, Any], alone: dict[str, Any], name: str) -> None:
    assert found["losses"] == pytest.approx(alone["losses"], rel=2e-6), name
    assert found["grad_norms"] == pytest.approx(alone["grad_norms"], rel=2e-5), name
    assert found["evaluations"][0]["eval_loss"] == pytest.approx(alone["evaluations"][0]["eval_loss"], rel=2e-6), name
    for key in ("tokens_per_step", "num_parameters", "num_trainable"):
        assert found[key] == alone[key], name


@pytest.mark.heavy
def test_every_schedule_trains_as_ranks_with_all_layers(tmp_path: Path) -> None:
    configs = [piped(tmp_path, name, pipeline={"schedule": name}) for name in SCHEDULES]
    alone, *found = run_ranks(train_all, 2, [piped(tmp_path, "alone", stages=None), *configs], local=1)[0]
    for name, summary in zip(SCHEDULES, found, strict=True):
        assert_trains_as_without_stages(summary, alone, name)
        boundaries = 1 if name in ("GPipe", "1F1B", "Eager1F1B") else 2 if name in ("ZBVZeroBubble", "DualPipeV") else 3
        sent = {
            "node/activations": boundaries * 2 * 8 * 16 * 16 * 4
        }  # two directions, rows, tokens, hidden size, bytes
        assert summary["traffic_bytes"][-1] == sent, name
    assert found[0]["strategy"] == "pipeline"


@pytest.mark.heavy
@pytest.mark.parametrize("name", EACH)
def test_stages_that_are_sharded_inside_train_as_without(tmp_path: Path, name: str) -> None:
    """Two groups of two nodes, so gradients cross inside a group; then two nodes of two ranks."""
    sections = EACH[name]
    without = {key: value for key, value in sections.items() if key != "pipeline"}
    configs = [piped(tmp_path, "alone", stages=None, **without), piped(tmp_path, "staged", **sections)]
    for local in (1, 2):
        alone, found = run_ranks(train_all, 4, configs, local=local)[0]
        assert_trains_as_without_stages(found, alone, name)
        configs = [piped(tmp_path, "alone 2", stages=None, **without), piped(tmp_path, "staged 2", **sections)]


@pytest.mark.heavy
def test_half_precision_and_codes_train_nearly_as_without(tmp_path: Path) -> None:
    """bf16 is sent in two bytes; activations in eight bits in one, and crossings of replicas in four bits in few."""
    configs = [
        piped(tmp_path, "alone", stages=None),
        piped(tmp_path, "bf16", shard={"param_dtype": "bfloat16"}),
        piped(tmp_path, "fp16", shard={"param_dtype": "float16"}),
        piped(tmp_path, "8bit", pipeline={"wire": "8bit"}),
        piped(tmp_path, "4bit", shard={"wire": "4bit"}),
    ]
    alone, *found = run_ranks(train_all, 4, configs, local=1)[0]
    bf16, fp16, coded, replicas = found
    for summary in found:
        assert summary["losses"] == pytest.approx(alone["losses"], rel=5e-3)
    whole = 2 * 2 * 8 * 16 * 16 * 4  # two pipelines
    sent = [summary["traffic_bytes"][-1]["node/activations"] for summary in found]
    assert sent[:2] == [whole // 2, whole // 2]
    assert whole / 4 < sent[2] < 0.26 * whole, "a step of two bytes for every 128 values"
    assert sent[3] == whole
    exact = sum(bf16["traffic_bytes"][-1][f"node/{kind}"] for kind in ("weights", "gradients"))
    assert sum(replicas["traffic_bytes"][-1][f"node/{kind}"] for kind in ("weights", "gradients")) < exact / 2
    assert fp16["grad_norms"] != bf16["grad_norms"] != coded["grad_norms"]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saved_again(config: Config, folder: Path) -> None:
    """Load the newest checkpoint of the job's output on these ranks, and save it in another folder."""
    ranks = RankInfo.from_environment()
    with process_group(ranks, torch.device("cpu"), config.train.timeout_s) as group:
        stepper = Trainer(config, ranks, torch.device("cpu"), group).stepper
        stepper.save(partial(save_checkpoint, folder, 2), {"config": {}})
        stepper.close()


def published(config: Config, folder: Path) -> None:
    """Take the steps of a job, and publish the weights after each; the versions go into `folder`."""
    ranks = RankInfo.from_environment()
    with process_group(ranks, torch.device("cpu"), config.train.timeout_s) as group:
        trainer = Trainer(config, ranks, torch.device("cpu"), group)
        publisher = Publisher(trainer.stepper.module, folder, dtype="float32", names="model")
        for step in range(2):
            with torch.no_grad():
                for stage in trainer.stepper._part.stages if config.pipeline.is_on else [trainer.stepper.module]:
                    for parameter in stage.parameters():
                        parameter.add_(1 + step)
            publisher.publish(step=step)
        publisher.wait()
        trainer.stepper.save(partial(save_checkpoint, folder.parent, 2), {"config": {}})
        trainer.stepper.close()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_held_in_part_is_published_whole(tmp_path: Path, tied: bool) -> None:
    config = piped(tmp_path, "out", model={"config": {**MODEL, "tie_word_embeddings": tied}})
    run_ranks(published, 4, config, tmp_path / "saved" / "versions", local=2)
    saved = contents(tmp_path / "saved" / "step-2")
    names = [name for name, _ in build_model(config.model).named_parameters()]
    read = {name: torch.zeros_like(saved[f"model.{name}"]) for name in names}
    assert Reader(tmp_path / "saved" / "versions").update(read) == 2
    assert differing(read, {name: saved[f"model.{name}"] for name in names}) == []


def contents(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint: the model's and the optimizer's."""
    metadata = storage.read_metadata(folder)
    tensors = {key: torch.zeros(e.shape, dtype=e.dtype) for key, e in storage.entries_of(metadata).items()}
    storage.load(dict(tensors), folder, offline=True)
    return tensors


HANDS: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {"stages": None}),
    (3, 1, {"stages": 3, "train": {"accumulation": 1}}),
    (4, 2, {"shard": {"cache": "rank"}, "pipeline": {"schedule": "Interleaved1F1B"}}),
    (4, 2, {"shard": {"strategy": "fsdp2"}}),
    (1, 1, {"stages": None, "shard": {"cache": "none"}}),
    (4, 1, {}),
]
"""The launches through which a checkpoint goes: ranks, ranks on a node, and the job."""


@pytest.mark.heavy
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_checkpoint_goes_from_any_stages_to_any_others_to_the_bit(tmp_path: Path, tied: bool) -> None:
    model = {"config": {**MODEL, "tie_word_embeddings": tied}}
    first = piped(tmp_path, "start", model=model, train={"steps": 2, "save_every": 0})
    run_ranks(train, 2, first, local=1)
    before, expected = tmp_path / "start" / "checkpoints", contents(tmp_path / "start" / "checkpoints" / "step-2")
    names = [key for key in expected if key.startswith("model.")]
    assert len(names) == len(list(build_model(first.model).named_parameters())) + tied, (
        "and a second name of a tied one"
    )
    for index, (ranks, local, sections) in enumerate(HANDS):
        own = {"resume": str(before), "save_every": 0, **sections.get("train", {})}
        config = piped(tmp_path, f"hand {index}", model=model, **{**sections, "train": own})
        before = tmp_path / f"again {index}"
        run_ranks(saved_again, ranks, config, before, local=local)
        assert differing(contents(before / "step-2"), expected) == [], index


RESUMED: dict[str, dict[str, Any]] = {
    "1F1B": {"lora": {"enabled": True, "rank": 2, "dropout": 0.3}},
    "ZBVZeroBubble": {"train": {"async_save": True}, "optimizer": {"name": "adamw8bit"}},
    "DualPipeV": {"shard": {"param_dtype": "float16"}},
}


@pytest.mark.heavy
def test_a_resumed_run_repeats_the_unbroken_one(tmp_path: Path) -> None:
    configs = []
    for name, sections in RESUMED.items():
        own = {"steps": 4, "save_every": 2, "accumulation": 2, **sections.get("train", {})}
        configs.append(piped(tmp_path, name, pipeline={"schedule": name}, **{**sections, "train": own}))
    for name, (unbroken, rest) in zip(RESUMED, run_ranks(train_and_resume, 2, configs, 2, local=1)[0], strict=True):
        assert rest["start_step"] == 2, name
        assert rest["losses"] == unbroken["losses"][2:], name
        rows = metrics(tmp_path / f"{name}-resumed")
        assert [row["loss"] for row in rows if "loss" in row] == unbroken["losses"], name


@pytest.mark.heavy
def test_a_run_is_exported_and_begins_from_a_folder(tmp_path: Path) -> None:
    """Each rank reads its own stages of `model.path`, and what it does not hold from nowhere."""
    saves = {"steps": 1, "save_every": 0}
    run_ranks(train, 2, piped(tmp_path, "out", train=saves), local=1)
    export(tmp_path / "out", tmp_path / "exported")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert not load_dcp(tmp_path / "out" / "checkpoints" / "step-1", model=exported)
    path = {"model": {"path": str(tmp_path / "exported"), "config": None}}
    configs = [piped(tmp_path, "on", **path), piped(tmp_path, "alone", stages=None, **path)]
    staged, alone = run_ranks(train_all, 2, configs, local=1)[0]
    assert_trains_as_without_stages(staged, alone, "from a folder")


# -- figures -----------------------------------------------------------------------------------------------------------


def test_stages_are_told_and_measured(tmp_path: Path) -> None:
    config = piped(tmp_path, "out")
    [summary], printed = run_ranks(train_and_listen, 2, [config], local=1)[0]
    told = " ".join(printed.split())
    assert (
        "a pipeline over 2 groups of nodes: stages of [4, 2] blocks by 1F1B, 4 micro-batches, activations exact" in told
    )
    assert summary["device_peak_bytes"] > 0


def test_rows_of_tokens_of_any_length_are_trained(tmp_path: Path) -> None:
    """Their loss is divided by the targets of the global batch, however the pipeline cuts its rows."""
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [(7 * n + k) % 250 for k in range(4 + n % 9)]} for n in range(64)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    data = {"kind": "datasets", "path": str(tmp_path / "rows"), "sequence_length": 12}
    configs = [
        piped(tmp_path, "alone", stages=None, data=data),
        piped(tmp_path, "staged", data=data),
        piped(tmp_path, "finer", data=data, pipeline={"micro_batches": 8}),
    ]
    alone, *found = run_ranks(train_all, 2, configs, local=1)[0]
    for summary in found:
        assert_trains_as_without_stages(summary, alone, "rows")


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    message = run_ranks(refusal, 2, piped(tmp_path, "out", optimizer={"lr": 1e30}), local=1)[0]
    assert "training stopped before the optimizer of step" in message
    assert "The weights are as after step" in message
    assert not dist.is_initialized()


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.machine
def test_the_command_trains_and_measures_memory(tmp_path: Path) -> None:
    config = piped(tmp_path, "out", log={"memory_step": 2}, train={"async_save": True, "save_every": 0})
    ended = [(process.communicate(), process.returncode) for process in started(tmp_path, config)]
    assert [code for _, code in ended] == [0, 0], ended
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["strategy"] == "pipeline"
    assert summary["step_peak_bytes"] > 0
    assert summary["resting_bytes"] > 0
    alone = run_ranks(train, 2, piped(tmp_path, "alone", stages=None), local=1)[0]
    assert_trains_as_without_stages(summary, alone, "the command")
    assert (tmp_path / "out" / "checkpoints" / f"step-{STEPS}").is_dir()


@pytest.mark.machine
def test_a_rank_that_leaves_ends_all_with_one_line_that_names_it(tmp_path: Path) -> None:
    config = piped(tmp_path, "out", train={"steps": 1_000_000, "log_every": 1, "eval_every": 0})
    code, lines, _ = said_after_kill(started(tmp_path, config), 1)
    assert code > 0
    assert len(lines) == 1, lines
