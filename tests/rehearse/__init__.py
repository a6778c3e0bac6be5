"""A race checker that needs no GPU: docs/races.md says what it proves."""
