"""What a unit is doing, and how far its gather has come: the states, and the changes that are allowed.

[Note: Phases]
A unit rests, or is in its forward, or in its backward: `UnitPhase`. Its gathered weights have a state of their own,
`GatherState`. A forward that backward recomputes leaves the unit in its backward. A root has a `Backward` besides, from
the first gradient anywhere below it to autograd's last callback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, Generic, NoReturn, TypeVar


class UnitPhase(Enum):
    """What a unit is doing: [Note: Phases]."""

    __hash__ = object.__hash__  # that of Enum is a call in Python

    REST = auto()
    FORWARD = auto()
    """From the call of its first module until all have returned: [Note: Several modules in one unit] in unit.py."""
    BACKWARD = auto()
    """From the first gradient at its outputs until it is done: [Note: When a unit is done with backward] in unit.py."""
    PAUSE = auto()
    """Between the backwards of two of its forwards, whose gradients are reduced together."""


_REST, _FORWARD, _BACKWARD, _PAUSE = UnitPhase
PHASES: Mapping[UnitPhase, Sequence[UnitPhase]] = {
    _REST: (_REST, _FORWARD, _BACKWARD),
    _FORWARD: (_REST, _FORWARD, _BACKWARD),
    _BACKWARD: (_REST, _FORWARD, _PAUSE),  # a forward, if the backward has raised and nobody has reset the root
    _PAUSE: (_REST, _FORWARD, _BACKWARD, _PAUSE),
}
"""The phases that may follow each one."""


class GatherState(Enum):
    """The progress of a unit's gather."""

    __hash__ = object.__hash__

    IDLE = auto()
    NODE = auto()
    """The gather across nodes has begun, or the node shard is in the cache already."""
    LOCAL = auto()
    """The gather inside the node has begun."""
    FULL = auto()
    """Compute may use the full buffers."""
    SHOWN = auto()
    """The modules show the gathered parameters, too."""
    WHOLE = auto()
    """The unit is released, and its full buffers stay."""


_IDLE, _NODE, _LOCAL, _FULL, _SHOWN, _WHOLE = GatherState
GATHER_STATES: Mapping[GatherState, Sequence[GatherState]] = {
    _IDLE: (_NODE,),
    _NODE: (_LOCAL,),
    _LOCAL: (_FULL,),
    _FULL: (_SHOWN, _IDLE, _WHOLE),
    _SHOWN: (_SHOWN, _IDLE, _WHOLE),
    _WHOLE: (_SHOWN, _IDLE),  # shown as it is, or gathered anew since the parameters have changed
}
"""The states that may follow each one."""

COMPLETE = (_FULL, _SHOWN, _WHOLE)
"""The states in which compute may use the full buffers."""
AT_REST = (_IDLE, _WHOLE)
"""The states in which there is nothing to release."""

_S = TypeVar("_S", bound=Enum)


class Transitions(dict[tuple[_S, _S], _S], Generic[_S]):
    """The changes of state of one unit: `state = transitions[state, new]` is `new`, by one look-up without a call."""

    def __init__(self, owner: str, allowed: Mapping[_S, Sequence[_S]]) -> None:
        """`owner` is the unit's name, and `allowed` has the states that may follow each one."""
        super().__init__({(state, new): new for state, following in allowed.items() for new in following})
        self.owner = owner

    def __missing__(self, change: tuple[Any, Any]) -> NoReturn:
        raise RuntimeError(
            f"{self.owner} is in state {change[0].name}, from which it cannot go to {change[1].name}: laconic has "
            "lost count of its forwards and backwards; call reset_iter_state() of the root"
        )
