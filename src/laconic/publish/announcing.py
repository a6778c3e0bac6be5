"""`Announcer`: tells other programs of each new version by HTTP, so that they need not ask."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laconic.publish.http_heads import address_of, connection_to, printable
from laconic.publish.source import FolderSource
from laconic.publish.versions import PublishError

_POLL_S = 0.2
_TIMEOUT_S = 10.0
_ATTEMPTS = 3


class Announcer:
    """POSTs {"run": ..., "version": 7, "step": ...} to each address when a version is there: a webhook.

    Each address has a thread of its own, so one that is slow does not hold up the others. It gets the newest
    version; those that came while it answered are passed over. If it does not take the news after three attempts, a
    line on stderr says so, and it gets the next version. Versions that are there at the beginning are not announced.

    Args:
        folder: the folder that the publisher writes. It may come into being later.
        urls: addresses with http or https.

    Raises:
        PublishError: an address makes no sense.
    """

    def __init__(self, folder: str | Path, urls: Sequence[str]) -> None:
        for url in urls:
            address_of(url, "http://HOST:PORT/PATH, without a password")
        self._source, self._ends = FolderSource(folder), threading.Event()
        self._threads = [threading.Thread(target=self._tell, args=(url, self._newest()), daemon=True) for url in urls]

    def __enter__(self) -> Announcer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _newest(self) -> int:
        try:
            return max(self._source.versions(), default=0)
        except PublishError:  # the folder is not there yet
            return 0

    def _tell(self, url: str, told: int) -> None:
        while not self._ends.wait(_POLL_S):
            newest = self._newest()
            if newest in (0, told):
                continue
            try:
                manifest = self._source.manifest(newest)
            except (PublishError, OSError):  # removed, damaged or not readable now: looked at again
                continue
            told = newest
            self._post(url, {"run": manifest.run, "version": newest, "step": manifest.step})

    def _post(self, url: str, news: dict[str, Any]) -> None:
        problem = ""
        for attempt in range(_ATTEMPTS):
            if self._ends.wait(attempt):
                return
            try:
                status = post(url, news)
            except (OSError, http.client.HTTPException) as error:
                problem = printable(str(error)) or type(error).__name__
                continue
            if status < http.HTTPStatus.MULTIPLE_CHOICES:
                return
            problem = f"status {status}"
        print(f"laconic publish: {url} was not told of version {news['version']}: {problem}", file=sys.stderr)


def post(url: str, value: Any) -> int:
    """POST a value as JSON, and return the status of the answer. Raises: OSError, HTTPException."""
    parts = address_of(url, "http://HOST:PORT/PATH")
    connection = connection_to(parts, _TIMEOUT_S)
    try:
        place = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", place, body=json.dumps(value), headers={"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()
