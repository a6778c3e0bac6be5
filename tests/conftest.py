"""Settings for all tests and for the processes that they start."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell's background job, and many a CI runner, starts with SIGINT ignored, and children inherit that. Tests send it
# to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# torch asks the resolver for the names of peers, of 127.0.0.1 too. A lost answer costs 5 s by default: with a thousand
# ranks, minutes of the suite.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# Two workers of the suite share two cores. More threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# All processes record what laconic unpickles; see tests/audit/sitecustomize.py. A benchmark may name the file.
_AUDIT = Path(__file__).parent / "audit"
_folder = tempfile.TemporaryDirectory(prefix="laconic-unpickled-")
_UNPICKLED = Path(os.environ.setdefault("LACONIC_UNPICKLED", f"{_folder.name}/stacks"))
if "PYTEST_XDIST_WORKER" in os.environ:  # or one worker's records would fail the tests of another
    _UNPICKLED = _UNPICKLED.with_name(f"{_UNPICKLED.name}-{os.environ['PYTEST_XDIST_WORKER']}")
    os.environ["LACONIC_UNPICKLED"] = str(_UNPICKLED)
os.environ["PYTHONPATH"] = os.pathsep.join([str(_AUDIT), *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path.insert(0, str(_AUDIT))
import sitecustomize  # noqa: E402

sitecustomize.install()
sys.path.remove(str(_AUDIT))


@pytest.fixture(autouse=True)
def unpickled() -> Iterator[Path]:
    """Fail a test in which laconic unpickles bytes: nothing that comes over the wire or from a disk may run code."""
    before = _UNPICKLED.stat().st_size if _UNPICKLED.exists() else 0
    yield _UNPICKLED
    if _UNPICKLED.exists() and _UNPICKLED.stat().st_size > before:
        stack = json.loads(_UNPICKLED.read_bytes()[before:].splitlines()[0])
        pytest.fail("laconic unpickled bytes:\n" + "\n".join(stack), pytrace=False)
