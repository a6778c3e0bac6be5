"""Cyclic data parallelism: workers run two time steps apart and exchange everything point to point."""

from laconic.cyclic.runtime import CyclicDataParallel
from laconic.cyclic.schedule import RULES, Rule, Schedule
from laconic.cyclic.stages import cut
from laconic.pipeline.meter import ActivationMeter
from laconic.pipeline.stages import Stage, partition, unstage

__all__ = ["RULES", "ActivationMeter", "CyclicDataParallel", "Rule", "Schedule", "Stage", "cut", "partition", "unstage"]
