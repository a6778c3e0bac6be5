"""The front figures in what people run: in bf16 as in fp32, with 8 micro-batches a step as with one.

    python -m benchmarks.twins                       all rows, some 40 minutes on 2 cores, recorded
    python -m benchmarks.twins --rows bytes          some rows, recorded too: bytes hang on no processor
    python -m benchmarks.twins --quick               all rows on a tiny job, printed only

Rows are measured on 2 nodes x 2 ranks; jobs/thinner.toml is the job, of 10.8 M parameters. Run `seconds-bf16` on a
processor that multiplies bf16 (`avx512_bf16` or `amx_bf16` among its flags): on others the products are most of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from benchmarks.wire.bench import Bench as WireBench
from benchmarks.wire.bench import Key, Setup, opened, seconds_of, wire_bytes
from laconic.compare.case import STRATEGIES
from laconic.compare.table import render
from laconic.lab import format_rate
from tests.support.measure import Benchmark
from tests.support.record import Record, Row, Table

TWINS: Mapping[str, Setup] = {
    f"{dtype}, {times}": Setup(job_file="thinner", is_half=dtype == "bf16", accumulation=times)
    for times in (1, 8)
    for dtype in ("fp32", "bf16")
}
"""By dtype of weights, gathers and products, and by micro-batches of a step."""
PEERS, OWN = ("fsdp2-two-level", "hsdp", "ddp", "ddp-bf16"), ("host", "4bit")
_RATE_BITS_PER_S = 200e6


class Bench(WireBench):
    """`benchmarks.wire.bench.Bench` on these jobs."""

    home = TWINS["fp32, 1"]

    def _steps(self, key: Key) -> int:
        """The number of steps of a case."""
        return 4 if self.quick or key.rate_bits_per_s is None else 6


def _save(record: Record, bench: Bench) -> None:
    unshaped = {key: run for key, run in bench.results.items() if key.rate_bits_per_s is None}
    rows = [
        (STRATEGIES[name].label, *(f"{_bytes(bench, name, setup) / 1e6:.2f}" for setup in TWINS.values()))
        for name in ("fsdp2", *PEERS, *OWN)
    ]
    record.save({"bytes": Table(columns=("MB a node and step", *TWINS), rows=rows)} if unshaped else None)


def _bytes(bench: Bench, name: str, setup: Setup) -> float:
    """The bytes of a node and step. DDP's weights and gradients stay in fp32 where products are in bf16."""
    return wire_bytes(bench.result(name, setup=replace(setup, is_half=setup.is_half and not name.startswith("ddp"))))


BENCHMARK = Benchmark(
    measures=("laconic.codec", "laconic.comm", "laconic.shard", "laconic.strategies"),
    name="twins",
    prepare=lambda options: opened(Bench(options.out, quick=options.quick), TWINS["fp32, 1"]),
    save=_save,
    details=lambda bench: render(list(bench.results.values())),
)


@BENCHMARK.row("bytes")
def wire_bytes_row(bench: Bench) -> Row:
    """Bytes at the interface against FSDP2 with a true ring."""
    ratios = {
        name: [_bytes(bench, name, setup) / _bytes(bench, "fsdp2", setup) for setup in TWINS.values()]
        for name in (*PEERS, *OWN)
    }
    words = "; ".join(f"{STRATEGIES[name].label} {_ratios(each)}" for name, each in ratios.items())
    parameters = bench.result("host", setup=TWINS["fp32, 1"]).num_parameters
    return Row(
        claim=f"bytes on the wire, full training of {parameters / 1e6:.1f} M parameters, {', '.join(OWN)} against "
        f"FSDP2's ring: {' / '.join(TWINS)} micro-batches",
        measured="; ".join(_ratios(ratios[name]) for name in OWN),
        note=f"at the interface, per node and step. {words}. results/twins-bytes.csv has the megabytes. Gradients are "
        "summed in the dtype of the products. Weights and gradients of DDP stay in fp32, under autocast, so it sends "
        "what it sends in fp32.",
    )


@BENCHMARK.row("seconds-fp32")
def seconds_fp32(bench: Bench) -> Row:
    """Seconds of a step in fp32."""
    return _seconds(bench, "fp32")


@BENCHMARK.row("seconds-bf16")
def seconds_bf16(bench: Bench) -> Row:
    """Seconds of a step in bf16, on a processor that multiplies it."""
    return _seconds(bench, "bf16")


def _seconds(bench: Bench, dtype: str) -> Row:
    """Seconds of a step against FSDP2 with a true ring."""
    twins = {name: setup for name, setup in TWINS.items() if name.startswith(dtype)}
    names = [name for name in (*PEERS, *OWN) if dtype == "fp32" or not name.startswith("ddp")]
    ratios: dict[str, list[float]] = {name: [] for name in names}
    notes, runs = [], {}
    for twin, setup in twins.items():
        times = bench.times(("fsdp2", *names), "full", _RATE_BITS_PER_S, setup)
        for name, found in ratios.items():
            found.append(times[name] / times["fsdp2"])
        runs |= {f"{name}, {twin}": each for name, each in times.runs.items()}
        notes.append(f"{twin}: {seconds_of(times)}")
    words = "; ".join(f"{STRATEGIES[name].label} {_ratios(each)}" for name, each in ratios.items())
    return Row(
        claim=f"seconds of a step at {format_rate(_RATE_BITS_PER_S)}, full training, {', '.join(OWN)} against FSDP2's "
        f"ring: {' / '.join(twins)} micro-batches",
        measured="; ".join(_ratios(ratios[name]) for name in OWN),
        note=f"{words}. Medians of {bench.repeats} alternating runs. {'; '.join(notes)}.",
        runs=runs,
    )


def _ratios(values: list[float]) -> str:
    return " / ".join(f"{value:.3f}x" for value in values)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
