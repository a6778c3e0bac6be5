"""Layers whose weights rest or multiply in few bits: frozen ones as in QLoRA, and trained ones in FP8, MX and NVFP4."""
