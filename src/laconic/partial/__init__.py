"""Partial parameter updates: each island trains a slice of the width of every layer. See updates.py."""
