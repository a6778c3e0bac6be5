"""Weights for those who serve the model: versions in a folder, written while training goes on, and their readers."""

from laconic.publish.http_source import HttpSource
from laconic.publish.publisher import Publisher, PublishPolicy
from laconic.publish.reader import Reader, WeightPatch
from laconic.publish.serving import WeightServer
from laconic.publish.source import FolderSource, VersionSource
from laconic.publish.together import ReaderGroup
from laconic.publish.versions import PublishError

__all__ = [
    "FolderSource",
    "HttpSource",
    "PublishError",
    "PublishPolicy",
    "Publisher",
    "Reader",
    "ReaderGroup",
    "VersionSource",
    "WeightPatch",
    "WeightServer",
]
