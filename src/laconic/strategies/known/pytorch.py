"""The strategies of PyTorch itself: FSDP2 in its forms, HSDP and DDP."""

from laconic.registry import Limit, Strategy
from laconic.strategies.known.engine import BESIDE_STAGES, LIMITS, NOT_ON_ENGINE, SYNCS_EVERY_STEP

_CODE = "torch's torch/distributed/fsdp/_fully_shard"
_HOOKS = "torch's torch/distributed/algorithms/ddp_comm_hooks"


def several_per_node(instead: str, why: str = "keeps parameters on the ranks of one node") -> Limit:
    """The limit of a strategy that has a use for the ranks of one node."""
    return Limit(
        key="launch.ranks_per_node",
        holds=lambda value: value >= 2,
        message=f"shard.strategy = {{strategy!r}} {why}, so it needs at least 2 ranks per node, got {{value}}; use "
        f"{instead!r} or more ranks per node",
    )


def reduced_always(strategy: Strategy, note: str, source: str) -> Strategy:
    """A baseline that reduces in every micro-batch, as a user takes it whose device cannot keep whole gradients."""
    name = f"{strategy.name}-reduced"
    return strategy.variant(
        name=name,
        label=f"{strategy.label}, reduced always",
        note=note,
        source=source,
        shard={"strategy": name},
        limits=(
            *strategy.limits,
            Limit(
                key="train.accumulation",
                holds=lambda value: value > 1,
                message="train.accumulation = {value!r} has one reduction a step anyway; use 'fsdp2' or 'hsdp'",
            ),
        ),
        reduces_always=True,
        in_compare=False,
    )


FSDP2 = Strategy(
    name="fsdp2",
    label="FSDP2",
    note="PyTorch's FSDP2 (ZeRO-3) with what NCCL gives it: a true ring reduce-scatter, and gathers and reductions "
    "that run beside compute.",
    source=f"PyTorch FSDP, arXiv 2304.11277; {_CODE}",
    maker="PyTorch",
    colour="#4d4d4d",
    shard={"strategy": "fsdp2"},
    limits=LIMITS,
    parallelize="laconic.strategies.parallelize:fsdp2",
    predict="laconic.plan.rehearsed:RehearsedStep",
    code="fully_shard(layer)  # of torch.distributed.fsdp; layers, then the model",
)
_HSDP = FSDP2.variant(
    name="hsdp",
    label="HSDP",
    note="FSDP2 inside each node; nodes are replicas, and keep all states.",
    source=f"hybrid sharding, arXiv 2304.11277, section 3.2.2; {_CODE}",
    colour="#4a78a8",
    shard={"strategy": "hsdp"},
    parallelize="laconic.strategies.parallelize:hsdp",
    code='fully_shard(layer, mesh=init_device_mesh(device, ({nodes}, {local}), mesh_dim_names=("replicate", "shard")))',
)
_DDP = Strategy(
    name="ddp",
    label="DDP",
    note="PyTorch's DDP: every rank keeps everything.",
    source="PyTorch Distributed, arXiv 2006.15704",
    maker="PyTorch",
    colour="#a3c1da",
    shard={"strategy": "ddp"},
    limits=(
        *NOT_ON_ENGINE,
        SYNCS_EVERY_STEP,
        *(
            Limit.only(
                f"shard.{key}",
                None,
                message=f"shard.{key} = {{value!r}} but shard.strategy = {{strategy!r}} has no mixed precision: "
                "leave it out and set model.dtype",
            )
            for key in ("param_dtype", "reduce_dtype")
        ),
    ),
    parallelize="laconic.strategies.parallelize:ddp",
    predict="laconic.plan.rehearsed:BucketedStep",
    code="torch.nn.parallel.DistributedDataParallel(model)",
)

STRATEGIES = (
    FSDP2,
    FSDP2.variant(
        name="fsdp2-zero2",
        label="FSDP2 ZeRO-2",
        note="FSDP2 with reshard_after_forward=False: weights stay whole on every rank from forward to backward, so "
        "they cross once and not twice.",
        source=f"ZeRO, arXiv 1910.02054, section 5; {_CODE}",
        colour="#5a6e8c",
        shard={"reshard_after_forward": False},
        code="fully_shard(layer, reshard_after_forward=False)  # of torch.distributed.fsdp; layers, then the model",
    ),
    FSDP2.variant(
        name="fsdp2-pipeline",
        label="FSDP2 pipeline",
        note="Nodes hold different layers and hand activations on: torch's own stages and schedules, with FSDP2 inside "
        "a stage, whose weights stay on each rank during a step.",
        source=f"GPipe, arXiv 1811.06965; 1F1B, arXiv 2104.04473; torch.distributed.pipelining; {_CODE}",
        colour="#08519c",
        limits=(
            *LIMITS,
            *BESIDE_STAGES,
            Limit.only(
                "pipeline.wire",
                "exact",
                message="pipeline.wire = {value!r} is for shard.strategy = 'laconic', not {strategy!r}; leave it out",
            ),
        ),
        pipeline={"wire": "exact"},
        stepper="laconic.strategies.pipeline:TorchPipelineStepper",
        parallelize="laconic.strategies.pipeline:shard_by_torch",
        predict="",
        in_plan=False,
    ),
    FSDP2.variant(
        name="fsdp2-gloo",
        label="FSDP2 on Gloo's own",
        note="The same FSDP2 with Gloo's own collectives. Gloo runs a reduce-scatter as an all-reduce, which moves "
        "gradients twice, so four passes cross in place of three. And FSDP2 waits for every gather, as a CPU has no "
        "streams.",
        colour="#262626",
        shard={"strategy": "fsdp2-gloo"},
        limits=(
            *LIMITS,
            Limit.only(
                "launch.device",
                None,
                "cpu",
                message="shard.strategy = {strategy!r} keeps Gloo's own collectives, which are for CPU; use 'fsdp2' on "
                "{value}",
            ),
        ),
        parallelize="laconic.strategies.parallelize:fsdp2_on_gloo",
    ),
    FSDP2.variant(
        name="fsdp2-hpz",
        label="FSDP2 hpZ",
        note="FSDP2 with an integer for reshard_after_forward: after forward each node keeps a copy of the weights on "
        "its devices.",
        source=f"reshard_after_forward = an integer, as hpZ of arXiv 2306.10209; {_CODE}",
        colour="#7f7f7f",
        shard={"strategy": "fsdp2-hpz"},
        limits=(
            *LIMITS,
            Limit.only(
                "shard.reshard_after_forward",
                None,
                message="shard.reshard_after_forward = {value!r} but shard.strategy = {strategy!r} sets it to the "
                "number of ranks per node: leave it out",
            ),
            several_per_node("fsdp2"),
        ),
        parallelize="laconic.strategies.parallelize:fsdp2_hpz",
        code="fully_shard(layer, reshard_after_forward={local})  # of torch.distributed.fsdp; layers, then the model",
    ),
    FSDP2.variant(
        name="fsdp2-two-level",
        label="FSDP2, two levels",
        note="FSDP2 with custom collectives on two levels, first between nodes and then inside each: a slice of the "
        "weights enters a machine once, and a sum of gradients leaves it once.",
        source="hierarchical all-gathers of torchcomms, pull request 4192, in set_custom_all_gather and "
        f"set_custom_reduce_scatter of {_CODE}",
        colour="#2f5f8f",
        shard={"strategy": "fsdp2-two-level"},
        limits=(*LIMITS, several_per_node("fsdp2", "gathers between nodes and then inside them")),
        parallelize="laconic.strategies.two_levels:fsdp2_two_level",
    ),
    _HSDP,
    reduced_always(
        FSDP2,
        "FSDP2 without no_sync: a device keeps no whole gradients between micro-batches.",
        "PyTorch FSDP, arXiv 2304.11277, section 3.4: without no_sync",
    ),
    reduced_always(
        _HSDP,
        "HSDP without no_sync, but with set_requires_all_reduce: every micro-batch reduces inside the node, and the "
        "last one over replicas. A device keeps no whole gradients between micro-batches.",
        f"hybrid sharding, arXiv 2304.11277, section 3.2.2; set_requires_all_reduce of {_CODE}",
    ),
    _DDP,
    _DDP.variant(
        name="ddp-bf16",
        label="DDP bf16",
        note="DDP with torch's bf16_compress_hook: gradients cross in bfloat16, and are summed so.",
        source=f"{_HOOKS}/default_hooks.py",
        colour="#8fb3d9",
        shard={"strategy": "ddp-bf16"},
        inexact="gradients are rounded to bfloat16, and summed in it",
        parallelize="laconic.strategies.ddp_hooks:ddp_bf16",
    ),
    _DDP.variant(
        name="ddp-powersgd",
        label="DDP PowerSGD",
        note="DDP with torch's powerSGD_hook: from the third step on, gradients of matrices cross as two factors of "
        "rank 4, with warm start and error feedback.",
        source=f"PowerSGD, arXiv 1905.13727; {_HOOKS}/powerSGD_hook.py",
        colour="#3f8f8f",
        shard={"strategy": "ddp-powersgd"},
        inexact="gradients of matrices are cut to rank 4, and what that loses is added to those of the next step",
        saves=False,  # what is fed back differs from rank to rank, and of DDP a checkpoint takes one rank's
        parallelize="laconic.strategies.ddp_hooks:ddp_powersgd",
    ),
    _DDP.variant(
        name="ddp-zero1",
        label="DDP ZeRO-1",
        note="DDP with PyTorch's ZeroRedundancyOptimizer: each rank keeps the optimizer's states of some parameters, "
        "and sends these to all others when it has updated them.",
        source="ZeRO, arXiv 1910.02054, section 5.1; torch's torch/distributed/optim/zero_redundancy_optimizer.py",
        colour="#5b9bb0",
        shard={"strategy": "ddp-zero1"},
        limits=(
            *_DDP.limits,
            Limit.only(
                "optimizer.name",
                "adamw",
                message="optimizer.name = {value!r} but shard.strategy = {strategy!r} is for torch's own optimizers; "
                "set shard.strategy to 'ddp' or 'laconic', or optimizer.name to 'adamw'",
            ),
        ),
        saves=False,  # a rank has states of its own parameters alone, and of DDP a checkpoint takes one rank's
        stepper="laconic.strategies.zero1:Zero1Stepper",
    ),
)
