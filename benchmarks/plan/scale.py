"""The row `scale`: a model of 405 billion parameters on 16,384 ranks, in a fresh process.

    python -m benchmarks.plan.scale

prints the seconds and the bytes of planning. The imports of laconic and transformers come before; what transformers
imports late, with the model's class, counts.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import tomli_w

from benchmarks.plan.bench import Bench
from tests.support.record import Row

JOB = {
    "model": {
        "config": {
            "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
            "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256,
            "max_position_embeddings": 131072, "tie_word_embeddings": False,
        },
        "activation_checkpointing": True,
    },
    "shard": {"param_dtype": "bfloat16"},
    "data": {"sequence_length": 8192},
    "train": {"device": "cuda", "micro_batch_size": 1},
}  # fmt: skip
"""Llama 3.1 405B, of its published configuration."""
CLUSTER = {
    "nodes": 2048, "ranks_per_node": 8, "device": "H100 SXM", "network": "8 x InfiniBand NDR",
    "host_memory_bytes": "2 TB",
}  # fmt: skip

JOB_8B = {**JOB, "model": {**JOB["model"], "config": {**JOB["model"]["config"],
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
}}}  # fmt: skip
"""Llama 3.1 8B, of its published configuration."""


def main() -> None:
    """Plan all strategies, and print what that took."""
    import transformers  # noqa: F401

    from laconic.config import Config, from_dict
    from laconic.plan.cluster_file import cluster_from_dict
    from laconic.plan.prediction import Predictor, Refusal

    before_bytes = _peak_bytes()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    found = list(Predictor(from_dict(Config, JOB), cluster_from_dict(CLUSTER)).all())
    answer = {
        "seconds": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s,
        "bytes": _peak_bytes() - before_bytes, "all_bytes": _peak_bytes(),
        "predicted": {e.strategy: [e.seconds, e.wire_bytes, e.peak_bytes, e.fits] for e in found
                      if not isinstance(e, Refusal)},
        "refused": {e.strategy: e.reason for e in found if isinstance(e, Refusal)},
    }  # fmt: skip
    print(json.dumps(answer))


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def row(bench: Bench) -> Row:
    """Measure the row: the quickest of three processes, since others may use the machine."""
    answers = []
    for _ in range(1 if bench.quick else 3):
        output = subprocess.run(
            [sys.executable, "-m", "benchmarks.plan.scale"], check=True, capture_output=True, text=True
        ).stdout
        answers.append(json.loads(output.splitlines()[-1]))
    best = min(answers, key=lambda answer: answer["seconds"])
    taken = max(answer["bytes"] for answer in answers)
    lines = ", ".join(f"{name} {values[0]:.1f} s" for name, values in best["predicted"].items())
    every = ", ".join(f"{answer['seconds']:.2f} s" for answer in answers)
    refused = "; ".join(f"{name}: {why}" for name, why in best["refused"].items())
    return Row(
        key="scale",
        claim="a plan of Llama 405B on 2,048 x 8 H100, all strategies",
        measured=f"{best['seconds']:.2f} s, {taken / 2**20:.0f} MiB",
        note=f"in a fresh process, after the imports of torch, transformers and laconic; the quickest of "
        f"{len(answers)} ({every}; {best['cpu_s']:.2f} s of the processor). Memory is the growth of the process's "
        f"peak, {best['all_bytes'] / 2**20:.0f} MiB with the imports. Seconds of a step: {lines}. Refused: {refused}.",
    )


def row_8b(bench: Bench) -> Row:
    """Measure `laconic plan` for an 8B model, the start of its process included: the quickest of three."""
    job, cluster = bench.out / "8b.toml", bench.out / "8b-cluster.toml"
    job.write_text(tomli_w.dumps(JOB_8B))
    cluster.write_text(tomli_w.dumps({**CLUSTER, "nodes": 4}))
    command = [sys.executable, "-m", "laconic.cli", "plan", str(job), "--cluster", str(cluster), "--json"]
    taken = []
    for _ in range(1 if bench.quick else 3):
        began_s = time.perf_counter()
        answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        taken.append(time.perf_counter() - began_s)
    predicted, refused = len(answer["strategies"]), len(answer["refused"])
    return Row(
        key="scale-8b",
        claim=f"`laconic plan` of Llama 3.1 8B on 4 x 8 H100: {predicted} strategies, and {refused} refusals",
        measured=f"{min(taken):.2f} s",
        note=f"from the start of the process to its end; of {len(taken)}: " + ", ".join(f"{s:.2f} s" for s in taken),
    )


if __name__ == "__main__":
    main()
