"""Published weights: bytes, the time that training stands still, memory, and the time to bring them to readers."""
