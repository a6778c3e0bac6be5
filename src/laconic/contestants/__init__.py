"""Engines of other makers, which train the same job: DeepSpeed and torchft. They are run and measured, not planned.

Nothing imports this room: `laconic.registry` finds its strategies. It is a distribution of its own,
laconic-contestants.
"""
