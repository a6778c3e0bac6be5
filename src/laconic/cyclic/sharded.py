"""Parameters that pass by: a worker keeps the stages it owns, and has each other stage for one forward or backward."""

from __future__ import annotations

from torch import Tensor

from laconic.cyclic.placement import Placement, Used, VersionError
from laconic.cyclic.schedule.messages import Message, Op


class Sharded(Placement):
    """`sharded`: an owner injects each version into two rings, one for forwards and one for backwards.

    [Note: A home without memory]
    Graphs recorded by a forward refer to the parameters' storage until their backward. So a stage that passes by has
    one *home* that its parameters always view; between uses the home's storage has no bytes. What a ring brings is
    copied into it, and travels on from where it arrived.
    """

    def install(self, message: Message, buffer: Tensor) -> None:
        """See Placement."""
        home = self.buffers[message.stage]
        home.untyped_storage().resize_(home.numel())
        home.copy_(buffer)
        self.version[message.stage] = max(message.index, self.first)
        self._passing = buffer

    def content(self, message: Message) -> Tensor:
        """See Placement."""
        expected = max(message.index, self.first)
        assert self.version[message.stage] == expected, (message, self.version[message.stage])
        return self.buffers[message.stage] if message.stage in self.held else self._passing

    def reenter(self, op: Op, used: Used) -> None:
        """The same version must have come again."""
        if self.version[op.stage] != used.version:
            raise VersionError(
                f"stage {op.stage} came back as version {self.version[op.stage]}, but the forward of worker "
                f"{op.worker}, batch {op.batch}, had {used.version}"
            )
        self._check(op, used)

    def leave(self, op: Op) -> None:
        """What passes by is not kept."""
        if op.stage not in self.held:
            self._free(op.stage)
