"""The ways to take a job's steps: sharded or replicated, with or without islands, or by the cyclic schedule."""
