"""The first ten minutes: the demo and the launch examples.

python -m benchmarks.start                    both rows, recorded
python -m benchmarks.start --rows demo        some rows, recorded too; the demo on an idle machine
python -m benchmarks.start --quick            the short demo, printed only
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.start.launch import launch_row
from tests.support.measure import Benchmark, Options
from tests.support.record import Row, recorded, recorded_rows

BENCHMARK = Benchmark[Options](
    name="start", prepare=lambda options: options, measures=("laconic.doctor", "laconic.lab")
)
MOMENTS = ("first row", "first table", "all")
_TOLERANCE = 0.1
_RATE_BITS_PER_S = 200e6
_TIMEOUT_S = 600.0


@BENCHMARK.row("demo")
def demo(options: Options) -> Row:
    """Run `laconic compare --demo` as `make demo` does; compare its ratios to FSDP2 with those on record."""
    times_s, results = _run(options)
    full = _medians([each for each in results if each["job"] == "full"])
    wire = _medians([each for each in recorded("wire")["results"] if _is_like_the_demo(each)])
    off, said = [], []
    for strategy in wire.keys() & full.keys() - {"fsdp2"}:
        for figure, name in (("step_s", "seconds"), ("wire_bytes", "bytes")):
            now, then = (each[strategy][figure] / each["fsdp2"][figure] for each in (full, wire))
            said.append(f"{strategy} {now:.3f} of the {name} for {then:.3f}")
            if abs(now / then - 1) > _TOLERANCE:
                off.append(said[-1])
    thin = recorded_rows()["thinner", "bytes"].measured
    return Row(
        claim="seconds of the demo after installation: first row / first table / all; ratios to FSDP2 as in wire",
        measured=" / ".join(f"{times_s[name]:.1f}" for name in MOMENTS)
        + f"; {'with' if '4bit' in full else 'without'} 4bit; {len(said) - len(off)} of {len(said)} ratios",
        note=f"`laconic compare --demo`, in a new process. Against FSDP2, for the record of 2 x 2 nodes at 200 Mbit/s: "
        f"{', '.join(sorted(said))}. 4bit {full['4bit']['wire_bytes'] / full['fsdp2']['wire_bytes']:.3f} of the bytes, "
        f"for {thin.split('; ')[1].split(' / ')[0]} in thinner; {len(results)} runs in all."
        + "".join(f" More than {_TOLERANCE:.0%} off: {each}." for each in off),
        measures=("laconic.compare", "laconic.lab"),
    )


def _run(options: Options) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The seconds until each of `MOMENTS` was on the screen, and the results of all runs."""
    command = [str(Path(sys.executable).with_name("laconic")), "compare", "--demo", "--out", str(options.out / "demo")]
    last = "laconic 4bit"
    times_s: dict[str, float] = {}
    start = time.monotonic()
    with subprocess.Popen(
        [*command, *(["--quick"] if options.quick else [])], stdout=subprocess.PIPE, text=True, bufsize=1,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  {time.monotonic() - start:6.1f} s  {line.rstrip()}", file=sys.stderr, flush=True)
            if line.startswith("FSDP2 "):
                times_s.setdefault("first row", time.monotonic() - start)
            elif line.startswith(last):
                times_s.setdefault("first table", time.monotonic() - start)
        if process.wait(_TIMEOUT_S):
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    times_s["all"] = time.monotonic() - start
    report = json.loads((options.out / "demo" / "compare.json").read_text(encoding="utf-8"))
    return times_s, report["results"]


def _is_like_the_demo(result: Mapping[str, Any]) -> bool:
    shape = result["job"], result["rate_bits_per_s"], result["num_nodes"], result["num_local"]
    return shape == ("full", _RATE_BITS_PER_S, 2, 2)


def _medians(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The seconds and the wire bytes of each strategy: medians of its runs."""
    strategies = dict.fromkeys(each["strategy"] for each in results)
    return {
        name: {
            figure: statistics.median(each[figure] for each in results if each["strategy"] == name)
            for figure in ("step_s", "wire_bytes")
        }
        for name in strategies
    }


BENCHMARK.row("launch")(launch_row)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
