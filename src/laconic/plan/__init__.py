"""Numbers of a run that can be computed before it starts."""
