"""Races between streams and threads, waits that nothing needs, and random orders: what CUDA would do, without a GPU.

docs/races.md says how. Every program of tests/rehearse/programs.py runs once; then each of its waits, events and host
synchronisations is taken out in turn; then it runs in random legal orders.
"""

from __future__ import annotations

import functools

from tests.faults.bench import Bench, campaign_row, faults_row
from tests.rehearse.campaign import Findings, explore
from tests.rehearse.fsdp2 import FSDP2
from tests.rehearse.programs import PROGRAMS
from tests.support.record import Row

_NUM_ORDERS = 2000
"""The promised number of orders, over all programs."""


@campaign_row("races")
def races(bench: Bench) -> Row:
    """Pairs of accesses without an order."""
    found = _explored(bench)
    return faults_row(
        claim="two accesses to the same bytes, device or host, are ordered in every program",
        tried=len(PROGRAMS),
        at_least=len(PROGRAMS),
        harms={"programs with a race": len(found.races)},
        note=f"programs: {'; '.join(PROGRAMS)}",
    )


@campaign_row("stream-waits")
def waits(bench: Bench) -> Row:
    """Waits, events and synchronisations that are taken out and not missed."""
    found = _explored(bench)
    lines = [f"{site} | {program}" for site, program in found.caught.items()]
    table = bench.out / "waits.txt"
    table.write_text("\n".join([*lines, *(f"{site} | -" for site in found.unnoticed), ""]))
    return faults_row(
        claim="each wait, event and host synchronisation of streams, messages and threads, taken out, makes a race",
        tried=len(found.caught) + len(found.unnoticed),
        at_least=len(found.caught),
        harms={"unnoticed": len(found.unnoticed), "passed by no program": len(found.unvisited)},
        note="; ".join(f"{site.split(' ')[0]} by *{program}*" for site, program in found.caught.items()),
    )


@campaign_row("orders")
def orders(bench: Bench) -> Row:
    """Random legal orders, with memory that is reused as a caching allocator does."""
    found = _explored(bench)
    return faults_row(
        claim="programs that run in random legal orders of their streams end with the same bits",
        tried=found.orders,
        at_least=len(PROGRAMS) if bench.quick else _NUM_ORDERS,
        harms={"different": len(found.different)},
    )


@campaign_row("races-fsdp2")
def races_of_fsdp2(bench: Bench) -> Row:
    """Torch's own FSDP2 and HSDP: code that the checker was not written for."""
    found = explore(FSDP2, range(1 if bench.quick else 10))
    return faults_row(
        claim="torch's FSDP2 and HSDP have no race, and end with the same bits in every legal order",
        tried=len(FSDP2),
        at_least=10,
        harms={"programs with a race": len(found.races), "different": len(found.different)},
        note=f"waits and events that some program needs: {len(found.caught)}; missed by none: {len(found.unnoticed)}",
    )


@functools.cache
def _explored(bench: Bench) -> Findings:
    return explore(PROGRAMS, range(1 if bench.quick else -(-_NUM_ORDERS // len(PROGRAMS)) + 10))
