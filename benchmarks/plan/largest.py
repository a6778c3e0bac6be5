"""The rows `largest-batch` and `largest-batch-paper`: the largest micro-batch that a memory limit leaves room for.

The first is measured: fresh processes under RLIMIT_DATA, as in the row `fits`. The limit counts private memory, and so
all of a rank but its part of the host cache, which lies in shared pages. So a CPU's process has the two memories of a
machine with accelerators. The second is the planner's, for the models and machines of the FCDP paper (arXiv 2602.06499,
its table of largest batches, which has powers of two).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.plan import paper
from benchmarks.plan.bench import Bench, columns
from benchmarks.plan.jobs import PEERS, STRATEGIES, VARIANTS, Case, make_cases
from benchmarks.plan.processes import most_resident_bytes
from laconic.plan.candidates import CANDIDATES
from laconic.plan.estimates import Estimate
from laconic.plan.prediction import Predictor
from tests.support.record import Row

NODES, LOCAL = 2, 2
ZERO_3, HPZ, HOST = "fsdp2", "fsdp2-hpz", "host"
COMPARED = (ZERO_3, "hsdp", HPZ, "none", HOST, "device")
_STEPS = 3
"""States exist from the end of the first step on, and caches are full."""
_LIMIT_BYTES = 640_000_000
_ROWS = 32
"""The search for the first strategy begins here."""
_MODELS = {
    "10B": (4800, 40, 40), "15B": (5760, 45, 40), "20B": (6656, 52, 40), "25B": (7168, 56, 39), "30B": (7936, 62, 40),
}  # fmt: skip
"""Width, heads and layers of the paper's models."""
_TOKENS = 1024
"""The tokens of a row: the most that GPT-2 takes."""
_IN_PAPER: dict[tuple[int, str], tuple[int | None, ...]] = {
    (2, ZERO_3): (256, 128, 128, 64, 64),
    (2, HPZ): (128, 128, 64, 32, None),
    (4, ZERO_3): (512, 512, 256, 256, 256),
    (4, HPZ): (512, 256, 256, 256, 128),
}
"""The paper's global batches by nodes and strategy, for each model: FCDP has those of ZeRO-3."""


def largest(runs: Callable[[int], bool], near: int) -> int:
    """The largest count that `runs`, which are all up to some count; 0 if none is. The search begins `near` it."""
    below, above, stride, count = 0, None, 1, near
    while above is None or above - below > 1:
        if runs(count):
            below = count
        else:
            above = count
        if above is not None and below:
            count = (below + above) // 2
        else:
            count, stride = count + stride if above is None else max(count - stride, 1), 2 * stride
    return below


def _case(bench: Bench, strategy: str, rows: int) -> Case:
    layers = [{**STRATEGIES, **PEERS}[strategy], VARIANTS["checkpointing"]]
    layers.append({"train": {"micro_batch_size": rows}, "data": {"sequence_length": 128}})
    (case,) = make_cases("layers", [(f"{strategy}, {rows} rows", layers, strategy)], out=bench.out, steps=_STEPS)
    return case


def _runs(bench: Bench, limit_bytes: int, strategy: str, rows: int) -> bool:
    return most_resident_bytes(_case(bench, strategy, rows), NODES, LOCAL, limit_bytes) is not None


def row(bench: Bench) -> Row:
    """Measure the largest micro-batches under a limit."""
    found: dict[str, int] = {}
    near = _ROWS
    for strategy in (ZERO_3, HPZ, HOST) if bench.quick else COMPARED:
        found[strategy] = largest(partial(_runs, bench, _LIMIT_BYTES, strategy), near)
        near = max(1, found[strategy])
        print(f"{CANDIDATES[strategy].label}: {near}", flush=True)
    host, hpz = (found[name] / found[ZERO_3] for name in (HOST, HPZ))
    return Row(
        key="largest-batch",
        claim="largest micro-batch under a memory limit, cache=host / FSDP2 hpZ against ZeRO-3 (FSDP2)",
        required=">= 1.00x / below 1x",
        measured=f"{host:.2f}x / {hpz:.2f}x",
        is_met=host >= 1 > hpz,
        note=f"{NODES} x {LOCAL} fresh processes, RLIMIT_DATA {_LIMIT_BYTES / 1e6:.0f} MB each, some 0.4 GB of it for "
        "Python and its libraries; rows of 128 tokens, 14 M parameters in fp32, activations recomputed. Rows: "
        f"{', '.join(f'{CANDIDATES[name].label} {rows}' for name, rows in found.items())}. The host cache lies in "
        "shared pages, which the limit does not count, as an accelerator's memory would not hold it. laconic has five "
        "process groups of Gloo, and so 25 threads more than FSDP2, whose stacks of 0.5 MiB count: some 13 MB, and a "
        "row takes 7. On accelerators NCCL has none of these.",
    )


def _most_rows(traces: dict[int, Predictor], shape: tuple[int, int, int], nodes: int, name: str, near: int) -> int:
    """The largest number of rows for each GPU under a strategy, on machines of the paper."""

    def fits(rows: int) -> bool:
        if rows not in traces:
            train = {"device": "cuda", "micro_batch_size": rows}
            job = paper.job(*shape, train=train, data={"sequence_length": _TOKENS})
            traces[rows] = Predictor(job, paper.cluster(nodes))
        found = traces[rows].on(paper.cluster(nodes)).estimate(CANDIDATES[name])
        assert isinstance(found, Estimate), found
        return found.fits

    return largest(fits, near)


def _global_batch(rows: int, nodes: int) -> int:
    """The batch of all GPUs with a power of two of rows each."""
    return 8 * nodes * (1 << rows.bit_length() >> 1)


def paper_row(bench: Bench) -> Row:
    """Predict the largest batches of the FCDP paper."""
    found: dict[str, list[int]] = {name: [] for name in COMPARED}
    lines: list[list[str]] = []
    models = list(_MODELS.items())
    for index, (model, shape) in enumerate(models[:1] if bench.quick else models):
        traces: dict[int, Predictor] = {}
        for nodes in (2, 4):
            near = 16
            for name in COMPARED:
                found[name].append(_most_rows(traces, shape, nodes, name, near))
                near = max(1, found[name][-1])
            batches = [_global_batch(found[name][-1], nodes) for name in (ZERO_3, HOST, HPZ)]
            said = [_IN_PAPER[nodes, name][index] or "none" for name in (ZERO_3, HPZ)]
            lines.append([f"{model}, {nodes} nodes", *(str(found[name][-1]) for name in COMPARED),
                          " / ".join(map(str, batches)), " / ".join(map(str, said))])  # fmt: skip
            print(" | ".join(lines[-1]), flush=True)
    labels = [f"{CANDIDATES[name].label}: rows" for name in COMPARED]
    bench.tables["largest-batch-paper"] = columns(
        ("model", *labels, "batch, ZeRO-3 / host / hpZ", "the paper, ZeRO-3 and FCDP / ZeRO++"), lines
    )
    host, hpz = ([own / peer for own, peer in zip(found[name], found[ZERO_3], strict=True)] for name in (HOST, HPZ))
    powers = [
        _global_batch(own, 1) / _global_batch(peer, 1) for own, peer in zip(found[HOST], found[ZERO_3], strict=True)
    ]
    return Row(
        key="largest-batch-paper",
        claim="largest batch on the FCDP paper's machines, 10B to 30B, cache=host / FSDP2 hpZ against ZeRO-3 (FSDP2)",
        required=">= 1.00x in each / below 1x in each",
        measured=f"{min(host):.2f}x to {max(host):.2f}x / {min(hpz):.2f}x to {max(hpz):.2f}x",
        is_met=min(host) >= 1 > max(hpz),
        note=f"by the planner, in rows of {_TOKENS} tokens for each GPU, activations recomputed; the paper gives no "
        f"length. In powers of two, as the paper counts, cache=host has {min(powers):.2f}x to {max(powers):.2f}x of "
        "ZeRO-3's batch. The paper has FCDP at 1x in all ten cases, ZeRO++ at half in five and out of memory in one.",
    )
