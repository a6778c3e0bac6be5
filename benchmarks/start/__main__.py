"""The first ten minutes: the demo, the README, the doctor, the launch examples and the pictures.

python -m benchmarks.start                    all rows, recorded in RESULTS.md
python -m benchmarks.start --rows demo        some rows, recorded too; the demo on an idle machine
python -m benchmarks.start --quick            the short demo and one healthy run, printed only
"""

from __future__ import annotations

import sys

from benchmarks.start import demo, doctor
from benchmarks.start.launch import launch_row
from tests.support.first_screens import MOST_LINES, PROCESSES, SCREEN_LINES, pictures, readme_lacks, readme_lines
from tests.support.measure import Benchmark, Options
from tests.support.record import Row


def _prepare(options: Options) -> Options:
    return options


BENCHMARK = Benchmark(name="start", prepare=_prepare, measures=("laconic.doctor", "laconic.lab"))
BENCHMARK.row("demo")(demo.row)


@BENCHMARK.row("readme")
def _readme(options: Options) -> Row:
    num_lines, lacks = readme_lines(), readme_lacks()
    return Row(
        claim=f"lines of the README; FSDP2, install, GPU and code in its first {SCREEN_LINES}",
        required=f"<= {MOST_LINES}; all",
        measured=f"{num_lines}; {'without ' + ', '.join(lacks) if lacks else 'all'}",
        is_met=num_lines <= MOST_LINES and not lacks,
    )


BENCHMARK.row("doctor")(doctor.row)
BENCHMARK.row("launch")(launch_row)


@BENCHMARK.row("pages")
def _pages(options: Options) -> Row:
    found = {process: pictures(page) for process, page in PROCESSES.items()}
    num_pictured = sum(map(bool, found.values()))
    return Row(
        claim="pages that describe a process, with a picture",
        required="all",
        measured=f"{num_pictured} of {len(found)}",
        is_met=num_pictured == len(found),
        note="; ".join(
            f"{process} (docs/{PROCESSES[process]}.md): {', '.join(names) or 'none'}"
            for process, names in found.items()
        )
        + ".",
    )


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(doc=__doc__))
