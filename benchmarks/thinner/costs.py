"""Rows about the bytes, the seconds and the memory of crossings in four bits."""

from __future__ import annotations

from benchmarks.thinner.bench import ACCUMULATED, BENCHMARK, FAST_BITS_PER_S, SLOW_BITS_PER_S, THINNER, Bench
from benchmarks.wire.bench import Setup, wire_bytes
from laconic.compare import STRATEGIES
from laconic.lab import format_rate
from tests.support.record import Row, ratio_row


def _bytes(bench: Bench, strategy: str, setup: Setup = THINNER) -> float:
    return wire_bytes(bench.result(strategy, setup=setup))


@BENCHMARK.row("bytes")
def wire_bytes_row(bench: Bench) -> Row:
    """Bytes at the interface against FSDP2, exact crossings and ZeRO++, and for each parameter."""
    coded = bench.result("4bit", setup=THINNER)
    per_parameter = wire_bytes(coded) / coded.num_parameters
    across = (coded.num_nodes - 1) / coded.num_nodes
    ratios = {name: wire_bytes(coded) / _bytes(bench, name) for name in ("fsdp2", "host", "zero++")}
    limits = {"fsdp2": 0.06, "host": 0.135, "zero++": 0.72}
    return Row(
        claim="wire bytes, full training, 4bit: B a parameter, against FSDP2's ring / laconic exact / ZeRO++",
        required="<= 1.07 (N-1)/N B; <= 0.06x / <= 0.135x / <= 0.72x",
        measured=f"{per_parameter / across:.3f} (N-1)/N B; " + " / ".join(f"{each:.4f}x" for each in ratios.values()),
        is_met=per_parameter <= 1.07 * across and all(ratios[name] <= limits[name] for name in limits),
        note=(
            f"at the interface, headers and control included, per node and step: {_sizes(bench, THINNER)}. N = 2; "
            f"counted by the engine: {(coded.counted_bytes or 0) / 1e6:.3f} MB."
        ),
    )


@BENCHMARK.row("accumulated")
def accumulated(bench: Bench) -> Row:
    """Bytes of a step with four micro-batches, against ZeRO++, which crosses in each of them."""
    ratio = _bytes(bench, "4bit", ACCUMULATED) / _bytes(bench, "zero++", ACCUMULATED)
    return ratio_row(
        claim="wire bytes with 4 micro-batches a step, 4bit against ZeRO++",
        ratio=ratio,
        limit=0.18,
        note=f"per node and step: {_sizes(bench, ACCUMULATED, ('zero++', '4bit'))}.",
    )


@BENCHMARK.row("seconds")
def seconds(bench: Bench) -> Row:
    """Seconds a step against FSDP2's ring at two rates."""
    ratios = []
    notes = []
    for rate in (FAST_BITS_PER_S, SLOW_BITS_PER_S):
        bench.alternate([(name, "full", rate) for name in ("fsdp2", "4bit")], THINNER)
        times = {name: bench.step_s(name, "full", rate, THINNER) for name in ("fsdp2", "4bit")}
        ratios.append(times["4bit"] / times["fsdp2"])
        notes.append(f"{format_rate(rate)}: {_times(times)}")
    return Row(
        claim="seconds a step at 200 / 50 Mbit/s, 10.8 M parameters, 4bit against FSDP2's ring",
        required="<= 0.15x / <= 0.09x",
        measured=" / ".join(f"{ratio:.3f}x" for ratio in ratios),
        is_met=ratios[0] <= 0.15 and ratios[1] <= 0.09,
        note=f"medians of {bench.repeats} alternating runs. " + "; ".join(notes) + ".",
    )


@BENCHMARK.row("against-hsdp")
def against_hsdp(bench: Bench) -> Row:
    """Seconds a step at the slow rate against HSDP and ZeRO++'s algorithm."""
    names = ("hsdp", "zero++", "4bit")
    bench.alternate([(name, "full", SLOW_BITS_PER_S) for name in names], THINNER)
    times = {name: bench.step_s(name, "full", SLOW_BITS_PER_S, THINNER) for name in names}
    by_hsdp, by_zero = times["4bit"] / times["hsdp"], times["4bit"] / times["zero++"]
    return Row(
        claim="seconds a step at 50 Mbit/s, 4bit against HSDP / ZeRO++'s algorithm",
        required="<= 0.2x / <= 0.85x",
        measured=f"{by_hsdp:.3f}x / {by_zero:.3f}x",
        is_met=by_hsdp <= 0.2 and by_zero <= 0.85,
        note=f"medians of {bench.repeats} alternating runs: {_times(times)}.",
    )


@BENCHMARK.row("unshaped")
def unshaped(bench: Bench) -> Row:
    """Seconds a step on an unshaped wire against exact crossings: what coding costs."""
    names = ("host", "4bit")
    bench.alternate([(name, "full", None) for name in names], THINNER)
    times = {name: bench.step_s(name, "full", None, THINNER) for name in names}
    return ratio_row(
        claim="seconds a step on an unshaped wire, 4bit against exact (CPU)",
        ratio=times["4bit"] / times["host"],
        limit=1.10,
        note=f"medians of {bench.repeats} alternating runs: {_times(times)}.",
    )


@BENCHMARK.row("memory")
def memory(bench: Bench) -> Row:
    """The device's peak and the host's bytes against exact crossings."""
    exact, coded = (bench.result(name, setup=THINNER) for name in ("host", "4bit"))
    peaks = [run.allocated_peak_bytes or 0 for run in (coded, exact)]
    engine = [run.engine_peak_bytes or 0 for run in (coded, exact)]
    ratio = peaks[0] / peaks[1]
    is_equal = coded.host_bytes_per_node <= exact.host_bytes_per_node * 1.001
    return Row(
        claim="device peak against exact / host bytes against exact",
        required="<= 1.02x / equal",
        measured=f"{ratio:.3f}x / {coded.host_bytes_per_node / exact.host_bytes_per_node:.4f}x",
        is_met=ratio <= 1.02 and is_equal,
        note=(
            f"torch's allocator: {peaks[0] / 1e6:.2f} against {peaks[1] / 1e6:.2f} MB on the fullest rank; the "
            f"engine's own buffers {engine[0] / 1e6:.2f} against {engine[1] / 1e6:.2f} MB."
        ),
    )


def _sizes(bench: Bench, setup: Setup, names: tuple[str, ...] = ("fsdp2", "host", "zero++", "4bit")) -> str:
    return ", ".join(f"{STRATEGIES[name].label} {_bytes(bench, name, setup) / 1e6:.3f} MB" for name in names)


def _times(times: dict[str, float]) -> str:
    return ", ".join(f"{STRATEGIES[name].label} {time:.3f} s" for name, time in times.items())
