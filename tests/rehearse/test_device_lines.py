"""Lines that run on an accelerator only: they are found in the code, and tests pass them without an accelerator."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.rehearse.device_lines import ATTRIBUTES, LIBRARY, RETURNS, ROOMS, DevicePlace, device_places
from tests.rehearse.passed import REASONS, Watch, not_passed, passed, told, watched_tests

LEAST_SHARE = 0.98
CODE = {
    "shard/lanes.py": """
        class Lane:
            def __init__(self, device):
                self._stream = None
                if device.type != "cpu":
                    self._stream = torch.Stream(device)  # device

            def running(self):
                if self._stream is None:
                    return None
                return self._stream  # device

            def record_event(self):
                return None if self._stream is None else self._stream.record_event()
        """,
    "shard/uses.py": """
        def uses(lane: Lane, tensor):
            with lane.running():
                done = lane.record_event()
            if done is not None:
                done.synchronize()  # device
            if not tensor.is_cuda or tensor.dtype != torch.bfloat16:
                return None
            copied = tensor.cpu()  # device
            return copied  # device

        def copies(tensor, backend):
            if backend.device_type == "cuda" and tensor is not None:
                _only_there()  # device

        def _only_there():
            "A docstring."  # which is no line
            print(1)  # device
            assert True  # device

        def groups(backend, device: torch.device | None):
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is None:
                raise ValueError("none")
            return _only_there()  # device

        def everywhere():
            global done
            done = None
            if done is not None:
                print("as another function left it")

        def on_any(tensor, flag):
            if tensor.device.type == "meta" or flag:
                return 0
            if flag and tensor.device.type == "cpu":
                return 1
            return 2
        """,
    "optim/step_triton.py": """
        import triton

        class Kernel:
            number = 0

            def run(self):
                return triton.jit  # device
        """,
    "train/loop.py": """
        def loop(device):
            if device.type == "cuda":
                print("no room of the core")
        """,
}
"""Files with a mark at each line of a device."""


def write(folder: Path, code: dict[str, str]) -> None:
    for name, text in code.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


def test_the_branches_that_a_cpu_does_not_take_are_found(tmp_path: Path) -> None:
    write(tmp_path, CODE)
    marked = {
        (name, number)
        for name, text in CODE.items()
        for number, line in enumerate(textwrap.dedent(text).splitlines(), 1)
        if " # device" in line
    }
    assert {(each.file, each.line) for each in device_places(tmp_path, ("shard", "optim"))} == marked


def test_facts_are_of_names_that_the_library_has() -> None:
    text = "\n".join(path.read_text("utf-8") for path in LIBRARY.rglob("*.py"))
    assert [name for name in (*ATTRIBUTES, *RETURNS) if not re.search(rf"\b{name}\b", text)] == []


def test_a_private_attribute_with_a_fact_belongs_to_one_file() -> None:
    """Another file's attribute of that name would be read as if it had the fact. One is the same in two files."""
    code = [path.read_text("utf-8") for room in ROOMS for path in (LIBRARY / room).rglob("*.py")]
    shared = {"_host_waits", "_device_type", "_uses_sends"}
    for name in (name for name in ATTRIBUTES if name.startswith("_") and name not in shared):
        assert sum(bool(re.search(rf"self\.{name}(: [^=\n]+)? = ", text)) for text in code) <= 1, name


RUN = """
    import threading

    def on(device, flag):
        if device == "gpu":
            return (
                flag
            )
        return flag

    def never():
        return 3

    if __name__ == "__main__":
        thread = threading.Thread(target=on, args=("cpu", False))
        thread.start()
        thread.join()
    """


@pytest.mark.machine
def test_what_runs_is_recorded_in_all_threads_unless_the_run_fails(tmp_path: Path) -> None:
    write(tmp_path, {"run.py": RUN})
    lines = (9, 9), (6, 8), (12, 12)
    runs, *others = (DevicePlace(file="run.py", function="on", line=line, last_line=last) for line, last in lines)
    assert passed(Watch(arguments=[str(tmp_path / "run.py")]), (runs, *others), tmp_path) == {runs}
    with pytest.raises(RuntimeError, match="-c raise SystemExit"):
        passed(Watch(arguments=("-c", "raise SystemExit(3)")), [], tmp_path)


FEW_PROGRAMS = (
    "from tests.rehearse.engine import ENGINE; "
    "[ENGINE[each].record() for each in ('cache host', 'lossless, half frozen')]"
)


@pytest.mark.machine
def test_two_programs_pass_the_lines_of_lanes_and_caches_on_a_device() -> None:
    """A small part of the campaign below."""
    places = [each for each in device_places() if each.file in ("shard/lanes.py", "shard/cache.py")]
    there = [each for each in places if each.file == "shard/lanes.py" or each.function.startswith("NodeShard")]
    assert len(there) >= 12
    assert passed(Watch(arguments=("-c", FEW_PROGRAMS)), places) >= set(there)


CPU_TESTS = ("tests/shard/test_offload.py", "tests/ragged/test_redistribute.py", "tests/optim/test_owners.py")
"""Tests of ranks on a CPU without a stand-in for a device."""
VACUOUS = {"shard/gather.py UnitGather.begin"}
"""A unit without parameters has no transfer that could block. So it takes the way of a device, and does nothing."""


@pytest.mark.campaign(seconds=60)
def test_no_rank_on_a_cpu_passes_a_line_of_a_device() -> None:
    found = passed(watched_tests(*CPU_TESTS), device_places())
    assert {f"{each.file} {each.function}" for each in found} <= VACUOUS


@pytest.mark.campaign(seconds=660)
@pytest.mark.timeout(1800)
def test_the_tests_pass_the_lines_of_a_device_without_one() -> None:
    places = device_places()
    missing = not_passed(places)
    assert len(missing) <= (1 - LEAST_SHARE) * len(places), "\n".join(told(missing))
    assert {f"{each.file} {each.function}" for each in missing} <= set(REASONS), "\n".join(told(missing))
