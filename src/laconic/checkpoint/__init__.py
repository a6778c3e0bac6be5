"""Sharded checkpoints that survive being killed, and exact resume."""

from laconic.checkpoint.api import load_checkpoint, save_checkpoint
from laconic.checkpoint.commit import CRASH_POINTS, CheckpointError
from laconic.checkpoint.offline import StoredCheckpoint, open_checkpoint
from laconic.checkpoint.sidecar import rng_state, set_rng_state

__all__ = [
    "CRASH_POINTS",
    "CheckpointError",
    "StoredCheckpoint",
    "load_checkpoint",
    "open_checkpoint",
    "rng_state",
    "save_checkpoint",
    "set_rng_state",
]
