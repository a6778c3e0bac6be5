"""Step time, memory, overlap and losses of the engine on a CUDA device."""
