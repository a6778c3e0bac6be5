"""The strategies on laconic's engine, ZeRO++'s algorithm among them, and shard.strategy = "auto"."""

from laconic.registry import AUTO, Limit, Strategy

_IS_LACONICS = "is for shard.strategy = 'laconic'"
NOT_ON_ENGINE = (
    Limit.only("shard.wire", None, "exact", message=f"shard.wire = {{value!r}} {_IS_LACONICS}; leave it out"),
    Limit.only("shard.offload", False, message=f"shard.offload = true {_IS_LACONICS}; leave it out"),
    Limit.only(
        "shard.shares", None, message=f"shard.shares {_IS_LACONICS}, which can cut unequally, not {{strategy!r}}; "
        "leave it out",
    ),
    Limit.only("shard.cache_until", "change", message=f"shard.cache_until = {{value!r}} {_IS_LACONICS}; leave it out"),
)  # fmt: skip
"""The limits of strategies that are not on the engine."""
CUTS_ANYWHERE = Limit.only(
    "optimizer.name", "adamw",
    message="optimizer.name = {value!r} needs whole blocks or matrices, which shard.strategy = {strategy!r} cuts "
    "anywhere; set shard.strategy to 'laconic' (or 'ddp', which cuts nothing), or optimizer.name to 'adamw'",
)  # fmt: skip
SYNCS_EVERY_STEP = Limit.only(
    "sync.mode", "every-step",
    message="sync.mode = {value!r} needs shard.strategy = 'laconic', got {strategy!r}, which synchronises all ranks in "
    "every step; change one of the two",
)  # fmt: skip
LIMITS = (*NOT_ON_ENGINE, CUTS_ANYWHERE, SYNCS_EVERY_STEP)
"""The limits of strategies that cut parameters anywhere and sync in every step."""
VALUES_WIRE = {"weights": "int8", "as_values": True, "gradients": "int4"}
"""The codes of qwZ and qgZ, in blocks of 128. DeepSpeed's groups are larger, and it codes gradients inside the node,
too. So these losses flatter ZeRO++."""
ZERO_PLUS_PLUS = {"cache": "device", "cache_until": "backward", "wire": {**VALUES_WIRE, "frozen": True}}
"""The keys of ZeRO++: every forward gathers all weights across the nodes, frozen ones too, in int8 (qwZ), and backward
those that hpZ has kept on the node. DeepSpeed's forward gathers along one ring of all ranks, which crosses more; since
0.13.2 it uses what it has kept until the optimizer's step, and of frozen weights for good (#4906)."""


_BESIDE_CYCLIC = (
    ("sync.mode", ("every-step",), ": islands train on their own, but workers of the cyclic schedule exchange every "
     "gradient; change one of the two"),
    ("train.compile", (False,), ": torch.compile is for layers that stay whole modules, and this schedule cuts the "
     "model into stages; leave one of the two out"),
    ("lora.quantize", (None,), ", which sends whole stages in the dtype of their parameters; leave one of the two out"),
    ("train.accumulation", (1,), ": every worker has one micro-batch per step; raise train.micro_batch_size, or "
     "schedule.workers"),
    ("train.rows", ("equal",), ": its messages have one size, so all workers have equally many rows; leave one of the "
     "two out"),
    ("optimizer.name", ("adamw", "adamw8bit"), ": every stage has an optimizer of its own, which cannot tell hidden "
     "layers from others; use 'adamw' or 'adamw8bit'"),
)  # fmt: skip
"""Keys with the values of them that the cyclic schedule takes: why, and what to do."""


_BESIDE_STAGES = (
    ("sync.mode", ("every-step",), ": islands train on their own, each with all layers; leave one of the two out"),
    ("schedule.kind", ("simultaneous",), ": the cyclic schedule has stages of its own; leave one of the two out"),
    ("train.rows", ("equal",), ": its messages have one size, so all ranks have equally many rows; leave one out"),
    ("shard.shares", (None,), ", whose stages are cut equally inside; leave one of the two out"),
    ("shard.audit_every", (0,), ": an audit repeats a whole forward on another rank, and no rank has all layers; leave "
     "one of the two out"),
    ("optimizer.name", ("adamw", "adamw8bit", "muon"), ": its states belong to all layers at once; use another"),
)  # fmt: skip
"""Keys with the values of them that a pipeline takes: why, and what to do."""
BESIDE_STAGES = tuple(
    Limit.only(key, *values, message=f"{key} = {{toml}} and pipeline.stages{reason}")
    for key, values, reason in _BESIDE_STAGES
)
"""The limits of strategies with stages."""


_ROUNDED = "crossings are rounded: losses within 0.13 % of exact crossings, either way (docs/thinner.md)"
_ROUNDED_GRADIENTS = "gradients are rounded, weights are not (docs/thinner.md)"
_TAKES_HALF = Limit.only(
    "shard.param_dtype", None, "bfloat16", "float16",
    message="shard.param_dtype = {value!r} gathers 32 bits, of which most change in every step, so strategy "
    "{strategy!r} saves nothing; use shard.param_dtype = 'bfloat16'",
)  # fmt: skip
_LOCAL = (
    "islands see only their own rows between syncs: within 0.3 % of every-step training after a warm-up, up to 20 % "
    "above it from scratch (docs/local-steps.md)"
)
_CYCLIC = "some gradients are one step old, so it wants a smaller learning rate (docs/cyclic.md)"

LACONIC = Strategy(
    name="laconic",
    label="laconic",
    note="laconic's engine, as the keys of [shard] say.",
    source="FCDP, arXiv 2602.06499",
    shard={"strategy": "laconic"},
    takes_checks=True,
    on_engine=True,
    parallelize="laconic.strategies.parallelize:on_engine",
    predict="laconic.plan.candidates:on_engine",
    code="laconic.fully_shard(layer, {rests})  # each layer, then the model",
    in_compare=False,
    in_plan=False,
)
_HOST = LACONIC.variant(
    name="host",
    label="laconic host",
    note="laconic: weights cross once, and rest in host memory until backward.",
    colour="#d95f02",
    shard={"cache": "host"},
    in_compare=True,
    in_plan=True,
)
_ISLANDS = _HOST.variant(
    name="local-steps",
    also=("local",),
    label="laconic local steps",
    note="laconic's local steps, as the job's [sync] says. Islands train apart between syncs, so losses differ.",
    source="DiLoCo, arXiv 2311.08105; Streaming DiLoCo, arXiv 2501.18512",
    colour="#c51b7d",
    code="laconic.LocalSteps(model, optimizer, mesh=mesh, every={every}, fragments={fragments}, overlap={overlap})",
    inexact=_LOCAL,
    limits=(
        Limit(
            key="shard.param_dtype",
            holds=lambda value: value != "float16",
            message="shard.param_dtype = 'float16' and sync.mode = 'local': islands would skip different steps when "
            "gradients overflow; use shard.param_dtype = 'bfloat16'",
        ),
    ),
    sync={},
)
_CYCLIC_SCHEDULE = LACONIC.variant(
    name="cyclic",
    label="laconic cyclic, replicated",
    note="Workers run one after the other, and each keeps everything.",
    source="CDP, arXiv 2403.08837",
    inexact=_CYCLIC,
    limits=tuple(
        Limit.only(key, *values, message=f"{key} = {{toml}} and schedule.kind = 'cyclic'{reason}")
        for key, values, reason in _BESIDE_CYCLIC
    ),
    on_engine=False,
    schedule={"states": "replicated"},
    stepper="laconic.strategies.cyclic:CyclicStepper",
    parallelize="",
    predict="",
)

_PIPELINE = _HOST.variant(
    name="pipeline",
    label="laconic pipeline",
    note="Nodes hold different layers and hand activations on, in torch's schedules; laconic shards inside a stage.",
    source="1F1B, arXiv 2104.04473; GPipe, arXiv 1811.06965; torch.distributed.pipelining",
    colour="#e6550d",
    limits=(*_HOST.limits, *BESIDE_STAGES),
    pipeline={},
    stepper="laconic.strategies.pipeline:PipelineStepper",
    parallelize="laconic.strategies.pipeline:shard_on_engine",
    predict="laconic.plan.pipelined:PipelinedStep",
    code='laconic.pipeline.PipelinePolicy(schedule="{schedule}", micro_batches={micro_batches})  # docs/pipeline.md',
)

STRATEGIES = (
    LACONIC,
    LACONIC.variant(
        name=AUTO,
        label="as laconic plan says",
        note="What laconic plan recommends for the job on the machines of shard.cluster.",
        shard={"strategy": AUTO},
        takes_checks=False,
    ),
    _HOST.variant(
        name="none",
        label="laconic none",
        note="laconic without a cache: ZeRO-3.",
        source="ZeRO-3, arXiv 1910.02054",
        colour="#f2c879",
        shard={"cache": "none"},
    ),
    _HOST,
    _HOST.variant(
        name="device",
        label="laconic device",
        note="laconic: weights cross once, and stay on the device until backward, as in HFSDP.",
        source="hpZ of ZeRO++, arXiv 2306.10209, section 4.2; HFSDP of Megatron-FSDP (outer_dp_sharding_strategy = "
        "'optim')",
        colour="#8c3b00",
        shard={"cache": "device"},
    ),
    _HOST.variant(
        name="rank",
        label="laconic rank",
        note="laconic: whole weights stay on each rank; gradients and states are cut. No weights cross in backward.",
        source="ZeRO-1 and ZeRO-2, arXiv 1910.02054, sections 5.1 and 5.2",
        colour="#1b7837",
        shard={"cache": "rank"},
    ),
    _HOST.variant(
        name="auto-cache",
        label="laconic auto",
        note="laconic: each unit rests where that saves most transfers in the free memory, as it finds out after "
        "the first step.",
        colour="#e7298a",
        shard={"cache": "auto"},
    ),
    _HOST.variant(
        name="8bit",
        label="laconic 8bit",
        note="laconic host with crossings in 8 bits. It trains with rounded weights and gradients.",
        source="SDP4Bit, arXiv 2410.15526, in eight bits",
        colour="#b8860b",
        inexact=_ROUNDED,
        shard={"wire": "8bit"},
    ),
    _HOST.variant(
        name="4bit",
        label="laconic 4bit",
        note="laconic host with crossings in 4 bits. It trains with rounded weights and gradients.",
        source="SDP4Bit, arXiv 2410.15526",
        colour="#7a5c00",
        inexact=_ROUNDED,
        shard={"wire": "4bit"},
    ),
    _HOST.variant(
        name="lossless",
        label="laconic lossless",
        note="laconic host whose bf16 weights cross in about three bits and gradients in eleven, without loss.",
        source="PULSE, arXiv 2602.03839, between the ranks of a trainer; ZipCCL, arXiv 2604.27844",
        colour="#7f0000",
        limits=(*_HOST.limits, _TAKES_HALF),
        shard={"wire": "lossless"},
    ),
    _HOST.variant(
        name="lossless-4bit",
        label="laconic lossless 4bit",
        note="laconic lossless with gradients in 4 bits. It trains with rounded gradients.",
        source="PULSE, arXiv 2602.03839; SDP4Bit, arXiv 2410.15526",
        colour="#5c3317",
        inexact=_ROUNDED_GRADIENTS,
        limits=(*_HOST.limits, _TAKES_HALF),
        shard={"wire": "lossless-4bit"},
    ),
    _HOST.variant(
        name="values",
        label="laconic values",
        note="laconic device with ZeRO++'s codes: int8 weights and int4 gradients. Frozen weights cross once in a run, "
        "and others once a step.",
        source="qwZ and qgZ of ZeRO++, arXiv 2306.10209, sections 4.1 and 4.3",
        colour="#a6562a",
        inexact="weights cross in 8 bits and gradients in 4, and nothing feeds the error back",
        shard={"cache": "device", "wire": VALUES_WIRE},
        in_plan=False,  # 4bit sends less, and trains better
    ),
    _PIPELINE,
    _ISLANDS,
    _ISLANDS.variant(
        name="local-fp32",
        also=(),
        label="laconic local fp32",
        note="laconic's local steps with exchanges in float32, beside torchft's.",
        colour="#8e0152",
        sync={"codec": "fp32", "error_feedback": False},
        in_plan=False,  # a job's own codec is planned
    ),
    _CYCLIC_SCHEDULE,
    _CYCLIC_SCHEDULE.variant(
        name="cyclic-sharded",
        label="laconic cyclic, sharded",
        note="Workers run one after the other, and each keeps the states of one stage.",
        schedule={"states": "sharded"},
    ),
    _CYCLIC_SCHEDULE.variant(
        name="cyclic-shared",
        label="laconic cyclic, shared",
        note="Workers run one after the other, over devices that each keep one stage.",
        schedule={"states": "shared"},
    ),
    Strategy(
        name="zero++",
        label="ZeRO++ on our engine",
        note="ZeRO++'s algorithm on laconic's engine: all weights cross in int8 in every forward, frozen ones too, "
        "and gradients in int4 in every backward. DeepSpeed's own runs on CUDA only.",
        source="ZeRO++, arXiv 2306.10209",
        maker="DeepSpeed",
        colour="#5e4b8b",
        shard={"strategy": "zero++"},
        policy={**ZERO_PLUS_PLUS, "device_budget_bytes": 0},
        inexact="weights cross in 8 bits and gradients in 4, and nothing feeds the error back",
        limits=LIMITS,
        on_engine=True,
        reduces_always=True,
        parallelize="laconic.strategies.parallelize:on_engine",
        predict="laconic.plan.candidates:on_engine",
    ),
)
