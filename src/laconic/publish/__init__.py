"""Weights for those who serve the model: versions in a folder, written while training goes on, and their readers."""
