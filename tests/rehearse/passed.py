"""Which lines of a device the tests pass on a machine without one: `python -m tests.rehearse.passed` lists the others.

device_lines.py finds the lines: [Note: Lines of a device]. tests/audit/passed_places.py records what runs in all
processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.rehearse.device_lines import LIBRARY, DevicePlace, device_places

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Watch:
    """A run of Python that is watched."""

    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    """What is added to its environment."""
    path: Sequence[Path] = ()
    """What is added to its PYTHONPATH."""


def watched_tests(*tests: str) -> Watch:
    """A run of tests."""
    return Watch(arguments=("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not campaign", *tests))


def _in_interpreter(module: str) -> Watch:
    """What tests/kernels runs in Triton's interpreter."""
    path = (Path(sys.prefix) / "triton",)
    return Watch(arguments=("-m", module), variables={"TRITON_INTERPRET": "1"}, path=path)


PROGRAMS = Watch(arguments=("-m", "tests.rehearse.programs"))
"""Runs each rehearsed program once, which test_order.py and test_without_values.py do many times."""
WATCHES = (
    PROGRAMS,
    *(_in_interpreter(f"tests.kernels.{each}") for each in ("interpreted", "lossless", "gradients")),
    watched_tests(
        "tests/rehearse/test_accelerator.py",
        "tests/layers/test_scaled.py::test_the_device_gets_codes_and_scales_as_it_wants_them",
        "tests/layers/test_scaled.py::test_each_device_multiplies_the_codes_that_it_knows",
        "tests/layers/test_scaled.py::test_a_layer_multiplies_codes_where_the_device_does",
        "tests/optim/test_adamw8bit.py::test_without_triton_a_device_takes_the_torch_version",
        "tests/comm/test_communicators.py",
        "tests/comm/test_launch.py",
        "tests/comm/test_speed.py",
        "tests/shard/test_room.py",
        "tests/shard/test_page_locks.py",
        "tests/shard/test_errors.py",
        "tests/shard/test_fsdp2_names.py::test_reduced_shards_pass_a_hook",
        "tests/guard/test_audit.py::test_the_random_numbers_of_a_device_are_those_without_an_audit",
        "tests/checkpoint/test_damage.py::test_random_states_of_any_accelerator_come_back",
    ),
)
"""What passes lines of a device in CI, which has none: rehearsed programs, Triton's interpreter, and stand-ins."""
REASONS: dict[str, str] = {}
"""Why no test without a device can pass a place, by its file and function."""


def passed(watch: Watch, places: Sequence[DevicePlace], root: Path = LIBRARY) -> set[DevicePlace]:
    """The places, below `root`, that the processes of a run pass.

    Raises:
        RuntimeError: the run failed.
    """
    by_file = defaultdict(list)
    for number, place in enumerate(places):
        by_file[str(root / place.file)].append((number, place.line, place.last_line))
    with tempfile.TemporaryDirectory(prefix="laconic-places-") as folder:
        told, target = Path(folder, "places.json"), Path(folder, "passed")
        told.write_text(json.dumps({"passed": str(target), "places": by_file}), encoding="utf-8")
        path = [_ROOT / "tests" / "audit", root.parent, *watch.path, *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(map(str, path)), "LACONIC_PLACES": str(told), **watch.variables}
        command = [sys.executable, *watch.arguments]
        run = subprocess.run(command, cwd=_ROOT, env={**os.environ, **own}, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{' '.join(watch.arguments)} failed:\n{run.stdout[-4000:]}\n{run.stderr[-4000:]}")
        return {places[int(number)] for number in target.read_text().split()} if target.exists() else set()


def not_passed(places: Sequence[DevicePlace], watches: Sequence[Watch] = WATCHES) -> list[DevicePlace]:
    """The places that no run passes."""
    found = set[DevicePlace]().union(*(passed(watch, places) for watch in watches))
    return [place for place in places if place not in found]


def told(places: Sequence[DevicePlace]) -> list[str]:
    """The places, each with the reason why no test passes it."""
    return [f"{place}: {REASONS.get(f'{place.file} {place.function}', 'no test passes it')}" for place in places]


if __name__ == "__main__":
    every = device_places()
    missing = not_passed(every)
    print(f"{len(every) - len(missing)} of {len(every)} passed")
    print("\n".join(told(missing)))
