"""A stand-in for SGLang's `/pull_weights`, with the conditions of `sglang/srt/weight_sync/local_checkpoint.py`.

A version is a delta if its index says how it is encoded. A version without an index is full, and has one file of
tensors, `model.safetensors`; slime's patch takes any files then. A pull begins at what is there, or at the newest full
version up to its target; all later ones must be deltas on the one before. A delta's index names exactly the tensors of
its files. Each tensor is a zstd frame that tells the size of its contents. The new bytes of each have the checksum in
the file's metadata.
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
_STATE = "pulled.json"


def pull(local: str, base: str, source: str, target: int) -> None:
    """Bring the checkpoint in `local` to a version in `source`; `base` is version 0."""
    state = Path(local) / _STATE
    applied = json.loads(state.read_text()) if state.exists() else None
    start = target
    while start > (applied or 0) and _delta(_version(source, start)) is not None:
        start -= 1
    if applied is None or start > applied:
        shutil.rmtree(local, ignore_errors=True)
        shutil.copytree(_version(source, start) if start else base, local)
        state.write_text(json.dumps(start))
    else:
        start = applied
    for number in range(start + 1, target + 1):
        index = _delta(_version(source, number))
        assert index is not None
        assert int(index["metadata"]["base_version"]) == json.loads(state.read_text())
        _apply(Path(local), _version(source, number), index)
        state.write_text(json.dumps(int(index["metadata"]["version"])))


def _version(source: str, number: int) -> Path:
    folder = Path(source) / f"weight_v{number:06d}"
    assert folder.is_dir(), f"{folder} is missing"
    return folder


def _delta(version: Path) -> dict[str, Any] | None:
    """The index of a delta; None for a full version."""
    if (version / INDEX).exists():
        index: dict[str, Any] = json.loads((version / INDEX).read_text())
        return index if "delta_encoding" in index.get("metadata", {}) else None
    assert [path.name for path in version.glob("*.safetensors")] == ["model.safetensors"]
    return None


def _apply(local: Path, version: Path, index: dict[str, Any]) -> None:
    about = index["metadata"]
    assert about["compression_format"] == "zstd"
    assert about["checksum_format"] == "adler32"
    files = {name: load_file(version / name) for name in set(index["weight_map"].values())}
    named = {tensor: file for file, tensors in files.items() for tensor in tensors}
    assert named == index["weight_map"]
    for path in local.glob("*.safetensors"):
        tensors = load_file(path)
        for name in set(tensors) & set(named):
            packed = files[named[name]][name].numpy().tobytes()
            with safe_open(version / named[name], "pt") as opened:
                checksum = opened.metadata()[name]
            region = tensors[name].view(-1).view(torch.uint8)
            _change(region, pyarrow.decompress(packed, _content_bytes(packed), "zstd", asbytes=True), about)
            assert f"{zlib.adler32(region.numpy().tobytes()):08x}" == checksum, name
        save_file(tensors, path)


def _change(region: torch.Tensor, delta: bytes, about: dict[str, Any]) -> None:
    if about["delta_encoding"] == "xor":
        assert len(delta) == len(region)
        region ^= torch.frombuffer(bytearray(delta), dtype=torch.uint8)
        return
    assert about["delta_encoding"] == "overwrite"
    count = int.from_bytes(delta[:4], "little")
    assert len(delta) == 4 + 5 * count
    for number in range(count):
        place = int.from_bytes(delta[4 + 4 * number : 8 + 4 * number], "little")
        region[place] = delta[4 + 4 * count + number]


def _content_bytes(frame: bytes) -> int:
    """The size of the contents that a zstd frame tells in its header (RFC 8878, 3.1.1.1)."""
    assert frame[:4] == b"\x28\xb5\x2f\xfd"
    kind, is_single = frame[4] >> 6, frame[4] >> 5 & 1
    size_bytes = (1 if is_single else 0, 2, 4, 8)[kind]
    assert size_bytes, "the frame does not tell the size of its contents"
    begin = 5 + (not is_single) + (0, 1, 2, 4)[frame[4] & 3]
    return int.from_bytes(frame[begin : begin + size_bytes], "little") + (256 if size_bytes == 2 else 0)
