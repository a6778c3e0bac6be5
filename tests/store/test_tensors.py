"""Files of tensors and plain values: every value comes back, and other programs read the tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from laconic.islands import earlier_states
from laconic.store import tensors
from laconic.store.folder import DamagedError

TENSORS = [
    torch.arange(7.0), torch.tensor(3), torch.empty(0), torch.arange(6).view(2, 3).T, torch.tensor([True, False]),
    torch.randn(5).to(torch.bfloat16), torch.arange(4, dtype=torch.uint8), torch.randn(3).to(torch.float8_e4m3fn),
]  # fmt: skip
VALUES: dict[str, Any] = {"a": TENSORS, "b": {"c": [1, 2.5, None, "x", True], "0.weight": torch.ones(2)}}


def test_every_value_comes_back(tmp_path: Path) -> None:
    record = tensors.write(tmp_path / "file", VALUES)
    data = (tmp_path / "file").read_bytes()
    assert (record.name, record.size_bytes, record.sha256) == ("file", len(data), hashlib.sha256(data).hexdigest())
    got = tensors.parse(data)
    assert got["b"]["c"] == VALUES["b"]["c"]
    for value, want in zip(got["a"], TENSORS, strict=True):
        assert value.dtype == want.dtype
        assert value.shape == want.shape
        assert torch.equal(value.view(-1).view(torch.uint8), want.contiguous().view(-1).view(torch.uint8))


def test_other_programs_read_the_tensors(tmp_path: Path) -> None:
    tensors.write(tmp_path / "file", VALUES)
    found = load_file(tmp_path / "file")
    assert sorted(found) == [*(f"a.{index}" for index in range(len(TENSORS))), "b.0.weight"]
    assert torch.equal(found["a.3"], TENSORS[3])
    assert torch.equal(found["b.0.weight"], torch.ones(2))


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


def test_every_change_of_an_earlier_states_file_is_refused() -> None:
    (path,) = (Path(__file__).parent / "old" / "islands" / "run-old").glob("*step-4*.part")
    data = path.read_bytes()
    assert set(earlier_states.parse(data)) == {"outer", "lost", "inner"}
    with pytest.raises(DamagedError, match="another file"):
        earlier_states.parse(data, "0" * 64)
    changed = [data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :] for i in range(len(data))]
    changed += [data[:i] for i in range(len(data))] + [data + b"\0", data[65:], data + data]
    for each in changed:
        with pytest.raises(DamagedError):
            earlier_states.parse(each)
