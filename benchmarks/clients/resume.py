"""The row about nothing lost: a run that is cut and resumed, and its weights in plain transformers, peft and torch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.clients.bench import BENCHMARK, TIMEOUT_S, Bench
from tests.support.launch import launch
from tests.support.record import Row

STEPS, CUT = 6, 3
CLIENTS = ("Trainer", "SFT LoRA", "accelerate loop", "Lightning")


@BENCHMARK.row("resume")
def resume(bench: Bench) -> Row:
    outcomes = {}
    for client in CLIENTS:
        for world in bench.worlds:
            with tempfile.TemporaryDirectory() as folder:
                found = launch(check, client, folder, num_ranks=world, timeout_s=TIMEOUT_S)
            outcomes[client, world] = [all(flags) for flags in zip(*found, strict=True)]
            print(f"{client}, {world} ranks: resumed equal, reloaded equal: {outcomes[client, world]}", flush=True)
    failed = [f"{client} on {world} ranks" for (client, world), flags in outcomes.items() if not all(flags)]
    return Row(
        claim="save, resume, reload in plain transformers / peft / torch",
        required="equal to the bit / outputs equal",
        measured=f"not equal: {', '.join(failed)}" if failed else "equal to the bit / equal to the bit",
        is_met=not failed,
        note=(
            f"{', '.join(CLIENTS)}; {' and '.join(map(str, bench.worlds))} ranks, fp32. A run of {STEPS} steps against "
            f"one that begins at the checkpoint of step {CUT} (Lightning: 2): all losses, gradient norms and weights. "
            "The saved model is read without laconic, and its outputs are compared with those of the sharded one."
        ),
    )


def check(client: str, folder: str) -> tuple[bool, bool]:
    """Whether a resumed run ends with equal bits, and whether the saved model gives equal outputs. On every rank."""
    checks = {"accelerate loop": _accelerate, "Lightning": _lightning}
    if client in checks:
        return checks[client](Path(folder))
    return _trainer({"Trainer": "trainer", "SFT LoRA": "sft_lora"}[client], Path(folder))


def _trainer(job: str, folder: Path) -> tuple[bool, bool]:
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    from laconic.integrations import LaconicArguments
    from tests.support import trainers

    more = {"save_strategy": "steps", "save_steps": CUT}
    straight = trainers.make(job, str(folder / "run"), STEPS, LaconicArguments(), **more)
    straight.train()
    resumed = trainers.make(job, str(folder / "run"), STEPS, LaconicArguments(), **more)
    resumed.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{CUT}"))
    is_resumed = trainers.log(straight) == trainers.log(resumed) and _same(
        _whole(straight.model), _whole(resumed.model)
    )

    straight.save_model(str(folder / "saved"))
    dist.barrier()
    if job == "trainer":
        plain = LlamaForCausalLM.from_pretrained(folder / "saved")
    else:
        plain = PeftModel.from_pretrained(trainers.llama(), folder / "saved")
    rows = torch.arange(4, 44).view(4, 10)
    straight.model.eval()
    with torch.no_grad():
        is_reloaded = torch.equal(straight.model(input_ids=rows).logits, plain.eval()(input_ids=rows).logits)
    return is_resumed, is_reloaded


def _accelerate(folder: Path) -> tuple[bool, bool]:
    from safetensors.torch import load_file

    from tests.support.accelerate_jobs import Loop
    from tests.support.language_model import make_model, make_rows

    straight = Loop("laconic")
    straight.run(CUT)
    straight.accelerator.save_state(str(folder / "state"))
    after = straight.run(STEPS - CUT)
    resumed = Loop("laconic")
    resumed.accelerator.load_state(str(folder / "state"))
    log = {key: figures[CUT:] for key, figures in after.items()}
    is_resumed = resumed.run(STEPS - CUT) == log and _same(_whole(straight.model), _whole(resumed.model))

    straight.accelerator.save_model(straight.model, str(folder / "saved"))
    straight.accelerator.wait_for_everyone()
    plain = make_model(seed=1)
    plain.load_state_dict(load_file(folder / "saved" / "model.safetensors"), strict=False)  # a tied name is left out
    with torch.no_grad():
        return is_resumed, torch.equal(plain(make_rows(4)), straight.model(make_rows(4)))


def _lightning(folder: Path) -> tuple[bool, bool]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from laconic.integrations.lightning import LaconicStrategy
    from tests.support import lightning_jobs as jobs
    from tests.support.language_model import make_rows

    def fit(strategy: LaconicStrategy, start: Path | None = None, **settings: Any) -> tuple[Any, Any]:
        trainer = jobs.make_trainer(strategy, STEPS, use_distributed_sampler=False, **settings)
        module = jobs.LightningModel()
        loaders = (jobs.loader(seed=dist.get_rank() + shift, rows=12) for shift in (0, 9))
        trainer.fit(module, *loaders, ckpt_path=start)  # epochs of two steps
        return trainer, module

    def saving(folder: Path) -> dict[str, Any]:
        # By a monitored figure: checkpoints at the end of an epoch make Lightning repeat a batch, under DDP too.
        saver = ModelCheckpoint(folder, filename="{step}", monitor="val_loss", save_top_k=-1)
        return {"callbacks": [saver], "enable_checkpointing": True}

    straight, module = fit(LaconicStrategy(), **saving(folder))
    resumed, resumed_module = fit(LaconicStrategy(), folder / "step=2.ckpt")
    log = {key: figures[2:] for key, figures in jobs.records(straight).items()}
    is_resumed = jobs.records(resumed) == log and _same(_whole(module), _whole(resumed_module))

    fit(LaconicStrategy(save_distributed_checkpoint=False), **saving(folder / "whole"))
    plain = jobs.LightningModel.load_from_checkpoint(folder / "whole" / f"step={STEPS}.ckpt", weights_only=False)
    with torch.no_grad():
        return is_resumed, torch.equal(plain.model(make_rows(4)), module.model(make_rows(4)))


def _whole(model: Any) -> dict[str, Tensor]:
    from laconic import RaggedTensor

    return {
        name: (p.full_tensor() if isinstance(p, RaggedTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
