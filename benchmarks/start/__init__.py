"""The first ten minutes of a newcomer, measured."""
