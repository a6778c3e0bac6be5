"""The section `sync` of a job description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from laconic.config.section import ConfigError, Section
from laconic.islands.membership import Membership
from laconic.islands.policies import SyncPolicy
from laconic.policy import Count, Positive, keys_of


@dataclass(frozen=True, kw_only=True)
class SyncConfig(Section):
    """When machines synchronise: after every step or, as islands, only now and then."""

    mode: Literal["every-step", "local"] = "every-step"
    """`every-step`: all ranks average gradients in every step. `local`: islands train on their own, each on its rows of
    the global batch, and average after several steps (DiLoCo). Evaluation, checkpoints and export use the average.
    `local` needs shard.strategy `laconic` or `torchft-diloco`. All other keys of this section are for `local`."""
    islands: Count | None = None
    """Number of islands, which other trainers call dp_replicate. It must divide the number of nodes, since each island
    has equally many whole nodes, one after the other. Default: every node is an island."""
    policy: SyncPolicy = SyncPolicy()
    slices: Count = 1
    """Partial updates: an island trains one of this many slices of every MLP and attention layer, and all other layers.
    Island i trains slice i mod slices; with `recovery`, an island that joins takes the slice that fewest train."""
    slice_include: tuple[Literal["mlp", "attention"], ...] = ("mlp", "attention")
    """The kinds of layers that are sliced."""
    recovery: str | None = None
    """A folder on each machine, best in memory (/dev/shm), for elastic runs (`torchrun --nnodes MIN:MAX`). It keeps the
    results of the last syncs; when islands are lost or join, the run that torchrun restarts goes on from the newest.
    Only states of the same output folder's run are used; environment variables in the path are expanded. Needs
    train.resume = "auto"."""
    rendezvous: str | None = None
    """HOST:PORT where `laconic rendezvous` runs. Each island is then a launch of its own (one torchrun, one output
    folder), and islands come and go while the others train on. `islands` says with how many training starts."""
    run_id: str | None = None
    """With `rendezvous`: the name of the run. Only islands of one run meet. Default: torchrun's --rdzv-id."""
    quorum: Count | None = None
    """With `rendezvous`: a sync begins when this many islands have taken their steps, and the others join it with those
    that they have; means weigh by tokens. Default: islands take equally many steps, and wait for each other."""
    timeout_s: Positive = 120.0
    """With `rendezvous`: the longest that islands wait for one of them at a sync, before they go on without it."""

    def _check_keys(self) -> None:
        self._check_only_with("mode", "local", keys=keys_of(SyncConfig).keys() - {"mode"})
        if self.rendezvous is None:
            for key in ("run_id", "quorum"):
                self._check(key, getattr(self, key) is None, "needs sync.rendezvous, where islands meet")
            self._check("timeout_s", self.timeout_s == 120.0, "needs sync.rendezvous, where islands meet")
        else:
            self._check_membership(self.rendezvous)
        coding, outer = self.policy.coding, self.policy.outer
        message = "has no effect: {codec='fp32'} loses nothing; leave it out, or choose another codec"
        self._check("error_feedback", not coding.error_feedback or coding.codec != "fp32", message)
        for key, value in (("outer_sliced_lr", outer.sliced_lr), ("outer_sliced_momentum", outer.sliced_momentum)):
            self._check(key, self.slices > 1 or value is None, "needs {slices} of at least 2")
        if not self.slice_include:
            raise ConfigError("sync.slice_include is empty, so no layer would be sliced; leave sync.slices out instead")
        is_default = self.slice_include == ("mlp", "attention")
        self._check(
            "slice_include", self.slices > 1 or is_default, f"needs sync.slices of at least 2, got {self.slices}"
        )

    def _check_membership(self, rendezvous: str) -> None:
        self._check("islands", self.islands is not None, "must say with how many islands training starts")
        message = "does not go with sync.rendezvous: {}"
        self._check("recovery", self.recovery is None, message.format("the others tell an island that comes the state"))
        self._check("slices", self.slices == 1, message.format("a slice whose islands have gone would never change"))
        Membership(rendezvous=rendezvous, islands=self.islands or 1, quorum=self.quorum, timeout_s=self.timeout_s)

    @property
    def is_local(self) -> bool:
        """Whether there are islands."""
        return self.mode == "local"
