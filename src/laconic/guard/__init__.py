"""The search for mistakes and damage in training, attached to the engine by its events: see guard/guard.py."""
