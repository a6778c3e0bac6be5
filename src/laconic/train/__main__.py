"""`python -m laconic.train CONFIG.toml`, the module for torchrun."""

import sys

from laconic.extras import run

sys.exit(run("laconic.train", "laconic.train.cli:command", sys.argv[1:]))
