"""The section `sync` of a job description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from laconic.config.section import ConfigError, Section
from laconic.islands.fragments import SyncSchedule
from laconic.islands.membership import Membership
from laconic.policy import Count, Positive, ProperShare, Switch, keys_of


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
    every: int = 100
    """Steps between two syncs of the same parameters."""
    fragments: int = 1
    """Number of parts of the model that sync in turn, one after each every / fragments steps; must divide `every`."""
    pattern: Literal["strided", "sequential"] = "strided"
    """The layers of a fragment. `strided`: layer l is in fragment l mod fragments; `sequential`: a run of layers."""
    overlap: int = 0
    """Steps that hide an exchange: its result is applied this many steps later; less than every / fragments."""
    mixing: ProperShare = 0.0
    """The share of an island's own parameters in the mixture when a result is applied; 0 takes the result alone."""
    codec: Literal["fp32", "bf16", "int8", "int4", "int3", "int2", "e2m1", "e3m0", "top64"] = "int4"
    """The format of pseudo-gradients on the wire: 32, 16, 8, 4, 3, 2, 4, 4 or 0.23 bits a parameter."""
    error_feedback: Switch = False
    """Add to each pseudo-gradient what the codec has lost of the earlier ones: all of it, or this share at each sync.
    `top64` needs it."""
    outer_lr: Positive = 0.7
    """Learning rate of the outer optimizer, SGD along the mean pseudo-gradient."""
    outer_momentum: ProperShare = 0.9
    """Nesterov momentum of the outer optimizer; 0: none."""
    outer_sliced_lr: Positive | None = None
    """The outer learning rate of slices that only some islands train. Default: `outer_lr`."""
    outer_sliced_momentum: ProperShare | None = None
    """The outer momentum of slices that only some islands train. Default: `outer_momentum`."""
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
        try:
            SyncSchedule(every=self.every, fragments=self.fragments, overlap=self.overlap)
        except ValueError as error:
            raise ConfigError(f"sync: {error}") from error
        if self.rendezvous is None:
            for key in ("run_id", "quorum"):
                self._check(key, getattr(self, key) is None, "needs sync.rendezvous, where islands meet")
            self._check("timeout_s", self.timeout_s == 120.0, "needs sync.rendezvous, where islands meet")
        else:
            self._check_membership(self.rendezvous)
        message = "has no effect: sync.codec = 'fp32' loses nothing; leave it out, or choose another codec"
        self._check("error_feedback", not self.error_feedback or self.codec != "fp32", message)
        for key in ("outer_sliced_lr", "outer_sliced_momentum"):
            self._check(key, self.slices > 1 or getattr(self, key) is None, "needs sync.slices of at least 2")
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
        try:
            Membership(rendezvous=rendezvous, islands=self.islands or 1, quorum=self.quorum, timeout_s=self.timeout_s)
        except ValueError as error:
            raise ConfigError(f"sync: {error}") from error

    @property
    def is_local(self) -> bool:
        """Whether there are islands."""
        return self.mode == "local"
