"""The policies of `LocalSteps`: frozen objects that check themselves. A job description has them without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from laconic.islands.fragments import SyncSchedule
from laconic.policy import Count, Policy, Positive, ProperShare, Switch, keys_of, option

if TYPE_CHECKING:
    import torch

CodecName = Literal["fp32", "bf16", "int8", "int4", "int2", "e2m1", "top64"]


@dataclass(frozen=True, kw_only=True)
class Coding(Policy):
    """The policy that says in which format pseudo-gradients cross between islands.

    Raises:
        ValueError: a value is out of its range.
    """

    codec: Any = option("int4", hint=CodecName)
    """The format of pseudo-gradients on the wire: 32, 16, 8, 4, 2, 4 or 0.16 bits a parameter. Python also takes a
    `Codec`. One island alone sends nothing, and uses fp32."""
    error_feedback: Switch = False
    """Add to each pseudo-gradient what the codec has lost of the earlier ones: all of it, or this share at each sync.
    `top64` needs it."""
    last_codec: Any = option(None, hint=CodecName | None)
    """The format of the last exchange of each fragment, where islands know how many steps they take. What feedback
    still holds would be lost with the end of training, and `int4` brings it home. Default: that of all others."""


@dataclass(frozen=True, kw_only=True)
class OuterSGD(Policy):
    """The outer optimizer of `LocalSteps`: SGD with Nesterov momentum (arXiv 2311.08105), which a call makes.

    Raises:
        ValueError: a value is out of its range.
    """

    lr: Positive = option(0.7, key="outer_lr")
    """Learning rate of the outer optimizer, SGD along the mean pseudo-gradient."""
    momentum: ProperShare = option(0.9, key="outer_momentum")
    """Nesterov momentum of the outer optimizer; 0: none."""
    sliced_lr: Positive | None = option(None, key="outer_sliced_lr")
    """The outer learning rate of slices that only some islands train. Default: that of all others."""
    sliced_momentum: ProperShare | None = option(None, key="outer_sliced_momentum")
    """The outer momentum of slices that only some islands train. Default: that of all others times the square root of
    the share of islands that train the slice."""

    def rates(self, *, holders: int, islands: int) -> tuple[float, float]:
        """The learning rate and the momentum of parameters that `holders` of `islands` train.

        [Note: Outer steps of slices] in islands/outer_optimizer.py. A slice without a holder keeps the rates of one.
        """
        if holders >= islands:
            return self.lr, self.momentum
        by_share = self.momentum * (max(holders, 1) / islands) ** 0.5
        return (
            self.lr if self.sliced_lr is None else self.sliced_lr,
            by_share if self.sliced_momentum is None else self.sliced_momentum,
        )

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer of parameter groups: [Note: Outer parameter groups] in islands/outer_optimizer.py."""
        import torch

        for group in groups:
            group["lr"], group["momentum"] = self.rates(holders=group["holders"], islands=group["islands"])
            group["nesterov"] = group["momentum"] > 0
        return torch.optim.SGD(groups, lr=self.lr)


@dataclass(frozen=True, kw_only=True)
class Membership(Policy):
    """The islands of a run, and what follows if one is lost or joins: [Note: An island's life] in islands/exchange.py.

    Without `recovery` and `rendezvous` islands stay until the job ends, or end with it.

    Raises:
        ValueError: a value is out of its range, or values do not go together.
    """

    islands: Count | None = None
    """Number of islands, which other trainers call dp_replicate. It must divide the number of nodes, since each island
    has equally many whole nodes, one after the other. Default: every node is an island. With `rendezvous`: the number
    of islands with which training starts. Later any number may come and go."""
    recovery: str | None = None
    """A folder on each machine, best in memory (/dev/shm), for elastic runs (`torchrun --nnodes MIN:MAX`). It keeps the
    results of the last syncs; when islands are lost or join, the run that torchrun restarts goes on from the newest.
    Only states of the same run are used; environment variables in the path are expanded. `laconic train` needs
    train.resume = "auto" with it."""
    rendezvous: str | None = None
    """HOST:PORT where `laconic rendezvous` runs, a small server that no island hosts. Each island is then a launch of
    its own (one torchrun, one output folder), and islands come and go while the others train on."""
    run_id: str | None = None
    """The name of the run. Only islands of one run meet, and only states of the same run are restored. Default:
    torchrun's --rdzv-id; `laconic train` keeps a name for `recovery` in the output folder."""
    timeout_s: Positive = 120.0
    """With `rendezvous`: the longest, in seconds, that islands wait for one of them at a sync, before they go on
    without it. It must be longer than islands are apart, and longer than the largest message takes: an island that
    comes is sent outer parameters and momentum. An island whose process dies is noticed earlier."""
    start_timeout_s: Positive = 1800.0
    """With `rendezvous`: the longest, in seconds, that an island waits to enter."""

    def _check_keys(self) -> None:
        if self.rendezvous is None:
            for key in ("timeout_s", "start_timeout_s"):
                is_default = getattr(self, key) == keys_of(Membership)[key].default
                self._check(key, is_default, "needs {rendezvous}, where islands meet")
            return
        host, _, port = self.rendezvous.rpartition(":")
        is_address = host and port.isdecimal() and 0 < int(port) < 1 << 16
        self._check("rendezvous", bool(is_address), "must be HOST:PORT, where `laconic rendezvous` runs")
        self._check("islands", self.islands is not None, "must say with how many islands training starts")
        message = (
            "does not go with {rendezvous}: the others tell an island that comes the state; leave it out, and save "
            "checkpoints against the loss of all islands"
        )
        self._check("recovery", self.recovery is None, message)

    def count(self, num_nodes: int) -> int:
        """The number of islands in a launch of so many nodes; with a rendezvous each launch is one.

        Raises:
            ValueError: they do not divide the nodes.
        """
        if self.rendezvous is not None:
            return 1
        message = (
            f"does not divide the {num_nodes} nodes of this launch; an island is made of whole nodes, so use a "
            "divisor, or leave it out to make every node an island"
        )
        self._check("islands", self.islands is None or num_nodes % self.islands == 0, message)
        return num_nodes if self.islands is None else self.islands

    @property
    def num_founders(self) -> int:
        """The number of islands with which training starts at the rendezvous."""
        assert self.islands is not None
        return self.islands

    @property
    def folder(self) -> Path | None:
        """The folder of `recovery` on this machine."""
        return None if self.recovery is None else Path(os.path.expandvars(self.recovery)).expanduser()

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port of the rendezvous; an IPv6 address without its brackets."""
        assert self.rendezvous is not None
        host, _, port = self.rendezvous.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, kw_only=True)
class SyncPolicy(Policy):
    """Which islands sync, when, in which format, and the step that they take then.

    `[sync]` and `LocalSteps` contain it.
    """

    membership: Membership = Membership()
    schedule: SyncSchedule = SyncSchedule()
    coding: Coding = Coding()
    outer: OuterSGD = OuterSGD()


outer_sgd = OuterSGD
"""The name of `OuterSGD` in earlier releases."""
