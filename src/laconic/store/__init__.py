"""Durable folders: written whole, checked by digest, committed by one rename. Of the standard library and torch."""

from laconic.store.folder import (
    CrashPoint,
    DamagedError,
    FileRecord,
    Manifest,
    begin,
    commit,
    commit_in_place,
    damage,
    describe,
    difference,
    free_name,
    reached,
    remove_folders,
)

__all__ = [
    "CrashPoint",
    "DamagedError",
    "FileRecord",
    "Manifest",
    "begin",
    "commit",
    "commit_in_place",
    "damage",
    "describe",
    "difference",
    "free_name",
    "reached",
    "remove_folders",
]
