"""The cost of optimizers that need whole blocks or whole matrices of a sharded model, and their losses."""
