"""How much less crosses the wire than with FSDP2, and how much time and memory that saves."""
