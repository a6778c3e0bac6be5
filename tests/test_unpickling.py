"""The record of what laconic unpickles (tests/audit/unpickled_audit.py) sees what it must see, and nothing else."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import laconic
from laconic.checkpoint import CheckpointError
from laconic.checkpoint.storage import read_metadata
from tests.support.launch import run_ranks

INSIDE = Path(laconic.__file__).with_name("made_up.py")
OUTSIDE = Path("/somewhere/else.py")
WAYS = {
    "loads": "import pickle; found = pickle.loads(data)",
    "load": "import io, pickle; found = pickle.load(io.BytesIO(data))",
    "Unpickler": "import io, pickle; found = pickle.Unpickler(io.BytesIO(data)).load()",
    "torch": "import io, pickle, torch; found = torch.load(io.BytesIO(saved), weights_only=False)",
    "weights_only": "import io, pickle, torch; found = torch.load(io.BytesIO(saved), weights_only=True)",
}


def run(way: str, file: Path) -> None:
    """Unpickle, as code of `file` would."""
    import io

    import torch

    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(1)}, buffer)
    exec(compile(WAYS[way], str(file), "exec"), {"data": pickle.dumps([1]), "saved": buffer.getvalue()})


def records(file: Path) -> list[list[str]]:
    """The stacks that were recorded, and removes them, so that the test passes."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("way", WAYS)
def test_what_laconic_unpickles_is_recorded(way: str, unpickled: Path) -> None:
    run(way, OUTSIDE)
    assert records(unpickled) == []
    run(way, INSIDE)
    found = records(unpickled)
    assert len(found) == (0 if way == "weights_only" else 1)
    assert all(f"{INSIDE}:1 <module>" in stack for stack in found)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "mkdir"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "serialization.os.mkdir"),
        ("torch.distributed.checkpoint.metadata", "os.mkdir"),
        ("torch.distributed.checkpoint.metadata", "Enum"),  # imported there, and no record
        ("pathlib", "Path.mkdir"),
        ("collections", "namedtuple"),
    ],
)
def test_the_index_of_a_dcp_folder_names_nothing_but_records(module: str, name: str, tmp_path: Path) -> None:
    """Each pickle calls the named thing with a path."""
    victim = str(tmp_path / "victim")
    text = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    call = b"\x93X" + len(victim).to_bytes(4, "little") + victim.encode() + b"\x85R."
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + text + call)
    with pytest.raises(CheckpointError, match=rf"names {module}\.{name}, which is not a record of DCP"):
        read_metadata(tmp_path)
    assert not Path(victim).exists()


@pytest.mark.machine
def test_ranks_and_other_processes_record_too(unpickled: Path) -> None:
    run_ranks(run, 2, "loads", INSIDE)
    assert len(records(unpickled)) == 2
    code = f"exec(compile('import pickle; pickle.loads(pickle.dumps(1))', {str(INSIDE)!r}, 'exec'))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(records(unpickled)) == 1
