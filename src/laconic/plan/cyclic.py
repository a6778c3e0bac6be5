"""The program of the cyclic schedule, for all its placements.

Source: Fournier and Oyallon, arXiv 2403.08837. cyclic_stages.py cuts the model, cyclic_devices.py keeps the time of all
devices and counts their bytes, and cyclic_memory.py fills the memory of the fullest.
"""

from __future__ import annotations

from laconic.config import ConfigError
from laconic.cyclic.links import ops_before_baton
from laconic.cyclic.schedule import Rule, Schedule
from laconic.plan.cyclic_devices import read_steady_state
from laconic.plan.cyclic_memory import fullest_device
from laconic.plan.cyclic_stages import cut_trace
from laconic.plan.estimates import first_rank
from laconic.plan.machine import Reading, Simulator
from laconic.plan.program import StepWork, WrittenProgram
from laconic.strategies.cyclic import num_workers


class CyclicProgram(WrittenProgram):
    """`CyclicDataParallel` under `laconic train`: one stage for every worker, one micro-batch each."""

    inexact = "some gradients are one step old, so it wants a smaller learning rate (docs/cyclic.md)"

    def __init__(self, machine: Simulator, work: StepWork) -> None:
        cluster, settings = machine.cluster, work.job.schedule
        if cluster.ranks < 2:
            raise ConfigError(
                "the cyclic schedule on one rank sends nothing; `laconic plan cyclic` shows its time steps"
            )
        workers = num_workers(settings, first_rank(cluster))
        self._schedule = Schedule(
            Rule.named(settings.rule, workers), settings.states, has_norm=work.optimizer.max_grad_norm > 0
        )
        self._stages = cut_trace(machine, work, workers)
        self._pass_after = self._ops_before_baton(settings.stagger, times_ops=machine.device_type == "cpu")

    def _ops_before_baton(self, stagger: float, *, times_ops: bool) -> int:
        """See [Note: Baton]."""
        if not stagger or not self._schedule.rule.is_staggered:
            return 0
        if times_ops:
            return ops_before_baton(self._stages.op_seconds(), stagger, self._schedule.num_stages)
        return round(2 * stagger)

    def step(self) -> None:
        """See `Program.step`: devices run whole batches, in `read`."""

    def read(self, machine: Simulator) -> Reading:
        """Read the steady state: see `Program.read`. Memory is that of the fullest device."""
        reading = read_steady_state(machine, self._schedule, self._stages, pass_after=self._pass_after)
        reading.peak, held = fullest_device(machine, self._schedule, self._stages, pass_after=self._pass_after)
        for kind, nbytes in held.items():
            machine.hold(kind, nbytes)
        return reading
