"""Optimizers that need whole blocks or whole matrices, on parameters that laconic has sharded."""

from laconic.codec import Tiling
from laconic.optim.adamw8bit import AdamW8bit
from laconic.optim.matrix import matrices_and_rest
from laconic.optim.muon import Muon
from laconic.optim.shampoo import Shampoo

__all__ = ["AdamW8bit", "Muon", "Shampoo", "Tiling", "matrices_and_rest"]
