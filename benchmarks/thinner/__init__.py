"""Crossings in few bits: bytes, seconds, memory and losses."""
