"""Methods that `fully_shard` puts in the place of a model's own.

This file imports no torch, so that rooms above can fill the table before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

overrides: dict[str, Callable[..., Any]] = {}
"""Methods that a sharded class gets if the plain class has a method of the same name. Rooms above fill it, so that this
room does not know them."""
