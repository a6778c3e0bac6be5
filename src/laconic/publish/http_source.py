"""`HttpSource`: versions that `laconic publish serve` serves, for readers on other machines."""

from __future__ import annotations

import http.client
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from laconic.comm.entries import EntryError, parse, typed
from laconic.publish.http_heads import address_of, connection_to, printable
from laconic.publish.serving import check_token
from laconic.publish.source import Registration, VanishedError, parse_manifest
from laconic.publish.versions import MANIFEST, PublishError, VersionManifest, version_name
from laconic.store.folder import FileRecord

TOKEN_VARIABLE = "LACONIC_PUBLISH_TOKEN"
"""The environment variable with the token of server and readers."""
_PAUSES_S = (0.1, 0.5, 2.0)
"""The times between attempts that bring nothing."""
_CHUNK_BYTES = 1 << 20
_MOST_LISTING_BYTES = 1 << 20
_MOST_MANIFEST_BYTES = 1 << 28
_MOST_MESSAGE_BYTES = 1 << 12


@dataclass(kw_only=True)
class _Download:
    """The part of a body that has arrived."""

    data: bytearray = field(default_factory=bytearray)
    etag: str | None = None
    """The server's mark of these contents; without one, a transfer that breaks off begins anew."""


class HttpSource:
    """The versions at an address: [Note: Versions over HTTP] in serving.py.

    A transfer that breaks off goes on where it ended, on a new connection. Redirects are not followed, so the token
    goes nowhere else.

    Args:
        url: the address of the machine and the port of `laconic publish serve`, or that of a proxy before it, with http
            or https.
        token: the server's token. Default: that of the environment variable LACONIC_PUBLISH_TOKEN.
        timeout_s: the seconds that the server may say nothing, and that the head of an answer may take.

    Raises:
        PublishError: the address or the token makes no sense.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 60.0) -> None:
        parts = address_of(url, "http://HOST:PORT, and the token apart")
        if parts.query or parts.fragment:
            raise PublishError(f"{url!r} is no address of a server; give http://HOST:PORT")
        if not timeout_s > 0:
            raise PublishError(f"timeout_s={timeout_s}: must be positive")
        token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
        check_token(token)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._connection = connection_to(parts, timeout_s)
        self._lock = threading.Lock()
        weakref.finalize(self, self._connection.close)

    def __str__(self) -> str:
        return self.url

    def versions(self) -> list[int]:
        """See `VersionSource.versions`."""
        body = self._whole("versions", _MOST_LISTING_BYTES)
        try:
            found = typed(dict[str, list[int]], parse(bytes(body), most_bytes=_MOST_LISTING_BYTES))["versions"]
        except (EntryError, KeyError) as error:
            raise PublishError(
                f"{self.url} does not list versions; give the address of `laconic publish serve`"
            ) from error
        return sorted(set(found))

    def manifest(self, version: int) -> VersionManifest:
        """See `VersionSource.manifest`."""
        place = f"{version_name(version)}/{MANIFEST}"
        body = self._whole(place, _MOST_MANIFEST_BYTES)
        return parse_manifest(bytes(body), version, f"{self.url}/{version_name(version)}")

    def read(self, version: int, file: FileRecord) -> bytearray:
        """See `VersionSource.read`."""
        return self._whole(f"{version_name(version)}/{file.name}", file.size_bytes)

    def register(self, reader: str, registration: Registration) -> None:
        """See `VersionSource.register`."""
        body = registration.to_text().encode()
        with self._lock:
            self._persistently(
                _Download(), lambda: self._transfer("PUT", f"readers/{reader}", {}, body, _Download(), 0)
            )

    def close(self) -> None:
        """Close the connection. The next call opens another."""
        with self._lock:
            self._connection.close()

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _whole(self, place: str, most_bytes: int) -> bytearray:
        """Read all of a place of at most so many bytes, in as many transfers as it takes."""
        download = _Download()

        def go_on() -> None:
            further = {}
            if download.data and download.etag:
                further = {"Range": f"bytes={len(download.data)}-", "If-Range": download.etag}
            self._transfer("GET", place, further, None, download, most_bytes)

        with self._lock:
            self._persistently(download, go_on)
        return download.data

    def _persistently(self, download: _Download, action: Callable[[], None]) -> None:
        """Run an action until it ends; it may break off, but not again and again without progress.

        Raises:
            PublishError: the server refuses.
            OSError: the server does not answer.
        """
        failed = before = 0
        while True:
            try:
                return action()
            except PublishError:
                self._connection.close()
                raise
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                failed = 0 if len(download.data) > before else failed + 1
                before = max(before, len(download.data))
                if failed > len(_PAUSES_S):
                    raise OSError(
                        f"{self.url} does not answer: {printable(str(error)) or type(error).__name__}"
                    ) from error
                time.sleep(_PAUSES_S[max(0, failed - 1)])

    def _transfer(
        self, method: str, place: str, headers: dict[str, str], body: bytes | None, into: _Download, most_bytes: int
    ) -> None:
        """Send one request, and append the answer's body to what has arrived. It may break off."""
        where = f"{self.url}/{place}"
        self._connection.request(method, f"{self._prefix}/{place}", body=body, headers={**self._headers, **headers})
        response = self._connection.getresponse()
        if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT, HTTPStatus.NO_CONTENT):
            raise self._refusal(response, where)
        if response.status != HTTPStatus.PARTIAL_CONTENT:  # all of it: the first time, or because it has changed
            into.data.clear()
            into.etag = response.getheader("ETag")
        elif not response.getheader("Content-Range", "").startswith(f"bytes {len(into.data)}-"):
            raise PublishError(f"{where} answers with another part than was asked for; update again")
        if response.length is None:
            raise PublishError(f"{where} has no length; give the address of `laconic publish serve`")
        end = len(into.data) + response.length
        if end > most_bytes:
            raise PublishError(f"{where} has {end} bytes, and at most {most_bytes} are read of it")
        while chunk := response.read(_CHUNK_BYTES):
            into.data += chunk
        if len(into.data) < end:
            raise ConnectionResetError(f"the transfer broke off at byte {len(into.data)} of {end}")

    def _refusal(self, response: http.client.HTTPResponse, where: str) -> PublishError | OSError:
        """The error that an answer stands for."""
        try:
            told = typed(dict[str, str], parse(response.read(_MOST_MESSAGE_BYTES)))["error"]
        except (EntryError, KeyError):
            told = ""  # from something before or instead of `laconic publish serve`
        message = printable(told or response.reason)
        match response.status:
            case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
                return PublishError(f"{self.url} refuses the token; give token=, or set {TOKEN_VARIABLE}")
            case HTTPStatus.GONE:
                return VanishedError(f"{where} is not there any more; update again")
            case HTTPStatus.NOT_FOUND if told:
                return PublishError(f"{self.url} is damaged: {message}; let the publisher write whole values again")
            case HTTPStatus.NOT_FOUND:
                return PublishError(f"there is no {where}; give the address of `laconic publish serve`")
            case status if status < HTTPStatus.INTERNAL_SERVER_ERROR:
                return PublishError(f"{where}: {status} {message}")
            case status:
                return OSError(f"{where}: {status} {message}")
