"""A sample of the kernels of triton, in its interpreter, beside their twins; test_kernels.py runs all in processes."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from laconic.codec import kernels
from laconic.optim import adamw8bit
from tests.kernels.apart import TRITON

MODULES = ("interpreted", "lossless", "gradients")
_put_away: dict[str, ModuleType] = {}


def _forget() -> None:
    """Let kernels be imported anew: what they are is settled at the import."""
    for name in [name for name in sys.modules if name.startswith("laconic.") and name.endswith("_triton")]:
        package, _, own = name.rpartition(".")
        delattr(sys.modules[package], own)  # or `from package import own` would find it
        del sys.modules[name]
    for name in MODULES:
        sys.modules.pop(f"tests.kernels.{name}", None)
    kernels._kernels.cache_clear()
    adamw8bit._kernels.cache_clear()


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Any]:
    """The module tests.kernels.interpreted, with triton on the path and kernels that the interpreter runs."""
    _forget()
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"), mock.patch.object(sys, "path", [str(TRITON), *sys.path]):
        yield importlib.import_module("tests.kernels.interpreted")
    _forget()
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:  # others ask whether it is there
        _put_away[name] = sys.modules.pop(name)
    atexit.register(sys.modules.update, _put_away)  # with the modules Python ends what triton would say that it leaks


@pytest.mark.parametrize("module", MODULES)
def test_kernels_have_the_bits_of_their_twins(module: str, interpreter: Any) -> None:
    with interpreter.as_a_device_does():
        compared = dict(importlib.import_module(f"tests.kernels.{module}").sample())
    assert len(compared) > 1
    assert [name for name, is_same in compared.items() if not is_same] == []
