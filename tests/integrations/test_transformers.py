"""transformers' Trainer with laconic: DDP's numbers, checkpoints to the bit, files that plain transformers reads."""

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
from safetensors.torch import load_file
from transformers import HfArgumentParser, LlamaForCausalLM, TrainerCallback, TrainingArguments

import laconic
from laconic.integrations import LaconicArguments
from laconic.integrations.options import ArgumentError
from laconic.integrations.trained_state import FILES, incomplete
from laconic.integrations.transformers import LaconicTrainer
from tests.support import trainers
from tests.support.flips import flipping_in_gradients
from tests.support.launch import run_ranks

pytestmark = pytest.mark.machine

STEPS = 3


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: laconic_whole(p).detach().clone() for name, p in model.named_parameters()}


def laconic_whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, laconic.RaggedTensor) else tensor


def is_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def gap(left: dict[str, list[float]], right: dict[str, list[float]]) -> float:
    assert left.keys() == right.keys()
    return max(abs(x - y) for key in left for x, y in zip(left[key], right[key], strict=True))


def eval_losses(trainer: Any) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def train_with_checkpoints(folder: Path) -> dict[str, Any]:
    """The whole life of a run: evaluation, checkpoints, the best model, a cut, a resumption, and export."""
    more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    more |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "lr_scheduler_type": "cosine"}
    more["greater_is_better"] = True  # so that the best model is not the last one
    stock = trainers.make("accumulation", str(folder / "ddp"), STEPS, **more)
    stock.train()
    found: dict[str, Any] = {}
    straight = trainers.make("accumulation", str(folder / "straight"), STEPS, LaconicArguments(cache="device"), **more)
    found["is_sharded"] = isinstance(straight.model, laconic.ShardedModule)
    found["units"] = sum(isinstance(module, laconic.ShardedModule) for module in straight.model.modules())
    straight.train()
    found["gap"] = gap(trainers.log(stock), trainers.log(straight))
    found["eval_gap"] = max(abs(x - y) for x, y in zip(eval_losses(stock), eval_losses(straight), strict=True))
    found["best_step"] = straight.state.best_global_step
    found["best"] = straight.state.best_model_checkpoint == stock.state.best_model_checkpoint.replace("ddp", "straight")
    found["best_gap"] = max(
        float((left - right).abs().max())
        for left, right in zip(whole(straight.model).values(), whole(stock.model).values(), strict=True)
    )

    found["reloaded"] = reloads(straight, folder / "exported")

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
    more["load_best_model_at_end"] = False
    more["save_total_limit"] = 2
    resumed = trainers.make("accumulation", str(folder / "resumed"), STEPS, LaconicArguments(), **more)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.train(resume_from_checkpoint=True)
    found["skipped"] = [str(each.message) for each in caught if "not complete" in str(each.message)]
    found["kept"] = [path.name for path in sorted((folder / "resumed").glob("checkpoint-*"))]
    found["damage"] = incomplete(folder / "resumed" / f"checkpoint-{STEPS}")
    end = load_file(folder / "straight" / f"checkpoint-{STEPS}" / "model.safetensors")
    found["resumed_equal"] = is_equal({name: value for name, value in whole(resumed.model).items() if name in end}, end)
    found["resumed_log"] = trainers.log(resumed) == trainers.log(straight)
    found["cut"] = refusal(lambda: resumed.train(resume_from_checkpoint=str(folder / "ddp" / "checkpoint-1")))
    return found


def reloads(trainer: Any, folder: Path) -> bool:
    """Whether plain transformers reads the model that `save_model` wrote, with equal outputs."""
    trainer.save_model(str(folder))
    dist.barrier()
    plain = LlamaForCausalLM.from_pretrained(folder)
    rows = torch.arange(4, 24).view(2, 10)
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=rows).logits
        expected = plain.eval()(input_ids=rows).logits
        tokens = trainer.model.generate(rows, max_new_tokens=3, do_sample=False)
        expected_tokens = plain.generate(rows, max_new_tokens=3, do_sample=False)
    config = json.loads((folder / "config.json").read_text())
    return (
        torch.equal(logits, expected)
        and torch.equal(tokens, expected_tokens)
        and config["architectures"] == ["LlamaForCausalLM"]
    )


def refusal(action: Any) -> str:
    try:
        action()
    except (ValueError, laconic.CorruptionError) as error:
        return str(error)
    return "nothing was refused"


def variants(folder: Path) -> dict[str, Any]:
    """Settings that change the forward or the backward, each against DDP."""
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}  # kernels would take a minute to build
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [  # for DDP, and in addition for laconic
        ({"label_smoothing_factor": 0.1}, {}),
        ({"neftune_noise_alpha": 0.5, "optim": "adafactor"}, {"gradient_checkpointing": True}),
        ({"optim": "sgd", "max_grad_norm": 0.0}, compiled),
        ({"bf16": True}, {}),
    ]
    audited = LaconicArguments(audit_every=2)
    found = {}
    for more, added in cases:
        stock = trainers.run("trainer", str(folder / "ddp"), 2, **more)
        own = trainers.run("trainer", str(folder / "own"), 2, audited, **more, **added)
        found[next(iter(more))] = gap(stock, own)
    return found


def islands(folder: Path) -> dict[str, Any]:
    """Two islands of one rank each, which sync after every second step."""
    more = {"save_strategy": "steps", "save_steps": 3}
    arguments = LaconicArguments(local_steps=2, islands=2)
    trainer = trainers.make("trainer", str(folder), 5, arguments, **more)
    trainer.train()
    after = whole(trainer.model)
    resumed = trainers.make("trainer", str(folder), 5, arguments, **more)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    norm = sum(float(value.norm()) for value in after.values())
    with trainer._shared_parameters():
        outer = sum(float(value.norm()) for value in whole(trainer.model).values())
    return {
        "inner": norm,
        "outer": outer,
        "eval": trainer.evaluate()["eval_loss"],
        "resumed_equal": is_equal(whole(resumed.model), after),
        "syncs": trainer._local_steps.steps,
    }


def refusals(folder: Path) -> dict[str, str]:
    def make(laconic_arguments: LaconicArguments | None = None, **more: Any) -> Any:
        return lambda: trainers.make("trainer", str(folder), 1, laconic_arguments or LaconicArguments(), **more)

    def stock_arguments_with(**values: Any) -> LaconicTrainer:
        given = TrainingArguments(**trainers.settings(str(folder), 1))
        for name, value in values.items():  # their own checks need other packages, or set environment variables
            setattr(given, name, value)
        return LaconicTrainer(model=trainers.llama(), args=given, train_dataset=trainers.token_rows(8))

    model = trainers.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = TrainingArguments(**trainers.settings(str(folder), 1))
    rows = trainers.token_rows(8)
    return {
        "auto_find_batch_size": refusal(make(auto_find_batch_size=True)),
        "fsdp": refusal(lambda: stock_arguments_with(fsdp=True)),
        "deepspeed": refusal(lambda: stock_arguments_with(deepspeed="zero3.json")),
        "parallelism_config": refusal(lambda: stock_arguments_with(parallelism_config="cp")),
        "save_on_each_node": refusal(lambda: stock_arguments_with(save_on_each_node=True)),
        "best island": refusal(
            make(
                LaconicArguments(local_steps=2), load_best_model_at_end=True, eval_strategy="steps",
                save_strategy="steps", save_steps=1, eval_steps=1,
            )
        ),
        "optim": refusal(make(optim="adamw_bnb_8bit")),
        "even_batches": refusal(make(accelerator_config={"even_batches": False})),
        "save_only_model": refusal(
            make(
                save_only_model=True, load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps",
                save_steps=1, eval_steps=1,
            )
        ),
        "optimizers": refusal(
            lambda: LaconicTrainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None))
        ),
        "units": refusal(make(LaconicArguments(units=["NoSuchLayer"]))),
        "islands": refusal(make(LaconicArguments(local_steps=2, islands=3))),
        "audit": refusal(make(LaconicArguments(local_steps=2, audit_every=3))),
    }  # fmt: skip


def model_init(folder: Path) -> bool:
    """Train twice from `model_init`; both runs shard a new model."""
    arguments = TrainingArguments(**trainers.settings(str(folder), 2))
    trainer = LaconicTrainer(model_init=lambda: trainers.llama(), args=arguments, train_dataset=trainers.token_rows(16))
    ends = []
    for _ in range(2):
        trainer.train()
        ends.append(whole(trainer.model))
    return isinstance(trainer.model, laconic.ShardedModule) and is_equal(*ends)


def traffic(folder: Path) -> list[int]:
    """The bytes on the wire of two optimizer steps with one micro-batch, and with three."""
    sent = []
    for job in ("trainer", "accumulation"):
        trainer = trainers.make(job, str(folder), 2, LaconicArguments())
        before = trainer.model.traffic.snapshot()
        trainer.train()
        sent.append((trainer.model.traffic.snapshot() - before).wire())
    return sent


def audits(folder: Path) -> dict[str, Any]:
    """The steps whose first micro-batch is audited, and what an audit says of a device that computes wrongly."""
    audit, steps = laconic.audit, []
    with pytest.MonkeyPatch.context() as patch:
        trainer = trainers.make("accumulation", str(folder), 4, LaconicArguments(audit_every=3))
        patch.setattr(laconic, "audit", lambda *args: (steps.append(trainer.state.global_step), audit(*args)))
        trainer.train()
    injured = trainers.make("trainer", str(folder), 1, LaconicArguments(audit_every=1))
    with flipping_in_gradients(0, bit=3, seed=0):
        damage = refusal(injured.train)
    pairs = trainers.make("trainer", str(folder), 1, LaconicArguments(audit_every=1))
    pairs.data_collator = lambda rows: {"prompts": [row["input_ids"] for row in rows]}
    return {"steps": steps, "damage": damage, "other batches": refusal(pairs.train)}


PARTS = (train_with_checkpoints, variants, islands, refusals, model_init, traffic, audits)


def whole_life(folder: Path) -> dict[str, Any]:
    return {part.__name__: part(folder / part.__name__) for part in PARTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(whole_life, 2, folder, local=1)


def test_a_run_equals_ddp_and_its_files_load(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        run = result["train_with_checkpoints"]
        assert run["is_sharded"]
        assert run["units"] == 3  # two layers and the root
        assert run["gap"] < 1e-5
        assert run["eval_gap"] < 1e-5
        assert run["best"]
        assert run["best_step"] == 1
        assert run["best_gap"] < 1e-5
        assert run["reloaded"]
        assert run["resumed_equal"]
        assert run["resumed_log"]
        assert "another trainer wrote it" in run["cut"]
        skipped = " ".join(run["skipped"])
        problem = "trainer_state.json does not have the contents that were written"
        assert (problem in skipped and FILES in skipped) == (rank == 0)
        assert run["kept"] == ["checkpoint-1", f"checkpoint-{STEPS}"]  # the best one and the last
        assert run["damage"] == ""


def test_settings_equal_ddp(results: list[dict[str, Any]]) -> None:
    for result in results:
        gaps = result["variants"]
        assert gaps.pop("bf16") < 0.05  # weights are rounded before the gather, and not only in the products
        assert max(gaps.values()) < 1e-5
        assert set(gaps) == {"label_smoothing_factor", "neftune_noise_alpha", "optim"}


def test_islands_evaluate_what_they_share_and_resume_to_the_bit(results: list[dict[str, Any]]) -> None:
    first, second = (result["islands"] for result in results)
    assert first["inner"] != second["inner"]  # each has taken a step of its own since the last sync
    assert first["outer"] == second["outer"] != first["inner"]
    assert first["eval"] == second["eval"]
    assert first["syncs"] == 5
    assert first["resumed_equal"]
    assert second["resumed_equal"]


def test_accumulation_sends_gradients_once(results: list[dict[str, Any]]) -> None:
    for result in results:
        one, three = result["traffic"]
        assert one == three > 0


def test_audits_repeat_a_neighbours_batch(results: list[dict[str, Any]]) -> None:
    for result in results:
        found = result["audits"]
        assert found["steps"] == [0, 3]
        assert "computed different bits from the same batch" in found["damage"]
        assert "use check_every" in found["other batches"]


def test_models_of_model_init_are_sharded(results: list[dict[str, Any]]) -> None:
    assert all(result["model_init"] for result in results)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("fsdp", "leave it out"),
        ("deepspeed", "leave it out"),
        ("parallelism_config", "leave it out"),
        ("save_on_each_node", "output_dir that all nodes share"),
        ("best island", "leave it out"),
        ("auto_find_batch_size", "set per_device_train_batch_size"),
        ("optim", "optimizer_cls_and_kwargs"),
        ("even_batches", "leave it True"),
        ("save_only_model", "set one of them"),
        ("optimizers", "optimizer_cls_and_kwargs"),
        ("units", "LlamaDecoderLayer"),
        ("islands", "use a divisor"),
        ("audit", "use fewer islands"),
    ],
)
def test_refusals_name_the_remedy(results: list[dict[str, Any]], name: str, remedy: str) -> None:
    assert all(remedy in result["refusals"][name] for result in results)


def test_one_process_trains_as_trainer_does(tmp_path: Path) -> None:
    stock = trainers.run("trainer", str(tmp_path / "stock"), 2)
    more = {"save_strategy": "steps", "save_steps": 1}
    trainer = trainers.make("trainer", str(tmp_path / "own"), 2, LaconicArguments(), **more)
    trainer.train()
    assert trainers.log(trainer) == stock
    assert not isinstance(trainer.model, laconic.ShardedModule)
    shutil.rmtree(tmp_path / "own" / "checkpoint-2")
    resumed = trainers.make("trainer", str(tmp_path / "own"), 2, LaconicArguments(), **more)
    resumed.train(resume_from_checkpoint=True)
    assert is_equal(whole(resumed.model), whole(trainer.model))


def test_one_process_goes_on_from_two_ranks(results: list[dict[str, Any]], folder: Path) -> None:
    checkpoint = folder / "train_with_checkpoints" / "straight" / f"checkpoint-{STEPS - 1}"
    trainer = trainers.make("accumulation", str(folder / "one"), STEPS, LaconicArguments())
    begun: dict[str, torch.Tensor] = {}

    class Look(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            begun.update(whole(trainer.model))

    trainer.add_callback(Look)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    saved = load_file(checkpoint / "model.safetensors")
    assert is_equal({name: begun[name] for name in saved}, saved)
    states = trainer.optimizer.state.values()
    assert all(state["step"] == STEPS for state in states)


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
        ({"param_dtype": "int8"}, "param_dtype='int8' is not known"),
        ({"device_budget_bytes": 5, "cache": "none"}, "needs cache='host'"),
        ({"wire": "5bit"}, "wire='5bit' is not known"),
        ({"wire": "4bit", "cache": "none"}, "but cache='none' keeps none; use cache='host' or 'device'"),
        ({"local_steps": -1}, "local_steps=-1 must be an integer of at least 0"),
        ({"islands": 2}, "needs local_steps"),
        ({"check_every": 1.5}, "check_every=1.5 must be an integer"),
        ({"on_damage": "regather"}, "set check_every too"),
        ({"units": "LlamaDecoderLayer"}, "must be a list of class names"),
        ({"granularity": "32 columns"}, "'32 columns' is not a block"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        LaconicArguments(**given)
