"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laconic.store import files, folder
from laconic.store.folder import damage, describe


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    files.write_text(path, "old")
    with files.replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == tmp_path, "a rename between file systems is a copy"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("existed", [True, False])
def test_a_failed_write_changes_nothing(tmp_path: Path, existed: bool) -> None:
    path = tmp_path / "index.json"
    if existed:
        path.write_text("old")

    def fail() -> None:
        with files.replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"):
        fail()
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("index.json", "old")] * existed


def test_writers_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    with files.replacing(path) as first, files.replacing(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first", "the outer block ends last"


def test_a_file_must_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), files.replacing(tmp_path / "index.json"):
        pass


def test_text_is_utf_8(tmp_path: Path) -> None:
    files.write_text(tmp_path / "text", "zwölf")
    assert (tmp_path / "text").read_bytes() == "zwölf".encode()


@pytest.mark.parametrize("durable", [True, False])
def test_only_durable_files_are_synced(tmp_path: Path, durable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    files.write_text(tmp_path / "text", "text", durable=durable)
    assert [Path(name).suffix for name in synced] == [".tmp"] * durable, "synced before the rename"
    files.sync(tmp_path)
    assert synced[durable:] == [str(tmp_path)]


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
