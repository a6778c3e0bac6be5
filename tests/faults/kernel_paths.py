"""Every kernel path of transformers under every strategy that computes products itself, against the unsharded model.

tests/composition/kernel_paths.py takes the paths from transformers' own registries, and has the models and strategies.
"""

from __future__ import annotations

import sys

from tests.composition.kernel_paths import LIMIT, STRATEGIES, Outcome, faults, job, paths, sort_out
from tests.faults.bench import Bench, campaign_row
from tests.support.launch import launch
from tests.support.record import Row

_MESHES = ((2, 1), (2, 2), (1, 3))
"""(nodes, ranks of a node)."""
_TIMEOUT_S = 1500.0


@campaign_row("kernel-paths", section="mend")
def row(bench: Bench) -> Row:
    """Try all paths under all strategies on each mesh; a quick run takes one mesh."""
    runnable, reasons, wrong = sort_out(paths())
    outcomes: list[Outcome] = []
    for nodes, local in _MESHES[:1] if bench.quick else _MESHES:
        by_rank = launch(job, runnable, STRATEGIES, num_ranks=nodes * local, num_local=local, timeout_s=_TIMEOUT_S)
        wrong += [f"{nodes}x{local}, {fault}" for fault in faults(by_rank)]
        outcomes += _worst_of_ranks(by_rank)
    print("\n".join(wrong), file=sys.stderr, flush=True)
    compared = [each for each in outcomes if not each.refusal]
    refused = sorted({f"{each.strategy} of {each.path}" for each in outcomes if each.refusal})
    largest = max(each.difference for each in compared)
    elsewhere = sorted({path.implementation for path in reasons})
    return Row(
        claim="default kernel paths x strategies against unsharded, relative difference of gradients in fp32",
        required=f"every cell <= {LIMIT:.0e}",
        measured=f"{len(compared)} cells, the largest difference {largest:.1e}; {len(wrong)} faults",
        is_met=not wrong and largest <= LIMIT,
        note=f"{len(runnable)} paths of transformers' registries and forms of models, {len(STRATEGIES)} strategies, "
        f"{len(_MESHES[:1] if bench.quick else _MESHES)} meshes. Refused by name: {', '.join(refused)}. The library "
        f"itself cannot train on this machine with {', '.join(elsewhere)}.",
    )


def _worst_of_ranks(by_rank: list[list[Outcome]]) -> list[Outcome]:
    return [max(cell, key=lambda each: each.difference) for cell in zip(*by_rank, strict=True)]
