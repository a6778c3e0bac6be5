"""laconic inside other trainers: the same numbers, how much of a script changes, and the speed on a slow wire.

    python -m benchmarks.clients                  all rows, some 15 minutes on 2 cores, recorded in RESULTS.md
    python -m benchmarks.clients --rows losses    some rows, recorded too
    python -m benchmarks.clients --quick          all rows on tiny jobs, printed only: does the method work?

Run rows with times (sft-lab) on a quiet machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.llama import Llama, decoder_layers, loss_of
from laconic.compare.runner import explain_failure
from laconic.lab import Lab, format_rate
from tests.support.launch import launch
from tests.support.measure import Benchmark, Options
from tests.support.record import Row

_LLAMA = Llama(
    hidden=512, intermediate=1408, layers=6, heads=8, kv_heads=4, vocab=258, batch=1, sequence=128,
)  # fmt: skip
_TINY_LLAMA = dataclasses.replace(_LLAMA, hidden=64, intermediate=96, layers=2, heads=2, kv_heads=1, sequence=32)
TIMEOUT_S = 900.0
"""The time limit of each launch of ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """The sizes of all jobs."""

    llama: Llama
    """The model that is fine-tuned in the lab."""
    lab_steps: int
    """The number of timed steps of each run in the lab."""
    pairs: int
    """The number of pairs of runs in the lab, on a slow wire and on an unshaped one."""
    steps: int
    """The number of steps whose losses are compared."""
    worlds: tuple[int, ...]
    """The numbers of ranks whose losses are compared."""
    out: Path


def _prepare(options: Options) -> Bench:
    if options.quick:
        return Bench(llama=_TINY_LLAMA, lab_steps=2, pairs=1, steps=4, worlds=(2,), out=options.out)
    return Bench(llama=_LLAMA, lab_steps=8, pairs=7, steps=30, worlds=(2, 4), out=options.out)


BENCHMARK = Benchmark(
    measures=("laconic.hf", "laconic.integrations", "laconic.shard"), name="clients", prepare=_prepare
)


_EXAMPLES = Path(__file__).parents[1] / "examples"
LIMITS = {"trainer.py": 3, "sft_lora.py": 3, "train_gpt.py": 8}
_MARK = re.compile(r"# (was: .*|new)$")


@BENCHMARK.row("lines")
def lines(bench: Bench) -> Row:
    counts = {"train_gpt.py": changed("train_gpt_ddp.py", "train_gpt.py")}
    counts |= {name: marked(name) for name in ("trainer.py", "sft_lora.py")}
    return Row(
        claim="lines changed in a Trainer script / an SFTTrainer + peft script / a DDP loop",
        required=" / ".join(f"<= {limit}" for limit in LIMITS.values()),
        measured=" / ".join(str(counts[name]) for name in LIMITS),
        is_met=all(counts[name] <= limit for name, limit in LIMITS.items()),
        note=(
            "examples/trainer.py and examples/sft_lora.py say in a comment where they differ from a stock script. "
            "examples/train_gpt.py is compared with train_gpt_ddp.py; a line that replaces another counts once, "
            "imports count, empty lines do not."
        ),
    )


def marked(name: str) -> int:
    """Return the number of lines that a comment marks as new or changed."""
    found = [line for line in (_EXAMPLES / name).read_text().splitlines() if _MARK.search(line)]
    if not found:
        raise RuntimeError(f"examples/{name} marks no line with '# was: ...' or '# new'")
    return len(found)


def changed(old: str, new: str) -> int:
    """Return the number of lines that differ between two examples, without their docstrings."""
    before, after = (_code(name) for name in (old, new))
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in codes if tag != "equal")


def _code(name: str) -> list[str]:
    text = re.sub(r'^""".*?"""\n', "", (_EXAMPLES / name).read_text(), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip()]


TOLERANCE = 1e-5
CLIENTS = {
    "Trainer": "trainer",
    "Trainer with accumulation": "accumulation",
    "SFT LoRA": "sft_lora",
    "DPO LoRA": "dpo_lora",
    "DPO with a reference model": "dpo",
    "Reward": "reward",
    "GRPO LoRA": "grpo_lora",
    "GRPO with a reference model": "grpo",
    "accelerate loop": "accelerate_jobs",
    "Lightning": "lightning_jobs",
}
"""The job of each client: a name of `trainers.JOBS`, or a module with a function `train`."""

Log = dict[str, list[float]]


@BENCHMARK.row("losses")
def losses(bench: Bench) -> Row:
    gaps, first, last = {}, {}, {}
    for client, job in CLIENTS.items():
        for world in bench.worlds:
            ddp, laconic = (_launch(job, strategy, bench.steps, world) for strategy in ("ddp", "laconic"))
            gaps[client, world] = largest_gap(ddp, laconic)
            first[client], last[client] = next(iter(laconic.values()))[0], next(iter(laconic.values()))[-1]
            print(f"{client}, {world} ranks: {gaps[client, world]:.1e}", flush=True)
    worst = max(gaps, key=lambda key: gaps[key])
    each = "; ".join(
        f"{client} {', '.join(f'{gaps[client, world]:.1e}' for world in bench.worlds)} "
        f"({first[client]:.4f} to {last[client]:.4f})"
        for client in CLIENTS
    )
    return Row(
        claim=(
            f"losses and gradient norms against DDP, {bench.steps} steps, "
            f"{' and '.join(map(str, bench.worlds))} ranks, fp32, largest difference"
        ),
        required=f"<= {TOLERANCE:.0e}",
        measured=f"{gaps[worst]:.1e} ({worst[0]}, {worst[1]} ranks)",
        is_met=gaps[worst] <= TOLERANCE,
        note=(
            f"largest absolute difference of any loss and any gradient norm, and laconic's first and last loss: "
            f"{each}. DDP adds the gradients of all ranks in another order, which rounds differently."
        ),
    )


def largest_gap(left: Log, right: Log) -> float:
    """Return the largest absolute difference between two logs, which have the same figures of the same steps."""
    pairs = [pair for key in left for pair in zip(left[key], right[key], strict=True)]
    return max(abs(x - y) for x, y in pairs)


def _launch(job: str, strategy: str, steps: int, world: int) -> Log:
    log: Log = launch(train, job, strategy, steps, num_ranks=world, timeout_s=TIMEOUT_S)[0]
    if any(len(figures) != steps for figures in log.values()):
        raise RuntimeError(f"{job} under {strategy} logged {log}, not {steps} steps")
    return log


def train(job: str, strategy: str, steps: int) -> Log:
    """Train a job on this rank, and return its log."""
    if job.endswith("_jobs"):
        return importlib.import_module(f"tests.support.{job}").train(strategy, steps)
    from laconic.integrations import LaconicArguments
    from tests.support import trainers

    with tempfile.TemporaryDirectory() as folder:
        return trainers.run(job, folder, steps, LaconicArguments() if strategy == "laconic" else None)


STEPS, CUT = 6, 3
RESUMED = ("Trainer", "SFT LoRA", "accelerate loop", "Lightning")


@BENCHMARK.row("resume")
def resume(bench: Bench) -> Row:
    outcomes = {}
    for client in RESUMED:
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
            f"{', '.join(RESUMED)}; {' and '.join(map(str, bench.worlds))} ranks, fp32. A run of {STEPS} steps against "
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


BASE_LIMIT = 0.32
_NODES, _LOCAL = 2, 2
_REAL = {
    "Llama 2 7B": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "Llama 3 8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip
"""The sizes of models that people fine-tune, for their shares of embeddings."""


@BENCHMARK.row("base")
def base(bench: Bench) -> Row:
    ranks = {"num_ranks": _NODES * _LOCAL, "num_local": _LOCAL, "timeout_s": TIMEOUT_S}
    plain, nf4 = (launch(resting_bytes, bench.llama, coded, **ranks) for coded in (False, True))
    ratios = {
        place: max(few[index] for few in nf4) / max(many[index] for many in plain)
        for index, place in enumerate(("device", "host", "wire"))
    }
    unsharded, sharded = (
        launch(lora_losses, bench.llama, is_sharded, bench.steps, **ranks)[0] for is_sharded in (False, True)
    )
    gap = max(abs(x - y) for x, y in zip(unsharded, sharded, strict=True))
    shares = [f"{name} {real_ratio(sizes, None):.3f}x, with the output layer {real_ratio(sizes, ()):.3f}x"
              for name, sizes in _REAL.items()]  # fmt: skip
    return Row(
        claim=(
            "frozen base in NF4 on 2 x 2: bytes on the device (cache=none) / on the host (cache=host) against bf16; "
            "losses against the same quantised base unsharded"
        ),
        required=f"<= {BASE_LIMIT}x; equal",
        measured=f"{ratios['device']:.3f}x / {ratios['host']:.3f}x; within {gap:.1e}",
        is_met=max(ratios["device"], ratios["host"]) <= BASE_LIMIT and gap <= TOLERANCE,
        note=(
            f"{bench.llama}; 4.25 bits a weight, embeddings, norms and the output layer in bf16; bytes at rest of the "
            f"rank that holds most. The base crosses the wire once, in {ratios['wire']:.3f}x the bytes, and never "
            f"again. Losses of {bench.steps} LoRA steps, {sharded[0]:.4f} to {sharded[-1]:.4f}, with DDP on whole "
            f"copies of the quantised base, which adds the gradients in another order. By their sizes: "
            f"{'; '.join(shares)}."
        ),
    )


def resting_bytes(shape: Llama, is_coded: bool) -> tuple[int, int, int]:
    """Return the bytes of a frozen base on this rank: device with cache=none, host with cache=host, and sent bytes."""
    found = []
    for cache in ("none", "host"):
        model: Any = shape.build(torch.device("cpu"), torch.bfloat16).requires_grad_(False)
        if is_coded:
            _quantize(model)
        _shard(model, cache)
        for _ in range(2):
            with torch.no_grad():
                loss_of(model, shape.tokens(torch.device("cpu"), seed=0))
        found.append((model.memory(), model.traffic.snapshot().total("node", "weights", "sent")))
    (on_device, _), (on_host, sent) = found
    return on_device.device_bytes, on_host.host_bytes, sent


def lora_losses(shape: Llama, is_sharded: bool, steps: int) -> list[float]:
    """Train LoRA adapters on a base in NF4, sharded or whole on every rank; return the losses of all ranks together."""
    import torch.distributed as dist

    model: Any = shape.build(torch.device("cpu"), torch.float32)
    _quantize(model)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"]))
    model = _shard(model, "host") if is_sharded else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    found = []
    for step in range(steps):
        loss = loss_of(
            model, shape.tokens(torch.device("cpu"), seed=dist.get_world_size() * (step % 4) + dist.get_rank())
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(float(mean) / dist.get_world_size())
    return found


def real_ratio(sizes: dict[str, int], skip: tuple[str, ...] | None) -> float:
    """Return the bytes of a Llama of these sizes with a base in NF4, as a share of its bytes in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import laconic

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).to(torch.bfloat16)
    in_bf16 = sum(parameter.nbytes for parameter in model.parameters())
    laconic.quantize_(model.requires_grad_(False), "nf4", skip=skip)
    return sum(parameter.nbytes for parameter in model.parameters()) / in_bf16


def _quantize(model: nn.Module) -> None:
    import laconic

    laconic.quantize_(model, "nf4")


def _shard(model: nn.Module, cache: Any) -> nn.Module:
    import laconic

    mesh = laconic.init_mesh("cpu")
    for module in (*decoder_layers(model), model):
        laconic.fully_shard(module, mesh=mesh, cache=cache)
    return model


RATE_BITS_PER_S = 100e6
"""The rate of the lab's links."""
LAB_LIMIT = 1.15
"""The largest ratio of laconic's step on this wire to its step on an unshaped wire."""


@BENCHMARK.row("sft-lab")
def sft_lab(bench: Bench) -> Row:
    pairs = [(_run(bench, "laconic", RATE_BITS_PER_S), _run(bench, "laconic", None)) for _ in range(bench.pairs)]
    ratios = sorted(shaped["step_s"] / unshaped["step_s"] for shaped, unshaped in pairs)
    ratio = statistics.median(ratios)
    peers = {name: (_run(bench, name, RATE_BITS_PER_S), _run(bench, name, None)) for name in ("fsdp2", "ddp")}
    step_s = statistics.median(shaped["step_s"] for shaped, _ in pairs)
    fsdp2, fsdp2_unshaped = peers["fsdp2"]
    each = "; ".join(
        f"{name} {shaped['step_s']:.3f} s and {shaped['sent_bytes'] / 1e6:.3f} MB, unshaped "
        f"{unshaped['step_s']:.3f} s, loss {shaped['loss']:.4f}"
        for name, (shaped, unshaped) in {**peers, "laconic, last pair,": pairs[-1]}.items()
    )
    return Row(
        claim=(
            f"LoRA by SFTTrainer on {_NODES} x {_LOCAL} at {format_rate(RATE_BITS_PER_S)}, seconds a step against the "
            "same on an unshaped wire; FSDP2 through accelerate beside it"
        ),
        required=f"<= {LAB_LIMIT:.2f}x",
        measured=(
            f"{ratio:.3f}x; FSDP2 {fsdp2['step_s'] / fsdp2_unshaped['step_s']:.1f}x; "
            f"laconic takes 1/{fsdp2['step_s'] / step_s:.0f} of FSDP2's step"
        ),
        is_met=ratio <= LAB_LIMIT,
        note=(
            f"{bench.llama}, fp32, adapters of rank 8 on q_proj and v_proj, 0.5 % of the weights. The median of "
            f"{bench.pairs} pairs of runs of {bench.lab_steps} steps, from {ratios[0]:.3f}x to {ratios[-1]:.3f}x; "
            f"{each}; bytes that a node sends in a step. FSDP2 has a true ring and gathers ahead. accelerate 1.15 "
            "trains by DDP on CPU, whatever FSDP settings it gets; the benchmark turns its FSDP2 on, as on a GPU."
        ),
        tried=(
            "1.198x by medians of 3 alternating runs of each strategy (0.748, 0.747 and 0.623 s against 0.665, 0.624 "
            "and 0.610 s), in which the machine's drift between the runs counts as the wire's."
        ),
    )


def _run(bench: Bench, strategy: str, rate_bits_per_s: float | None) -> dict[str, float]:
    job, answer = bench.out / "sft.json", bench.out / "sft-answer.json"
    job.write_text(json.dumps({"llama": dataclasses.asdict(bench.llama), "steps": bench.lab_steps}))
    with Lab(nodes=_NODES, rate_bits_per_s=rate_bits_per_s) as lab:
        command = ["-m", "benchmarks.sft_rank", strategy, str(job), str(answer)]
        outcome = lab.run(command, local=_LOCAL, timeout_s=TIMEOUT_S, show=False)
    if outcome.exit_code:
        raise RuntimeError(f"{strategy} failed: {explain_failure(outcome)}")
    found: dict[str, float] = json.loads(answer.read_text())
    print(f"{strategy}, {format_rate(rate_bits_per_s)}: {found}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
