"""Python imports this module first, where its folder is on PYTHONPATH."""

import unpickled_audit  # noqa: F401
