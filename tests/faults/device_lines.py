"""The lines that run on an accelerator only: tests pass them on machines without one."""

from __future__ import annotations

from tests.faults.bench import Bench, campaign_row
from tests.rehearse.device_lines import ROOMS, device_places
from tests.rehearse.passed import WATCHES, not_passed, told
from tests.support.record import Row

_LEAST_SHARE = 0.98


@campaign_row("device-lines", section="device")
def row(bench: Bench) -> Row:
    """Run the rehearsed programs and the tests with stand-ins; a quick run takes the programs only."""
    places = device_places()
    missing = not_passed(places, WATCHES[:1] if bench.quick else WATCHES)
    share = 1 - len(missing) / len(places)
    return Row(
        claim="lines that run on an accelerator only, executed by some test without one",
        required=f">= {100 * _LEAST_SHARE:g} %",
        measured=f"{len(places) - len(missing)} of {len(places)}, {100 * share:.1f} %",
        is_met=share >= _LEAST_SHARE,
        note="Read from the code: statements, and arms of expressions, of the core that no CPU comes to. "
        f"Left: {'; '.join(told(missing)) or 'none'}.",
        measures=tuple(f"laconic.{room.removesuffix('.py')}" for room in ROOMS),
    )
