"""`python -m laconic.train CONFIG.toml`: what torchrun is given."""

import sys

from laconic.train.cli import main

sys.exit(main(sys.argv[1:]))
