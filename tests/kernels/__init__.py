"""Triton's kernels on a machine without a GPU: compiled for those that people have, and run by its interpreter."""
