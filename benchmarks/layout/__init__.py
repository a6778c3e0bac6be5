"""How much ragged layouts pad, how long planning takes, and how much time and memory the layouts save."""
