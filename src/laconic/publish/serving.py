"""`WeightServer`: a folder of versions over HTTP, for readers on machines that do not share it.

[Note: Versions over HTTP]
    GET  /versions                       {"versions": [6, 7]}, ascending
    GET  /weight_v000007/manifest.json   the manifest
    GET  /weight_v000007/NAME            a file of the version
    PUT  /readers/NAME                   what a reader has and needs: [Note: Registered readers] in versions.py

Files have an ETag, and may be asked for in part (RFC 9110, sections 8.8.3 and 14). 410 says that a version is not there
any more, 404 that it lacks the file. A refusal of GET, HEAD or PUT is a JSON object with one line, {"error": "..."}.

The server reads nothing but versions and writes nothing but registrations. With a token each request needs
`Authorization: Bearer TOKEN`. Without one the server binds to this machine alone, and answers requests for this machine
alone: a page in a browser here may find other names for it, but not change the name that it asks for. The server does
not encrypt: put a proxy with TLS before it where others can listen, and give `HttpSource` the https address.

[Note: One reading of a head]
A proxy before the server and the server must agree where a request ends. Else what one of them takes for a body is
another request for the other (request smuggling: RFC 9112, section 11.2). Python's parser forgives: it skips lines that
are no header, and takes the first of several lengths. So the server reads a head by itself. Each line is a name, a
colon and text without control characters. What frames or addresses a request comes at most once.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import ipaddress
import json
import os
import re
import socket
import socketserver
import stat
import sys
import threading
import weakref
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from laconic.comm.entries import EntryError
from laconic.publish.http_source import TimedReads, check_token, is_host
from laconic.publish.versions import (
    FILE_NAME,
    MOST_REGISTRATION_BYTES,
    READERS,
    VERSION_NAME,
    FolderSource,
    PublishError,
    Registration,
    check_reader_name,
)

_MOST_READERS = 4096
_PATIENCE_S = 60.0
"""How long a connection may say nothing, and how long a request may take to come."""
_CHUNK_BYTES = 1 << 20
_MOST_HEAD_BYTES = 1 << 16
_MOST_HEADERS = 100
_REQUEST = re.compile(r"([A-Z]+) ([!-~]+) HTTP/1\.([01])\r?\n")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)\r?\n")
_ONCE = {"content-length", "transfer-encoding", "host", "authorization", "range", "if-range", "expect"}
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})")
_Headers = dict[str, str]


class WeightServer:
    """Serves the versions of a folder over HTTP: [Note: Versions over HTTP].

        with WeightServer("/shared/weights", host="0.0.0.0", port=8377, token=token) as server:
            server.serve_forever()

    Args:
        folder: the folder that the publisher writes. It may come into being later.
        host: the address to serve at; 0.0.0.0 for all of this machine, and then readers give its name.
        port: a port; 0 takes a free one, and `url` has it.
        token: a secret that readers give; None only on this machine.

    Raises:
        PublishError: there is no token, and `host` is not this machine alone; or the token is no word of ASCII, or
            `host` no name.
        OSError: the port is not free, or the address is not this machine's.
    """

    def __init__(self, folder: str | Path, *, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        if token is None and not _is_loopback(host):
            raise PublishError(
                f"host={host!r} lets other machines read the weights without a token; give token=, or host='127.0.0.1'"
            )
        check_token(token)
        if not is_host(host):
            raise PublishError(f"host={host!r} can be the name of no machine")
        self._server = _Server(FolderSource(folder), host, port, token)
        self._has_served = False
        number = self._server.server_address[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{number}"
        """The address for readers, as this machine knows it."""

    def start(self) -> None:
        """Serve in a thread until `close`."""
        self._has_served = True
        threading.Thread(target=self.serve_forever, name="laconic-publish-http", daemon=True).start()

    def serve_forever(self) -> None:
        """Serve until `close` is called in another thread, or KeyboardInterrupt."""
        self._has_served = True
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """End the server. Transfers that have begun break off."""
        if self._has_served:
            self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> WeightServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True
    block_on_close = False

    def __init__(self, source: FolderSource, host: str, port: int, token: str | None) -> None:
        self.source, self.token, self.is_local = source, token, _is_loopback(host)
        self.open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        """The sockets of connections."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_close(self) -> None:
        """End the server and all connections."""
        super().server_close()
        for each in list(self.open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has gone is no error; anything else is said in one line."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"laconic publish: {client_address[0]}: {error!r}", file=sys.stderr)


class _RefusedError(Exception):
    """A request that is not answered as it asks."""

    def __init__(self, status: HTTPStatus, message: str, headers: _Headers | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}


def _no_place() -> _RefusedError:
    """A new error each time: one that is raised again keeps all frames of before, and so their connections."""
    return _RefusedError(
        HTTPStatus.BAD_REQUEST, "there is no such place; give the address that `laconic publish serve` has"
    )


class _Request(NamedTuple):
    """The head of a request: [Note: One reading of a head]."""

    method: str
    target: str
    headers: _Headers
    """By their names in small letters; of those that come more than once the last one."""
    is_last: bool
    """Whether the connection ends after it."""


def _read_head(line: str, file: io.BufferedIOBase) -> _Request:
    """Read the head that begins with a line.

    Raises:
        _RefusedError: it has more than one reading.
        TimeoutError: it did not come in time.
    """
    request, names, size = _REQUEST.fullmatch(line), list[str](), 0
    if request is None:
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "the first line is no request of HTTP/1.1")
    headers: _Headers = {}
    while (line := file.readline(_MOST_HEAD_BYTES).decode("latin-1")) not in ("\r\n", "\n"):
        found, size = _HEADER.fullmatch(line), size + len(line)
        if found is None:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"line {len(names) + 1} of the head is no header")
        names.append(found[1].lower())
        headers[names[-1]] = found[2].strip(" \t")
        if len(names) > _MOST_HEADERS or size > _MOST_HEAD_BYTES:
            message = f"at most {_MOST_HEADERS} headers of {_MOST_HEAD_BYTES} bytes in all"
            raise _RefusedError(HTTPStatus.BAD_REQUEST, message)
    for name in _ONCE:
        if names.count(name) > 1:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"{name} comes more than once")
    if "host" not in headers and request[3] == "1":
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "there is no header Host")
    is_last = request[3] == "0" or "close" in headers.get("connection", "").lower()
    return _Request(request[1], request[2], headers, is_last)


class _Handler(socketserver.StreamRequestHandler):
    timeout = _PATIENCE_S
    disable_nagle_algorithm = True  # or a body waits until its head is acknowledged, which takes 40 ms
    server: _Server
    _asked: _Request
    _unread_bytes: int
    """Of the request's body."""

    def handle(self) -> None:
        """Answer requests until the connection ends. Each comes within a time."""
        self.server.open.add(self.connection)
        reads = TimedReads(self.rfile, self.connection.settimeout, _PATIENCE_S)
        self.rfile = io.BufferedReader(reads)
        self._is_last = False
        while not self._is_last:
            reads.begin(waits=True)
            if not (line := self.rfile.readline(_MOST_HEAD_BYTES)):
                return
            self._asked, self._is_last, self._unread_bytes = _Request("GET", "", {}, True), True, 0
            try:
                self._asked = _read_head(line.decode("latin-1"), self.rfile)
                self._check_body()
                self._check_token()
                self._check_host()
                self._is_last = self._asked.is_last
                self._answer()
            except _RefusedError as refused:
                self._is_last = True
                if self._unread_bytes <= _CHUNK_BYTES:  # a connection that ends before takes the answer with it
                    self.rfile.read(self._unread_bytes)
                self._send_json({"error": str(refused)}, refused.status, {"Connection": "close", **refused.headers})

    def _answer(self) -> None:
        try:
            path = urlsplit(self._asked.target).path.strip("/").split("/")
        except ValueError:
            raise _no_place() from None
        match self._asked.method, path:
            case ["GET" | "HEAD", ["versions"]]:
                self._send_json({"versions": self._versions()})
            case ["GET" | "HEAD", [version, name]] if VERSION_NAME.fullmatch(version) and FILE_NAME.fullmatch(name):
                self._send_file(self.server.source.folder / version, name)
            case ["PUT", ["readers", name]]:
                self._register(name)
            case ["GET" | "HEAD" | "PUT", _]:
                raise _no_place()
            case [method, _]:
                raise _RefusedError(HTTPStatus.NOT_IMPLEMENTED, f"{method} is none of GET, HEAD and PUT")

    def _check_body(self) -> None:
        """Refuse a body that is not read: a proxy could take it for another reader's request."""
        length = self._asked.headers.get("content-length", "0")
        is_known = re.fullmatch(r"[0-9]{1,18}", length) and "transfer-encoding" not in self._asked.headers
        self._unread_bytes = int(length) if is_known else 0
        if not is_known or (self._asked.method != "PUT" and length != "0"):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "a body is for PUT, with its length; leave it out")

    def _check_token(self) -> None:
        given, wanted = self._asked.headers.get("authorization", ""), f"Bearer {self.server.token}"
        if self.server.token is not None and not hmac.compare_digest(given.encode("latin-1"), wanted.encode()):
            raise _RefusedError(HTTPStatus.UNAUTHORIZED, "the token is wrong", {"WWW-Authenticate": "Bearer"})

    def _check_host(self) -> None:
        """Without a token, answer what asks for this machine alone: another name leads a browser here."""
        host = self._asked.headers.get("host", "localhost")
        host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self.server.token is None and self.server.is_local and not _is_loopback(host):
            raise _RefusedError(
                HTTPStatus.MISDIRECTED_REQUEST, "without a token, ask for localhost; or give the server a token"
            )

    def _versions(self) -> list[int]:
        try:
            return self.server.source.versions()
        except PublishError as error:
            if self.server.source.folder.exists():
                raise _RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
            return []  # the publisher has not begun

    def _register(self, name: str) -> None:
        if "content-length" not in self._asked.headers or self._unread_bytes > MOST_REGISTRATION_BYTES:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MOST_REGISTRATION_BYTES} bytes")
        source = self.server.source
        try:
            check_reader_name(name)
            if self._asked.headers.get("expect", "").lower() == "100-continue":
                self._send_head(HTTPStatus.CONTINUE, {})
            body, self._unread_bytes = self.rfile.read(self._unread_bytes), 0
            registration = Registration.parse(body)
            known = source.folder / READERS
            if known.is_symlink():
                raise PublishError(f"{known} is a link; the server writes into its own folder alone")
            if not (known / f"{name}.json").exists() and known.is_dir() and len(os.listdir(known)) >= _MOST_READERS:
                raise PublishError(f"there are {_MOST_READERS} readers already; remove {known}")
            if not source.folder.is_dir():
                raise PublishError(f"{source.folder} is not there; start the publisher")
            source.register(name, registration)
        except (EntryError, PublishError) as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, str(error)) from error
        except OSError as error:
            raise _RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, f"it cannot be written: {error}") from error
        self._send_head(HTTPStatus.NO_CONTENT, {})

    # -- files ---------------------------------------------------------------------------------------------------------

    def _send_file(self, folder: Path, name: str) -> None:
        try:
            opened = _open_plain(folder, name)
        except FileNotFoundError as error:
            if not folder.is_dir():
                raise _RefusedError(HTTPStatus.GONE, f"{folder.name} is not there any more") from error
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"{folder.name} has no {name}") from error
        except OSError as error:
            raise _RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, f"{name} cannot be read: {error.strerror}") from error
        with opened:
            facts = os.fstat(opened.fileno())
            tag = f'"{facts.st_size:x}-{facts.st_mtime_ns:x}-{facts.st_ino:x}"'
            if tag in map(str.strip, self._asked.headers.get("if-none-match", "").split(",")):
                self._send_head(HTTPStatus.NOT_MODIFIED, {"ETag": tag})
                return
            begin, end = self._asked_for(facts.st_size, tag)
            is_part = (begin, end) != (0, facts.st_size)
            headers = {"Content-Range": f"bytes {begin}-{end - 1}/{facts.st_size}"} if is_part else {}
            headers |= {"ETag": tag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
            headers["Content-Length"] = str(end - begin)
            self._send_head(HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK, headers)
            if self._asked.method == "GET":
                self._send_bytes(opened, begin, end)

    def _asked_for(self, size: int, tag: str) -> tuple[int, int]:
        """The begin and the end of the bytes that are asked for: all, unless one range is asked for, of this file."""
        asked = self._asked.headers
        found = self._asked.method == "GET" and _RANGE.fullmatch(asked.get("range", ""))
        if not found or asked.get("if-range", tag) != tag:
            return 0, size
        begin, end = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
        if begin >= end:
            headers = {"Content-Range": f"bytes */{size}"}
            raise _RefusedError(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"the file has {size} bytes", headers)
        return begin, end

    def _send_bytes(self, opened: IO[bytes], begin: int, end: int) -> None:
        opened.seek(begin)
        while begin < end:
            chunk = opened.read(min(_CHUNK_BYTES, end - begin))
            if not chunk:  # somebody cuts the file; the reader finds out by the length
                self._is_last = True
                return
            self.wfile.write(chunk)
            begin += len(chunk)

    def _send_json(self, value: Any, status: HTTPStatus = HTTPStatus.OK, headers: _Headers | None = None) -> None:
        body = json.dumps(value).encode()
        length = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        self._send_head(status, {**length, **(headers or {})})
        if self._asked.method != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: HTTPStatus, headers: _Headers) -> None:
        headers = {"Server": "laconic", "Date": formatdate(usegmt=True), **headers}
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {headers[name]}" for name in headers), "", ""]
        self.wfile.write("\r\n".join(lines).encode("latin-1"))


def _open_plain(folder: Path, name: str) -> IO[bytes]:
    """Open a file of a folder; neither is a link to another. Raises: OSError."""
    inside = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
    finally:
        os.close(inside)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(folder / name)
    return os.fdopen(descriptor, "rb")
