"""Communication: the mesh and its groups, collectives with counted bytes, agreement and failure of ranks."""
