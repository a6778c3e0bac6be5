"""Files that appear whole or not at all; and files of tensors and plain values."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from laconic.store import files, folder, tensors
from laconic.store.folder import DamagedError, Manifest, damage, describe
from laconic.store.tensors import parse_named


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "index.json"

    def fail() -> None:
        with files.replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"):
        fail()
    with pytest.raises(FileNotFoundError), files.replacing(path):
        pass
    assert list(tmp_path.iterdir()) == []
    files.write_text(path, "zwölf")
    assert path.read_bytes() == "zwölf".encode()
    with pytest.raises(OSError, match="disk is full"):
        fail()
    with files.replacing(path) as first, files.replacing(path) as second:
        assert first != second, "writers do not share a temporary file"
        assert first.parent == tmp_path, "a rename between file systems is a copy"
        first.write_text("first")
        second.write_text("second")
        assert path.read_text() == "zwölf"
    assert path.read_text() == "first", "the outer block ends last"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("durable", [True, False])
def test_only_durable_files_are_synced(tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, open_before = list[str](), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    files.write_text(tmp_path / "text", "text", durable=durable)
    assert [Path(name).suffix for name in synced] == [".tmp"] * durable, "synced before the rename"
    files.sync(tmp_path)
    tensors.write(tmp_path / "tensors", {"weight": torch.ones(2)})
    assert synced[durable:] == [str(tmp_path), str(tmp_path / "tensors")]
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_damage_is_told_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("whole", "changed", "longer", "gone", "folder"):
        (tmp_path / name).write_text(name)
    records = [describe(tmp_path, path.name) for path in sorted(tmp_path.iterdir())]
    (tmp_path / "changed").write_text("chANged")
    (tmp_path / "longer").write_text("longer!")
    (tmp_path / "gone").unlink()
    (tmp_path / "folder").unlink()
    (tmp_path / "folder").mkdir()
    digest = folder.file_digest

    def digest_of(path: Path, *chunk_bytes: int | None) -> str:
        if path.name == "whole":
            raise OSError(5, "Input/output error")
        return digest(path, *chunk_bytes)

    assert len(damage(tmp_path, records)) == 4
    monkeypatch.setattr(folder, "file_digest", digest_of)
    *found, unreadable = damage(tmp_path, records)
    assert unreadable == "whole is unreadable: Input/output error"
    for name, problem in zip(("changed", "folder", "gone", "longer"), found, strict=True):
        assert name in problem


# -- files of tensors --------------------------------------------------------------------------------------------------

TENSORS = [
    torch.arange(7.0), torch.tensor(3), torch.empty(0), torch.arange(6).view(2, 3).T, torch.tensor([True, False]),
    torch.randn(5).to(torch.bfloat16), torch.arange(4, dtype=torch.uint8), torch.randn(3).to(torch.float8_e4m3fn),
]  # fmt: skip
VALUES: dict[str, Any] = {"a": TENSORS, "b": {"c": [1, 2.5, None, "x", True], "0.weight": torch.ones(2)}}


def test_every_value_comes_back_and_other_programs_read_the_tensors(tmp_path: Path) -> None:
    record = tensors.write(tmp_path / "file", VALUES)
    data = (tmp_path / "file").read_bytes()
    assert (record.name, record.size_bytes, record.sha256) == ("file", len(data), hashlib.sha256(data).hexdigest())
    got, loaded = tensors.parse(data), load_file(tmp_path / "file")
    assert got["b"]["c"] == VALUES["b"]["c"]
    assert torch.equal(loaded.pop("b.0.weight"), torch.ones(2))
    assert loaded.keys() == {f"a.{index}" for index in range(len(TENSORS))}
    for index, (value, want) in enumerate(zip(got["a"], TENSORS, strict=True)):
        for each in (value, loaded[f"a.{index}"]):
            assert (each.dtype, each.shape) == (want.dtype, want.shape)
            assert torch.equal(each.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    """A digest finds damage; bytes that it does not cover end with one error, too."""
    tensors.write(tmp_path / "file", VALUES)
    data = (tmp_path / "file").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    save_file({"x": torch.ones(2)}, tmp_path / "other")
    for each in [data[:i] for i in range(header)] + [data[:-1], (tmp_path / "other").read_bytes(), b"\xff" * 99]:
        with pytest.raises(DamagedError):
            tensors.parse(each)
    for index in range(header):
        changed = data[:index] + bytes([data[index] ^ 1 << index % 8]) + data[index + 1 :]
        try:
            tensors.parse(changed)
        except DamagedError:
            continue


@pytest.mark.parametrize(
    "value", [{1}, torch.empty(1, dtype=torch.complex128), {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}]
)
def test_values_without_a_place_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a file of tensors has no place for"):
        tensors.write(tmp_path / "file", {"a": value} if not isinstance(value, dict) else value)
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    "places",
    [[(0, 4)] * 3 + [(4, 12)], [(0, 4), (8, 12)], [(0, 4), (4, 8)], [(4, 8), (8, 12)], [(0, 8), (4, 12)]],
    ids=str,
)
def test_tensors_that_share_bytes_or_leave_some_out_are_damage(places: list[tuple[int, int]]) -> None:
    """A small file that names one place often would take any memory."""
    header = {
        str(number): {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for number, (begin, end) in enumerate(places)
    }
    text = json.dumps(header).encode()
    with pytest.raises(DamagedError, match=r"begins at byte|end at byte"):
        parse_named(len(text).to_bytes(8, "little") + text + bytes(12))


@pytest.mark.parametrize("depth", [10, sys.getrecursionlimit() // 2, sys.getrecursionlimit(), 100_000])
def test_nested_manifests_are_damage(depth: int) -> None:
    for each in range(depth - 8, depth + 8):
        with pytest.raises(DamagedError, match=r"is unreadable|does not match its own checksum"):
            Manifest.parse(b'{"checksum": "x", "y": ' + b"[" * each + b"]" * each + b"}", "it")
