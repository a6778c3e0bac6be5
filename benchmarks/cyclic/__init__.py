"""How much memory the cyclic schedule saves, and how well models train under its rules."""
