"""transformers' Trainer with laconic: DDP's numbers, checkpoints to the bit, files that plain transformers reads."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import HfArgumentParser, LlamaForCausalLM, TrainingArguments

import laconic
from benchmarks.clients import trainers
from laconic.integrations import LaconicArguments, shard_model
from laconic.integrations.options import ArgumentError
from laconic.integrations.trained_state import FILES, incomplete
from laconic.integrations.transformers import LaconicTrainer
from tests.ranks import run_ranks

STEPS = 4


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
    stock = trainers.make("accumulation", str(folder / "ddp"), STEPS, **more)
    stock.train()
    found: dict[str, Any] = {}
    straight = trainers.make("accumulation", str(folder / "straight"), STEPS, LaconicArguments(cache="device"), **more)
    found["is_sharded"] = isinstance(straight.model, laconic.ShardedModule)
    found["units"] = sum(isinstance(module, laconic.ShardedModule) for module in straight.model.modules())
    straight.train()
    found["gap"] = gap(trainers.log(stock), trainers.log(straight))
    found["eval_gap"] = max(abs(x - y) for x, y in zip(eval_losses(stock), eval_losses(straight), strict=True))
    found["best"] = straight.state.best_model_checkpoint == stock.state.best_model_checkpoint.replace("ddp", "straight")
    found["best_gap"] = max(
        float((left - right).abs().max())
        for left, right in zip(whole(straight.model).values(), whole(stock.model).values(), strict=True)
    )

    found["reloaded"] = reloads(straight, folder / "exported")

    # The run is cut while it writes its third checkpoint, and another kill left a folder with nothing but weights.
    more["load_best_model_at_end"] = False
    last = trainers.make("accumulation", str(folder / "last"), STEPS, LaconicArguments(), **more)
    last.train()
    expected = whole(last.model)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(folder / "last", folder / "resumed")
        (folder / "resumed" / f"checkpoint-{STEPS}" / "scheduler.pt").write_bytes(b"")
        (folder / "resumed" / f"checkpoint-{STEPS - 1}" / FILES).unlink()
    dist.barrier()
    resumed = trainers.make("accumulation", str(folder / "resumed"), STEPS, LaconicArguments(), **more)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.train(resume_from_checkpoint=True)
    found["skipped"] = [str(each.message) for each in caught if "not complete" in str(each.message)]
    found["resumed_equal"] = is_equal(whole(resumed.model), expected)
    found["resumed_log"] = trainers.log(resumed) == trainers.log(last)
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
    except (ArgumentError, ValueError) as error:
        return str(error)
    return "nothing was refused"


def variants(folder: Path) -> dict[str, Any]:
    """Settings that change the forward or the backward, each against DDP."""
    found = {}
    cases: dict[str, dict[str, Any]] = {
        "label smoothing": {"label_smoothing_factor": 0.1},
        "checkpointing": {"gradient_checkpointing": True},
        "bf16": {"bf16": True},
        "sgd": {"optim": "sgd", "max_grad_norm": 0.0},
        "neftune": {"neftune_noise_alpha": 0.5},
    }
    for name, more in cases.items():
        stock = trainers.run("trainer", str(folder / "ddp"), 2, **more)
        found[name] = gap(stock, trainers.run("trainer", str(folder / "own"), 2, LaconicArguments(), **more))
    return found


def islands(folder: Path) -> dict[str, Any]:
    """Two islands of one rank each, which sync after every second step."""
    more = {"save_strategy": "steps", "save_steps": 3}
    arguments = LaconicArguments(local_steps=2, islands=2)
    trainer = trainers.make("trainer", str(folder), STEPS + 1, arguments, **more)
    trainer.train()
    after = whole(trainer.model)
    resumed = trainers.make("trainer", str(folder), STEPS + 1, arguments, **more)
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

    model = trainers.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments = TrainingArguments(**trainers.settings(str(folder), 1))
    rows = trainers.token_rows(8)
    return {
        "auto_find_batch_size": refusal(make(auto_find_batch_size=True)),
        "optim": refusal(make(optim="adafactor")),
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
        "layers": refusal(lambda: shard_model(torch.nn.Linear(3, 3))),
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


def job(folder: Path) -> dict[str, Any]:
    import time

    t0 = time.time()
    out = {}
    for fn in (train_with_checkpoints, variants, islands, refusals, model_init):
        t = time.time()
        out[fn.__name__] = fn(folder / fn.__name__)
        if dist.get_rank() == 0:
            print(fn.__name__, time.time() - t, flush=True)
    return out


def test_trainer(tmp_path: Path) -> None:
    results = run_ranks(job, 2, tmp_path, local=1)
    import pprint

    pprint.pprint(results)
    assert 0
