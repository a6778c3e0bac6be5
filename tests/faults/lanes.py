"""Rows about the engine's lanes, read from the order of streams: exposed transfers, waits of the host, operations.

The programs are those of tests/rehearse, which run on an accelerator that is not there: docs/races.md.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Sequence

from laconic.rehearse.tape import Mark, Step, Tape, Wait
from tests.faults.bench import Bench, campaign_row
from tests.rehearse.engine import ENGINE
from tests.rehearse.exposure import moved
from tests.support.record import Row

_BLOCKS = 5
_EXACT = (
    "cache none", "cache host", "cache device", "mixed precision", "LoRA, cache host", "replicas",
    "4 bits, cache device",
)  # fmt: skip
_DEEP = 16
"""The layers of the programs whose operations are counted."""
_COUNTED = ("cache none", "cache host", "4 bits, cache device")
_OFFLOADED = ("offload", "offload, cache host", "offload, 8 bits")
_OF_MESSAGES = ("guard/comparison.py", "shard/crossing.py")
"""Where the host waits for messages of other hosts, and for no device."""


@campaign_row("overlap", section="device")
def overlap(bench: Bench) -> Row:
    """Sums and gathers that compute waits for although it has work."""
    names = [name for name, program in ENGINE.items() if program.backend == "nccl"][: 4 if bench.quick else None]
    found = {name: list(moved(_tape(name))) for name in names}
    exposed = {name: Counter(str(each) for each in of if each.is_exposed) for name, of in found.items()}
    all_moved = [each for of in found.values() for each in of]
    beside = sum(bool(each.products) for each in all_moved)
    ends = sum(each.is_at_an_end and not each.products for each in all_moved)
    num_clean = sum(not of for of in exposed.values())
    odd = "; ".join(f"{name}: {', '.join(of)}" for name, of in exposed.items() if of)
    return Row(
        claim="transfers beside which compute may run a product: all but a pass's first gathers and last sums",
        required="all, in every program",
        measured=f"{beside:,} of {len(all_moved) - ends:,}; {num_clean} of {len(names)} programs",
        is_met=beside == len(all_moved) - ends,
        note=(
            f"Vector clocks of warm runs of {_BLOCKS} layers on NCCL: no event orders the transfer before or after the "
            f"product. {ends:,} transfers are at an end: the first product of a forward or backward needs them, or "
            f"none is issued after them. Exposed: {odd or 'none'}. Units that run in another order than before are not "
            "gathered ahead of use."
        ),
    )


@campaign_row("host-waits", section="device")
def host_waits(bench: Bench) -> Row:
    """Waits of the host in a warm step, by place."""
    exact, offloaded = _waits(_EXACT), _waits(_OFFLOADED)
    messages = {place: max(of[place] for of in (*exact, *offloaded)) for place in _OF_MESSAGES}
    for of in (*exact, *offloaded):
        for place in _OF_MESSAGES:
            del of[place]
    worst = [max(sum(of.values()) for of in each) for each in (exact, offloaded)]
    places = sorted({place for of in (*exact, *offloaded) for place in of})
    return Row(
        claim="waits of the host for the device in a warm step, weights on the device / offload, worst program",
        required="0 / <= 1",
        measured=f"{worst[0]:g} / {worst[1]:g}",
        is_met=worst[0] == 0 and worst[1] <= 1,
        note=(
            f"Programs: {', '.join(_EXACT)} / {', '.join(_OFFLOADED)}. What the program reads itself is not counted. "
            f"Places: {', '.join(places) or 'none'}. With offload, one wait is for gradients that arrive on the host "
            "and for the last read of weights there. An edit between forward and backward waits for the forward's "
            "reads; a step without one does not. Besides, hosts wait for small messages of other hosts: "
            + ", ".join(f"{count:g} a step in {place}" for place, count in messages.items())
            + " (the comparison of ranks, sent before the last sums; the agreement on copies, in few bits)."
        ),
    )


@campaign_row("lane-operations", section="device")
def lane_operations(bench: Bench) -> Row:
    """Operations on the engine's lanes for a unit in a step: kernels, copies and collectives."""
    found = {name: _operations(name) for name in _COUNTED}
    exact, coded = (max(sum(found[name].values()) for name in names) for names in (_COUNTED[:2], _COUNTED[2:]))
    each = "; ".join(
        f"{name}: {', '.join(f'{kind} {count:.1f}' for kind, count in of.most_common())}" for name, of in found.items()
    )
    return Row(
        claim="operations on the lanes for a unit in a warm step, exact / in four bits",
        required="<= 8.5 / <= 20",
        measured=f"{exact:.1f} / {coded:.1f}",
        is_met=exact <= 8.5 and coded <= 20,
        note=(
            f"{_DEEP} layers and the root on NCCL, 2 x 2 ranks, fp32; a codec's kernel is one operation, as on a GPU. "
            f"{each}. A step has three more, of the flags of used parameters."
        ),
    )


def _operations(name: str) -> Counter[str]:
    """The operations on streams other than compute in a step, by kind, for each unit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that are odd on purpose
        tape = ENGINE[name].record(num_blocks=_DEEP, is_warm=True, counts=True).tape
    counted = Counter(
        entry.name.removeprefix("aten::")
        for entry in tape.entries
        if isinstance(entry, Step)
        and tape.timelines[entry.timeline] == "stream"
        and (entry.cost is not None or entry.transfer is not None)
    )
    return Counter({kind: count / (_DEEP + 1) / _backwards(tape) for kind, count in counted.items()})


def _waits(names: Sequence[str]) -> list[Counter[str]]:
    """The engine's waits of the host in a step of each program, by file."""
    found = []
    for name in names:
        tape, waits = _tape(name), Counter[str]()
        for entry in tape.entries:
            if isinstance(entry, Wait) and entry.timeline in tape.threads and entry.site is not None:
                waits[entry.site.file] += 1
        found.append(Counter({place: count / _backwards(tape) for place, count in waits.items()}))
    return found


def _backwards(tape: Tape) -> int:
    return sum(isinstance(entry, Mark) and entry.label == "backward" for entry in tape.entries)


@functools.cache
def _tape(name: str) -> Tape:
    """A warm run of a program, with marks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that are odd on purpose
        return ENGINE[name].record(num_blocks=_BLOCKS, is_warm=True).tape
