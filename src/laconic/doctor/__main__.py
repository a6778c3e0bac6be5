"""`torchrun ... -m laconic.doctor`, the module for ranks; alone, `laconic doctor` does the same."""

import sys

from laconic.extras import run

sys.exit(run("laconic doctor", "laconic.doctor.cli:main", sys.argv[1:]))
