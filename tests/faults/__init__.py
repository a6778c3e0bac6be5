"""Campaigns of faults: crash states, damaged files, kills, schedules. Each counts the faults that did harm."""
