"""One training job under several strategies, side by side in the lab, for `laconic compare` and for benchmarks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time, `__getattr__` imports a name when it is first used
    from laconic.compare.case import STRATEGIES, Case, ComparisonError
    from laconic.compare.result import Result
    from laconic.compare.runner import Comparison

__all__ = ["STRATEGIES", "Case", "Comparison", "ComparisonError", "Result"]

_HOMES = {
    "STRATEGIES": "laconic.compare.case",
    "Case": "laconic.compare.case",
    "Comparison": "laconic.compare.runner",
    "ComparisonError": "laconic.compare.case",
    "Result": "laconic.compare.result",
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use: records of measurements are written where only torch is installed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
