"""ZeRO++'s algorithm on laconic's engine."""

from laconic.registry import Strategy
from laconic.strategies.known.pytorch import LIMITS

WIRE = {"weights": "int8", "as_values": True, "gradients": "int4"}
"""The crossings of ZeRO++: qwZ and qgZ, in blocks of 128. DeepSpeed's groups are larger, and it codes gradients inside
the node, too. So these losses flatter it; the bytes between nodes are its own."""
STRATEGIES = (
    Strategy(
        name="zero++",
        label="ZeRO++ on our engine",
        note="ZeRO++'s algorithm on laconic's engine: weights cross in int8 in every forward, gradients in int4 in "
        "every backward. DeepSpeed's own runs on CUDA only.",
        source="ZeRO++, arXiv 2306.10209",
        maker="DeepSpeed",
        colours=("#5e4b8b", "#9a83d6"),
        shard={"strategy": "zero++"},
        policy={"wire": WIRE, "cache": "device", "device_budget_bytes": 0},
        inexact="weights cross in 8 bits and gradients in 4, and nothing feeds the error back",
        limits=LIMITS,
        on_engine=True,
        reduces_always=True,
        parallelize="laconic.strategies.parallelize:on_engine",
        predict="laconic.plan.candidates:on_engine",
    ),
)
