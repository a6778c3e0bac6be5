"""The fragments of a model, and the steps in which they sync: arithmetic on a step counter that all islands share.

[Note: Streaming]
Every parameter is in one fragment. The fragments sync in turn, each once in `every` inner steps. So the wire carries
small messages all the time, not a large one now and then. A fragment that is sent after step t is applied after step
t + overlap, and the wire has `overlap` steps to carry it. At most one fragment is in flight, and the step counter alone
determines the next one, so all ranks of all islands communicate in one order (arXiv 2501.18512, section 2).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from laconic.policy import Count, Policy, ProperShare, Size

FragmentPattern = Literal["strided", "sequential"]

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class SyncSchedule(Policy):
    """The steps in which fragments are sent and applied. Steps count from 1.

    Raises:
        ValueError: `every` or `fragments` is not positive; `overlap` is negative or not less than every / fragments;
            `fragments` does not divide `every`; or `mixing` is out of its range.
    """

    every: Count = 100
    """Steps between two syncs of the same parameters."""
    fragments: Count = 1
    """Number of parts of the model that sync in turn, one after each every / fragments steps; must divide `every`."""
    pattern: FragmentPattern = "strided"
    """The layers of a fragment. `strided`: layer l is in fragment l mod fragments; `sequential`: a run of layers."""
    overlap: Size = 0
    """Steps that hide an exchange: its result is applied this many steps later; less than every / fragments."""
    mixing: ProperShare = 0.0
    """The share of an island's own parameters in the mixture when a result is applied; 0 takes the result alone. With
    overlap this keeps part of the steps that the island took while the result was on its way."""

    def _check_keys(self) -> None:
        even = -(-self.every // self.fragments) * self.fragments
        self._check(
            "fragments",
            self.every % self.fragments == 0,
            f"does not divide {{every={self.every}}}, so fragments could not be synced at even distances; use "
            f"{{every={even}}}, or other fragments",
        )
        message = f"must be less than every / fragments = {self.interval}: one fragment at most is in flight"
        self._check("overlap", self.overlap < self.interval, message)

    @property
    def interval(self) -> int:
        """The number of inner steps between the syncs of two fragments."""
        return self.every // self.fragments

    def rounds(self, steps: int) -> int:
        """The number of fragments that an island has sent after its first `steps` inner steps."""
        return steps // self.interval

    def in_flight(self, steps: int) -> int | None:
        """The fragment that is in flight after `steps` inner steps; None if there is none."""
        rounds = self.rounds(steps)
        return rounds % self.fragments if rounds and steps % self.interval < self.overlap else None


def fragment_of(names: Iterable[str], fragments: int, pattern: FragmentPattern = "strided") -> dict[str, int]:
    """Assign parameters to fragments by their layer, which is the first number in a parameter's name.

    Layer l of L goes to fragment l mod P with the strided pattern, and to l P // L with the sequential one. Parameters
    without a layer go to fragment 0. Strided fragments keep the wire evenly busy (arXiv 2501.18512).

    Raises:
        ValueError: there are more fragments than layers, or a fragment would have no parameter.
    """
    names = list(names)
    layers = {name: int(found[1]) for name in names if (found := _LAYER.search(name))}
    num_layers = max(layers.values(), default=-1) + 1
    most = max(1, num_layers)
    if fragments > most:
        raise ValueError(f"fragments={fragments}, but the model has {num_layers} numbered layers; use at most {most}")
    if pattern == "strided":
        assigned = {name: layers.get(name, 0) % fragments for name in names}
    else:
        assigned = {name: layers.get(name, 0) * fragments // most for name in names}
    empty = sorted(set(range(fragments)) - set(assigned.values()))
    if empty and names:
        raise ValueError(
            f"fragments={fragments} with the pattern {pattern!r} leaves fragments {empty} without a parameter: only "
            f"the layers {sorted(set(layers.values()))} have parameters that sync; use fewer fragments"
        )
    return assigned
