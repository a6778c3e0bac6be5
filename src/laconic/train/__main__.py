"""`python -m laconic.train CONFIG.toml`: what torchrun is given."""

import sys

from laconic.train.cli import command

sys.exit(command(sys.argv[1:]))
