"""Cyclic data parallelism: workers run two time steps apart and exchange everything point to point."""

from laconic.cyclic.meter import ActivationMeter
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import RULES, Rule, Schedule
from laconic.cyclic.stages import Stage, cut, partition, unstage

__all__ = ["RULES", "ActivationMeter", "CyclicDataParallel", "Rule", "Schedule", "Stage", "cut", "partition", "unstage"]
