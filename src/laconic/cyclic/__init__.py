"""Cyclic data parallelism: workers run two time steps apart and exchange everything point to point."""

from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule.rule import RULES, Rule
from laconic.cyclic.schedule.schedule import Schedule
from laconic.cyclic.stages.cut import cut
from laconic.cyclic.stages.meter import ActivationMeter
from laconic.cyclic.stages.stage import Stage, partition, unstage

__all__ = ["RULES", "ActivationMeter", "CyclicDataParallel", "Rule", "Schedule", "Stage", "cut", "partition", "unstage"]
