"""`HttpSource`: versions that `laconic publish serve` serves, for readers on other machines.

The head of an answer, or of a request, is read within a time, however slowly it comes: `TimedReads`.
"""

from __future__ import annotations

import http.client
import io
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import SplitResult, urlsplit

from laconic.comm.entries import EntryError, parse, typed
from laconic.publish.versions import (
    MANIFEST,
    PublishError,
    Registration,
    VanishedError,
    VersionManifest,
    parse_manifest,
    version_name,
)
from laconic.store.folder import FileRecord

TOKEN_VARIABLE = "LACONIC_PUBLISH_TOKEN"
"""The environment variable with the token of server and readers."""
_PAUSES_S = (0.1, 0.5, 2.0)
"""The times between attempts that bring nothing."""
_CHUNK_BYTES = 1 << 20
_MOST_LISTING_BYTES = 1 << 20
_MOST_MANIFEST_BYTES = 1 << 28
_MOST_MESSAGE_BYTES = 1 << 12
_MOST_HOST = 253
"""The letters of a host's name (RFC 1035, section 2.3.4)."""


class TimedReads(io.RawIOBase):
    """The bytes of a connection, of which a head must be there within a time, however slowly it comes."""

    def __init__(self, file: Any, set_timeout: Callable[[float], None], patience_s: float) -> None:
        """Read a buffered file of a connection. `patience_s` is how long the connection may say nothing."""
        self._file, self._set_timeout, self._patience_s = file, set_timeout, patience_s
        self._is_timed = False
        self._deadline_s: float | None = None

    def begin(self, *, waits: bool) -> None:
        """Begin a head, which must arrive within the patience. With `waits`, that time begins with its first byte."""
        self._is_timed, self._deadline_s = True, None if waits else time.monotonic() + self._patience_s

    def end(self) -> None:
        """End the head: each later read may take the patience again."""
        self._is_timed = False

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`. Raises: TimeoutError."""
        if self._is_timed:
            left_s = self._patience_s if self._deadline_s is None else self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            self._set_timeout(left_s)
        data = self._file.read1(len(buffer))
        if self._is_timed:
            self._set_timeout(self._patience_s)
            self._deadline_s = self._deadline_s or time.monotonic() + self._patience_s
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


class Answer(http.client.HTTPResponse):
    """An answer whose head must be there within the connection's time-out, with all that comes before it."""

    def __init__(self, sock: Any, *args: Any, **texts: Any) -> None:
        super().__init__(sock, *args, **texts)
        self._reads = TimedReads(self.fp, sock.settimeout, sock.gettimeout())
        self.fp = io.BufferedReader(self._reads)

    def begin(self) -> None:
        """Read the head."""
        self._reads.begin(waits=False)
        super().begin()
        self._reads.end()


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
        parts = _address_of(url)
        if not timeout_s > 0:
            raise PublishError(f"timeout_s={timeout_s}: must be positive")
        token = token if token is not None else os.environ.get(TOKEN_VARIABLE)
        check_token(token)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)  # opens with the first request
        self._connection.response_class = Answer
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
        self._whole(f"readers/{reader}", 0, "PUT", registration.to_text().encode())

    def close(self) -> None:
        """Close the connection. The next call opens another."""
        with self._lock:
            self._connection.close()

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _whole(self, place: str, most_bytes: int, method: str = "GET", body: bytes | None = None) -> bytearray:
        """Ask for a place of at most so many bytes, in as many transfers as it takes, and return all of the answer.

        A transfer may break off, but not again and again without progress.

        Raises:
            PublishError: the server refuses.
            OSError: the server does not answer.
        """
        download, failed, before = _Download(), 0, 0
        with self._lock:
            while True:
                try:
                    self._transfer(method, place, body, download, most_bytes)
                    return download.data
                except PublishError:
                    self._connection.close()
                    raise
                except (OSError, http.client.HTTPException) as error:
                    self._connection.close()
                    failed = 0 if len(download.data) > before else failed + 1
                    before = max(before, len(download.data))
                    if failed > len(_PAUSES_S):
                        raise OSError(
                            f"{self.url} does not answer: {_printable(str(error)) or type(error).__name__}"
                        ) from error
                    time.sleep(_PAUSES_S[max(0, failed - 1)])

    def _transfer(self, method: str, place: str, body: bytes | None, into: _Download, most_bytes: int) -> None:
        """Send one request, and append the answer's body to what has arrived. It may break off."""
        where, headers = f"{self.url}/{place}", dict(self._headers)
        if into.data and into.etag:
            headers |= {"Range": f"bytes={len(into.data)}-", "If-Range": into.etag}
        self._connection.request(method, f"{self._prefix}/{place}", body=body, headers=headers)
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
        message = _printable(told or response.reason)
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


def _address_of(url: str) -> SplitResult:
    """Parse the address of a server. Raises: PublishError: it is none, or holds a password, which is not shown."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.port != 0 and is_host(parts.hostname or "")
    except ValueError:
        parts, is_address = urlsplit(""), False
    if "@" in url:
        raise PublishError(
            f"the address of {parts.hostname or 'a server'} holds a password; give http://HOST:PORT, and the token "
            "apart"
        )
    is_plain = url.isascii() and url.isprintable() and not {" ", "?", "#"} & set(url)
    if not is_address or not is_plain:
        raise PublishError(f"{url!r} is no address of a server; give http://HOST:PORT")
    return parts


def is_host(name: str) -> bool:
    """True if a name may be that of a host: it is short enough, also in each of its labels, and none is empty."""
    return len(name) <= _MOST_HOST and all(0 < len(label) < 64 for label in name.removesuffix(".").split("."))


def check_token(token: str | None) -> None:
    """Raise PublishError unless a token can stand in a header."""
    if token is not None and not (token.isascii() and token.isprintable() and token and " " not in token):
        raise PublishError("a token is one word of ASCII, without spaces and line ends, and not empty")


def _printable(text: str) -> str:
    """Return the text of another machine as one short line, without control characters, for a message."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())[:200]
