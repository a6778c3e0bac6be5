"""The section `sync` of a job description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from laconic.config.section import ConfigError, Section
from laconic.islands.policies import Membership, SyncPolicy
from laconic.policy import Count, keys_of


@dataclass(frozen=True, kw_only=True)
class SyncConfig(Section):
    """When machines synchronise: after every step or, as islands, only now and then."""

    mode: Literal["every-step", "local"] = "every-step"
    """`every-step`: all ranks average gradients in every step. `local`: islands train on their own, each on its rows of
    the global batch, and average after several steps (DiLoCo). Evaluation, checkpoints and export use the average.
    `local` needs shard.strategy `laconic` or `torchft-diloco`. All other keys of this section are for `local`."""
    policy: SyncPolicy = SyncPolicy()
    slices: Count = 1
    """Partial updates: an island trains one of this many slices of every MLP and attention layer, and all other layers.
    Island i trains slice i mod slices; with `recovery`, an island that joins takes the slice that fewest train."""
    slice_include: tuple[Literal["mlp", "attention"], ...] = ("mlp", "attention")
    """The kinds of layers that are sliced."""

    def _check_keys(self) -> None:
        self._check_only_with("mode", "local", keys=keys_of(SyncConfig).keys() - {"mode"})
        membership = self.membership
        if membership.rendezvous is None:
            self._check("run_id", membership.run_id is None, "needs {rendezvous}, where islands meet")
        else:
            message = "does not go with {rendezvous}: a slice whose islands have gone would never change"
            self._check("slices", self.slices == 1, message)
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

    @property
    def is_local(self) -> bool:
        """Whether there are islands."""
        return self.mode == "local"

    @property
    def membership(self) -> Membership:
        """The islands, and what follows if one is lost or joins."""
        return self.policy.membership
