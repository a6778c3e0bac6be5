"""The sections of a job description. Each is a frozen dataclass that refuses values that make no sense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from laconic import registry
from laconic.config.section import ConfigError, Dtype, Section
from laconic.islands.policies import Membership, SyncPolicy
from laconic.pipeline.policies import PipelineWire, ScheduleName
from laconic.policy import (
    AtLeastTwo,
    Bound,
    Count,
    NonNegative,
    Positive,
    ProperShare,
    Share,
    Size,
    keys_of,
    option,
    to_keys,
)
from laconic.shard.policies import Audits, Cache, Checks, ShardPolicy, Wire

CHECKED = (*keys_of(Checks), *keys_of(Audits))
"""The keys of `[shard]` for strategies that take checks."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model, and how its parameters are kept."""

    config: dict[str, Any] | str | None = None
    """A transformers configuration: an inline table whose `model_type` picks the class, or the path of a `config.json`.
    The weights are then drawn at random from `init_seed`. A table without `vocab_size` gets the tokenizer's."""
    path: str | None = None
    """A local folder with `config.json` and safetensors weights; each rank reads only its own part."""
    dtype: Dtype = "float32"
    """The type of parameters and optimizer states."""
    init_seed: int = 0
    """Seed of the random initialisation (`config`, and LoRA adapters)."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in backward: less memory, one more forward."""

    def _check_keys(self) -> None:
        message = "and model.path are both set: `config` starts from random weights, `path` from a folder's; keep one"
        self._check("config", self.config is None or self.path is None, message)
        if isinstance(self.config, dict) and "model_type" not in self.config:
            raise ConfigError(
                f"model.config has no `model_type` (keys: {', '.join(sorted(self.config)) or 'none'}); "
                "it picks the transformers class, for example model_type = 'llama'"
            )


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Low-rank adapters, made by peft. The model's own weights are frozen."""

    enabled: bool = False
    """Freeze the model and train adapters only."""
    rank: Count = 8
    """Rank of each adapter."""
    alpha: float = 16.0
    """Scale: an adapter's output is multiplied by alpha / rank."""
    dropout: ProperShare = 0.0
    """Dropout on the adapters' input."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter, for example "q_proj"; empty: all but the output layer."""
    dora: bool = False
    """Train the magnitude of each row of an adapted weight apart from its direction (DoRA)."""
    quantize: Literal["nf4", "int8"] | None = None
    """Keep the frozen linear layers in blocks of 64 (QLoRA): `nf4` takes 4.25 bits per weight, `int8` 8.25. Fused
    experts, embeddings and norms stay in model.dtype."""
    quantize_skip: tuple[str, ...] | None = None
    """Linear layers that `quantize` leaves alone, by name, such as "lm_head", or by pattern. Default: the output layer;
    an empty list: none."""

    def _check_keys(self) -> None:
        for key in ("dora", "quantize"):
            message = (
                "needs lora.enabled = true: only adapters train then, and the model's own weights stay as they are"
            )
            self._check(key, self.enabled or not getattr(self, key), message)
        self._check("quantize_skip", self.quantize_skip is None or self.quantize is not None, "needs lora.quantize")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The source of the tokens, and the tokens that the loss counts."""

    kind: Literal["text", "datasets", "python-stdlib"] = "python-stdlib"
    """`text`: a file or a folder of text files; `datasets`: what Hugging Face `datasets` reads, that is a folder of
    `save_to_disk`, a Parquet, CSV or JSON file (also of lines) or a folder of them, or the name of a data set on the
    Hub; `python-stdlib`: the running Python's own library sources, which need no download. Rows of tokens, such as
    conversations, have the field `input_ids`, and `labels` or masks as TRL makes them: docs/fine-tune.md."""
    path: str | None = None
    """The file, the folder or, for `datasets`, the name on the Hub; not used by `python-stdlib`."""
    subset: str | None = None
    """With `datasets`: the configuration of a data set that has several."""
    split: str = "train"
    """With `datasets`: the split to read."""
    text_field: str = "text"
    """The field that holds a text. Texts follow each other, and rows are runs of sequence_length tokens that begin
    anywhere among them."""
    tokenizer: str = "bytes"
    """`bytes` (256 tokens, no file needed) or a local folder with a Hugging Face tokenizer."""
    sequence_length: AtLeastTwo = 256
    """Tokens per row of a batch, at most; longer rows of tokens are cut."""
    eval_fraction: ProperShare = 0.02
    """Share of the documents or rows held out for evaluation (of the tokens, where there are too few documents)."""
    seed: int = 0
    """Seed of the sampler: the rows of a step are a function of (seed, step) alone."""
    cache: str | None = None
    """Folder for the tokenised corpus, which one rank per node makes; default: `tokens` in the output folder. Every
    start reads and checks all of it (1.5 GB/s per core, or as fast as the disk), and makes damaged data again."""

    def _check_keys(self) -> None:
        if self.kind == "python-stdlib":
            message = "is not used by data.kind = 'python-stdlib'; set data.kind to 'text' or 'datasets'"
            self._check("path", self.path is None, message)
        else:
            self._check("kind", self.path is not None, "needs data.path, the file or folder to read")
        self._check_only_with("kind", "datasets", keys=("subset", "split"))


_WITH_OWNERS = ("muon", "shampoo")
"""The optimizers of which one rank updates each matrix of hidden layers whole."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "adamw8bit", "muon", "shampoo"] = "adamw"
    """`adamw8bit` keeps AdamW's moments in 8 bits. `muon` and `shampoo` take the matrices of hidden layers, and AdamW
    takes the rest (embeddings, output layer, norms, biases). All but `adamw` need shard.strategy `laconic` or `ddp`."""
    lr: Positive = 3e-4
    """Peak learning rate."""
    adamw_lr: Positive | None = None
    """With `muon` and `shampoo`: peak learning rate of the parameters that AdamW takes; default: lr."""
    betas: tuple[ProperShare, ProperShare] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: Positive = 1e-8
    """Added to the square root of the second moment."""
    momentum: ProperShare = 0.95
    """With `muon`: decay rate of the momentum."""
    nesterov: bool = True
    """With `muon`: use Nesterov's momentum."""
    ns_steps: Count = 5
    """With `muon`: Newton-Schulz iterations."""
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = None
    """With `muon`: how a matrix's shape scales lr; default `original`. `match_rms_adamw` fits an lr tuned for AdamW."""
    update_every: Count = 10
    """With `shampoo`: steps between two computations of the preconditioners."""
    block_size: Count = 1024
    """With `shampoo`: longest side of a preconditioned block."""
    grafting: Literal["adam", "rmsprop", "sgd", "none"] = "adam"
    """With `shampoo`: the optimizer that sets the length of a step."""
    weight_decay: NonNegative = 0.1
    """Decoupled decay of matrices; parameters of fewer than two dimensions (norms, biases) are never decayed."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm, which each island has for itself, to this; 0: only measure the norm. The cyclic
    schedule clips under the rules `clip`, `v1` and `dp` alone, and does not measure the norm."""
    lr_schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: `cosine` falls at once, `wsd` stays and falls linearly at the end, `constant` stays."""
    warmup_steps: Size = 0
    """Steps of linear warm-up."""
    decay_steps: Count | None = None
    """Steps of the decay. Default: for `cosine` all steps after the warm-up, for `wsd` the last fifth of all steps."""
    min_lr_ratio: Share = 0.1
    """The decay ends at this share of the peak learning rate."""
    flat_blocks: bool = False
    """With `adamw8bit`: moments share a scale in runs of 256 elements instead of tiles of 32 x 32. A tile keeps 32 rows
    on one rank, which pads layers on hundreds of ranks and more; a run hardly pads on any number of ranks."""
    fused: bool = True
    """With `adamw`: use torch's fused AdamW, on CPU too; false: one tensor at a time."""
    loss_scale: Positive = 65536.0
    """With shard.param_dtype = "float16": the loss is multiplied by this, so that small gradients do not vanish. A step
    whose gradients overflow is skipped, on all ranks, and halves the scale."""
    loss_scale_growth_steps: Count = 2000
    """With shard.param_dtype = "float16": as many steps in a row without overflow double the scale."""

    @property
    def has_owners(self) -> bool:
        """Whether each matrix of hidden layers is updated whole, by one rank."""
        return self.name in _WITH_OWNERS

    def _check_keys(self) -> None:
        self._check_only_with("name", "adamw", keys=("fused",))
        self._check_only_with("name", "adamw8bit", keys=("flat_blocks",))
        self._check_only_with("name", "muon", keys=("momentum", "nesterov", "ns_steps", "adjust_lr_fn"))
        self._check_only_with("name", "shampoo", keys=("update_every", "block_size", "grafting"))
        self._check_only_with("name", *_WITH_OWNERS, keys=("adamw_lr",))


@dataclass(frozen=True, kw_only=True)
class ShardConfig(Section):
    """How the model is sharded over the ranks."""

    strategy: str = option("laconic", hint=Literal[registry.ways_to_train()])  # messages and help have the names
    """`laconic`, or another way to train the very same job: PyTorch's own (`fsdp2`, `hsdp`, `ddp` and others),
    DeepSpeed's, torchft's. docs/compare.md says what each runs and needs. On CPU FSDP2 and HSDP reduce along a true
    ring and gather ahead, as on NCCL. `auto` takes what `laconic plan` recommends for this job on the machines of
    `cluster`. No key sets sizes, torchrun knows them: what other trainers call dp_shard is nodes x local ranks here."""
    cluster: str | None = None
    """With strategy = "auto": the cluster file, which `laconic doctor --out` writes: docs/plan.md."""
    policy: ShardPolicy = ShardPolicy(cache=Cache(where="host"))

    def _check_keys(self) -> None:
        precision = self.policy.precision
        message = "needs {param_dtype='float16'}, got {param_dtype=}: the loss is scaled only then"
        self._check("reduce_dtype", precision.reduce_dtype != "float16" or precision.param_dtype == "float16", message)
        if self.strategy not in (known := registry.ways_to_train()):
            raise ConfigError(f"shard.strategy: {registry.unknown(self.strategy, known)}")
        strategy, values = registry.named(self.strategy), to_keys(self)
        if problem := strategy.problem("shard", values):
            raise ConfigError(problem)
        message = f"is for shard.strategy = 'laconic', got {self.strategy!r}; leave it out, or change shard.strategy"
        for name in CHECKED:
            self._check(name, strategy.takes_checks or values[name] == keys_of(ShardPolicy)[name].default, message)
        message = "needs shard.cluster, a cluster file: `laconic doctor --out` under torchrun writes it"
        self._check("strategy", self.strategy != "auto" or self.cluster is not None, message)
        message = f"is for shard.strategy = 'auto', got {self.strategy!r}; leave it out"
        self._check("cluster", self.cluster is None or self.strategy == "auto", message)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """Whether workers run at the same time or one after the other."""

    kind: Literal["simultaneous", "cyclic"] = "simultaneous"
    """`cyclic`: the model is cut into one stage per worker, and workers run two time steps apart (Cyclic Data
    Parallelism). So gradients and parameters travel between neighbours during the whole step, and the activations of
    all workers together stay flat. It takes the place of shard.*. All other keys of this section are for `cyclic`."""
    rule: Literal["v2", "lag2", "clip", "v1", "dp"] = "lag2"
    """Which workers use the newest version of a stage, and which the version one batch older: see docs/cyclic.md."""
    states: Literal["replicated", "sharded", "shared"] = "replicated"
    """Where parameters rest: on every worker, with a stage's owner alone, or (`shared`) on each stage's own devices."""
    cache: Literal["none", "host"] = "none"
    """With states = "sharded": whether a worker keeps a stage's weights in host memory from its forward to its
    backward, or gets them a second time."""
    workers: Annotated[int, Bound(lambda value: 2 <= value <= 4096, "lie in [2, 4096]")] | None = None
    """Number N of micro-batches in a global batch, and of stages. Default: the number of ranks or, with states =
    "shared", the N for which N (N + 1) / 2 ranks are launched. One rank interleaves this many micro-batches."""
    wire: Wire = option(Wire(), of=Wire.of, plain=Wire.plain, hint=dict[str, Any] | str | None)
    """The bits in which weights and gradients cross between nodes: "exact", "8bit" or "4bit", which need replicated
    states. Or a table with the fields of `laconic.Wire`, such as { gradients = "int8", feedback = true }. Lossless
    weights are for sharded training alone. Default: exact."""
    cut_by: Literal["time", "memory", "parameters"] | None = None
    """The quantity that stages share equally: `time` of forward and backward or `memory` saved for backward, which rank
    0 measures at the start, or `parameters`, which gives the same cut every time. A resumed run keeps its cut. Default:
    time; on one rank, where no worker waits for another, memory."""
    stagger: Share = 1.0
    """Lag of a worker behind the previous one, in 1/N of a batch: 1 keeps activations flat, less suits a slow wire."""

    def _check_keys(self) -> None:
        self._check_only_with("kind", "cyclic", keys=keys_of(ScheduleConfig).keys() - {"kind"})

    @property
    def is_cyclic(self) -> bool:
        """Whether workers run one after the other."""
        return self.kind == "cyclic"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Section):
    """Whether machines hold different layers, and hand activations on (docs/pipeline.md)."""

    stages: Literal["nodes"] | int | None = None
    """Groups of nodes that each hold a part of the layers; it divides the number of nodes. Inside a group the part is
    sharded as [shard] says. `nodes`: as many as there are. Default: no pipeline; all other keys are for one."""
    schedule: ScheduleName = "1F1B"
    """The order of forwards and backwards, as torch.distributed.pipelining names it, or `Eager1F1B`. GPipe, 1F1B and
    Eager1F1B have one stage on each rank, the V-shaped ones (ZBVZeroBubble, DualPipeV) two, all others as many as `cut`
    says, or two."""
    micro_batches: Count | None = None
    """The equal parts into which a pipeline cuts its rows of a step: for each of its ranks the
    train.micro_batch_size x train.accumulation rows that this rank would have alone. So a pipeline changes no batch.
    Default: parts of train.micro_batch_size rows."""
    cut: Literal["cost"] | tuple[int, ...] = "cost"
    """Where the model is cut. `cost`: the most expensive stage is as cheap as possible, by the multiplications of a
    token; the output layer counts. A list: the blocks of each stage in order. Blocks are the embedding, each layer, and
    the output layer with the norm before it."""
    wire: PipelineWire = "exact"
    """The bits in which activations and their gradients cross: "exact" is the dtype that they have, "8bit" eight bits
    and a step for every 128 values."""

    def _check_keys(self) -> None:
        if self.stages is None:
            for name, key in keys_of(PipelineConfig).items():
                message = "needs pipeline.stages, which says on how many groups of nodes the layers are; set it"
                self._check(name, getattr(self, name) == key.default, message)
            return
        is_number = isinstance(self.stages, int) and not isinstance(self.stages, bool)
        message = (
            "must be at least 2, or 'nodes'; leave [pipeline] out for a model that each group of nodes holds whole"
        )
        self._check("stages", self.stages == "nodes" or (is_number and int(self.stages) >= 2), message)
        message = "must be 'cost', or the number of blocks of each stage, at least 1"
        self._check("cut", self.cut == "cost" or (len(self.cut) > 1 and min(map(int, self.cut)) >= 1), message)

    @property
    def is_on(self) -> bool:
        """Whether there is a pipeline."""
        return self.stages is not None


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """The length of the run, the size of its batches and its output."""

    steps: Count = 100
    """Optimizer steps of the whole run."""
    epochs: Positive | None = None
    """In place of `steps`: passes over the corpus."""
    micro_batch_size: Count = 4
    """Rows per rank and micro-batch."""
    accumulation: Count = 1
    """Micro-batches per rank and optimizer step."""
    rows: Literal["equal", "by-speed"] | tuple[int, ...] = "equal"
    """How the rows of a step are divided over ranks. `by-speed`: slower ranks get fewer, as measured now and then. A
    list: the rows of each rank, which add up to `micro_batch_size` times `accumulation` for each rank of an island. A
    faster rank's micro-batches are larger than `micro_batch_size`, and need memory for that. Losses stay as they are,
    but for the order of sums."""
    seed: int = 0
    """Seed of dropout. Each step of each rank derives its own seed from it, so a resumed run drops the same out."""
    compile: bool = False
    """Compile each layer with torch.compile; the first step takes long."""
    device: str = "auto"
    """`cpu`, or the type of the machine's accelerator, such as `cuda`. `auto` takes the accelerator if there is one."""
    eval_every: Size = 0
    """Steps between two evaluations; the last step is followed by one too. 0: never evaluate."""
    eval_batches: Count = 8
    """Micro-batches per rank in one evaluation."""
    save_every: Annotated[int, Bound(lambda value: value >= -1, "be at least -1")] = 0
    """Steps between two checkpoints; the last step is followed by one too. 0: only the last; -1: none."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy in host memory of each rank's part."""
    keep: AtLeastTwo = 2
    """Number of complete checkpoints to keep; at least two, so that a run can go on if the newest one is damaged."""
    log_every: Count = 10
    """Steps between two lines of the log. For a line, the ranks of all islands combine their figures."""
    resume: Literal["never", "auto"] | bool | str = "never"
    """`auto`: go on from the newest complete checkpoint in `output`, or start from step 0 if there is none. A path: the
    same, but without one go on from another run's output folder or step-N folder. `never`: refuse an `output` that has
    results of a run. True and false, as in older files, are `auto` and `never`. SIGINT and SIGTERM end a run after the
    step that is under way, with a checkpoint and exit code 130 or 143."""
    output: str = "runs/laconic"
    """Folder for checkpoints, logs, the effective configuration and `summary.json`. One run at a time may use it."""
    timeout_s: Annotated[float, Bound(lambda value: 0 < value <= 1e9, "lie in (0, 1e9]")] = 600.0
    """A collective that takes longer than this ends the run."""
    peer_timeout_s: Annotated[float, Bound(lambda value: 0 <= value <= 1e9, "lie in [0, 1e9]")] = 60.0
    """A rank whose machine gives no sign for this long is gone, and the run ends; 0: wait for `timeout_s`. A process
    that is killed on a living machine ends the run at once."""

    def __post_init__(self) -> None:
        if isinstance(self.resume, bool):
            object.__setattr__(self, "resume", "auto" if self.resume else "never")
        super().__post_init__()

    def _check_keys(self) -> None:
        is_list = isinstance(self.rows, tuple)
        message = "is not known; use 'equal', 'by-speed' or the rows of each rank"
        self._check("rows", is_list or self.rows in ("equal", "by-speed"), message)
        message = "must give each rank a whole number of rows, at least 1"
        self._check("rows", not is_list or all(isinstance(n, int) and n >= 1 for n in self.rows), message)
        message = f"and train.steps = {self.steps} are both set; keep one"
        self._check("epochs", self.epochs is None or self.steps == TrainConfig.steps, message)


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """The files and the terminal that show a run's figures."""

    tensorboard: bool = True
    """Write TensorBoard events to `tensorboard` in the output folder."""
    jsonl: bool = True
    """Write one JSON object per step to `metrics.jsonl` in the output folder."""
    wandb: bool = False
    """Send the figures to Weights & Biases. The package wandb reads its account, project, name and mode from the
    environment, for example WANDB_PROJECT and WANDB_MODE=offline."""
    memory_step: int = 0
    """On CPU: watch the allocator during this step (the first is 1), for the summary's `step_peak_bytes`; 0: never. It
    slows the step down. A GPU's allocator keeps a peak by itself."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig(Section):
    """When machines synchronise: after every step or, as islands, only now and then."""

    mode: Literal["every-step", "local"] = "every-step"
    """`every-step`: all ranks average gradients in every step. `local`: islands train on their own, each on its rows of
    the global batch, and average after several steps (DiLoCo). Evaluation, checkpoints and export use the average.
    `local` needs shard.strategy `laconic` or `torchft-diloco`. All other keys of this section are for `local`."""
    policy: SyncPolicy = SyncPolicy()
    slices: Count = 1
    """Partial updates: an island trains one of this many slices of every MLP, and all other layers whole.
    Island i trains slice i mod slices; with `recovery`, an island that joins takes the slice that fewest train."""
    slice_include: tuple[Literal["mlp", "attention"], ...] = ("mlp",)
    """The kinds of layers that are sliced: "mlp", "attention" or both. Slices of attention save FLOPs and memory, too,
    and cost more quality."""

    def _check_keys(self) -> None:
        self._check_only_with("mode", "local", keys=keys_of(SyncConfig).keys() - {"mode"})
        membership = self.membership
        if membership.rendezvous is None:
            self._check("run_id", membership.run_id is None, "needs {rendezvous}, where islands meet")
        else:
            message = "does not go with {rendezvous}: a slice whose islands have gone would never change"
            self._check("slices", self.slices == 1, message)
        coding, outer = self.policy.coding, self.policy.outer
        message = "has no effect: {codec='fp32'} loses nothing; leave it out, or choose another codec"
        self._check("error_feedback", not coding.error_feedback or coding.codec != "fp32", message)
        message = "does not go with {rendezvous}: islands that come and go do not take the same last step"
        self._check("last_codec", coding.last_codec is None or membership.rendezvous is None, message)
        for key, value in (("outer_sliced_lr", outer.sliced_lr), ("outer_sliced_momentum", outer.sliced_momentum)):
            self._check(key, self.slices > 1 or value is None, "needs {slices} of at least 2")
        if not self.slice_include:
            raise ConfigError("sync.slice_include is empty, so no layer would be sliced; leave sync.slices out instead")
        is_default = self.slice_include == keys_of(SyncConfig)["slice_include"].default
        self._check(
            "slice_include", self.slices > 1 or is_default, f"needs sync.slices of at least 2, got {self.slices}"
        )

    @property
    def is_local(self) -> bool:
        """Whether there are islands."""
        return self.mode == "local"

    @property
    def membership(self) -> Membership:
        """The islands, and what follows if one is lost or joins."""
        return self.policy.membership
