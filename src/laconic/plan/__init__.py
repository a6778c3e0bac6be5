"""The seconds, bytes and memory of a run, before it starts: under laconic's strategies and its peers'.

`estimate` predicts one strategy, `choose` ranks all. Everything is arithmetic on shapes and on a cluster's figures.
"""

from typing import Any

__all__ = ["Choice", "ClusterSpec", "Estimate", "Predictor", "choose", "estimate", "load_cluster"]

_HOMES = {
    "Choice": "choice", "ClusterSpec": "cluster_spec", "Estimate": "estimates", "Predictor": "prediction",
    "choose": "choice", "estimate": "prediction", "load_cluster": "cluster_file",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: most parts of this room need no transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
