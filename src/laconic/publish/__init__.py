"""Weights for those who serve the model: versions in a folder, written while training goes on, and their readers.

The format: versions, changes. Write: publisher, by holdings and shares. Read: reader, by staging; http_source, from
serving.
"""

from laconic.publish.http_source import HttpSource
from laconic.publish.publisher import Publisher, PublishPolicy
from laconic.publish.reader import Reader, WeightPatch
from laconic.publish.serving import WeightServer
from laconic.publish.versions import FolderSource, PublishError, VersionSource

__all__ = [
    "FolderSource",
    "HttpSource",
    "PublishError",
    "PublishPolicy",
    "Publisher",
    "Reader",
    "VersionSource",
    "WeightPatch",
    "WeightServer",
]
