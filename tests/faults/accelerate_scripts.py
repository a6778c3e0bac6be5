"""accelerate's own scripts with `LaconicAccelerator`: how many of their checks pass, beside accelerate's classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.faults.accelerate_checks import CHECKS, Check, Kind, run_checks
from tests.faults.bench import Bench, campaign_row
from tests.support.launch import launch
from tests.support.record import Row

_SAMPLE = ("test_dataloader_break", "test_gradient_accumulation", "test_trigger")


@campaign_row("accelerate-scripts", section="mend")
def row(bench: Bench) -> Row:
    """Checks that pass with accelerate's own `Accelerator` and fail with ours."""
    checks = [check for check in CHECKS if check.function in _SAMPLE] if bench.quick else list(CHECKS)
    passed = {kind: passing(checks, kind, bench.out) for kind in ("ddp", "fsdp2", "laconic", "laconic-whole")}
    ours = passed["laconic"] | passed["laconic-whole"]
    lost = passed["fsdp2"] - passed["laconic"]
    left = passed["ddp"] - ours
    named = f" ({', '.join(check.name for check in checks if check in lost | left)})" if lost or left else ""
    return Row(
        claim="accelerate's test_sync and test_script with our Accelerator on 2 ranks",
        required="every check that passes with its own",
        measured=f"of {len(checks)} checks pass: its own on DDP {len(passed['ddp'])}, its own on FSDP2 "
        f"{len(passed['fsdp2'])}, ours {len(passed['laconic'])}, {len(ours)} with whole weights and DDP's autocast; "
        f"fail with ours: {len(lost)} that pass with FSDP2, {len(left)} that pass with DDP{named}",
        is_met=not lost and not left,
        note="torch.testing.assert_close refuses to compare a DTensor with a plain tensor, so the checks of training "
        "run again with `full_tensor()` on both sides, and with param_dtype='float32', which is DDP's autocast.",
    )


def passing(checks: Sequence[Check], kind: Kind, folder: Path) -> set[Check]:
    """Run each check in two new processes, and return those that pass on both."""
    found = set()
    for check in checks:
        try:
            results = launch(run_checks, [check], kind, folder, num_ranks=2, timeout_s=90)
        except (RuntimeError, TimeoutError):  # it ended a rank, or left one waiting
            continue
        if all(result[check] is None for result in results):
            found.add(check)
    return found
