"""Engines of other makers, which train the same job: DeepSpeed and torchft, and their programs for the planner.

Nothing imports this room: `laconic.registry` finds its strategies. It is a distribution of its own,
laconic-contestants.
"""
