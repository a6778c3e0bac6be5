"""Mutants of the critical code: does a test notice each small change of meaning?

    python -m tests.mutants --record                    all rooms, recorded in RESULTS.md
    python -m tests.mutants --rooms codec,store         some rooms, printed only
    python -m tests.mutants --matching "first_tensor"   the mutants whose names have this, all of them

A seed draws a sample of each room. For every mutant a fork of this process, which has imported torch but not laconic,
imports the changed module and runs the nearest tests; the first failure kills the mutant. What a run has found is kept
in `--out`, so that it can go on after a break. A survivor needs a test, or a reason in `EXPLAINED` or `MISSED`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import json
import multiprocessing.context
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.explained import EXPLAINED, MISSED
from tests.mutants.mutation import Mutant, mutants
from tests.support import launch

_ROOT = Path(__file__).parents[2]
_SHARES = {"codec": 30, "layout": 25, "store": 15, "islands": 25, "cyclic": 35, "shard": 40, "publish": 30}
"""The mutants that are drawn of each room."""
_NEAREST = {
    "codec": "codec/test_codecs codec/test_dynamic_map codec/test_fused optim/test_adamw8bit",
    "codec/linear": "codec hf/test_quantized",
    "codec/scaled": "codec/test_scaled shard/test_scaled",
    "codec/scaled_linear": "codec/test_scaled shard/test_scaled",
    "codec/sparse": "islands/test_sparse codec/test_codecs",
    "codec/sums": "codec/test_codecs comm/test_collectives shard/test_wire_twin shard/test_crossing",
    "codec/varying": "codec/test_varying codec/test_lossless_sums",
    "codec/lossless_sums": "codec/test_lossless_sums",
    "codec/payload": "codec/test_codecs shard/test_wire_twin shard/test_crossing",
    **dict.fromkeys(
        (
            f"codec/{name}"
            for name in ("bits_numba", "cells", "contexts", "contexts_numba", "lossless", "lossless_numba", "patterns")
        ),
        "codec/test_lossless",
    ),
    **dict.fromkeys(("codec/lossless_gradients", "codec/lossless_gradients_numba"), "codec/test_lossless_gradients"),
    "codec/lossless_gradients_triton": "kernels/test_gradients",
    "codec/tiles": "codec/test_codecs codec/test_dynamic_map optim/test_adamw8bit optim/test_muon",
    "layout": "layout/test_packing layout/test_granularity layout/test_bucket ragged/test_tensor plan/test_padding",
    "store": "store checkpoint/test_damage",
    "islands": "islands/test_fragments islands/test_saved_state islands/test_forged islands/test_local_steps"
    " islands/test_golden islands/test_sparse islands/test_holders islands/test_recovery islands/test_membership",
    "islands/elastic": "islands/test_membership islands/test_forged islands/test_ends",
    "islands/agreements": "islands/test_membership islands/test_forged",
    "islands/entrance": "islands/test_membership islands/test_forged",
    "islands/exchange": "islands/test_membership islands/test_forged",
    "islands/policies": "islands/test_membership islands/test_local_steps islands/test_forged",
    "islands/rendezvous": "islands/test_membership islands/test_forged",
    "islands/recovery": "islands/test_saved_state islands/test_recovery islands/test_recovery_faults",
    "islands/state_folder": "islands/test_saved_state islands/test_recovery_faults islands/test_recovery store",
    "islands/earlier_states": "store/test_old_folders islands/test_recovery",
    "cyclic": "cyclic/test_schedule cyclic/test_stages cyclic/test_meter cyclic/test_stagger cyclic/test_scaling"
    " cyclic/test_variety cyclic/test_refusals cyclic/test_snapshot cyclic/test_runtime strategies/test_cyclic",
    "cyclic/coding": "cyclic/test_coding cyclic/test_scaling",
    "cyclic/placement": "cyclic/test_coding cyclic/test_runtime cyclic/test_scaling cyclic/test_variety"
    " cyclic/test_snapshot",
    "cyclic/causal_lm": "strategies/test_cyclic cyclic/test_stages",
    "cyclic/optimizers": "cyclic/test_scaling cyclic/test_variety cyclic/test_snapshot cyclic/test_runtime",
    "cyclic/snapshot": "cyclic/test_snapshot cyclic/test_refusals",
    "cyclic/links": "cyclic/test_refusals cyclic/test_stagger cyclic/test_runtime",
    "shard": "shard/test_bucket shard/test_unit shard/test_api shard/test_reduce shard/test_autograd shard/test_graphs"
    " shard/test_cache shard/test_zero_copy shard/test_errors shard/test_offload shard/test_mixed_precision"
    " shard/test_crossing shard/test_fsdp2_names shard/test_gather shard/test_buffers shard/test_conversion"
    " shard/test_wire_twin shard/test_first_weights shard/test_cleared shard/test_models rehearse/test_without_values"
    " shard/test_whole_gradients shard/test_auto",
    "shard/crossing": "shard/test_crossing shard/test_wire_twin shard/test_conversion shard/test_cache",
    "shard/cache": "shard/test_cache shard/test_crossing shard/test_unit shard/test_offload shard/test_auto",
    "shard/gather": "shard/test_gather shard/test_prefetch rehearse/test_prefetch shard/test_unit shard/test_zero_copy"
    " shard/test_autograd shard/test_graphs",
    "shard/buffers": "shard/test_buffers shard/test_errors",
    "shard/reduce": "shard/test_reduce shard/test_mixed_precision shard/test_cleared shard/test_autograd"
    " shard/test_whole_gradients guard/test_checks",
    "shard/placement": "shard/test_choice",
    "shard/choosing": "shard/test_auto",
    "shard/room": "shard/test_room",
    "shard/grad": "shard/test_cleared shard/test_autograd shard/test_reduce",
    "shard/policies": "shard/test_errors shard/test_mixed_precision shard/test_crossing shard/test_api",
    "publish": "publish/test_format publish/test_reader publish/test_publisher publish/test_upkeep",
    **dict.fromkeys(("publish/http_source", "publish/serving"), "publish/test_http"),
    "publish/announcing": "publish/test_announcing",
    "publish/together": "publish/test_together",
    "publish/forms": "publish/test_forms",
    "publish/coordinates": "publish/test_publisher publish/test_exports",
}
"""The tests that run for the mutants of a room, or of one module of it, those first that notice most for their time."""
_AT_LEAST, _TEST_S, _MUTANT_S = 97, 60, 1500  # percent killed; seconds of one test, and of all tests of one mutant


def main() -> int:
    """Run the mutants that the command line names; return 1 if one survives without a reason."""
    options = _options()
    chosen = _sample(options.rooms.split(","), options.seed, options.matching)
    known = _known(options.out)
    _import_once()
    with tempfile.TemporaryDirectory(prefix="laconic-mutants-") as folder:
        copy = Path(folder) / "copy"  # the working tree may change meanwhile
        shutil.copytree(_ROOT, copy, ignore=_not_of_the_sources)
        for number, mutant in enumerate(chosen, 1):
            if mutant.key not in known:
                begin_s = time.monotonic()
                known[mutant.key] = _killer(mutant, copy)
                with options.out.open("a", encoding="utf-8") as file:
                    print(json.dumps([mutant.key, known[mutant.key]]), file=file)
                verdict = known[mutant.key] or "SURVIVED"
                print(f"{number}/{len(chosen)} {time.monotonic() - begin_s:4.0f}s {mutant.key}: {verdict}", flush=True)
        for tests in {tuple(_nearest(mutant.module)): mutant for mutant in chosen}:
            of_tests = [mutant for mutant in chosen if tuple(_nearest(mutant.module)) == tests]
            if all(known[mutant.key] for mutant in of_tests):  # or one has shown that they pass
                same = dataclasses.replace(of_tests[0], code=_source(of_tests[0].module))
                if failure := _killer(same, copy):
                    print(f"without a mutant, too, fails {failure}", file=sys.stderr)
                    return 1
    return _report(chosen, known, record=options.record)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rooms", default=",".join(_SHARES), metavar="A,B,...", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matching", default="", metavar="TEXT", help="all mutants with this in their names")
    parser.add_argument("--out", type=Path, default=_ROOT / "runs" / "mutants.jsonl", help="keep what is found here")
    parser.add_argument("--record", action="store_true", help="write the row of RESULTS.md")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    return options


def _sample(rooms: list[str], seed: int, matching: str) -> list[Mutant]:
    """Draw the mutants of each room, no two in one line: they change one decision."""
    chosen = []
    for room in rooms:
        files = sorted((_ROOT / "src" / "laconic" / room).glob("*.py"))
        found = [mutant for file in files for mutant in mutants(f"{room}/{file.stem}", _source(f"{room}/{file.stem}"))]
        if matching:
            chosen += [mutant for mutant in found if matching in mutant.key]
            continue
        random.Random(f"{seed} {room}").shuffle(found)
        lines = {(mutant.module, mutant.line): mutant for mutant in reversed(found)}
        chosen += list(reversed(lines.values()))[: _SHARES[room]]
    return chosen


def _source(module: str) -> str:
    return (_ROOT / "src" / "laconic" / f"{module}.py").read_text("utf-8")


def _known(out: Path) -> dict[str, str]:
    return dict(map(json.loads, out.read_text("utf-8").splitlines())) if out.exists() else {}


def _import_once() -> None:
    """Import what every fork needs, but nothing of laconic; see [Note: Fork server] in launch.py."""
    for module in launch.PRELOADED:
        if not module.startswith("laconic"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    gc.collect()
    gc.freeze()


def _not_of_the_sources(folder: str, names: list[str]) -> set[str]:
    """The names that are not copied. Hidden files below the root are the sources', such as those of old checkpoints."""
    at_root = {name for name in names if name.startswith(".") or name in ("runs", "build")}
    return {"__pycache__", *(at_root if Path(folder) == _ROOT else ())}


def _killer(mutant: Mutant, copy: Path) -> str:
    """Return the test that fails with the mutant, "time" if the tests do not end, or "" if all pass."""
    path, log = copy / "src" / "laconic" / f"{mutant.module}.py", copy.with_name("log")
    original = path.read_text("utf-8")
    path.write_text(mutant.code, encoding="utf-8")
    try:
        child = os.fork()
        if child == 0:
            _run_tests(_nearest(mutant.module), copy, log)
        return _verdict(child, log)
    finally:
        path.write_text(original, encoding="utf-8")


def _nearest(module: str) -> list[str]:
    names = _NEAREST.get(module, _NEAREST[module.partition("/")[0]]).split()
    paths = [f"tests/{name}" if (_ROOT / "tests" / name).is_dir() else f"tests/{name}.py" for name in names]
    assert all((_ROOT / path).exists() for path in paths), f"the nearest tests of {module} are not all there: {paths}"
    return paths


class _Rank(multiprocessing.context.ForkProcess):
    """A fork without garbage: a process group in it would wait, when it is collected, for threads that no fork has."""

    def start(self) -> None:
        gc.collect()
        super().start()


class _Context(multiprocessing.context.ForkContext):
    Process = _Rank


def _run_tests(tests: list[str], copy: Path, log: Path) -> None:
    """Run tests of the copy in this fork, and end. Their ranks are forks of this process."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:0] = [str(copy), str(copy / "src")]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    importlib.import_module("tests.support.launch").context = _Context()  # type: ignore[attr-defined]
    pytest = importlib.import_module("pytest")
    status = 3
    try:
        status = pytest.main(["-x", "-q", "-rfE", "-m", "", "-p", "no:cacheprovider", f"--timeout={_TEST_S}", *tests])
    finally:
        sys.stdout.flush()
        os._exit(int(status))


def _verdict(child: int, log: Path) -> str:
    deadline = time.monotonic() + _MUTANT_S
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return "time"
    if status == 0:
        return ""
    text = log.read_text("utf-8", errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, flags=re.MULTILINE)
    return failed[0] if failed else f"exit status {os.waitstatus_to_exitcode(status)}"


def _report(chosen: list[Mutant], known: dict[str, str], *, record: bool) -> int:
    survivors = [mutant.key for mutant in chosen if not known[mutant.key]]
    unexplained = [key for key in survivors if key not in EXPLAINED | MISSED]
    killed, equal = len(chosen) - len(survivors), sum(key in EXPLAINED for key in survivors)
    missed = len(survivors) - equal - len(unexplained)
    percent = 100 * killed / max(1, len(chosen) - equal)
    print(f"{killed} of {len(chosen)} killed; {len(survivors)} survive, {len(unexplained)} of them without a reason")
    for key in survivors:
        print(f"  {key}: {(EXPLAINED | MISSED).get(key, 'NO REASON')}")
    if record:
        from tests.support.record import Record, Row

        by_time = sum(known[mutant.key] == "time" for mutant in chosen)
        row = Row(
            key="mutants",
            claim="mutants of engine, codecs, layouts, store, islands, cyclic and publish that the nearest tests kill",
            required=f">= 150 tried, >= {_AT_LEAST} % of those that change something killed, the rest explained",
            measured=f"{killed} of {len(chosen)}, {percent:.1f} %; {len(unexplained)} unexplained",
            is_met=len(chosen) >= 150 and percent >= _AT_LEAST and not unexplained,
            note=(
                f"a test that names no limit fails after {_TEST_S} s; {by_time} mutants were killed by the limit of all"
                f" their tests. Of the survivors {equal} change no result, and {missed} change what"
                " the nearest tests do not show: see tests/mutants/explained.py."
            ),
        )  # fmt: skip
        rooms = [f"laconic.{room}" for room in _SHARES]
        Record("start", [row], [row.key], sys.argv[1:], module="tests.mutants", measures=rooms).save()
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
