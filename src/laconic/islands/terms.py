"""The settings that all islands of a run share, and the settings that `membership=` refuses."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from laconic.comm.cluster import Cluster
from laconic.islands.fragments import SyncSchedule
from laconic.islands.holders import Holders
from laconic.islands.outer_optimizer import OuterFragment


def terms_of(schedule: SyncSchedule, mixing: float, fragments: Sequence[OuterFragment]) -> dict[str, Any]:
    """The settings that must be equal on all islands, as JSON."""
    shapes = [[[name, list(each.shape)] for name, each in fragment.parameters.items()] for fragment in fragments]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
    optimizer = type(fragments[0].optimizer).__qualname__
    return {**asdict(schedule), "mixing": mixing, "outer optimizer": optimizer, "parameters (digest)": digest}


def refuse_beside_membership(cluster: Cluster, holders: Holders, names: Iterable[str], recovers: bool) -> None:
    """Refuse settings that do not go with `membership=`. Raises: ValueError."""
    if cluster.num_islands > 1:
        raise ValueError(
            f"membership= and a mesh of {cluster.num_islands} islands: with membership each island is a job of its "
            "own; start one torchrun for each, and leave islands= out of init_mesh"
        )
    if recovers:
        raise ValueError(
            "recovery= and membership=: an island that comes back gets the state from the others, so recovery= has "
            "nothing to restore; leave it out, and save checkpoints against the loss of all islands"
        )
    if any(holders.order(name) >= 0 for name in names):
        raise ValueError(
            "membership= and partial_updates: a slice whose islands have gone would never change again; leave one of "
            "them out"
        )
