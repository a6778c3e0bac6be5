"""`python -m laconic.train CONFIG.toml`, the module for torchrun."""

import sys

from laconic.train.cli import command

sys.exit(command(sys.argv[1:]))
