"""Arithmetic about a run before it starts: the padding of layouts, and the time steps of cyclic schedules."""
