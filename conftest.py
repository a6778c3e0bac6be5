"""Settings for all tests and for the processes that they start."""

import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist

pytest_plugins = ("tests.support.tiers", "tests.support.sample", "tests.support.times")

# The same examples in each run: a failure is never a matter of luck.
hypothesis.settings.register_profile("laconic", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("laconic")

# A shell's background job, and many a CI runner, starts with SIGINT ignored, and children inherit that. Tests send it
# to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# torch asks the resolver for the names of peers, of 127.0.0.1 too. A lost answer costs 5 s by default: with a thousand
# ranks, minutes of the suite.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# The workers of the suite share two cores. More threads would wait for each other: in this process, where torch is
# imported already, and in those that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

# All processes record what laconic unpickles; see tests/audit/unpickled_audit.py. A benchmark may name the file.
_AUDIT = Path(__file__).parent / "tests" / "audit"
_folder = tempfile.TemporaryDirectory(prefix="laconic-unpickled-")
_UNPICKLED = Path(os.environ.setdefault("LACONIC_UNPICKLED", f"{_folder.name}/stacks"))
if "PYTEST_XDIST_WORKER" in os.environ:  # or one worker's records would fail the tests of another
    _UNPICKLED = _UNPICKLED.with_name(f"{_UNPICKLED.name}-{os.environ['PYTEST_XDIST_WORKER']}")
    os.environ["LACONIC_UNPICKLED"] = str(_UNPICKLED)
os.environ["PYTHONPATH"] = os.pathsep.join([str(_AUDIT), *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path.insert(0, str(_AUDIT))
import unpickled_audit  # noqa: E402

unpickled_audit.install()
sys.path.remove(str(_AUDIT))

# A worker takes a whole file, so a long one that begins last is run alone. These take a minute or more in
# `make test-all`; in `make test` no file takes long.
LONGEST_FIRST = (
    "kernels/test_kernels.py",
    "composition/test_caches.py",
    "strategies/test_islands_checkpoint.py",
    "train/test_loop.py",
    "composition/test_islands_and_cyclic.py",
    "lab/test_torchrun.py",
    "rehearse/test_order.py",
    "integrations/test_examples.py",
    "islands/test_membership.py",
    "composition/test_matrix.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Keep a worker of `make test` on one processor: its threads take turns, and a turn on another one comes later."""
    worker, processors = os.environ.get("PYTEST_XDIST_WORKER", ""), sorted(os.sched_getaffinity(0))
    if worker and "not machine" in config.option.markexpr:  # what processes a test starts would stay there, too
        os.sched_setaffinity(0, {processors[int(worker.removeprefix("gw")) % len(processors)]})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; the others stay in their order."""
    places = {Path(__file__).parent / "tests" / name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


_MANY = 100
_num_modules = 0


def pytest_runtest_setup() -> None:
    """Keep modules out of each collection of garbage, the many too that a test has imported since.

    To look at them takes longer than most tests, and a training collects its garbage.
    """
    global _num_modules
    if len(sys.modules) > _num_modules + _MANY:
        _num_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def unpickled() -> Iterator[Path]:
    """Fail a test in which laconic unpickles bytes: nothing that comes over the wire or from a disk may run code."""
    before = _UNPICKLED.stat().st_size if _UNPICKLED.exists() else 0
    yield _UNPICKLED
    if _UNPICKLED.exists() and _UNPICKLED.stat().st_size > before:
        stack = json.loads(_UNPICKLED.read_bytes()[before:].splitlines()[0])
        pytest.fail("laconic unpickled bytes:\n" + "\n".join(stack), pytrace=False)


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """Fail a test that leaves a default process group to the next test of its worker, and destroy the group."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left torch.distributed's default process group", pytrace=False)
