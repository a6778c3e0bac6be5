"""Cyclic data parallelism: micro-batches two time steps apart, point to point all along the step."""

from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule.rule import Rule
from laconic.cyclic.schedule.schedule import Schedule
from laconic.cyclic.stages.cut import cut, unstage

__all__ = ["CyclicDataParallel", "Rule", "Schedule", "cut", "unstage"]
