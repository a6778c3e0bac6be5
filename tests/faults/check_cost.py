"""The seconds that checksums and audits at their default intervals add to a step, in interleaved pairs.

One launch of 2 nodes x 2 ranks holds the same model twice, with checks and without, and steps them in turn. So the two
meet the same noise of the machine. A step that is checked, or audited, is compared with the plain step beside it, and
its surplus is divided by the interval.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import laconic
from laconic.shard.policies import Checks
from tests.faults.bench import Bench, campaign_row
from tests.support.launch import launch
from tests.support.record import Row

_LIMIT = 0.01
_AUDIT_INTERVAL = 1000
"""The interval that the documentation advises."""
_TIMEOUT_S = 1800.0


class _Model(nn.Module):
    """Residual MLPs, small enough for two cores, and wide enough that compute takes most of a step."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (B, D) -> (B, D)."""
        for block in self.blocks:
            x = x + block(x)
        return x


def _sharded(width: int, num_blocks: int, checks: Checks | None) -> Any:
    torch.manual_seed(0)
    model = _Model(width, num_blocks)
    for module in (*model.blocks, model):
        laconic.fully_shard(module, cache="host", checks=checks)
    return model


def _loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def job(pairs: int, width: int, num_blocks: int, rows: int) -> list[tuple[float, float, float]]:
    """The seconds of a plain step, a checked one and an audit, by pair, on this rank."""
    plain, checked = (_sharded(width, num_blocks, checks) for checks in (None, Checks(interval=1)))
    optimizers = {model: torch.optim.AdamW(model.parameters()) for model in (plain, checked)}
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step(model: Any) -> None:
        _loss(model, x).backward()
        optimizers[model].step()
        optimizers[model].zero_grad()

    def seconds(action: Any, *arguments: Any) -> float:
        dist.barrier()
        began = time.perf_counter()
        action(*arguments)
        dist.barrier()
        return time.perf_counter() - began

    found = []
    for pair in range(pairs + 1):
        order = (plain, checked) if pair % 2 else (checked, plain)
        times = {model: seconds(step, model) for model in order}
        found.append((times[plain], times[checked], seconds(laconic.audit, plain, x, _loss)))
    return found[1:]  # the first pair allocates


@campaign_row("check-cost")
def row(bench: Bench) -> Row:
    """Measure the surplus of checked steps and of audits."""
    size = (4, 64, 2, 32) if bench.quick else (12, 512, 6, 512)
    times = launch(job, *size, num_ranks=4, num_local=2, timeout_s=_TIMEOUT_S)[0]
    plain = statistics.median(each for each, _, _ in times)
    surplus = statistics.median(checked - each for each, checked, _ in times)
    audit = statistics.median(each for _, _, each in times)
    interval = Checks().interval
    shares = surplus / interval / plain, audit / _AUDIT_INTERVAL / plain
    return Row(
        claim=f"seconds that checksums every {interval} steps / audits every {_AUDIT_INTERVAL} steps add to a step",
        required=f"<= {_LIMIT:.0%} / <= {_LIMIT:.0%}",
        measured=f"{shares[0]:.3%} / {shares[1]:.3%}",
        is_met=max(shares) <= _LIMIT,
        note=(
            f"medians of {len(times)} pairs of steps in turn, 2 nodes x 2 ranks on this machine's cores, fp32, host "
            f"cache: a plain step takes {1e3 * plain:.1f} ms, a checked one {1e3 * surplus:.1f} ms more, and an audit "
            f"{1e3 * audit:.1f} ms."
        ),
    )
