"""The sections of a job description, each a frozen dataclass that refuses by itself what makes no sense."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from laconic.errors import JobError
from laconic.islands.fragments import SyncSchedule

Dtype = Literal["float32", "bfloat16", "float16"]
Strategy = Literal["laconic", "fsdp2", "fsdp2-hpz", "hsdp", "ddp"]


class ConfigError(JobError):
    """The configuration is wrong; the message says which key and what it should be."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is held."""

    config: dict[str, Any] | str | None = None
    """A transformers configuration: an inline table whose `model_type` picks the class, or the path of a `config.json`.
    The weights are then drawn at random from `init_seed`. A table without `vocab_size` gets the tokenizer's."""
    path: str | None = None
    """A local folder with `config.json` and safetensors weights; each rank reads only its own part."""
    dtype: Dtype = "float32"
    """The type parameters and optimizer states are kept in."""
    init_seed: int = 0
    """Seed of the random initialisation (`config`, and LoRA adapters)."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in backward: less memory, one more forward."""

    def __post_init__(self) -> None:
        _require(
            self.config is None or self.path is None,
            "model.config and model.path are both set: `config` starts from random weights, `path` from a folder's; "
            "keep one",
        )
        if isinstance(self.config, dict):
            _require(
                "model_type" in self.config,
                f"model.config has no `model_type` (keys: {', '.join(sorted(self.config)) or 'none'}); "
                "it picks the transformers class, for example model_type = 'llama'",
            )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters by peft: the model's own weights are frozen."""

    enabled: bool = False
    """Freeze the model and train adapters only."""
    rank: int = 8
    """Rank of each adapter."""
    alpha: float = 16.0
    """Scale: an adapter's output is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout on the adapters' input."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter, for example "q_proj"; empty: all but the output layer."""

    def __post_init__(self) -> None:
        _require(self.rank >= 1, f"lora.rank = {self.rank} must be at least 1")
        _require(0 <= self.dropout < 1, f"lora.dropout = {self.dropout} must lie in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    kind: Literal["text", "jsonl", "datasets", "python-stdlib"] = "python-stdlib"
    """`text`: a file or a folder of text files; `jsonl`: one JSON object a line; `datasets`: a folder written by
    Hugging Face `save_to_disk`; `python-stdlib`: the running Python's own library sources, which need no download."""
    path: str | None = None
    """The file or folder; not used by `python-stdlib`."""
    text_field: str = "text"
    """The field that holds the text, for `jsonl` and `datasets`."""
    tokenizer: str = "bytes"
    """`bytes` (256 tokens, no file needed) or a local folder with a Hugging Face tokenizer."""
    sequence_length: int = 256
    """Tokens per row of a batch."""
    eval_fraction: float = 0.02
    """Share of the documents held out for evaluation (of the tokens, where there are too few documents)."""
    seed: int = 0
    """Seed of the sampler: which rows each step sees is a function of (seed, step) alone."""
    cache: str | None = None
    """Folder for the tokenised corpus, made once per node; default: `tokens` in the output folder."""

    def __post_init__(self) -> None:
        _require(self.sequence_length >= 2, f"data.sequence_length = {self.sequence_length} must be at least 2")
        _require(0 <= self.eval_fraction < 1, f"data.eval_fraction = {self.eval_fraction} must lie in [0, 1)")
        _require(
            self.kind == "python-stdlib" or self.path is not None,
            f"data.kind = {self.kind!r} needs data.path, the file or folder to read",
        )
        _require(
            self.kind != "python-stdlib" or self.path is None,
            f"data.path = {self.path!r} is not used by data.kind = 'python-stdlib'; "
            "set data.kind to 'text', 'jsonl' or 'datasets'",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: Literal["adamw", "adamw8bit", "muon", "shampoo"] = "adamw"
    """`adamw8bit` keeps AdamW's moments in 8 bits; `muon` and `shampoo` take the matrices of hidden layers, and AdamW
    the rest (embeddings, output layer, norms, biases). All but `adamw` need shard.strategy `laconic` or `ddp`."""
    lr: float = 3e-4
    """Peak learning rate."""
    adamw_lr: float | None = None
    """With `muon` and `shampoo`: peak learning rate of the rest; default: lr."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    momentum: float = 0.95
    """Of `muon`."""
    nesterov: bool = True
    """Of `muon`: Nesterov's momentum."""
    ns_steps: int = 5
    """Of `muon`: Newton-Schulz iterations."""
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = None
    """Of `muon`: how a matrix's shape changes its learning rate; default: `original`. With `match_rms_adamw`, learning
    rates tuned for AdamW fit."""
    update_every: int = 10
    """Of `shampoo`: steps between two computations of the preconditioners."""
    block_size: int = 1024
    """Of `shampoo`: longest side of a preconditioned block."""
    grafting: Literal["adam", "rmsprop", "sgd", "none"] = "adam"
    """Of `shampoo`: the rule whose step length is used."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; parameters of fewer than two dimensions (norms, biases) are never decayed."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm, that of each island, to this; 0 only measures it. The cyclic schedule can clip
    under the rules `clip`, `v1` and `dp` alone, and does not measure it."""
    lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: `cosine` falls to lr * min_lr_ratio, `wsd` stays and falls linearly at the end, `constant`."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    decay_steps: int | None = None
    """Length of the decay. Default: all steps after the warm-up for `cosine` (which starts it right after the warm-up),
    a fifth of all steps for `wsd` (which ends it with the last step)."""
    min_lr_ratio: float = 0.1
    """The decay ends at lr * min_lr_ratio."""
    fused: bool = True
    """Use torch's fused AdamW, on CPU too; false: one tensor at a time."""

    def __post_init__(self) -> None:
        _require(self.lr > 0 and math.isfinite(self.lr), f"optimizer.lr = {self.lr} must be a positive number")
        _require(
            all(0 <= beta < 1 for beta in self.betas), f"optimizer.betas = {list(self.betas)} must both lie in [0, 1)"
        )
        _require(self.eps > 0, f"optimizer.eps = {self.eps} must be positive")
        _require(self.weight_decay >= 0, f"optimizer.weight_decay = {self.weight_decay} must not be negative")
        _require(
            self.max_grad_norm >= 0,
            f"optimizer.max_grad_norm = {self.max_grad_norm} must not be negative (0: do not clip)",
        )
        _require(self.warmup_steps >= 0, f"optimizer.warmup_steps = {self.warmup_steps} must not be negative")
        _require(
            self.decay_steps is None or self.decay_steps >= 1,
            f"optimizer.decay_steps = {self.decay_steps} must be at least 1",
        )
        _require(0 <= self.min_lr_ratio <= 1, f"optimizer.min_lr_ratio = {self.min_lr_ratio} must lie in [0, 1]")
        self._check_names()

    def _check_names(self) -> None:
        """Refuse settings of another optimizer, which would be without effect."""
        defaults = {item.name: item.default for item in dataclasses.fields(self)}
        for names, keys in _OF_OPTIMIZERS.items():
            for key in keys:
                _require(
                    self.name in names or getattr(self, key) == defaults[key],
                    f"optimizer.{key} = {getattr(self, key)!r} is for optimizer.name = "
                    f"{' or '.join(map(repr, names))}, got {self.name!r}; leave it out",
                )
        for key in ("ns_steps", "update_every", "block_size"):
            _require(getattr(self, key) >= 1, f"optimizer.{key} = {getattr(self, key)} must be at least 1")
        _require(0 <= self.momentum < 1, f"optimizer.momentum = {self.momentum} must lie in [0, 1)")
        _require(
            self.adamw_lr is None or (self.adamw_lr > 0 and math.isfinite(self.adamw_lr)),
            f"optimizer.adamw_lr = {self.adamw_lr} must be a positive number",
        )


_OF_OPTIMIZERS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("muon",): ("momentum", "nesterov", "ns_steps", "adjust_lr_fn"),
    ("shampoo",): ("update_every", "block_size", "grafting"),
    ("muon", "shampoo"): ("adamw_lr",),
    ("adamw",): ("fused",),
}
"""Which keys only some optimizers have."""


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """How the model is spread over the ranks."""

    strategy: Strategy = "laconic"
    """`laconic`, or a PyTorch baseline on the very same job: `fsdp2` (ZeRO-3), `fsdp2-hpz` (its slice stays in the node
    between forward and backward), `hsdp` (sharded inside a node, replicated between nodes), `ddp`. Sizes are never
    configured, torchrun knows them: what other trainers call dp_shard is nodes x local ranks here, and dp_replicate is
    sync.islands."""
    cache: Literal["none", "host", "device"] = "host"
    """Where `laconic` keeps a gathered slice between its uses: freed, in host memory, or on the device."""
    device_budget_bytes: int = 0
    """With cache = "host": the last layers' slices stay on the device until this many bytes per rank are spent."""
    param_dtype: Dtype | None = None
    """Cast parameters to this for forward and backward, and on the wire; default: model.dtype."""
    reduce_dtype: Dtype | None = None
    """Reduce gradients in this; default: param_dtype, on every release of torch."""
    reshard_after_forward: bool | None = None
    """Free gathered parameters after forward and gather them again in backward; default: yes, the root too."""
    granularity: dict[str, Any] | str | None = None
    """What `laconic` never cuts: "1 row", "32 rows", "256 elements" or "whole" of every parameter; or a table from
    patterns of a parameter's name in its layer, such as "self_attn.*", to one of these, where the first match counts
    and what matches none may be cut between rows. Default: what the optimizer needs, 32 rows for `adamw8bit`."""

    def __post_init__(self) -> None:
        _require(
            self.device_budget_bytes >= 0,
            f"shard.device_budget_bytes = {self.device_budget_bytes} must not be negative",
        )
        _require(
            not self.device_budget_bytes or self.cache == "host",
            f"shard.device_budget_bytes = {self.device_budget_bytes} needs shard.cache = 'host', got {self.cache!r}",
        )
        _require(
            self.strategy != "ddp" or (self.param_dtype is None and self.reduce_dtype is None),
            "shard.strategy = 'ddp' has no mixed precision: leave shard.param_dtype and shard.reduce_dtype out "
            "and set model.dtype",
        )
        _require(
            self.strategy != "fsdp2-hpz" or self.reshard_after_forward is None,
            "shard.strategy = 'fsdp2-hpz' is reshard_after_forward = <ranks per node>: leave it out",
        )
        blocks = self.granularity.values() if isinstance(self.granularity, dict) else [self.granularity]
        for text in blocks:
            if text is not None:
                block(text)


def block(text: Any) -> dict[str, Any]:
    """The fields of a `laconic.Block` that "32 rows", "256 elements" or "whole" means."""
    if text == "whole":
        return {"unit": "whole"}
    match = re.fullmatch(r"([1-9][0-9]*) (row|element)s?", text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f'shard.granularity: {text!r} is not a block; write "32 rows", "256 elements" or "whole"')
    return {"unit": f"{match[2]}s", "count": int(match[1])}


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """When machines agree: after every step, or, as islands, only now and then."""

    mode: Literal["every-step", "local"] = "every-step"
    """`every-step`: one model, gradients of all ranks. `local`: islands train on their own, each on its rows of the
    global batch, and agree every so many steps (DiLoCo); evaluation, checkpoints and export are of what they agreed on.
    Needs shard.strategy `laconic`. All other keys of this section are of `local`."""
    islands: int | None = None
    """Islands, each of as many whole nodes that follow each other; must divide the number of nodes. Default: every node
    is an island. What other trainers call dp_replicate."""
    every: int = 100
    """Steps between two syncs of the same parameters."""
    fragments: int = 1
    """Parts of the model that are synced in turn, one each every / fragments steps; must divide `every`."""
    pattern: Literal["strided", "sequential"] = "strided"
    """How layers are dealt to fragments: `strided`, layer l to fragment l mod fragments, or in runs."""
    overlap: int = 0
    """Steps that an exchange may take, behind which it is hidden, before its outcome is applied; less than every /
    fragments."""
    mixing: float = 0.0
    """How much of an island's own parameters is kept when the outcome is applied, in [0, 1)."""
    codec: Literal["fp32", "bf16", "int8", "fp4", "fp4-e2m1"] = "fp32"
    """What pseudo-gradients are on the wire: 4, 2, 1 or half a byte per parameter."""
    error_feedback: bool = False
    """Add to each pseudo-gradient what the codec lost of the last one."""
    outer_lr: float = 0.7
    """Learning rate of the outer optimizer, SGD along the mean pseudo-gradient."""
    outer_momentum: float = 0.9
    """Its momentum, Nesterov's; 0: none."""
    slices: int = 1
    """Partial updates: an island trains one of so many slices of every MLP and attention layer, and all of the rest.
    Island i trains slice i mod slices; with `recovery`, who comes later takes the slice that fewest train."""
    slice_include: tuple[Literal["mlp", "attention"], ...] = ("mlp", "attention")
    """The kinds of layers that are sliced."""
    recovery: str | None = None
    """A folder on each machine, best in memory (/dev/shm), for elastic runs (`torchrun --nnodes MIN:MAX`): the last
    agreement is kept there, and when islands were lost or join, the run that torchrun restarts goes on from it. It is
    this run's alone; environment variables in it are expanded. Needs train.resume."""

    def __post_init__(self) -> None:
        if self.mode == "every-step":
            for item in dataclasses.fields(self):
                _require(
                    item.name == "mode" or getattr(self, item.name) == item.default,
                    f"sync.{item.name} = {getattr(self, item.name)!r} is for sync.mode = 'local', got 'every-step'; "
                    "leave it out, or set the mode",
                )
        try:
            SyncSchedule(every=self.every, fragments=self.fragments, overlap=self.overlap)
        except ValueError as error:
            raise ConfigError(f"sync: {error}") from error
        _require(self.islands is None or self.islands >= 1, f"sync.islands = {self.islands} must be at least 1")
        _require(0 <= self.mixing < 1, f"sync.mixing = {self.mixing} must lie in [0, 1); 0 takes the outcome as it is")
        _require(
            not self.error_feedback or self.codec != "fp32",
            "sync.error_feedback = true has nothing to do: sync.codec = 'fp32' loses nothing; leave it out",
        )
        _require(
            self.outer_lr > 0 and math.isfinite(self.outer_lr),
            f"sync.outer_lr = {self.outer_lr} must be a positive number",
        )
        _require(0 <= self.outer_momentum < 1, f"sync.outer_momentum = {self.outer_momentum} must lie in [0, 1)")
        _require(self.slices >= 1, f"sync.slices = {self.slices} must be at least 1")
        _require(
            len(self.slice_include) > 0,
            "sync.slice_include is empty, so nothing would be sliced; leave sync.slices out instead",
        )
        _require(
            self.slices > 1 or self.slice_include == ("mlp", "attention"),
            f"sync.slice_include = {list(self.slice_include)} needs sync.slices of at least 2, got {self.slices}",
        )

    @property
    def is_local(self) -> bool:
        """Whether there are islands."""
        return self.mode == "local"


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Whether workers run at the same time, or one after the other."""

    kind: Literal["simultaneous", "cyclic"] = "simultaneous"
    """`cyclic`: the model is cut into one stage per worker, and workers run two time steps apart (Cyclic Data
    Parallelism), so that gradients and parameters travel from neighbour to neighbour all along the step, and the
    activations of all workers together stay flat. It takes the place of shard.*. All other keys are of `cyclic`."""
    rule: Literal["v2", "lag2", "clip", "v1", "dp"] = "lag2"
    """Which workers use the newest parameters of a stage, and which those of a batch before: docs/cyclic.md."""
    states: Literal["replicated", "sharded", "shared"] = "replicated"
    """Where parameters rest: on every worker, with their stage's owner alone, or (`shared`) each stage on its own
    devices."""
    workers: int | None = None
    """Micro-batches of a global batch, and stages. Default: the number of ranks N; with states = "shared" the launch
    has N (N + 1) / 2. On one rank so many micro-batches are interleaved on its device."""
    cut_by: Literal["time", "memory", "parameters"] = "time"
    """What stages have equal shares of: time of forward and backward or bytes saved for backward, both measured on rank
    0 at the start, or parameters, which gives the same cut every time. A resumed run keeps its cut."""
    stagger: float = 1.0
    """How much of 1/N of a batch a worker is behind the one before: 1 keeps activations flat, less forgives a slow
    wire."""

    def __post_init__(self) -> None:
        if not self.is_cyclic:
            for item in dataclasses.fields(self):
                _require(
                    item.name == "kind" or getattr(self, item.name) == item.default,
                    f"schedule.{item.name} = {getattr(self, item.name)!r} is for schedule.kind = 'cyclic', got "
                    "'simultaneous'; leave it out, or set the kind",
                )
        _require(
            self.workers is None or self.workers >= 2,
            f"schedule.workers = {self.workers} must be at least 2, for one worker has nobody to be behind",
        )
        _require(
            0 <= self.stagger <= 1, f"schedule.stagger = {self.stagger} must lie in [0, 1]; 1 is an N-th of a batch"
        )

    @property
    def is_cyclic(self) -> bool:
        """Whether workers run one after the other."""
        return self.kind == "cyclic"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how much at once, and where to."""

    steps: int = 100
    """Optimizer steps of the whole run."""
    micro_batch_size: int = 4
    """Rows per rank and micro-batch."""
    accumulation: int = 1
    """Micro-batches per rank and optimizer step."""
    seed: int = 0
    """Seed of dropout; each step of each rank draws its own from it, so that a resumed run draws the same."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """`auto` takes a GPU where there is one."""
    eval_every: int = 0
    """Evaluate every so many steps and after the last; 0: never."""
    eval_batches: int = 8
    """Micro-batches per rank in one evaluation."""
    save_every: int = 0
    """Checkpoint every so many steps; 0: only after the last; -1: never."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in host memory of what each rank holds."""
    keep: int = 2
    """Complete checkpoints kept; at least two, so that a damaged newest one has one to fall back to."""
    log_every: int = 10
    """Steps between two lines, for which all ranks put their figures together; islands too."""
    resume: bool = False
    """Go on from the newest complete checkpoint in `output`, or start where there is none."""
    output: str = "runs/laconic"
    """Folder for checkpoints, logs, the effective configuration and `summary.json`."""
    timeout_s: float = 600.0
    """A collective that takes longer than this ends the run."""

    def __post_init__(self) -> None:
        for name in ("steps", "micro_batch_size", "accumulation", "eval_batches", "log_every"):
            _require(getattr(self, name) >= 1, f"train.{name} = {getattr(self, name)} must be at least 1")
        for name, least in {"eval_every": 0, "save_every": -1, "keep": 2}.items():
            _require(getattr(self, name) >= least, f"train.{name} = {getattr(self, name)} must be at least {least}")
        _require(self.timeout_s > 0, f"train.timeout_s = {self.timeout_s} must be positive")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Who is told."""

    tensorboard: bool = True
    """Write TensorBoard events to `tensorboard` in the output folder."""
    jsonl: bool = True
    """Write one JSON object per step to `metrics.jsonl` in the output folder."""
    progress: bool = True
    """A progress bar where rank 0 has a terminal; plain lines elsewhere."""
    memory_step: int = 0
    """On CPU: watch the allocator during this step (the first is 1) for the summary's `step_peak_bytes`, which slows
    the step down; 0: never. A GPU's allocator keeps a peak by itself."""
