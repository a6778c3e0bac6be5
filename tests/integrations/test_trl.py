"""TRL's trainers with laconic: DDP's numbers on three ranks, adapters in peft's format, resumption to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader

import laconic
from laconic.integrations import LaconicArguments
from laconic.integrations.options import ArgumentError
from tests.integrations.test_transformers import gap, is_equal, whole
from tests.support import trainers
from tests.support.launch import run_ranks

pytestmark = pytest.mark.machine

JOBS = ("sft_lora", "dpo_lora", "dpo", "reward", "grpo_lora", "grpo")
REFUSED = {"use_vllm": "publish the weights", "use_transformers_continuous_batching": "rollout_func="}


def train_all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for job in JOBS:
        stock = trainers.run(job, str(folder / "ddp"), 2)
        trainer = trainers.make(job, str(folder / "own"), 2, LaconicArguments())
        trainer.train()
        models = [trainer.model, *([trainer.ref_model] if job in ("dpo", "grpo") else [])]
        are_sharded = all(isinstance(model, laconic.ShardedModule) for model in models)
        found[job] = {"gap": gap(stock, trainers.log(trainer)), "are_sharded": are_sharded}
    found["adapter"] = adapter_files(folder)
    found["refusals"] = {name: refusal(folder, name) for name in REFUSED}
    return found


def refusal(folder: Path, argument: str) -> str:
    with pytest.raises(ArgumentError) as error:
        trainers.make("grpo_lora", str(folder / "refused"), 1, LaconicArguments(), **{argument: True})
    return str(error.value)


def adapter_files(folder: Path) -> dict[str, Any]:
    """Train an adapter, resume it, and load its files in plain peft."""
    more = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    straight = trainers.make("sft_lora", str(folder / "straight"), 3, LaconicArguments(), **more)
    straight.train()
    resumed = trainers.make("sft_lora", str(folder / "straight"), 3, LaconicArguments(), **more)
    resumed.train(resume_from_checkpoint=str(folder / "straight" / "checkpoint-2"))
    straight.save_model(str(folder / "adapter"))
    dist.barrier()
    with safe_open(folder / "adapter" / "adapter_model.safetensors", "pt") as file:
        names = list(file.keys())
    plain = PeftModel.from_pretrained(trainers.llama(), folder / "adapter").eval()
    straight.model.eval()
    rows = torch.arange(4, 24).view(2, 10)
    with torch.no_grad():
        outputs = [model(input_ids=rows).logits for model in (straight.model, plain)]
        base = trainers.llama().eval()(input_ids=rows).logits
    shards = folder / "straight" / "checkpoint-2" / "laconic" / "step-2"
    return {
        "resumed_equal": is_equal(whole(resumed.model), whole(straight.model)),
        "only_adapters": all("lora_" in name for name in names),
        "outputs_equal": torch.equal(*outputs),
        "has_learnt": not torch.equal(outputs[1], base),
        "weights": [
            key for key in FileSystemReader(shards).read_metadata().state_dict_metadata if key.startswith("model.")
        ],
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(train_all, 3, tmp_path_factory.mktemp("trl"))


@pytest.mark.parametrize("job", JOBS)
def test_trains_as_under_ddp(results: list[dict[str, Any]], job: str) -> None:
    for result in results:
        assert result[job]["are_sharded"]
        assert result[job]["gap"] < 1e-5


def test_adapters_are_saved_resumed_and_reloaded(results: list[dict[str, Any]]) -> None:
    for result in results:
        adapter = result["adapter"]
        assert adapter["resumed_equal"]
        assert adapter["only_adapters"]
        assert adapter["outputs_equal"]
        assert adapter["has_learnt"]
        assert adapter["weights"]
        assert all("lora_" in key for key in adapter["weights"])  # the frozen base is not in a checkpoint


@pytest.mark.parametrize("argument", REFUSED)
def test_other_ways_to_generate_are_refused(results: list[dict[str, Any]], argument: str) -> None:
    for result in results:
        message = result["refusals"][argument]
        assert message.startswith(f"{argument}=True does not work with a sharded model: ")
        assert REFUSED[argument] in message
