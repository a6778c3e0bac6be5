"""Python imports this module first, where its folder is on PYTHONPATH."""

import passed_places  # noqa: F401
import unpickled_audit  # noqa: F401
