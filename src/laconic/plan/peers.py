"""All peers of laconic that the planner predicts."""

from __future__ import annotations

from laconic.plan.peers_islands import ISLAND_PEERS
from laconic.plan.peers_torch import TORCH_PEERS
from laconic.plan.peers_zero import ZERO_PEERS

PEERS = (*TORCH_PEERS, *ZERO_PEERS, *ISLAND_PEERS)
