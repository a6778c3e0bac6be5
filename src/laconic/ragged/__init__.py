"""Tensors that are cut over ranks in whole blocks, and parameters that consist of several slices."""

from laconic.ragged import operations as operations  # registers the operations of RaggedTensor
from laconic.ragged import optimizer_state as optimizer_state  # registers its hook
