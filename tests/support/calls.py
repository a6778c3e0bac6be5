"""Counts calls in Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import laconic

_SOURCES = str(Path(laconic.__file__).parent)


def calls_in(function: Callable[[], Any]) -> int:
    """Call `function` and return how many functions of laconic this thread calls meanwhile."""
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(_SOURCES)

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls
