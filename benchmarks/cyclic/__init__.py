"""How much memory the cyclic schedule saves, how fast it is, and how well models train under its rules."""
