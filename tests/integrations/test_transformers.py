"""The trainers of transformers and TRL with laconic: DDP's numbers, resumption to the bit, and their files."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import (
    HfArgumentParser,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainingArguments,
)

import laconic
from laconic.integrations import LaconicArguments
from laconic.integrations.options import ArgumentError
from laconic.integrations.trained_state import FILES, incomplete
from laconic.integrations.transformers import LaconicMixin, LaconicTrainer, laconic_trainer
from tests.support import trainers
from tests.support.flips import flipping_in_gradients
from tests.support.launch import on_ranks, run_ranks
from tests.support.sharded_net import full_parameters

STEPS = 3
SAVING = {"save_strategy": "steps", "save_steps": 1}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 1}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


def assert_same_log(trainer: Any, stock: Any, atol: float = 1e-5) -> None:
    for log in (trainers.log, eval_losses):
        torch.testing.assert_close(log(trainer), log(stock), rtol=0, atol=atol)


def eval_losses(trainer: Any) -> dict[str, list[float]]:
    return {"eval_loss": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]}


def trained(job: str, folder: Path, steps: int, arguments: LaconicArguments | None = None, **more: Any) -> Any:
    trainer = trainers.make(job, str(folder), steps, arguments, **more)
    trainer.train()
    return trainer


# -- on two nodes ------------------------------------------------------------------------------------------------------


@pytest.mark.machine
def test_a_run_equals_ddp_and_its_files_load(tmp_path: Path) -> None:
    """The whole life of a run: evaluation, checkpoints, the best model, a cut, and resumptions, also on one rank."""
    run_ranks(job_whole_life, 2, tmp_path, local=1)
    checkpoint = tmp_path / "straight" / f"checkpoint-{STEPS - 1}"
    trainer = trainers.make("accumulation", str(tmp_path / "one"), STEPS, LaconicArguments())
    begun: dict[str, torch.Tensor] = {}

    class Look(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            begun.update(full_parameters(trainer.model))

    trainer.add_callback(Look)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    saved = load_file(checkpoint / "model.safetensors")
    assert_equal({name: begun[name] for name in saved}, saved)
    assert all(state["step"] == STEPS for state in trainer.optimizer.state.values())


def job_whole_life(folder: Path) -> None:
    more: dict[str, Any] = {**SAVING, **EVALUATING, "lr_scheduler_type": "cosine", "load_best_model_at_end": True}
    more |= {"metric_for_best_model": "loss", "greater_is_better": True}  # so that the best model is not the last one
    stock = trained("accumulation", folder / "ddp", STEPS, **more)
    straight = trained("accumulation", folder / "straight", STEPS, LaconicArguments(cache="device"), **more)
    assert isinstance(straight.model, laconic.ShardedModule)
    assert sum(isinstance(module, laconic.ShardedModule) for module in straight.model.modules()) == 3
    assert_same_log(straight, stock)
    assert straight.state.best_global_step == 1
    assert straight.state.best_model_checkpoint == str(folder / "straight" / "checkpoint-1")
    for name, value in full_parameters(straight.model).items():
        torch.testing.assert_close(value, dict(stock.model.named_parameters())[name].detach(), rtol=0, atol=1e-5)
    assert_exported(straight, folder / "exported")

    # A power cut left zeros in the third checkpoint, and a kill left the second without its list of files. The first
    # one has a list of earlier versions, without hashes.
    if dist.get_rank() == 0:
        shutil.copytree(folder / "straight", folder / "resumed")
        damaged = folder / "resumed" / f"checkpoint-{STEPS}" / "trainer_state.json"
        damaged.write_bytes(bytes(damaged.stat().st_size))
        (folder / "resumed" / f"checkpoint-{STEPS - 1}" / FILES).unlink()
        old = folder / "resumed" / "checkpoint-1" / FILES
        sizes = {record["name"]: record["size_bytes"] for record in json.loads(old.read_text())["files"]}
        old.write_text(json.dumps({"world_size": dist.get_world_size(), "files": sizes}))
    dist.barrier()
    more |= {"load_best_model_at_end": False, "save_total_limit": 2}
    resumed = trainers.make("accumulation", str(folder / "resumed"), STEPS, LaconicArguments(), **more)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.train(resume_from_checkpoint=True)
    skipped = " ".join(str(each.message) for each in caught if "not complete" in str(each.message))
    problem = "trainer_state.json does not have the contents that were written"
    assert (problem in skipped and FILES in skipped) == (dist.get_rank() == 0)
    kept = [path.name for path in sorted((folder / "resumed").glob("checkpoint-*"))]
    assert kept == ["checkpoint-1", f"checkpoint-{STEPS}"]  # the best one and the last
    assert incomplete(folder / "resumed" / f"checkpoint-{STEPS}") == ""
    end = load_file(folder / "straight" / f"checkpoint-{STEPS}" / "model.safetensors")
    assert_equal({name: value for name, value in full_parameters(resumed.model).items() if name in end}, end)
    assert trainers.log(resumed) == trainers.log(straight)
    with pytest.raises(ValueError, match="another trainer wrote it"):
        resumed.train(resume_from_checkpoint=str(folder / "ddp" / "checkpoint-1"))


def assert_exported(trainer: Any, folder: Path) -> None:
    """Plain transformers reads the model that `save_model` writes, with equal outputs."""
    trainer.save_model(str(folder))
    dist.barrier()
    plain, rows = LlamaForCausalLM.from_pretrained(folder), torch.arange(4, 24).view(2, 10)
    trainer.model.eval()
    with torch.no_grad():
        assert torch.equal(trainer.model(input_ids=rows).logits, plain.eval()(input_ids=rows).logits)
        tokens = [each.generate(rows, max_new_tokens=3, do_sample=False) for each in (trainer.model, plain)]
    assert torch.equal(*tokens)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.machine
@on_ranks(2, local=1)
def test_settings_equal_ddp(tmp_path: Path) -> None:
    """Settings that change the forward or the backward."""
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}  # kernels would take a minute to build
    cases: list[tuple[dict[str, Any], dict[str, Any], float]] = [  # for DDP, and in addition for laconic
        ({"label_smoothing_factor": 0.1}, {}, 1e-5),
        ({"neftune_noise_alpha": 0.5, "optim": "adafactor"}, {"gradient_checkpointing": True}, 1e-5),
        ({"optim": "sgd", "max_grad_norm": 0.0}, compiled, 1e-5),
        ({"bf16": True}, {}, 0.05),  # weights are rounded before the gather, and not only in the products
    ]
    for more, added, atol in cases:
        stock = trained("trainer", tmp_path / "ddp", 2, **more)
        own = trained("trainer", tmp_path / "own", 2, LaconicArguments(audit_every=2), **more, **added)
        assert_same_log(own, stock, atol)


@pytest.mark.machine
@on_ranks(2, local=1)
def test_islands_evaluate_what_they_share_and_resume_to_the_bit(tmp_path: Path) -> None:
    """Two islands of one rank each, which sync after every second step."""
    more = {"save_strategy": "steps", "save_steps": 3}
    arguments = LaconicArguments(local_steps=2, islands=2)
    trainer = trained("trainer", tmp_path, 5, arguments, **more)
    after = full_parameters(trainer.model)
    resumed = trainers.make("trainer", str(tmp_path), 5, arguments, **more)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_equal(full_parameters(resumed.model), after)
    with trainer._shared_parameters():
        outer = full_parameters(trainer.model)
    norms = [sum(float(value.norm()) for value in each.values()) for each in (after, outer)]
    facts: list[Any] = [None, None]
    dist.all_gather_object(facts, (*norms, trainer.evaluate()["eval_loss"]))
    (inner, outer_norm, loss), (other_inner, other_outer, other_loss) = facts
    assert inner != other_inner  # each has taken a step of its own since the last sync
    assert outer_norm == other_outer != inner
    assert loss == other_loss
    assert trainer._local_steps.steps == 5


@pytest.mark.machine
@on_ranks(2, local=1)
def test_accumulation_sends_gradients_once_and_models_of_model_init_are_sharded(tmp_path: Path) -> None:
    sent = []
    for job in ("trainer", "accumulation"):  # one micro-batch, and three
        trainer = trainers.make(job, str(tmp_path), 2, LaconicArguments())
        before = trainer.model.traffic.snapshot()
        trainer.train()
        sent.append((trainer.model.traffic.snapshot() - before).wire())
    assert sent[0] == sent[1] > 0
    arguments = TrainingArguments(**trainers.settings(str(tmp_path), 2))
    trainer = LaconicTrainer(model_init=lambda: trainers.llama(), args=arguments, train_dataset=trainers.token_rows(16))
    ends = []
    for _ in range(2):
        trainer.train()
        ends.append(full_parameters(trainer.model))
    assert isinstance(trainer.model, laconic.ShardedModule)
    assert_equal(*ends)


@pytest.mark.machine
@on_ranks(2, local=1)
def test_audits_repeat_a_neighbours_batch(tmp_path: Path) -> None:
    """Of the first micro-batch of some steps; a device that computes wrongly is told."""
    audit, steps = laconic.audit, []
    with pytest.MonkeyPatch.context() as patch:
        trainer = trainers.make("accumulation", str(tmp_path), 4, LaconicArguments(audit_every=3))
        patch.setattr(laconic, "audit", lambda *args: (steps.append(trainer.state.global_step), audit(*args)))
        trainer.train()
    assert steps == [0, 3]
    injured, pairs = (trainers.make("trainer", str(tmp_path), 1, LaconicArguments(audit_every=1)) for _ in range(2))
    with (
        flipping_in_gradients(0, bit=3, seed=0),
        pytest.raises(laconic.CorruptionError, match="computed different bits from the same batch"),
    ):
        injured.train()
    pairs.data_collator = lambda rows: {"prompts": [row["input_ids"] for row in rows]}
    with pytest.raises(ValueError, match="use check_every"):
        pairs.train()


@pytest.mark.machine
@on_ranks(2, local=1)
def test_options_that_do_not_fit_the_ranks_are_refused(tmp_path: Path) -> None:
    options: dict[str, Any]
    for options, remedy in (
        ({"units": ["NoSuchLayer"]}, "LlamaDecoderLayer"),
        ({"local_steps": 2, "islands": 3}, "use a divisor"),
        ({"local_steps": 2, "audit_every": 3}, "use fewer islands"),
    ):
        with pytest.raises(ValueError, match=remedy):
            trainers.make("trainer", str(tmp_path), 1, LaconicArguments(**options))
    model, given = trainers.llama(), TrainingArguments(**trainers.settings(str(tmp_path), 1))
    optimizers = (torch.optim.SGD(model.parameters()), None)
    with pytest.raises(ArgumentError, match="optimizer_cls_and_kwargs"):
        LaconicTrainer(model=model, args=given, train_dataset=trainers.token_rows(8), optimizers=optimizers)


# -- in one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "values", "remedy"),
    [
        ({}, {"fsdp": True}, "leave it out"),
        ({}, {"deepspeed": "zero3.json"}, "leave it out"),
        ({}, {"parallelism_config": "cp"}, "leave it out"),
        ({}, {"save_on_each_node": True}, "output_dir that all nodes share"),
        ({"local_steps": 2}, {**SAVING, **EVALUATING, "load_best_model_at_end": True}, "leave it out"),
        ({}, {"auto_find_batch_size": True}, "set per_device_train_batch_size"),
        ({}, {"optim": "adamw_bnb_8bit"}, "optimizer_cls_and_kwargs"),
        ({}, {"accelerator_config": {"even_batches": False}}, "leave it True"),
        ({}, {**SAVING, **EVALUATING, "save_only_model": True, "load_best_model_at_end": True}, "set one of them"),
    ],
)
def test_refusals_name_the_remedy(
    options: dict[str, Any], values: dict[str, Any], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = TrainingArguments(**trainers.settings(str(tmp_path), 1))
    for name, value in values.items():  # their own checks need other packages, or set environment variables
        setattr(given, name, type(getattr(given, name))(**value) if isinstance(value, dict) else value)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    model, rows = trainers.llama(), trainers.token_rows(8)
    data = {"train_dataset": rows, "eval_dataset": rows}
    with pytest.raises(ArgumentError, match=remedy):
        LaconicTrainer(model=model, args=given, **data, laconic=LaconicArguments(**options))


def test_one_process_trains_as_trainer_does(tmp_path: Path) -> None:
    stock = trained("trainer", tmp_path / "stock", 2)
    trainer = trained("trainer", tmp_path / "own", 2, LaconicArguments(), **SAVING)
    assert trainers.log(trainer) == trainers.log(stock)
    assert not isinstance(trainer.model, laconic.ShardedModule)
    shutil.rmtree(tmp_path / "own" / "checkpoint-2")
    resumed = trainers.make("trainer", str(tmp_path / "own"), 2, LaconicArguments(), **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert_equal(full_parameters(resumed.model), full_parameters(trainer.model))


def test_arguments_are_command_line_options() -> None:
    parser = HfArgumentParser((TrainingArguments, LaconicArguments))
    line = "--output_dir out --cache device --reshard_after_forward false --units A B --local_steps 5 --no_broadcast"
    _, options = parser.parse_args_into_dataclasses(
        [*line.split(), "--wire", "8bit", "--check_every", "9", "--audit_every", "7", "--granularity", "32 rows",
         "--shares", "24", "12.5"]
    )  # fmt: skip
    assert options == LaconicArguments(
        cache="device",
        reshard_after_forward=False,
        units=["A", "B"],
        local_steps=5,
        broadcast=False,
        check_every=9,
        audit_every=7,
        granularity="32 rows",
        wire="8bit",
        shares=[24.0, 12.5],
    )
    assert options.policy.granularity == laconic.rows(32)
    assert options.policy.shares == (24.0, 12.5)
    assert LaconicArguments(granularity={"*.weight": "whole"}).policy.granularity == {"*.weight": laconic.whole()}
    assert LaconicArguments().policy.precision.mp_policy(autocast=torch.bfloat16).reduce_dtype == torch.float32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache": "disk"}, "cache='disk' is not known"),
        ({"local_steps": -1}, "local_steps=-1 must be an integer of at least 0"),
        ({"islands": 2}, "needs local_steps"),
        ({"check_every": 1.5}, "check_every=1.5 must be an integer"),
        ({"units": "LlamaDecoderLayer"}, "must be a list of class names"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        LaconicArguments(**given)


# -- TRL's trainers ----------------------------------------------------------------------------------------------------


JOBS = ("sft_lora", "dpo_lora", "dpo", "reward", "grpo_lora", "grpo")


@pytest.mark.machine
@on_ranks(3)
def test_trains_as_under_ddp(tmp_path: Path) -> None:
    for job in JOBS:
        stock = trained(job, tmp_path / "ddp", 2)
        trainer = trained(job, tmp_path / "own", 2, LaconicArguments())
        assert_same_log(trainer, stock)
        for model in (trainer.model, *([trainer.ref_model] if job in ("dpo", "grpo") else [])):
            assert isinstance(model, laconic.ShardedModule), job
    for argument, remedy in (
        ("use_vllm", "publish the weights"),
        ("use_transformers_continuous_batching", "rollout_func="),
    ):
        message = f"^{argument}=True does not work with a sharded model: .*{remedy}"
        with pytest.raises(ArgumentError, match=message):
            trainers.make("grpo_lora", str(tmp_path / "refused"), 1, LaconicArguments(), **{argument: True})


@pytest.mark.machine
@on_ranks(3)
def test_adapters_are_saved_resumed_and_reloaded(tmp_path: Path) -> None:
    """Train an adapter, resume it, and load its files in plain peft."""
    more = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    straight = trained("sft_lora", tmp_path / "straight", 3, LaconicArguments(), **more)
    resumed = trainers.make("sft_lora", str(tmp_path / "straight"), 3, LaconicArguments(), **more)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    assert_equal(full_parameters(resumed.model), full_parameters(straight.model))
    straight.save_model(str(tmp_path / "adapter"))
    dist.barrier()
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118
    plain, rows = PeftModel.from_pretrained(trainers.llama(), tmp_path / "adapter"), torch.arange(4, 24).view(2, 10)
    with torch.no_grad():
        trained_logits, own, base = (
            model.eval()(input_ids=rows).logits for model in (straight.model, plain, trainers.llama())
        )
    assert torch.equal(own, trained_logits)
    assert not torch.equal(own, base)
    shards = FileSystemReader(tmp_path / "straight" / "checkpoint-2" / "laconic" / "step-2")
    weights = [key for key in shards.read_metadata().state_dict_metadata if key.startswith("model.")]
    assert weights
    assert all("lora_" in key for key in weights)  # the frozen base is not in a checkpoint


def test_a_framework_that_makes_the_trainer_gets_its_class_with_options(tmp_path: Path) -> None:
    cls = laconic_trainer(Seq2SeqTrainer, LaconicArguments(cache="device", granularity="32 rows"))
    assert issubclass(cls, LaconicMixin)
    assert issubclass(cls, Seq2SeqTrainer)
    arguments = Seq2SeqTrainingArguments(**trainers.settings(str(tmp_path), 1))
    trainer: Any = cls(model=trainers.llama(), args=arguments, train_dataset=trainers.token_rows(4))
    assert trainer.laconic_arguments == LaconicArguments(cache="device", granularity="32 rows")
