"""Made-up results of a comparison."""

from __future__ import annotations

from typing import Any

from laconic.compare.result import Result


def canned(**changes: Any) -> Result:
    """Return a result of FSDP2, with `changes`."""
    values: dict[str, Any] = {
        "job": "full", "strategy": "fsdp2", "rate_bits_per_s": 200e6, "steps": 4, "step_s": 8.0,
        "step_times_s": (8.0, 8.0), "wire_bytes": 300e6, "counted_bytes": None, "traffic_bytes": {},
        "allocated_peak_bytes": 50_000_000, "engine_peak_bytes": None, "host_bytes_per_node": 0, "wait_s": None,
        "losses": (5.0, 4.0, 3.0, 2.5), "num_parameters": 25_000_000, "num_trainable": 25_000_000, "wall_s": 40.0,
        "output": "runs/full-200mbit-fsdp2", "num_nodes": 2, "num_local": 2, "local_bytes": 310e6, "tokens": 99_200,
    }  # fmt: skip
    return Result(**{**values, **changes})


def canned_host(**changes: Any) -> Result:
    """Return a result of laconic's host cache, with `changes`."""
    values: dict[str, Any] = {
        "strategy": "host", "step_s": 2.8, "step_times_s": (2.8, 2.8), "wire_bytes": 100e6, "counted_bytes": 99e6,
        "traffic_bytes": {"local/weights": 50e6, "node/weights": 49.5e6, "node/gradients": 49.5e6},
        "engine_peak_bytes": 30_000_000, "host_bytes_per_node": 100_000_000, "wait_s": 1.5,
        "output": "runs/full-200mbit-host",
    }  # fmt: skip
    return canned(**{**values, **changes})
