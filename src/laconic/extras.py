"""laconic's extras: how to install them, and commands that need them.

No package index has laconic, so its name alone finds nothing. Most commands are a distribution of their own,
laconic-tools, which fills rooms of this package.
"""

import contextlib
import gc
import importlib
import platform
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def how_to_install(extra: str, *, environment: str = "", of_contestants: bool = False) -> str:
    """The end of a message about a package that is missing: what to run. `environment` stands before pip's name.

    `of_contestants`: the extra is one of laconic-contestants, the distribution with engines of other makers.
    """
    pip = f"{environment} pip install".lstrip()
    folder, name = ("./contestants", "laconic-contestants") if of_contestants else (".", "laconic")
    return f"{pip} '{folder}[{extra}]' in a clone of laconic, or {pip} '{name}[{extra}] @ file:///PATH/OF/ITS/WHEEL'"


def versions_of(*packages: str) -> dict[str, str]:
    """The versions of Python and of those packages that are installed; laconic itself may be a source tree."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def run(command: str, place: str, arguments: Sequence[str]) -> int:
    """Import and run the command called `command` at "module:function", and return its exit code.

    If a package is missing, print a line that names it and its remedy, and return 2.
    """
    module, _, function = place.partition(":")
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # of torch, which needs it nowhere here
    try:
        gc.disable()  # modules stay: to look for garbage among them takes half a second
        try:
            action = getattr(importlib.import_module(module), function)
        finally:
            gc.enable()
        return int(action(list(arguments)))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "laconic":
            if find_spec("laconic.registry") is not None:  # a room of laconic-tools
                raise
            wheel = "pip install 'laconic-tools @ file:///PATH/OF/ITS/WHEEL'"
            print(f"{command} is one of laconic-tools; pip install ./tools in a clone, or {wheel}", file=sys.stderr)
            return 2
        extra = "train" if error.name != "matplotlib" else "bench"
        print(f"{command} needs the package {error.name!r}; {how_to_install(extra)}", file=sys.stderr)
        return 2
