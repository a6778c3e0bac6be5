"""Cyclic data parallelism: workers run two time steps apart and exchange everything point to point."""

from laconic.cyclic.cut import cut
from laconic.cyclic.meter import ActivationMeter
from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import RULES, Rule, Schedule
from laconic.cyclic.stage import Stage, partition, unstage

__all__ = ["RULES", "ActivationMeter", "CyclicDataParallel", "Rule", "Schedule", "Stage", "cut", "partition", "unstage"]
