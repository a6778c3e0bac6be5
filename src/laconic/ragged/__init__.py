"""RaggedTensors: tensors that are cut over ranks in whole blocks. Sliced parameters, too, have their place here."""

from laconic.ragged import operations as operations  # registers the operations of RaggedTensor
