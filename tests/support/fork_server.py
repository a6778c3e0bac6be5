"""Freezes the objects of the fork server, which imports this module last: [Note: Fork server] in launch.py."""

import gc

gc.collect()
gc.freeze()
