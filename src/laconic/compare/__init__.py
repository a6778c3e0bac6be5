"""One training job under several strategies, side by side in the lab, for `laconic compare` and for benchmarks."""

from laconic.compare.case import STRATEGIES, Case, ComparisonError
from laconic.compare.result import Result
from laconic.compare.runner import Comparison

__all__ = ["STRATEGIES", "Case", "Comparison", "ComparisonError", "Result"]
