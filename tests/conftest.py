"""Settings for all tests and for the processes that they start."""

import os
import signal

# A shell's background job, and many a CI runner, starts with SIGINT ignored, and children inherit that. Tests send it
# to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# torch asks the resolver for the names of peers, of 127.0.0.1 too. A lost answer costs 5 s by default: with a thousand
# ranks, minutes of the suite.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# Two workers of the suite share two cores. More threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
