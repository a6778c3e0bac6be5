"""The program of torchft's DiLoCo: islands under FSDP2 that average pseudo-gradients now and then.

[Note: torchft's DiLoCo]
The algorithm is DiLoCo (arXiv 2311.08105), in fragments as in Streaming DiLoCo (arXiv 2501.18512). Its order of work is
that of `torchft.local_sgd` (0.2). The parameters after the last sync rest in host memory. A sync brings those of a
fragment to the device, subtracts, copies the pseudo-gradients into flat buckets, and sums these over the islands with a
ring all-reduce in the parameters' dtype, for which training waits. Then the island's own parameters are copied, and
those of the last sync take their place. An SGD with Nesterov momentum, whose state is on the device, takes the outer
step, and the new parameters are copied to the host. The inner gradients are there until then.
"""

from __future__ import annotations

from dataclasses import replace

from laconic.config import SyncConfig
from laconic.plan.machine import PlanTransfer, Reading, Simulator
from laconic.plan.program import Program, Shape, StepWork, add_share
from laconic.plan.rehearsed import RehearsedStep


class TorchftDiloco(Program):
    """torchft's DiLoCo on a machine, a `Make`: [Note: torchft's DiLoCo]."""

    def __init__(self, machine: Simulator, work: StepWork, shape: Shape) -> None:
        """Shard inside each island of `shape`; islands sync every `sync.every` steps, in `sync.fragments` parts.

        Raises:
            ValueError: there is one island, or FSDP2 refuses the parameters.
        """
        if shape.islands < 2:
            raise ValueError("DiLoCo needs at least 2 islands, and the cluster has one node; use 'fsdp2'")
        self._machine, self._sync, self._shape = machine, work.job.sync, shape
        alone = replace(work.job, shard=replace(work.job.shard, strategy="fsdp2"), sync=SyncConfig())
        self.inner = RehearsedStep(machine, replace(work, job=alone), replace(shape, islands=1))
        trained = [each for unit in work.trace.units for each in unit.parameters if each.is_trained]
        rows = (-(-each.shape[0] // shape.ranks) / each.shape[0] for each in trained)
        self._bytes = sum(share * each.nbytes for share, each in zip(rows, trained, strict=True))
        """This rank's trained parameters."""
        self.inexact = f"islands agree every {self._sync.policy.schedule.every} steps"

    def read(self, machine: Simulator) -> Reading:
        """Read a step, and add its share of a sync."""
        reading = self.inner.read(machine)
        machine.host_bytes += self._bytes
        if self._sync.policy.outer.momentum:
            machine.hold("optimizer", self._bytes)
            reading.peak["optimizer"] += self._bytes
        sync = self._read_sync()
        add_share(reading, sync, self._sync.policy.schedule.fragments / self._sync.policy.schedule.every)
        return reading

    def _read_sync(self) -> Reading:
        """Read the sync of one fragment."""
        machine, islands = self._machine, self._shape.islands
        nbytes = self._bytes / self._sync.policy.schedule.fragments
        sent_bytes = 2 * (islands - 1) / islands * nbytes
        transfer = PlanTransfer(
            name="islands", purpose="outer", sent={"island": sent_bytes}, hops={"island": 2 * (islands - 1)}
        )
        pseudo_gradients = machine.holding("transfers", nbytes)
        with machine.reading() as reading, machine.holding("gradients", self._bytes), pseudo_gradients:
            machine.wait(machine.copy("outer parameters", nbytes, to_device=True), "outer parameters")
            machine.touch("pseudo-gradient", 3 * nbytes)
            with machine.holding("transfers", nbytes):  # the flat buckets
                machine.touch("fill buckets", 2 * nbytes)
                machine.wait(machine.send(transfer), "islands")
                machine.touch("empty buckets", 3 * nbytes)
                with machine.holding("transfers", nbytes):  # the island's own parameters
                    machine.touch("own parameters", 2 * nbytes)
                    machine.wait(machine.copy("outer parameters", nbytes, to_device=True), "outer parameters")
            machine.touch("outer step", 7 * nbytes)
            machine.wait(machine.copy("outer parameters", nbytes, to_device=False), "outer parameters")
        return reading
