"""Counts calls in Python."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import laconic

_SOURCES = str(Path(laconic.__file__).parent)


def calls_in(function: Callable[[], Any], *, everywhere: bool = False) -> int:
    """Call `function` and return how many functions of laconic, or `everywhere` of anybody, this thread calls."""
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and (everywhere or frame.f_code.co_filename.startswith(_SOURCES))

    before = sys.getprofile()
    gc.collect()  # now: a collection in between would run what others have left to be finalized
    gc.disable()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls
