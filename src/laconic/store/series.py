"""Series of stores: those of one folder whose names have numbers, such as `step-7`, and of which the last are kept.

[Note: A series]
A folder belongs to a series by its name. It is a store ([Note: A store] in store/folder.py) if it has a manifest, and
the manifest is one of this name. An interrupted write or removal leaves a name with one of the endings `REMAINS`, which
is no store; the next write clears it away. Which stores are newer than others, and which are kept, their users say:
checkpoints (checkpoint/commit.py) count up, states of islands (islands/state_folder.py) have a start and a step, and
published versions (publish/publisher.py) stay while a reader needs them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from laconic.store import folder as store
from laconic.store.files import remove

MANIFEST = "manifest.json"
_M = TypeVar("_M", bound=store.Manifest)
_Choice = Callable[[re.Match[str]], bool]


def numbered(folder: Path, names: str) -> list[tuple[Path, re.Match[str]]]:
    """List what has such a name in a folder, in the order of names; nothing if it is no folder. Raises: OSError."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return [(path, found) for path in paths if (found := re.fullmatch(names, path.name))]


@dataclass(frozen=True, kw_only=True)
class Member(Generic[_M]):
    """A folder with the name of a store."""

    folder: Path
    manifest: _M | None
    problem: str = ""
    """Why there is no manifest of this name."""


@dataclass(frozen=True, kw_only=True)
class Series(Generic[_M]):
    """The stores of one kind in a folder, which need not exist: [Note: A series]."""

    folder: Path
    names: str
    """A pattern of their names. The first group is the name without an ending that a store may have, too."""
    kind: type[_M]
    name_of: Callable[[_M], str]
    """The name of the store that has a manifest."""

    def members(self) -> list[Member[_M]]:
        """Read the manifest of each store, in the order of names. Raises: OSError if the folder is not readable."""
        return [self.member(path, found[1]) for path, found in numbered(self.folder, self.names)]

    def member(self, folder: Path, name: str | None = None) -> Member[_M]:
        """Read the manifest of a folder, which must be that of the store `name`, or of any."""
        manifest, problem = None, ""
        try:
            manifest = self.kind.read(folder / MANIFEST)
            if name not in (None, found := self.name_of(manifest)):
                manifest, problem = None, f"its {MANIFEST} is that of {found}"
        except FileNotFoundError:
            problem = f"its {MANIFEST} is missing"
        except (OSError, store.DamagedError) as error:
            problem = str(error)
        return Member(folder=folder, manifest=manifest, problem=problem)

    def prune(self, is_old: _Choice, is_rest: _Choice = lambda name: True) -> None:
        """Remove the stores that are old by their names, and then the remains that nobody writes any more."""
        store.remove_folders([path for path, name in numbered(self.folder, self.names) if is_old(name)])
        for path, name in numbered(self.folder, self.names + store.REMAINS):
            if is_rest(name):
                remove(path)
