"""Heads of HTTP requests and answers: read within a time, and in one way only; and addresses.

[Note: One reading of a head]
A proxy before the server and the server must agree where a request ends. Else what one of them takes for a body is
another request for the other (request smuggling: RFC 9112, section 11.2). Python's parser forgives: it skips lines that
are no header, and takes the first of several lengths. So the lines of a head are checked before Python sees them. Each
is a name, a colon and text without control characters. What frames or addresses a request comes at most once.
"""

from __future__ import annotations

import http.client
import io
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import SplitResult, urlsplit

from laconic.publish.versions import PublishError

_MOST_HEAD_BYTES = 1 << 16
_MOST_HEADERS = 100
_REQUEST = re.compile(rb"[A-Z]+ [!-~]+ HTTP/1\.[01]\r?\n")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t -~\x80-\xff]*\r?\n")
_ONCE = {b"content-length", b"transfer-encoding", b"host", b"authorization", b"range", b"if-range", b"expect"}
_MOST_HOST = 253
"""The letters of a host's name (RFC 1035, section 2.3.4)."""


class HeadError(Exception):
    """A head that has more than one reading."""


class TimedReads(io.RawIOBase):
    """The bytes of a connection, of which a head must be there within a time, however slowly it comes."""

    def __init__(self, file: Any, set_timeout: Callable[[float | None], None], patience_s: float | None) -> None:
        """Read a buffered file of a connection. `patience_s` is how long the connection may say nothing."""
        self._file, self._set_timeout, self._patience_s = file, set_timeout, patience_s
        self._is_timed = False
        self._deadline_s: float | None = None

    def begin(self, *, waits: bool) -> None:
        """Begin a head, which must arrive within the patience. With `waits`, that time begins with its first byte."""
        self._is_timed = self._patience_s is not None
        self._deadline_s = None if waits else self._after_patience()

    def end(self) -> None:
        """End the head: each later read may take the patience again."""
        self._is_timed = False

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`. Raises: TimeoutError."""
        if not self._is_timed:
            data = self._file.read1(len(buffer))
        else:
            left_s = self._patience_s if self._deadline_s is None else self._deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError("timed out")
            self._set_timeout(left_s)
            data = self._file.read1(len(buffer))
            self._set_timeout(self._patience_s)
            self._deadline_s = self._deadline_s or self._after_patience()
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def _after_patience(self) -> float | None:
        return None if self._patience_s is None else time.monotonic() + self._patience_s


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


def connection_to(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to an address that `address_of` has parsed. It opens with the first request."""
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    connection.response_class = Answer
    return connection


def address_of(url: str, wanted: str) -> SplitResult:
    """Parse an address with http or https; `wanted` says in errors what to give.

    Raises:
        PublishError: it is none, holds a password, or no host can have that name.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.port != 0 and is_host(parts.hostname or "")
    except ValueError:
        parts, is_address = urlsplit(""), False
    if "@" in url:  # it is not shown: what stands before is a password
        raise PublishError(f"the address of {parts.hostname or 'a server'} holds a password; give {wanted}")
    if not is_address or not url.isascii() or not url.isprintable() or " " in url:
        raise PublishError(f"{url!r} is no address; give {wanted}")
    return parts


def is_host(name: str) -> bool:
    """True if a name may be that of a host: it is short enough, also in each of its labels, and none is empty."""
    return len(name) <= _MOST_HOST and all(0 < len(label) < 64 for label in name.removesuffix(".").split("."))


def read_head(request: bytes, file: io.BufferedIOBase) -> bytes:
    """Read the headers that follow the line of a request, with the empty line at their end.

    Raises:
        HeadError: they, or that line, have more than one reading: [Note: One reading of a head].
        TimeoutError: they did not come in time.
    """
    if not _REQUEST.fullmatch(request):
        raise HeadError("the first line is no request of HTTP/1.1")
    lines, names = [], list[bytes]()
    while (line := file.readline(_MOST_HEAD_BYTES)) not in (b"\r\n", b"\n"):
        found = _HEADER.fullmatch(line)
        lines.append(line)
        if found is None:
            raise HeadError(f"line {len(lines)} of the head is no header")
        names.append(found[1].lower())
        if len(lines) > _MOST_HEADERS or sum(map(len, lines)) > _MOST_HEAD_BYTES:
            raise HeadError(f"at most {_MOST_HEADERS} headers of {_MOST_HEAD_BYTES} bytes in all")
    for name in _ONCE:
        if names.count(name) > 1:
            raise HeadError(f"{name.decode()} comes more than once")
    if b"host" not in names and request.rstrip().endswith(b"HTTP/1.1"):
        raise HeadError("there is no header Host")
    return b"".join([*lines, b"\r\n"])


def printable(text: str) -> str:
    """Return the text of another machine as one short line, without control characters, for a message."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())[:200]
