"""How much traffic local steps save, and how much quality they cost."""
