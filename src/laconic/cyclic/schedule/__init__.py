"""Pure arithmetic: rules, time steps, places, programs and their messages."""
