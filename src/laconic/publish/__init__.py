"""Weights for those who serve the model: versions in a folder, written while training goes on, and their readers."""

from laconic.publish.publisher import Publisher, PublishPolicy
from laconic.publish.reader import Reader, WeightPatch
from laconic.publish.source import FolderSource, VersionSource
from laconic.publish.versions import PublishError

__all__ = ["FolderSource", "PublishError", "PublishPolicy", "Publisher", "Reader", "VersionSource", "WeightPatch"]
