"""From documents to batches of tokens."""
