"""The suite, with a record of what laconic unpickles (tests/audit/unpickled_audit.py) in all its processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.faults.bench import Bench, campaign_row, faults_row
from tests.support.record import Row

TESTS = (
    "tests/comm", "tests/checkpoint", "tests/shard", "tests/strategies", "tests/islands", "tests/partial",
    "tests/cyclic", "tests/train", "tests/hf", "tests/integrations", "tests/optim", "tests/ragged",
)  # fmt: skip
_QUICK = ("tests/comm/test_agreement.py", "tests/checkpoint/test_resume.py")
_SHOWN = 5  # stacks


@campaign_row("pickles")
def row(bench: Bench) -> Row:
    """Run the tests of all strategies, and count the records."""
    file = bench.out / "unpickled"
    for old in bench.out.glob("unpickled*"):  # a worker of pytest adds its name
        old.unlink()
    tests = _QUICK if bench.quick else TESTS
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *tests]
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        command, cwd=root, env={**os.environ, "LACONIC_UNPICKLED": str(file)}, capture_output=True, text=True
    )
    found = re.search(r"(\d+) passed", ended.stdout)
    lines = [line for written in bench.out.glob("unpickled*") for line in written.read_bytes().splitlines()]
    stacks = [json.loads(line) for line in lines]
    for stack in stacks[:_SHOWN]:
        print("\n".join(stack), flush=True)
    # tests/test_unpickling.py shows that the record sees what it must see; it is not among these tests
    return faults_row(
        claim="bytes from the wire or a disk that laconic unpickled, in the tests of all strategies",
        tried=int(found[1]) if found else 0,
        at_least=len(_QUICK) if bench.quick else 1000,
        harms={"unpickled": len(stacks)},
        note=f"Tried: tests, with pytest's `{ended.stdout.strip().splitlines()[-1]}`. Not counted: "
        "torch.load(weights_only=True), the metadata of checkpoints (read by a class that builds DCP's records alone), "
        "and what Lightning and torch read where laconic's strategy calls Lightning's own loader.",
    )
