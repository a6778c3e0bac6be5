"""The planner's predictions beside measurements."""
