"""How much less crosses the wire, and what that is worth: every row of the claim in one run, in the lab.

    python benchmarks/wire.py                            all rows, some 20 minutes on 2 cores, recorded in RESULTS.md
    python benchmarks/wire.py --rows wire-full,losses    some of them, recorded too
    python benchmarks/wire.py --quick                    all rows on a tiny job, printed only: does the method work?

Run it on a quiet machine. 2 nodes x 2 ranks, full training and LoRA of benchmarks/wire.toml.

[Note: How each row is measured]
Bytes are the interface's, per node and step, mean over the steps from the second on, so that no initialisation is in
them. Times are the median over a run's timed steps; where two sides of a ratio take less than a second per step, runs
alternate several times and the medians of their medians are compared, since no machine is equally fast at all times.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import measure, options_of
from record import Record, Row, rows_table
from rich.console import Console

from laconic.compare import STRATEGIES, Case, Comparison, ComparisonError, Result
from laconic.compare.case import Job, config_of
from laconic.compare.plot import save_plot
from laconic.compare.progress import make_reporter
from laconic.compare.runner import why
from laconic.compare.table import LEGEND, render
from laconic.config.job import Config, load, to_toml
from laconic.lab import LabUnavailable, format_rate

_HERE = Path(__file__).parent
_PICTURE = _HERE.parent / "docs" / "wire.png"
_NODES, _LOCAL = 2, 2
_FLOAT32_BYTES = 4
_RATES = (1e9, 200e6, 100e6)
_LORA_RATE = 100e6
_SLOWEST_RATE = 20e6
_WIRE_SHARE = 0.9
"""Of FSDP2's step, at a rate where the wire is what counts."""


class Bench:
    """Runs what rows ask for, each case once."""

    def __init__(self, comparison: Comparison, *, quick: bool) -> None:
        self.comparison = comparison
        self.quick = quick
        self.repeats = 1 if quick else 3
        self.loss_steps = 6 if quick else 50
        self.results: dict[tuple[Any, ...], Result] = {}
        self._alone: dict[str, float] | None = None

    def get(self, strategy: str, job: Job = "full", rate: float | None = None, repeat: int = 0) -> Result:
        """The result of one case."""
        key = (job, rate, strategy, repeat)
        if key not in self.results:
            case = Case(
                strategy=strategy, job=job, rate_bits_per_s=rate, repeat=repeat, steps=self._steps(*key),
                measure_memory=rate is None and repeat == 0,
                log_every=1 if strategy == "fsdp2" else 100,  # logs cross the wire too, and some steps move little
            )  # fmt: skip
            self.results[key] = self.comparison.run(case)
        return self.results[key]

    def _steps(self, job: Job, rate: float | None, strategy: str, repeat: int) -> int:
        """Few where a step takes long."""
        if rate is None and job == "full" and strategy in ("fsdp2", "host") and repeat == 0:
            return self.loss_steps
        if self.quick:
            return 4
        if rate is None or (job == "lora" and strategy != "fsdp2"):
            return 12
        return 4 if job == "lora" else 6

    def step_s(self, strategy: str, job: Job = "full", rate: float | None = None) -> float:
        """Seconds per step: the median over the repeats that `alternate` has run."""
        runs = [r for key, r in self.results.items() if key[:3] == (job, rate, strategy)]
        return statistics.median(run.step_s for run in runs)

    def alternate(self, *cases: tuple[str, Job, float | None]) -> None:
        """Run all cases in turn, several times."""
        for repeat in range(self.repeats):
            for strategy, job, rate in cases:
                self.get(strategy, job, rate, repeat)

    def alone(self) -> dict[str, float]:
        """Seconds of forward and backward of full training without communication."""
        if self._alone is None:
            out = self.comparison.out
            config = config_of(self.comparison.base, Case(strategy="host"), out)
            job, answer = out / "alone.toml", out / "alone.json"
            job.write_text(to_toml(config), encoding="utf-8")
            command = [str(_HERE / "compute_alone.py"), str(job), str(5 if self.quick else 20), str(answer)]
            outcome = self.comparison.run_ranks(command, None)
            if outcome.exit_code:
                raise ComparisonError(f"compute alone failed: {why(outcome)}")
            self._alone = json.loads(answer.read_text())
        return self._alone


# ------------------------------------------------------------------------------------------------ the rows


def wire_full(bench: Bench) -> Row:
    mine, other = _wire(bench.get("host")), _wire(bench.get("fsdp2"))
    return Row(
        key="wire-full",
        claim="wire bytes per step, full training, fp32, cache=host, against FSDP2",
        required="<= 0.35x",
        measured=f"{mine / other:.3f}x",
        is_met=mine / other <= 0.35,
        note=f"{mine / 1e6:.2f} MB against {other / 1e6:.2f} MB per node and step; the formula says 0.333.",
    )


def wire_lora(bench: Bench) -> Row:
    mine, other = bench.get("host", "lora", _LORA_RATE), bench.get("fsdp2", "lora", _LORA_RATE)
    ratio = _wire(mine) / _wire(other)
    trainable = mine.num_trainable / mine.num_parameters
    return Row(
        key="wire-lora",
        claim="wire bytes per step, LoRA with <= 1 % trainable, from step 2 on, against FSDP2",
        required="<= 1 %",
        measured=f"{ratio:.2%}",
        is_met=ratio <= 0.01 and trainable <= 0.01,
        note=f"{trainable:.2%} trainable; {_wire(mine) / 1e6:.3f} MB against {_wire(other) / 1e6:.2f} MB.",
    )


def counted(bench: Bench) -> Row:
    runs = [bench.get(name) for name in ("none", "host", "device")]
    lora = bench.get("host", "lora", _LORA_RATE)
    each = "; ".join(
        f"{run.job} {run.strategy}: interface {_wire(run) / 1e6:.3f} MB, counted "
        f"{_counted(run) / _wire(run) - 1:+.2%}, formula {_formula_bytes(run) / _wire(run) - 1:+.2%}"
        for run in (*runs, lora)
    )
    by_count = max(abs(_counted(run) / _wire(run) - 1) for run in runs)
    by_formula = max(abs(_formula_bytes(run) / _wire(run) - 1) for run in runs)
    return Row(
        key="counted",
        claim="counted bytes against the interface counters, and against the formula",
        required="within 2 %",
        measured=f"{by_count:.2%} and {by_formula:.2%} at worst, full training",
        is_met=max(by_count, by_formula) <= 0.02,
        note=(
            f"{each}. The interface also sees headers, acknowledgements and the backend's handshakes, some 400 bytes a "
            "message: nothing beside the megabytes of a unit, but a few per cent of the kilobytes of a unit's adapters."
        ),
    )


def _formula_bytes(run: Result) -> float:
    """(N - 1) / N of the weights per gather across nodes, and of the gradients once."""
    crossings = 2 if run.strategy == "none" else 1
    frozen = run.num_parameters - run.num_trainable if run.strategy == "none" else 0
    elements = run.num_trainable * (crossings + 1) + frozen * crossings
    return (_NODES - 1) / _NODES * elements * _FLOAT32_BYTES


def time_full(bench: Bench) -> Row:
    measured = {}
    for rate in _RATES[1:]:
        other, mine = bench.get("fsdp2", rate=rate), bench.get("host", rate=rate)
        measured[rate] = mine.step_s / other.step_s, other, mine
    bound = [rate for rate, (_, other, _) in measured.items() if _wire_share(other) > _WIRE_SHARE]
    each = "; ".join(
        f"{format_rate(rate)}: {mine.step_s:.3f} s against {other.step_s:.3f} s, {ratio:.3f}x; FSDP2's bytes take "
        f"{_wire_share(other):.1%} of its step"
        for rate, (ratio, other, mine) in measured.items()
    )
    rate = bound[0] if bound else min(measured)
    return Row(
        key="time-full",
        claim="step time, full training, at a rate where FSDP2 spends > 90 % of its step on the wire",
        required="<= 0.37x FSDP2",
        measured=f"{measured[rate][0]:.3f}x at {format_rate(rate)}",
        is_met=bool(bound) and measured[rate][0] <= 0.37,
        note=f"{each}.",
    )


def time_lora(bench: Bench) -> Row:
    other, mine = (bench.get(name, "lora", _SLOWEST_RATE) for name in ("fsdp2", "host"))
    return Row(
        key="time-lora",
        claim="step time, LoRA, at the slowest rate of the sweep",
        required="<= 1/50 of FSDP2",
        measured=f"1/{other.step_s / mine.step_s:.0f} at {format_rate(_SLOWEST_RATE)}",
        is_met=mine.step_s <= other.step_s / 50,
        note=f"{mine.step_s:.3f} s against {other.step_s:.2f} s.",
    )


def lora_rate(bench: Bench) -> Row:
    bench.alternate(("host", "lora", None), ("host", "lora", _LORA_RATE))
    shaped, free = bench.step_s("host", "lora", _LORA_RATE), bench.step_s("host", "lora")
    return Row(
        key="lora-rate",
        claim="step time, LoRA, at 100 Mbit/s, against its own step on an unshaped wire",
        required="<= 1.15x",
        measured=f"{shaped / free:.3f}x",
        is_met=shaped / free <= 1.15,
        note=f"{shaped:.3f} s against {free:.3f} s, medians of {bench.repeats} alternating runs each.",
    )


def overlap(bench: Bench) -> Row:
    alone = bench.alone()
    ratios, each = {}, []
    for rate in _RATES:
        run = bench.get("host", rate=rate)
        forward_s, backward_s = (_wire(run) * share * 8 / rate for share in _phase_shares(run))
        bound_s = max(alone["forward_s"], forward_s) + max(alone["backward_s"], backward_s)
        ratios[rate] = run.step_s / bound_s
        each.append(
            f"{format_rate(rate)}: {run.step_s:.3f} s, wire {forward_s:.3f} + {backward_s:.3f} s, {ratios[rate]:.3f}x"
        )
    return Row(
        key="overlap",
        claim="step time against the sum over forward and backward of max(compute alone, wire bytes / rate)",
        required="<= 1.15x",
        measured=", ".join(f"{ratio:.3f}x at {format_rate(rate)}" for rate, ratio in ratios.items()),
        is_met=max(ratios.values()) <= 1.15,
        note=(
            f"full training, cache=host; compute alone {alone['forward_s']:.3f} + {alone['backward_s']:.3f} s, by the "
            f"same 4 processes on the same cores without communication; {'; '.join(each)}."
        ),
    )


def _phase_shares(run: Result) -> tuple[float, float]:
    """Of the wire's bytes, those of forward and of backward: with a cache, weights cross in forward alone."""
    weights, gradients = (run.traffic_bytes[f"node/{purpose}"] for purpose in ("weights", "gradients"))
    return weights / (weights + gradients), gradients / (weights + gradients)


def unshaped(bench: Bench) -> Row:
    names = ("fsdp2", "host", "none", "device")
    bench.alternate(*((name, "full", None) for name in names))
    times = {name: bench.step_s(name) for name in names}
    ratios = {name: times[name] / times["fsdp2"] for name in names[1:]}
    return Row(
        key="unshaped",
        claim="step time on an unshaped wire, full training, cache=host / every other strategy",
        required="<= 0.75x / <= 1x FSDP2",
        measured=f"{ratios['host']:.3f}x / none {ratios['none']:.3f}x, device {ratios['device']:.3f}x",
        is_met=ratios["host"] <= 0.75 and max(ratios.values()) <= 1,
        note=(
            "; ".join(f"{name} {time:.3f} s" for name, time in times.items())
            + f", medians of {bench.repeats} alternating runs each."
        ),
    )


def device_memory(bench: Bench) -> Row:
    host, none, device, other = (bench.get(name) for name in ("host", "none", "device", "fsdp2"))
    by_torch = [run.allocated_peak_bytes or math.nan for run in (host, none, device, other)]
    by_engine = [run.engine_peak_bytes or math.nan for run in (host, none, device)]
    # What is in flight at the peak varies a little from step to step.
    no_more = all(of[0] <= 1.005 * of[1] for of in (by_torch, by_engine))
    return Row(
        key="device-memory",
        claim="peak device bytes, cache=host",
        required="= cache=none, <= FSDP2",
        measured=f"{by_torch[0] / by_torch[1]:.3f}x none, {by_torch[0] / by_torch[3]:.3f}x FSDP2",
        is_met=no_more and by_torch[0] <= by_torch[3],
        note=(
            "the most that torch's allocator held on a rank in a step, as its profiler reports it, and with it what "
            f"rests: host {by_torch[0] / 1e6:.2f}, none {by_torch[1] / 1e6:.2f}, device {by_torch[2] / 1e6:.2f}, FSDP2 "
            f"{by_torch[3] / 1e6:.2f} MB. The engine's own buffers: host {by_engine[0] / 1e6:.2f}, none "
            f"{by_engine[1] / 1e6:.2f}, device {by_engine[2] / 1e6:.2f} MB. Held to: no more than none, and than FSDP2."
        ),
    )


def host_memory(bench: Bench) -> Row:
    run = bench.get("host")
    weights_bytes = run.num_parameters * _FLOAT32_BYTES
    excess = run.host_bytes_per_node / weights_bytes - 1
    return Row(
        key="host-memory",
        claim="host bytes per node",
        required="one copy of the weights in the compute dtype + <= 1 %",
        measured=f"one copy {excess:+.3%}",
        is_met=0 <= excess <= 0.01,
        note=f"{run.host_bytes_per_node / 1e6:.3f} MB for {weights_bytes / 1e6:.3f} MB of weights.",
    )


def losses(bench: Bench) -> Row:
    mine, other = bench.get("host").losses, bench.get("fsdp2").losses
    worst = max(abs(a / b - 1) for a, b in zip(mine, other, strict=True))
    return Row(
        key="losses",
        claim=f"losses over {bench.loss_steps} steps",
        required="equal to FSDP2's within 1e-4 relative, fp32",
        measured=f"within {worst:.1e}",
        is_met=worst <= 1e-4,
        note=f"the loss falls from {other[0]:.3f} to {other[-1]:.3f}.",
    )


ROWS: dict[str, Callable[[Bench], Row]] = {
    "wire-full": wire_full,
    "wire-lora": wire_lora,
    "counted": counted,
    "time-full": time_full,
    "time-lora": time_lora,
    "lora-rate": lora_rate,
    "overlap": overlap,
    "unshaped": unshaped,
    "device-memory": device_memory,
    "host-memory": host_memory,
    "losses": losses,
}
"""In the order of the table."""


def _wire(run: Result) -> float:
    assert run.wire_bytes is not None  # the lab has a wire
    return run.wire_bytes


def _counted(run: Result) -> float:
    assert run.counted_bytes is not None  # the engine counts
    return run.counted_bytes


def _wire_share(run: Result) -> float:
    """Of a step, the time its bytes take on the wire."""
    assert run.rate_bits_per_s is not None
    return _wire(run) * 8 / run.rate_bits_per_s / run.step_s


# ------------------------------------------------------------------------------------------------ the command


def main() -> int:
    options = options_of(__doc__, ROWS, quick="a tiny job and few steps", out=Path("runs/wire"))
    base = load(_HERE / "wire.toml")
    if options.quick:
        base = _tiny(base)
    console = Console()
    try:
        with Comparison(base, options.out, nodes=_NODES, local=_LOCAL, reporter=make_reporter(console=console)) as lab:
            bench = Bench(lab, quick=options.quick)
            rows = measure(ROWS, options, bench, lambda found: _record(found, _sorted(bench)))
    except (ComparisonError, LabUnavailable) as error:
        print(f"wire.py: {error}", file=sys.stderr)
        return 1
    print(f"\n{rows_table(rows)}\n\n{render(_sorted(bench))}\n\n{LEGEND}")
    return 0


def _sorted(bench: Bench) -> list[Result]:
    return [result for _, result in sorted(bench.results.items(), key=_order)]


def _order(item: tuple[tuple[Any, ...], Result]) -> tuple[Any, ...]:
    job, rate, strategy, repeat = item[0]
    return job, -(rate or math.inf), list(STRATEGIES).index(strategy), repeat


def _tiny(base: Config) -> Config:
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    assert isinstance(base.model.config, dict)
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, config={**base.model.config, **small}),
        lora=dataclasses.replace(base.lora, rank=1),
    )


def _record(rows: list[Row], results: list[Result]) -> None:
    """Beside rows and runs measured before; and the picture."""
    results = [dataclasses.replace(result, output=Path(result.output).name) for result in results]
    record = Record(Path(__file__).name, rows, ROWS)
    now = {_identity(result) for result in results}
    kept = [old for old in map(Result.from_dict, record.known.get("results", [])) if _identity(old) not in now]
    every = [*kept, *results]
    record.save(
        about=f"{_NODES} nodes x {_LOCAL} ranks; ",
        more=["Every run (of repeated ones, all):", render(every), LEGEND],
        results=[result.to_dict() for result in every],
    )
    _PICTURE.parent.mkdir(exist_ok=True)
    chosen = [result for result in _first_of_each(every) if result.strategy in ("fsdp2", "host")]
    millions = max(result.num_parameters for result in every) / 1e6
    title = f"{_NODES} nodes x {_LOCAL} ranks on {record.machine['cores']} cores, {millions:.1f} M parameters, fp32"
    save_plot(chosen, _PICTURE, title=title)


def _identity(result: Result) -> tuple[Any, ...]:
    return result.output, result.job, result.strategy, result.rate_bits_per_s


def _first_of_each(results: list[Result]) -> list[Result]:
    """One run of each case, fastest wire first, and only rates at which both strategies ran."""
    first: dict[tuple[Any, ...], Result] = {}
    for result in results:
        first.setdefault((result.job, result.rate_bits_per_s, result.strategy), result)
    pairs = {key[:2] for key in first if all((*key[:2], name) in first for name in ("fsdp2", "host"))}
    chosen = [result for key, result in first.items() if key[:2] in pairs]
    return sorted(chosen, key=lambda result: (result.job, -(result.rate_bits_per_s or math.inf)))


if __name__ == "__main__":
    sys.exit(main())
