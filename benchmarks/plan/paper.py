"""The rows of the FCDP paper (arXiv 2602.06499): what it measured, from the planner.

`fcdp-paper` has step times on 10 GbE and volumes; `fcdp-infiniband` the gain over ZeRO-3 on InfiniBand, where it claims
40 %; `fcdp-infiniband-fitted` the same on a wire that gives ZeRO-3 the rate that it had; `fcdp-slow-wire` the most that
it claims: LoRA on 1 GbE.

The paper states: nodes of 8 A40, PCIe 4; GPT-2-like models of 50257 tokens; batches of 8 for each GPU unless noted;
LoRA of rank 8 on queries, keys, values and outputs. FCDP as published gathers once on a flat ring, as FSDP2 hpZ does:
hpZ keeps on the device what FCDP keeps on the host.

Derived from it: 16 GB between 2 nodes take 6.745 s on its 10 GbE, that is 8 GB in each direction, so 1.186 GB/s of
payload; 0.949 s on InfiniBand, and 67.66 s on 1 GbE. Its 213.73 "GB" are the bytes of both nodes in GiB, since nothing
else fits the 30B model on 2 nodes.

Not published: the sequence length (384 is usual for SQuAD), whether activations were recomputed (assumed, since
the batches would not fit), and the type of adapters' gradients (float32 fits: backward moved twice what forward did).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.plan.bench import Bench
from laconic.config import Config, from_dict
from laconic.plan.candidates import CANDIDATES
from laconic.plan.cluster_file import cluster_from_dict
from laconic.plan.cluster_spec import ClusterSpec
from laconic.plan.estimates import Estimate
from laconic.plan.prediction import Predictor
from tests.support.record import Row, Table, recorded_rows

_CLOSE = 0.05
_COPY_S = {"10 GbE": 6.745, "InfiniBand EDR": 0.949, "1 GbE": 67.66}
"""The paper's own measurement of a copy of 16 GB between 2 nodes: 8 GB in each direction."""
_MODELS = {
    "10B": (4800, 40, 40), "15B": (5760, 45, 40), "20B": (6656, 52, 40), "25B": (7168, 56, 39), "30B": (7936, 62, 40),
}  # fmt: skip
"""Width, heads and layers."""
_LARGEST = {2: (256, 128, 128, 64, 64), 4: (512, 512, 256, 256, 256)}
"""The largest global batches of ZeRO-3, and of FCDP, by nodes, for each model."""
_GAIN = 0.402, 0.413
"""What FCDP gains over ZeRO-3 on InfiniBand at most, at equal and at the largest batches: 10B, 4 nodes."""
_ROWS = 8, 16
"""The rows of a GPU at these batches, 10B on 4 nodes."""
_RATES = {2: 14.1, 4: 23.2}
"""Samples per second of ZeRO-3, 10B, on InfiniBand, by nodes."""
_ZERO_3 = "fsdp2"
"""The planner's name of ZeRO-3 on a flat ring."""
_HPZ = "fsdp2-hpz"
"""Gathered once across nodes, frozen weights too: what the paper measured as ZeRO++, and FCDP-Sched."""


_LORA = {"enabled": True, "rank": 8, "targets": ["c_attn", "attn.c_proj"]}


def cluster(nodes: int, network: str = "10 GbE", share: float = 1.0) -> ClusterSpec:
    """The paper's machines, on a wire with a share of the rate of its copy."""
    return cluster_from_dict(
        {
            "nodes": nodes, "ranks_per_node": 8, "device": "A40", "host_memory_bytes": "512 GB", "network": network,
            "wire_bits_per_s": share * 8 * 8e9 / _COPY_S[network], "wire_header_factor": 1.0,
        }
    )  # fmt: skip


def job(width: int, heads: int, layers: int = 40, **sections: dict[str, Any]) -> Config:
    """A model of the paper."""
    table = {
        "model": {
            "config": {
                "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024,
                "vocab_size": 50257,
            },
            "activation_checkpointing": True,
        },
        "shard": {"param_dtype": "bfloat16"},
        "data": {"sequence_length": 384},
        "train": {"device": "cuda", "micro_batch_size": 8},
        **sections,
    }  # fmt: skip
    return from_dict(Config, table)


def _estimated(predictor: Predictor, name: str) -> Estimate:
    found = predictor.estimate(CANDIDATES[name])
    assert isinstance(found, Estimate), found
    return found


def row(bench: Bench) -> Row:
    """Compare the planner with the paper."""
    lines: list[tuple[str, str, float, float]] = []
    full = Predictor(job(4800, 40), cluster(2))
    for nodes, said_s in ((2, 53.3), (4, 55.7)):
        found = _estimated(full.on(cluster(nodes)), _ZERO_3)
        lines.append((f"10B, {nodes} nodes, ZeRO-3: s", found.label, found.seconds, said_s))
    lora = job(7936, 62, lora=_LORA)
    adapters = Predictor(lora, cluster(2))
    in_gib = 2 / 2**30  # both nodes
    for name, words, said in ((_ZERO_3, "ZeRO-3", 213.73), (_HPZ, "ZeRO++, FCDP-Sched", 108.28)):
        found = _estimated(adapters, name)
        lines.append((f"30B LoRA, 2 nodes, {words}: GiB", found.label, found.wire_bytes * in_gib, said))
    fp32 = dataclasses.replace(lora, shard=lora.shard.with_keys(reduce_dtype="float32"))
    host = _estimated(Predictor(fp32, cluster(2)), "host")
    across = host.ranks_per_node * sum(
        size for (level, purpose), size in host.sent_bytes.items()
        if level == "node" and purpose in ("weights", "gradients")
    )  # fmt: skip
    flat = (15 / 16) / (1 / 2)  # the published FCDP gathers along a flat ring; laconic's two levels cross less
    lines.append(("30B LoRA, 2 nodes, FCDP-Comm: GiB", f"{host.label}, as a flat ring", across * flat * in_gib, 0.16))
    errors = [value / said - 1 for _, _, value, said in lines]
    bench.tables["fcdp-paper"] = Table(
        columns=("figure", "strategy", "predicted", "the paper", ""),
        rows=[
            [name, label, f"{value:.2f}", f"{said:.2f}", f"{value / said - 1:+.1%}"]
            for name, label, value, said in lines
        ],
    )
    return Row(
        key="fcdp-paper",
        claim="step times (53.3 s, 55.7 s) and volumes (213.73, 108.28, 0.16 GB) of the FCDP paper",
        measured=", ".join(
            f"{value:.2f} ({error:+.1%})" for (_, _, value, _), error in zip(lines, errors, strict=True)
        ),
        note="the wire's rate is the paper's own measurement of a copy. The paper gives no sequence length (384 is "
        "assumed) and no unit of its counters (GiB of both nodes fit). FCDP as published crosses on a flat ring; "
        f"laconic's two levels would cross {across * in_gib:.3f} GiB. "
        "Gradients of adapters are in float32, as backward's bytes say.",
    )


def infiniband(bench: Bench) -> Row:
    """Compare the planner with the paper's gain on InfiniBand."""
    lines, own_gains = [], []
    steps = _steps_on_infiniband(bench)
    for (model, nodes, rows), found in steps.items():
        published, own = _gains(found)
        own_gains.append(own - published)
        batch, seconds = 8 * nodes * rows, [each.seconds for each in found.values()]
        fits = "yes" if found["host"].fits and found[_ZERO_3].fits else "no"
        lines.append([f"{model}, {nodes} nodes", str(batch), *(f"{batch / each:.1f}" for each in seconds),
                      f"{published:+.1%}", f"{own:+.1%}", fits])  # fmt: skip
    bench.tables["fcdp-infiniband"] = Table(
        columns=("full training, InfiniBand", "batch", "ZeRO-3: samples/s", "FCDP as published", "cache=host",
         "FCDP against ZeRO-3", "cache=host", "fits"), rows=lines,
    )  # fmt: skip
    found_gains = [_gains(steps["10B", 4, rows])[0] for rows in _ROWS]
    rates = [64 * nodes / steps["10B", nodes, 8][_ZERO_3].seconds for nodes in _RATES]
    at_8 = [_gains(found)[0] for (*_, rows), found in steps.items() if rows == 8]
    return Row(
        key="fcdp-infiniband",
        claim="full training on InfiniBand, 10B on 4 nodes of the FCDP paper: what FCDP as published gains over ZeRO-3 "
        "at a batch of 8 a GPU (+40.2 %) and at the largest, 16 (+41.3 %)",
        measured=f"{' / '.join(f'{each:+.1%}' for each in found_gains)}; {100 * min(own_gains):+.1f} points or more",
        note="by the planner. The wire's rate is the paper's own measurement of a copy, 67 Gbit/s of 100. FCDP as "
        "published gathers once on a flat ring, as FSDP2 hpZ does, which stands for it. The paper gives no sequence "
        f"length (384 is assumed). 10B to 30B on 2 and 4 nodes gain {min(at_8):+.1%} to {max(at_8):+.1%} at 8 a GPU. "
        "At 16 the plan of ZeRO-3 waits for compute, since it gives collectives the rate of a copy: on 2 / 4 nodes it "
        f"has {' / '.join(f'{rate:.1f}' for rate in rates)} samples a second, and the paper measured 14.1 / 23.2.",
    )


def infiniband_fitted(bench: Bench) -> Row:
    """Compare the gains again, on a wire of the rate that ZeRO-3 had in the paper."""
    planned_s = _steps_on_infiniband(bench)["10B", 4, 8][_ZERO_3].seconds
    share = planned_s * _RATES[4] / 256  # the step waits for the wire alone
    on = cluster(4, "InfiniBand EDR", share)
    estimates = {rows: _on_infiniband(_job_of("10B", rows).on(on)) for rows in _ROWS}
    shorter = _gains(_on_infiniband(_job_of("10B", _ROWS[1], tokens=256).on(on)))[0]
    rate = 256 / estimates[8][_ZERO_3].seconds
    gains = [_gains(found) for found in estimates.values()]
    return Row(
        key="fcdp-infiniband-fitted",
        claim="the same with the wire's rate fitted to one figure of the paper, ZeRO-3's 23.2 samples a second: FCDP "
        "as published over ZeRO-3, at 8 a GPU (+40.2 %) and at 16 (+41.3 %)",
        measured=" / ".join(f"{published:+.1%}" for published, _ in gains),
        note=f"{share:.0%} of the rate of the copy; ZeRO-3 then has {rate:.1f} samples a second. The gain at 16 hangs "
        "on the length of a sequence, which the paper does not give: longer ones compute for longer, and that hides "
        f"the wire. At 256 tokens in place of 384 it is {shorter:+.1%}. cache=host would gain "
        f"{' / '.join(f'{own:+.1%}' for _, own in gains)}.",
    )


def _gains(found: dict[str, Estimate]) -> tuple[float, float]:
    """What FCDP as published, and cache=host, gain over ZeRO-3."""
    published, own = (found[_ZERO_3].seconds / found[name].seconds - 1 for name in (_HPZ, "host"))
    return published, own


def _are_close(gains: Sequence[float]) -> bool:
    return all(abs(gain - said) <= _CLOSE for gain, said in zip(gains, _GAIN, strict=True))


def _on_infiniband(predictor: Predictor) -> dict[str, Estimate]:
    """ZeRO-3, FCDP as published, and cache=host."""
    return {name: _estimated(predictor, name) for name in (_ZERO_3, _HPZ, "host")}


def _job_of(model: str, rows: int, tokens: int = 384) -> Predictor:
    sections: dict[str, Any] = {
        "train": {"device": "cuda", "micro_batch_size": rows},
        "data": {"sequence_length": tokens},
    }
    return Predictor(job(*_MODELS[model], **sections), cluster(2))


def _steps_on_infiniband(bench: Bench) -> dict[tuple[str, int, int], dict[str, Estimate]]:
    """By model, nodes and rows a GPU, the estimates of ZeRO-3, of FCDP as published and of cache=host."""
    if bench.infiniband:
        return bench.infiniband
    models = list(_MODELS)
    for index, model in enumerate(models[:1] if bench.quick else models):
        rows_on = {nodes: {8, batches[index] // (8 * nodes)} for nodes, batches in _LARGEST.items()}
        for rows in sorted(set().union(*rows_on.values())):
            traced = _job_of(model, rows)
            for nodes in (each for each in rows_on if rows in rows_on[each]):
                on = traced.on(cluster(nodes, "InfiniBand EDR"))
                bench.infiniband[model, nodes, rows] = _on_infiniband(on)
    return bench.infiniband


def slow_wire(bench: Bench) -> Row:
    """Compare the planner with the most that the paper claims, and name what it beat."""
    names = {"ZeRO-3": _ZERO_3, "ZeRO++": _HPZ, "int8": "zero++", "FCDP": "host"}
    lines, ratios = [], dict[str, list[float]]()
    for model in ("10B", "30B"):
        predictor = Predictor(job(*_MODELS[model], lora=_LORA), cluster(2, "1 GbE"))
        found = {name: _estimated(predictor, of_name) for name, of_name in names.items()}
        for name, each in found.items():
            ratios.setdefault(name, []).append(each.seconds / found["FCDP"].seconds)
            lines.append([f"{model}, {each.label}", f"{each.seconds:.1f}", f"{ratios[name][-1]:.1f}x"])
    bench.tables["fcdp-slow-wire"] = Table(columns=("LoRA, 1 GbE", "s", "against laconic host"), rows=lines)
    today = recorded_rows()["wire", "lora-hpz"]
    return Row(
        key="fcdp-slow-wire",
        claim="LoRA on 1 GbE, 10B / 30B on 2 nodes of the FCDP paper: cache=host against ZeRO-3; against hpZ as it was "
        "before DeepSpeed 0.13.2, which is the paper's ZeRO++ and is gone",
        measured="; ".join(" / ".join(f"{each:.0f}x" for each in ratios[name]) for name in ("ZeRO-3", "ZeRO++")),
        note="by the planner. The paper's 51x is not against a ZeRO++ of today. Its bytes say that its ZeRO++ was hpZ "
        "without codes that gathered frozen weights in every forward; DeepSpeed's hpZ has kept a frozen base on the "
        "node since 0.13.2, so what the paper beat is gone. Against the hpZ of today, measured and not planned "
        f"(section wire, row lora-hpz), cache=host takes {today.measured.split(' / ')[1]} of the time. With ZeRO++'s "
        "int8, on two levels, frozen weights again in every forward: "
        f"{' / '.join(f'{each:.0f}x' for each in ratios['int8'])}.",
    )
