"""Sharded checkpoints that survive being killed, change size, and are written while training goes on; exact resume."""

from laconic.checkpoint.api import StoredCheckpoint, load_checkpoint, load_dcp, open_checkpoint, save_checkpoint
from laconic.checkpoint.asynchronous import AsyncSaver
from laconic.checkpoint.commit import CheckpointError
from laconic.checkpoint.fill import Differences
from laconic.checkpoint.sidecar import rng_state, set_rng_state

__all__ = [
    "AsyncSaver",
    "CheckpointError",
    "Differences",
    "StoredCheckpoint",
    "load_checkpoint",
    "load_dcp",
    "open_checkpoint",
    "rng_state",
    "save_checkpoint",
    "set_rng_state",
]
