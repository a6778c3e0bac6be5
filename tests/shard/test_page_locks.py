"""Locked pages of a host cache on CUDA: what is told to the driver, in which order. A stand-in is the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.shard import cache as cache_module
from laconic.shard.cache import free_slab, make_slab

GPU = torch.device("cuda", 1)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver is told, in order. Its locks fail while `locks` in it is False."""
    calls: list[Any] = []

    @contextlib.contextmanager
    def current(device: torch.device) -> Iterator[None]:
        calls.append(device)
        yield
        calls.append("back")

    def sleep(cycles: int) -> None:
        calls.append("a kernel")
        raise RuntimeError("CUDA error: out of memory")  # which is that of the lock

    driver = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: calls.append(("lock", address)) or 2,
        cudaHostUnregister=lambda address: calls.append(("unlock", address)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    return calls


def test_the_error_of_a_lock_that_fails_is_taken_from_torch(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver keeps it, and torch would raise it at its next kernel."""
    monkeypatch.setattr(cache_module.resource, "getrlimit", lambda _: (8_000_000, 8_000_000))
    message = r"page-lock the host cache of 0.00 GB \(CUDA error 2; `ulimit -l` is 8.0 MB.*slower.*ulimit -l unlimited"
    with pytest.warns(UserWarning, match=message):
        slab = make_slab(4096, GPU)
    assert slab.fill_(3).sum() == 3 * 4096
    assert told == [("lock", slab.data_ptr()), "a kernel"]


def test_pages_are_unlocked_after_their_own_device_has_used_them(
    told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = torch.empty(4096, dtype=torch.uint8)
    free_slab(slab, GPU)
    assert told == [], "they are not locked"
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: True)
    free_slab(slab, torch.device("cpu"))
    free_slab(slab[:0], GPU)
    assert told == []
    free_slab(slab, GPU)
    assert told == [GPU, "wait", ("unlock", slab.data_ptr()), "back"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    free_slab(slab, GPU)
    assert len(told) == 4, "a process that has not used CUDA makes no context to free memory"


def test_other_accelerators_get_pinned_memory_of_torch(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = torch.empty(8, dtype=torch.uint8)

    def empty(nbytes: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        if nbytes > 8:
            raise RuntimeError("cannot allocate")
        assert pin_memory
        return pinned

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", empty)
        assert make_slab(8, torch.device("xpu", 0)) is pinned
        with pytest.warns(UserWarning, match=r"could not page-lock .*\(cannot allocate; `ulimit -l` is"):
            slab = make_slab(4096, torch.device("xpu", 0))
    free_slab(slab, torch.device("xpu", 0))
    assert slab.nbytes == 4096
    assert told == [], "torch's allocator looks after the pages"
