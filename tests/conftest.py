"""What holds for every test."""

import signal

# A shell's background job, and many a CI runner, starts with SIGINT ignored, and children inherit that; tests send it
# to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
