"""No transfer is exposed while compute has work: each runs beside a product that no event orders before or after it."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from laconic.rehearse.order import Clock, clocks
from laconic.rehearse.tape import Free, Mark, Step, Tape, Transfer
from tests.rehearse.engine import ENGINE

POLICIES = ("one rank per node", "LoRA, cache host", "recomputation", "4 bits, cache device", "offload")
MORE = (
    "cache none", "cache host", "cache device", "accumulation, a block skipped", "mixed precision", "step in backward",
    "lossless, cache device", "ZeRO++", "replicas, 4 bits",
)  # fmt: skip
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"}
_NOT_THE_MODEL = ("codec/", "optim/")
"""Where other products are: a rotation, a matrix that an optimizer makes orthogonal."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A gather of weights or a sum of gradients in a forward or a backward, and how it lies beside the products."""

    transfer: Transfer
    products: int
    """The products in the same forward or backward that no event orders before or after it."""
    is_at_an_end: bool
    """True for a gather that the first product needs, and for a sum after whose begin no product is issued."""

    @property
    def is_exposed(self) -> bool:
        """True if compute waits for it, and might have worked meanwhile."""
        return not (self.products or self.is_at_an_end)

    def __str__(self) -> str:
        each = self.transfer
        return f"{each.op}, {each.level}, {each.purpose}, {each.unit}"


@dataclass
class _Pass:
    """A forward or a backward: each step with its place on the tape and its clock."""

    products: list[tuple[int, Step, Clock]] = field(default_factory=list)
    parts: dict[int, list[tuple[int, Step, Clock]]] = field(default_factory=dict)
    """By transfer."""


def moved(tape: Tape) -> Iterator[Moved]:
    """Yield what each forward and each backward of a tape with marks has moved."""
    for each in _passes(tape):
        for (place, begin, earliest), *rest in each.parts.values():
            _, end, latest = (rest or [(place, begin, earliest)])[-1]
            assert begin.transfer is not None
            needs = [clock[end.timeline] >= latest[end.timeline] for _, _, clock in each.products]
            came_before = [earliest[step.timeline] >= clock[step.timeline] for _, step, clock in each.products]
            if begin.transfer.purpose == "weights":
                is_at_an_end = True not in needs or needs.index(True) == 0
            else:
                is_at_an_end = not any(later > place for later, _, _ in each.products)
            yield Moved(
                transfer=begin.transfer,
                products=sum(not (a or b) for a, b in zip(needs, came_before, strict=True)),
                is_at_an_end=is_at_an_end,
            )


def _passes(tape: Tape) -> list[_Pass]:
    begins = [place for place, entry in enumerate(tape.entries) if isinstance(entry, Mark)]
    place_of = {id(entry): place for place, entry in enumerate(tape.entries)}
    passes = [_Pass() for _ in begins]
    for step, clock in clocks(tape):
        place = place_of[id(step)]
        number = bisect_right(begins, place) - 1
        if number < 0 or step.timeline in tape.threads:
            continue
        if step.transfer is not None:
            if step.transfer.purpose in ("weights", "gradients"):
                passes[number].parts.setdefault(id(step.transfer), []).append((place, step, list(clock)))
        elif step.name in _PRODUCTS and not step.place.startswith(_NOT_THE_MODEL):
            passes[number].products.append((place, step, list(clock)))
    return passes


@pytest.mark.parametrize("name", [*POLICIES, *(pytest.param(name, marks=pytest.mark.heavy) for name in MORE)])
def test_each_sum_and_each_gather_runs_beside_compute(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of settings that are odd on purpose
        found = list(moved(ENGINE[name].record(num_blocks=5, is_warm=True, has_values=False).tape))
    assert [str(each) for each in found if each.is_exposed] == []
    beside = [str(each) for each in found if each.products]
    assert len(beside) > sum(each.is_at_an_end for each in found), "five layers: what is at an end is a small part"
    for purpose in ("weights", "gradients"):
        assert any(purpose in each for each in beside)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("cache host", 3),  # the root's, whose gradients come first and end last, and those of two layers
        ("recomputation", 2),  # the sum of the last layer has run beside the recomputation of this one
        ("recomputation, accumulation", 2),
    ],
)
def test_recomputation_leaves_time_to_free_the_last_bucket(name: str, most: int) -> None:
    """The most buckets of full gradients that a device holds at once in a warm run of five layers."""
    tape = ENGINE[name].record(num_blocks=5, is_warm=True, has_values=False).tape
    alive, found = set[int](), 0
    for entry in tape.entries:
        if isinstance(entry, Step) and entry.allocates is not None:
            if "(_allocate)" in tape.memories[entry.allocates].place:
                alive.add(entry.allocates)
        elif isinstance(entry, Free):
            alive.discard(entry.memory)
        found = max(found, len(alive))
    assert found == most
