"""The row `simulated-h100`: a step that an H100 has really taken, simulated with the figures of the grid."""

from __future__ import annotations

from benchmarks.gpu.training import FULL
from benchmarks.simulated.cluster import ATTENTION, MATMUL, MEASURED_S, MEMORY, h100_nodes
from benchmarks.simulated.grid import Bench
from laconic.config import Config, from_dict
from laconic.plan.candidates import CANDIDATES
from laconic.plan.estimates import Estimate
from laconic.plan.machine import PlanLane, Simulator
from laconic.plan.model_trace import trace_job
from laconic.plan.prediction import Predictor
from tests.support.record import Row


def _job() -> Config:
    """The job of the row `step-plain`: benchmarks/gpu."""
    shape = FULL.step
    config = {
        "model_type": "llama", "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab, "tie_word_embeddings": False,
    }  # fmt: skip
    return from_dict(
        Config,
        {
            "model": {"config": config, "dtype": "bfloat16"},
            "data": {"sequence_length": shape.sequence},
            "optimizer": {"max_grad_norm": 0},
            "train": {"device": "cuda", "micro_batch_size": shape.batch},
        },
    )


def simulated_s() -> dict[str, float]:
    """The seconds in which the device computes, by contestant: plain PyTorch, and FSDP2 and laconic on one rank."""
    job, cluster = _job(), h100_nodes(1, 25, ranks_per_node=1)
    plain = trace_job(
        Config(model=job.model, shard=job.shard.with_keys(strategy="fsdp2"), data=job.data, train=job.train)
    )
    machine = Simulator(cluster)
    predictor = Predictor(job, cluster)
    whole = predictor.estimate(CANDIDATES["ddp"], keeps_spans=True)
    assert isinstance(whole, Estimate), whole
    updates = [span for span in whole.spans if "adamw" in span.name]
    found = {"plain": sum(map(machine.seconds, plain.phases)) + sum(each.end_s - each.begin_s for each in updates)}
    for name in ("fsdp2", "none"):
        step = predictor.estimate(CANDIDATES[name])
        assert isinstance(step, Estimate), step
        found[name] = step.busy_s[PlanLane.COMPUTE]
    return found


def row(bench: Bench) -> Row:
    """Hold the simulated compute to a measurement that had no part in it."""
    found = simulated_s()
    errors = {name: seconds / MEASURED_S[name] - 1 for name, seconds in found.items()}
    each = ", ".join(
        f"{name} {found[name] * 1e3:.1f} ms against {MEASURED_S[name] * 1e3:.1f} ms ({error:+.1%})"
        for name, error in errors.items()
    )
    ratios = [of["none"] / of["fsdp2"] for of in (found, MEASURED_S)]
    return Row(
        key="simulated-h100",
        claim="simulated compute of a step that one H100 has taken, plain PyTorch, against the measurement",
        measured=f"{errors['plain']:+.1%}",
        note=f"{FULL.step}, bf16, fused AdamW: {each}. Under FSDP2 and laconic the trainer measures a norm as well. "
        f"laconic against FSDP2: {ratios[0]:.3f}x simulated, {ratios[1]:.3f}x measured. Products at {MATMUL.text}, "
        f"attention at {ATTENTION.text}, memory at {MEMORY.text}: none of these is from this step. Small kernels do "
        "not fill the memory's bandwidth, and no gap between kernels is counted.",
    )
