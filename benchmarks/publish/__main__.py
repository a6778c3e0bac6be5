"""How much a published version takes: bytes, the trainer's time and memory, and seconds to bring it to readers.

    python -m benchmarks.publish                      all rows, recorded
    python -m benchmarks.publish --rows bytes         some rows, recorded too
    python -m benchmarks.publish --quick              all rows on a tiny model, printed only

A Llama of 17.7 M parameters learns bytes of this repository's texts: first at 1e-3, so that its weights are no longer
those of an initialisation, then at the rate of a row, by a new AdamW. Rows with times run in the lab, where 200 Mbit/s
join the nodes; run them on a quiet machine. Each takes turns with its baseline in the same processes.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.llama import Llama
from benchmarks.publish import device
from benchmarks.publish.job import Job, fine_tuned, train_step
from laconic.compare.runner import explain_failure
from laconic.lab import Lab, format_rate
from laconic.publish import FolderSource, Publisher, Reader
from tests.support.measure import Benchmark, Options
from tests.support.record import Row

_LLAMA = Llama(hidden=512, intermediate=1408, layers=6, heads=8, kv_heads=4, vocab=258, batch=4, sequence=128)
_TINY = dataclasses.replace(_LLAMA, hidden=64, intermediate=96, layers=2, heads=2, kv_heads=1, batch=2, sequence=32)
RATE_BITS_PER_S = 200e6
_RATES = {1e-6: 40, 1e-5: 12, 1e-4: 5}
"""The learning rates, and by how much a patch must be smaller than whole values."""
_TIMEOUT_S = 1200.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The sizes of all jobs."""

    job: Job
    versions: int
    """The versions whose bytes or times are measured."""
    out: Path


def _prepare(options: Options) -> Bench:
    if options.quick:
        return Bench(job=Job(llama=_TINY, first_steps=3, warm_up_steps=1), versions=2, out=options.out)
    return Bench(job=Job(llama=_LLAMA, first_steps=60), versions=8, out=options.out)


BENCHMARK = Benchmark(measures=("laconic.publish", "laconic.codec.lossless"), name="publish", prepare=_prepare)


@BENCHMARK.row("bytes")
def patch_bytes(bench: Bench) -> Row:
    """Bytes of patches in both ways to write them, against those of all values in bf16."""
    found = {
        rate: {encoding: _patch_bytes(bench, rate, encoding) for encoding in ("smallest", "gaps")} for rate in _RATES
    }
    whole = 2 * bench.job.numel
    ratios = {rate: {name: whole / nbytes for name, nbytes in each.items()} for rate, each in found.items()}
    return Row(
        claim='bytes of a patch, `encoding="smallest"` / "gaps", against whole bf16, AdamW at 1e-6; 1e-5; 1e-4',
        measured="; ".join(f"1/{each['smallest']:.1f} / 1/{each['gaps']:.1f}" for each in ratios.values()),
        note=f"{bench.job.llama}, after {bench.job.first_steps} steps at 1e-3 and {bench.job.warm_up_steps} of a new "
        f"AdamW at the rate; medians of {bench.versions} versions, one a step, without the manifest, whose bytes are "
        "those of names and digests. Gaps, the default, are what every reader of safetensors and every engine can "
        "apply: a byte for the place of a change, two for its value.",
    )


@BENCHMARK.row("disk", section="lossless")
def weights_on_disk(bench: Bench) -> Row:
    """Bytes on disk of weights as differences to those of some steps before, in the coding of the wire."""
    limits = {1e-4: 0.2, 1e-5: 0.08}
    every = 5
    whole = 2 * bench.job.numel
    once = {rate: _patch_bytes(bench, rate, "smallest") / whole for rate in limits}
    later = {rate: _patch_bytes(bench, rate, "smallest", every=every) / whole for rate in limits}
    return Row(
        claim="bf16 weights on disk as differences to the version before, against whole ones, AdamW at 1e-4 / 1e-5: of "
        f"each step; of each {every}th step; whole again",
        measured=f"{once[1e-4]:.3f}x / {once[1e-5]:.3f}x; {later[1e-4]:.3f}x / {later[1e-5]:.3f}x; to the bit",
        note=f"{bench.job.llama}; medians of {bench.versions} versions of laconic.publish, which is where weights are "
        "kept as differences; each chain was read back and compared with the model. A checkpoint has weights in fp32 "
        "and two moments besides, which change everywhere, so its folders stay whole.",
    )


def _patch_bytes(bench: Bench, rate: float, encoding: str, *, every: int = 1) -> float:
    """The median bytes of the patches of a run at a learning rate, a version each `every` steps; all are read back."""
    torch.set_num_threads(2)
    model, optimizer = fine_tuned(bench.job, rate)
    with tempfile.TemporaryDirectory(dir=bench.out) as folder:
        with Publisher(model, folder, encoding=encoding, keep=bench.versions + 1) as publisher:  # type: ignore[arg-type]
            for version in range(bench.versions + 1):
                publisher.publish(step=version)
                publisher.wait()
                if version < bench.versions:
                    for step in range(every):
                        train_step(bench.job, model, optimizer, every * version + step)
        held = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in model.state_dict().items()}
        Reader(folder).update(held)
        wrong = [name for name, tensor in model.state_dict().items() if not torch.equal(held[name], tensor.bfloat16())]
        if wrong:
            raise RuntimeError(f"read back differently: {wrong}")
        source = FolderSource(folder)
        return statistics.median(source.manifest(version).nbytes("patch") for version in source.versions()[1:])


@BENCHMARK.row("standstill")
def standstill(bench: Bench) -> Row:
    """The time in `publish` against a gather of all weights to rank 0."""
    found = {rate: _in_lab(bench, "standstill", nodes=2, local=2, rate=rate) for rate in (RATE_BITS_PER_S, None)}
    ratios = {rate: each["publish_s"] / each["gather_s"] for rate, each in found.items()}
    return Row(
        claim=f"time that training stands still for a version, 2 x 2, {format_rate(RATE_BITS_PER_S)} / unshaped, "
        "against a whole gather to rank 0",
        measured=" / ".join(f"{ratio:.3f}x" for ratio in ratios.values()),
        note=f"{bench.job.llama}, cache=host; medians of {bench.versions} versions, of the slowest rank: "
        + "; ".join(f"{format_rate(rate)}: publish {each['publish_s']:.4f} s, gather {each['gather_s']:.4f} s"
                    for rate, each in found.items())
        + ". The gather is torch's `get_model_state_dict` of FSDP2 with `full_state_dict` and `cpu_offload`, cast to "
        "bf16 on rank 0. Four ranks share two processors.",
    )  # fmt: skip


@BENCHMARK.row("memory")
def host_memory(bench: Bench) -> Row:
    """The host memory of a publisher, over all ranks, against one copy in bf16."""
    found = _in_lab(bench, "memory", nodes=2, local=2, rate=None)
    ratio = found["held_bytes"] / (2 * bench.job.numel)
    return Row(
        claim="host memory that a publisher holds between versions, over all ranks, against one copy in bf16",
        measured=f"{ratio:.3f}x; {found['held_bytes_lossless'] / (2 * bench.job.numel):.3f}x",
        note=f"{bench.job.llama}, 2 x 2, bytes of all tensors that only the publisher holds. The copy of the wire is "
        "not used: it lags behind the weights in units that no forward has gathered since, and has other borders.",
    )


BENCHMARK.row("device-memory")(device.memory_row)


def _sync_row(bench: Bench, readers: int) -> Row:
    found = _in_lab(bench, "sync", nodes=1 + readers, local=1, rate=RATE_BITS_PER_S)
    ratio = found["http"]["seconds"] / found["whole"]["seconds"]
    each = "; ".join(f"{name}: {it['seconds']:.3f} s, {it['sent_bytes'] / 1e6:.3f} MB" for name, it in found.items())
    return Row(
        claim=f"seconds from a step to {readers} reader{'s' * (readers > 1)}, a node each, "
        f"{format_rate(RATE_BITS_PER_S)}, AdamW at 1e-6: HTTP, against a broadcast of whole weights",
        measured=f"{ratio:.3f}x",
        note=f"{bench.job.llama}; medians of {bench.versions} versions in turns, from `publish` until the slowest "
        f"reader has them, with bytes that leave the trainer's interface; {each}. {1 + readers} processes share two "
        'processors: comparing, hashing, applying take the rest. Readers have `verify="first"`, patches are gaps. '
        "The broadcast is Gloo's, of one bf16 buffer.",
    )


@BENCHMARK.row("sync-1")
def sync_to_one(bench: Bench) -> Row:
    """One reader."""
    return _sync_row(bench, 1)


@BENCHMARK.row("sync-4")
def sync_to_four(bench: Bench) -> Row:
    """Four readers."""
    return _sync_row(bench, 4)


def _in_lab(bench: Bench, part: str, *, nodes: int, local: int, rate: float | None) -> dict[str, Any]:
    """Run a part of the job on the ranks of a lab, and return its answer."""
    name = f"{part}-{nodes}-{format_rate(rate)}"
    given, answer = bench.out / f"{name}.json", bench.out / f"{name}-answer.json"
    given.write_text(json.dumps({"job": dataclasses.asdict(bench.job), "versions": bench.versions}))
    answer.unlink(missing_ok=True)
    with Lab(nodes=nodes, rate_bits_per_s=rate) as lab:
        command = ["-m", "benchmarks.publish.job", part, str(given), str(answer)]
        outcome = lab.run(command, local=local, timeout_s=_TIMEOUT_S, show=False)
    if outcome.exit_code:
        raise RuntimeError(f"{part} failed: {explain_failure(outcome)}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
